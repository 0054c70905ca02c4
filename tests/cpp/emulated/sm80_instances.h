// Stands in for the generated list of the kernels that a build has.
#pragma once

#include "kernels/sm80/dispatch.h"
#include "kernels/sm80/kernels.h"

namespace flash_ext::sm80 {

using Elements = Types<Fp16, Bf16, Fp32>;
using HeadDims = Values<32, 64, 128>;

template <class Element>
struct HeadDimsOf {
  using Type = HeadDims;
};

}  // namespace flash_ext::sm80
