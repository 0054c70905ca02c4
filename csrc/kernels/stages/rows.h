// What sm80's backward does to whole rows before and after its main kernel, and sums of parts, which sm90 has, too;
// host functions that launch on args.fwd.stream. fp16, bf16 and float; float64 has its own kernels. What is [b, h_q,
// s_q] here is [h_q, rows_q] where sequences are packed.
#pragma once

#include <vector_types.h>

#include "core/args.h"

namespace flash_ext::cuda {

// delta = rowsum(dO o out) - dlse, [b, h_q, s_q]; 0 where lse is -inf. With `bounds` [b, h_q, 2], zeros before: the
// largest |dO row| and |delta| of the head. With `dlse_apart` the caller subtracts dlse, and only `bounds` has it. With
// `renorm` [b, h_q, s_q]: of each row whose lse is far from 0, what kernels/sm80/backward/renormalised_rows.cuh says;
// 16-bit types without a bias.
void delta(const BackwardArgs& args, float* delta, float* bounds, bool dlse_apart = false, float2* renorm = nullptr);

// dq = scale * dq_accum [b, h_q, s_q, d], in dq's own dtype and strides. `in_fragments`: from compute capability 9.0 on
// groups of 16 rows lie there as kernels/sm80/backward/dq_accumulate.cuh says, but not of packed sequences.
void convert_dq(const BackwardArgs& args, const float* dq_accum, bool in_fragments);

// dalibi [b, h_q] = sums over the last dimension of partial [b, h_q, count], in its order, and of each row the sum of
// dS times distance_to_keys, which sm80's main kernel leaves out. Packed: partial [h_q, count] has a number for each
// block_n keys of a sequence, from kernels/sm80/sequence.h's first_tile on. For sinks: delta and inverse of each row,
// as kernels/sm80/backward/renormalise.cuh finds them beside what args.fwd.lse is then; dlse_apart as in delta().
void sum_slopes(const BackwardArgs& args, const float* partial, int64_t count, int64_t block_n, const float* delta,
                const float* inverse, bool dlse_apart);

// sums [count] = partial [parts, count] over its first dimension, in order.
void sum_parts(void* sums, DType dtype, const float* partial, int64_t count, int64_t parts, void* stream);

}  // namespace flash_ext::cuda
