// The gradient of a bias in bf16 out of the main backward kernel, where the device has TMA: dS of a pair of warps, 32
// keys by all queries of a tile, becomes rows of keys where their P was, and TMA stores it or adds it to what is there.
//
//   dbias[query, key] = sum over the batch elements that share the bias of dS^T[key, query]
//
// Batch elements that share it run one after the other, a launch each, so that the order of a sum is theirs. A sum is
// rounded to bf16 that many times; beyond kMostSums it has bias_gradient.cuh, a pass of its own that computes S and dP
// anew. NOTE: 4x16x4096x128, (1, 16, S, S): that pass takes 3.9 ms, what its operands take from L2, beside the 4.9 of
// the main kernel. Called by bwd.cuh and run_bwd.cuh. Invariant: two boxes that add to the same element are never in
// flight together.
#pragma once

#include "attention/band.h"
#include "sm80/boxes.cuh"
#include "sm80/bwd_parts.cuh"

namespace flash_ext::sm80 {

constexpr int64_t kMostSums = 8;
constexpr int kDbiasCols = 32;  // of a box: a warp's keys, in 64 bytes

// `buffer`: where this warp's P lies, which it has read. Behind it: bulk_wait_read before P is written again.
template <class Frag, int kM, int kN>
__device__ __forceinline__ void send_dbias(const Operands<Frag, kM, kN>& ds, uint32_t buffer,
                                           const cuda::TensorMap& map, bool adds, cuda::BoxStart at) {
  static_assert(kM * 16 == kDbiasCols);
  const unsigned lane = opaque(threadIdx.x % 32), row = lane % 8;
  const uint32_t to = buffer + row * 64 + (lane / 8 ^ row / 2) * kChunkBytes;  // swizzled in 64 bytes
  __syncwarp();                                                                // all lanes have read P
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    stmatrix_x4_trans(to + n * 512, ds.row[0].word(2 * n), ds.row[0].word(2 * n + 1), ds.row[kM - 1].word(2 * n),
                      ds.row[kM - 1].word(2 * n + 1));
  }
  fence_async_proxy();
  __syncwarp();
  if (lane != 0) return;
  if (adds) {
    cuda::tma_add(&map.map, buffer, at);
  } else {
    cuda::tma_store(&map.map, buffer, at);
  }
  bulk_commit();
}

// Whether the gradient is wanted in bf16: then either this or bias_gradient.cuh writes it so.
template <class Element>
bool has_narrow_dbias(const Problem& problem) {
  return std::is_same_v<Element, Bf16> && problem.wants_dbias && problem.bias_dtype == DType::kBFloat16;
}

// How many launches the main kernel takes for the gradient of the bias, or 0 where it does not make it.
template <class Traits>
int dbias_launches(const BackwardArgs& args, const Plan& plan) {
  const Problem& problem = args.fwd.problem;
  const TensorView& view = args.dbias;
  if (!Traits::kSendsDbias || !plan.tensor_maps || !plan.narrow_dbias) return 0;
  if (problem.wants_dalibi || problem.dropout_p > 0.0 || args.d_lse != nullptr) return 0;
  if (!problem.wants_dq && !problem.wants_dk && !problem.wants_dv) return 0;  // then that pass is less work
  if (problem.heads_k != problem.heads_v && problem.wants_dv) return 0;       // which is two launches as it is
  if (cuda::tma_refuses(problem, view, problem.heads_q, problem.len_q) != nullptr) return 0;
  if (is_whole(problem, view)) return 1;
  Problem one = problem;
  one.batch_rank = 0;
  if (!is_whole(one, view) || problem.batch > kMostSums) return 0;
  for (int i = 0; i < problem.batch_rank; ++i) {
    if (view.batch_stride[i] != 0 && problem.batch_size[i] > 1) return 0;
  }
  // Launches that do not fill the card are what it must not cost.
  const int64_t blocks = block_count(problem.len_k, Traits::kBlockN) * problem.heads_k;
  const int64_t apart = problem.batch * block_count(blocks, plan.processors);
  return 10 * apart <= 12 * block_count(blocks * problem.batch, plan.processors) ? static_cast<int>(problem.batch) : 0;
}

}  // namespace flash_ext::sm80
