// Tile sizes of the CPU backend, and the reason for each.
//
// A tile is chosen so that what one step touches (S, P, and the K^T and V blocks of forward; S^T, dP^T, P^T, dS^T and
// six operands of backward) stays in a private L2 of 1 MiB, while products stay large enough to hide the cost
// of a call (0.1 us). Called by plan() and by everything that carves its scratch.
// Invariant: every size is a multiple of kPad, so dropout's 16x16 blocks and vectors never straddle a tile's edge.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/args.h"
#include "kernels/cpu/vector_kernels.h"

namespace flash_ext::cpu {

// NOTE: measured on one core with AVX-512, geomean of eight shapes: forward 64x512, 256x512 and 128x256 are within 1%
// of 128x512 without a causal band (fewer rows are more calls where products are faster than vdpbf16ps); under one, 64
// rows waste less of the diagonal: -5%. Backward 128, 256 and 512 rows are within 1%, 256 keys +4 to +6%.
template <class Compute>
struct Tiles {
  static constexpr int kForwardM = 128;
  static constexpr int kForwardCausalM = 64;
  static constexpr int kForwardN = 512;
  static constexpr int kBackwardM = 256;
  static constexpr int kBackwardN = 128;
};
template <>
struct Tiles<ComputeF64> {
  static constexpr int kForwardM = 64;
  static constexpr int kForwardCausalM = 64;
  static constexpr int kForwardN = 256;
  static constexpr int kBackwardM = 128;
  static constexpr int kBackwardN = 512;
};

// Up to this many queries, K and V are read in place, by plain dot products, instead of being packed. NOTE: at
// 1x8x1x4096x64 fp32, 1 query, packing took 3x the time of the products; with bf16 and 8 queries, AMX earns it back.
template <class Compute>
constexpr int64_t kFewQueries = Compute::kPairs ? 4 : 16;
// In fp16, where packing converts, too. NOTE: at 1x8x512x128, forward, PyTorch's time over ours was 1.16 in place and
// 0.83 packed with 17 queries, 1.02 and 1.03 with 24 (1.11 and 1.04 at 64 columns), 0.86 and 1.01 with 32.
constexpr int64_t kFewHalfQueries = 24;
// The same with the parts of Q and K exchanged, for this many keys.
constexpr int64_t kFewKeys = 8;
// Up to this many queries or keys, fp32 scores and dP are sums in a tree (Products::by_tree) where few_queries() and
// few_keys() do not hold, whose sums are as good. NOTE: torch's matrix products
// sum so where there are few rows or columns, so eager attention is more exact there: inputs of mean 2, 5 queries, E =
// 128 or 256, one long sum had 4 to 5x its error in out and every gradient; inputs of mean 0, 9 to 15 keys, E = 64 to
// 128, on AVX2 1.5 to 1.9x its error in out. From 16 on, and up to E = 256, both sum alike.
constexpr int64_t kTreeRows = 15;
// The inner dimension of one product of scores. NOTE: torch's matrix products sum no more at once either; one long sum
// had 1.8 to 2.7 times the error of eager fp32 attention from E = 512 and 16 queries on.
constexpr int kLongestSum = 256;
// A leaf's inner dimension, and the largest product: a tile of forward or backward by the padding of what is few.
constexpr int kTreeLeaf = 16;
constexpr int kTreeTile = std::max(Tiles<ComputeF32>::kForwardM, Tiles<ComputeF32>::kBackwardN) * kPad;
// A chunk of forward keeps O for all of its rows while it walks over the keys.
constexpr int64_t kMaxChunkRows = 4096;
// Below this many floating-point operations (work_flops) one thread is faster than waking the others (some 10 us).
constexpr double kSerialFlops = 2e6;
// The same for adding so many numbers up.
constexpr int64_t kSerialSums = 1 << 15;
// What plan() shows as the limit of on_chip: a common private L2.
constexpr int64_t kCacheBytes = 1 << 20;

constexpr int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class Compute>
bool sums_by_tree(const Problem& problem) {
  return std::is_same_v<Compute, ComputeF32> && problem.dtype == DType::kFloat32 &&
         std::min(problem.len_q, problem.len_k) <= kTreeRows;
}

// Rows of a product: exact when few, else a multiple of 8, so that the library compiles a bounded number of kernels.
constexpr int round_rows(int64_t rows) { return static_cast<int>(rows <= 8 ? rows : round_up(rows, 8)); }

// The same where rows are the inner dimension, too: even for pairs.
template <class Compute>
constexpr int key_rows(int64_t rows) {
  return Compute::kPairs ? static_cast<int>(round_up(round_rows(rows), 2)) : round_rows(rows);
}

// Rows of K or V in a product: exact up to 64, so that they can be read where they lie (left_rows).
template <class Compute>
constexpr int product_rows(int64_t rows) {
  return rows <= kPanel ? static_cast<int>(rows) : key_rows<Compute>(rows);
}

}  // namespace flash_ext::cpu
