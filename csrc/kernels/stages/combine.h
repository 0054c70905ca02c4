// Joins results over disjoint keys of the same queries, for GPU backends that split the keys of a tile over blocks:
//
//   max = max_i max_i    sum = sum_i e^(max_i - max) sum_i    lse = max + log sum
//   out = sum_i e^(max_i - max) sum_i / sum out_i
//
// Parts tell maximum and sum apart, because beyond 2^24 a float lse has lost the log of the sum.
// Host function that launches on args.stream behind the kernel that writes the parts. Its blocks may be on the card
// before that kernel has ended (programmatic dependent launch); they wait for its end themselves.
#pragma once

#include <cuda_runtime.h>

#include "core/args.h"

namespace flash_ext::cuda {

// out [count, b, h_q, s_q, d_v], float, divided by sum_i, and sums [count, b, h_q, s_q] of (max_i, sum_i). A part of
// (-inf, 0) is not used; all of them: out is 0 and lse -inf. d_v is a multiple of 4 up to 256, count at most 128,
// args.out dense in its last dimension and aligned to 8 bytes; 16-bit.
void combine(const ForwardArgs& args, const float* out, const float2* sums, int count);

}  // namespace flash_ext::cuda
