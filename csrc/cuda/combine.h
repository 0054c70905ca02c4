// Joins results over disjoint keys of the same queries, for GPU backends that split the keys of a tile over blocks:
//
//   lse = log sum_i e^lse_i        out = sum_i e^(lse_i - lse) out_i
//
// Host function that launches on args.stream behind the kernel that writes the parts. Its blocks may be on the card
// before that kernel has ended (programmatic dependent launch); they wait for its end themselves.
#pragma once

#include "attention/args.h"

namespace flash_ext::cuda {

// out [count, b, h_q, s_q, d_v] and lse [count, b, h_q, s_q], float. A part whose lse is -inf is not used; all of them:
// out is 0 and lse -inf. d_v is a multiple of 4 up to 256, count at most 128, args.out dense in its last dimension and
// aligned to 8 bytes; 16-bit.
void combine(const ForwardArgs& args, const float* out, const float* lse, int count);

}  // namespace flash_ext::cuda
