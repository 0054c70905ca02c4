// What the host side of this backend calls, without any CUDA syntax: one function a (pass, dtype, head dimension).
//
// Definitions lie in generated units (cmake/cuda_units.cmake writes one per instance from fwd.cu.in and bwd.cu.in), so
// a missing instance is an undefined symbol, which the linker refuses. Called by backend.cpp only.
#pragma once

#include "attention/args.h"

namespace flash_ext::sm90 {

// grid: of forward_order (config.h). counter: device memory where that order is counted.
template <DType kDType, int kHeadDim>
void run_forward(const ForwardArgs& args, int grid, void* counter);

template <DType kDType, int kHeadDim>
int64_t backward_scratch_bytes(const Problem& problem);
// grid: blocks of the main kernel. workspace: of that size, aligned to 64.
template <DType kDType, int kHeadDim>
void run_backward(const BackwardArgs& args, int64_t grid, void* workspace);

struct Instance {
  DType dtype;
  int head_dim;  // serves smaller ones, too: columns beyond the tensor's read as zeros
  void (*run_forward)(const ForwardArgs& args, int grid, void* counter);
  int64_t (*backward_scratch_bytes)(const Problem& problem) = nullptr;  // null, as the next: it has no backward
  void (*run_backward)(const BackwardArgs& args, int64_t grid, void* workspace) = nullptr;
};

}  // namespace flash_ext::sm90
