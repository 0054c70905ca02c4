// What the kernels of CPU and CUDA allocate, results and scratch: uninitialised tensors beside another one.
//
// A kernel stands below every dispatch key, where tensors are real, so it makes its tensors without the dispatcher.
// Called by the kernels of ops.cpp, cache_append.cpp and cache_kernel.cpp and by grad_buffer.h: above them (autograd,
// Meta) a mode or a transform may have to see what is allocated. Invariant: the same tensors that at::empty_strided
// makes, but for torch.utils.deterministic.fill_uninitialized_memory: that is for memory that a user could read before
// it is written, and kernels write all that they return. Filled, a backward in deterministic mode took up to 6 % longer
// (an H200, 2x16x8192x128 causal: 2.84 ms, and 2.68 without).
//
// NOTE: an H200's host took 10.3 us instead of 14.0 for the forward operator and 21.9 instead of 28.5 for the backward
// one, on 1x8x128x64, where at::empty had been called 3 and 8 times (0.5 us of each: cuda::allow_shared).
#pragma once

#include "torch/options.h"

namespace flash_ext {

// The device of `like` is the current one.
Tensor allocate_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, const Tensor& like, at::ScalarType dtype);
// The same, last dimension innermost.
Tensor allocate(c10::IntArrayRef sizes, const Tensor& like, at::ScalarType dtype);
// What an operator returns in the place of a tensor that was not asked for: of size 0, on the device of `like`.
Tensor allocate_absent(const Tensor& like, at::ScalarType dtype);

}  // namespace flash_ext
