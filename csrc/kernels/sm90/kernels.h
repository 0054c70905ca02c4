// What the host side of this backend calls, without any CUDA syntax: one function a (pass, dtype, head dimension).
//
// Definitions lie in generated units (cmake/cuda_units.cmake writes them from unit.cu.in of forward/ and backward/ and
// from forward/unit_fp8.cu.in), so a missing instance is an undefined symbol, which the linker refuses. Called by
// rows.cpp only.
#pragma once

#include "core/args.h"
#include "kernels/sm90/forward/splits.h"

namespace flash_ext::sm90 {

// What a forward's plan says of its launch. grid: of forward_order (config.h) or split_order (forward/splits.h).
struct ForwardLaunch {
  Tiles tiles;
  Splits splits;  // of Tiles::kSplit
  int grid;
  bool finds_ranges;  // finds_mask_ranges
};

// As Plan has them.
struct BackwardLaunch {
  int64_t grid;  // blocks of the main kernel
  int64_t sms;
  bool two_pass;
  bool finds_ranges;
};

// workspace: of plan().scratch_bytes.
template <DType kDType, int kHeadDim>
void run_forward(const ForwardArgs& args, const ForwardLaunch& how, void* workspace);
template <DType kDType, int kHeadDim>
void run_forward_fp8(const ForwardArgs& args, const ForwardLaunch& how, void* workspace);

template <DType kDType, int kHeadDim>
int64_t backward_scratch_bytes(const Problem& problem, bool two_pass);
// workspace: of that size, aligned to 64.
template <DType kDType, int kHeadDim>
void run_backward(const BackwardArgs& args, const BackwardLaunch& how, void* workspace);

struct Instance {
  DType dtype;
  int head_dim;  // serves smaller ones, too: columns beyond the tensor's read as zeros
  void (*run_forward)(const ForwardArgs& args, const ForwardLaunch& how, void* workspace);
  int64_t (*backward_scratch_bytes)(const Problem& problem,
                                    bool two_pass) = nullptr;  // null, as the next: it has no backward
  void (*run_backward)(const BackwardArgs& args, const BackwardLaunch& how, void* workspace) = nullptr;
};

}  // namespace flash_ext::sm90
