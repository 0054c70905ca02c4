// From the types of kernels.h to those of the kernels: which of the two shapes of a head dimension is launched.
// Called by backend.cpp through kernels.h; instantiated by generated units (fwd.cu.in).
#pragma once

#include <type_traits>

#include "sm90/fwd.cuh"
#include "sm90/kernels.h"

namespace flash_ext::sm90 {

template <DType kDType, int kHeadDim>
void run_forward(const ForwardArgs& args, bool persistent, int grid) {
  using T = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  if (persistent) {
    launch_forward<ForwardTraits<T, kHeadDim, forward_shape(kHeadDim, true)>>(args, grid);
  } else {
    launch_forward<ForwardTraits<T, kHeadDim, forward_shape(kHeadDim, false)>>(args, grid);
  }
}

}  // namespace flash_ext::sm90
