// Values of e4m3 as a kernel wants them whose products read both operands along keys (sm90/forward/fp8.cuh):
//
//   [b, h_v, d_v, keys], contiguous; a row is a column of V, its keys in groups of 16 in the order
//   0 1 8 9  2 3 10 11  4 5 12 13  6 7 14 15, zeros behind the last one up to a multiple of kKeysOfGroup
//
// The order is that in which a thread holds the scores of a row (gpu/wgmma.cuh): which of them are its, packed, is what
// wgmma takes for 4 neighbouring k. Host function that launches on args.stream.
#pragma once

#include "core/args.h"

namespace flash_ext::cuda {

constexpr int kKeysOfGroup = 128;

constexpr int64_t transposed_keys(const Problem& problem) {
  return (problem.len_k + kKeysOfGroup - 1) / kKeysOfGroup * kKeysOfGroup;
}
constexpr int64_t transposed_bytes(const Problem& problem) {
  return problem.batch * problem.heads_v * problem.head_dim_v * transposed_keys(problem);
}

// to: of transposed_bytes, aligned to 16. args.v: rows at multiples of 16 bytes, head_dim_v a multiple of 16.
void transpose_values(const ForwardArgs& args, void* to);

}  // namespace flash_ext::cuda
