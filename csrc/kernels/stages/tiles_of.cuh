// What a list of tiles (sequences.cu, list_few.cuh) has of each sequence.
//
// Called by these two. Invariant: whatever the numbers in memory are, no sequence has more tiles than rows.
#pragma once

#include "core/band.h"
#include "core/sequences.h"
#include "kernels/stages/sequences.h"

namespace flash_ext::cuda {

struct ListScratch {
  PackedTile* tiles;  // [most_packed_tiles]
  int64_t* first;     // [b + 1], of the sequences in order the first tile; behind them how many tiles there are
  int32_t* order;     // [b]
  int64_t count;      // most_packed_tiles
};

// Which tiles a list has: `block` rows each, of which the first sees row `lower` of the other tensor and the rows
// behind it and the last row `upper` and those before it, from the sequence's diagonal.
struct Tiling {
  TilesOf of;
  int block;
  int64_t lower, upper;
  int diagonal;  // -1: a sequence's diagonal ends at its last key; 0: it begins at the first

  static Tiling make(const Problem& problem, TilesOf of, int64_t block) {
    const Band band = make_band(problem, 0, 0);
    const bool is_query = of == TilesOf::kQueries;
    return {of, static_cast<int>(block), is_query ? band.lower : -band.upper, is_query ? band.upper : -band.lower,
            problem.bottom_right ? -1 : 0};
  }
};

// What a sequence has of tiles.
struct Tiles {
  int count;
  int longest;  // how many keys (queries) the one sees that sees most
  bool last_first;
  bool fall;  // from the first in the list on they see ever fewer, about a tile's rows
};

// NOTE: 32 bits, in which a division is not a function call.
__device__ __forceinline__ int tile_count(int rows, int block) {
  return static_cast<int>((static_cast<unsigned>(rows) + static_cast<unsigned>(block) - 1) /
                          static_cast<unsigned>(block));
}

__device__ __forceinline__ Tiles tiles_of(const Tiling& tiling, const Sequence& sequence) {
  const bool is_query = tiling.of == TilesOf::kQueries;
  const int len = is_query ? sequence.len_q : sequence.len_k, other = is_query ? sequence.len_k : sequence.len_q;
  const int count = tile_count(len, tiling.block);
  if (count == 0) return {0, 0, false, false};
  const int diagonal = (sequence.len_k - sequence.len_q) & tiling.diagonal;
  const int64_t shift = is_query ? diagonal : -int64_t{diagonal};
  const auto seen = [&](int tile) {
    const int first = tile * tiling.block;
    const int64_t begin = first + shift + tiling.lower, end = min(first + tiling.block, len) + shift + tiling.upper;
    return static_cast<int>(max(int64_t{0}, min(end, int64_t{other}) - max(begin, int64_t{0})));
  };
  const int first = seen(0), last = seen(count - 1);
  return {count, max(max(first, last), seen(count / 2)), is_query && last > first,
          is_query ? first != last : first > last};
}

// Half powers of two of what the longest tile has to do; 0: the most.
constexpr int kBuckets = 64;
__device__ __forceinline__ int bucket_of(int work) {
  if (work <= 0) return kBuckets - 1;
  const int exponent = 31 - __clz(work);
  return kBuckets - 2 - (2 * exponent + (exponent > 0 ? work >> (exponent - 1) & 1 : 0));
}

// Whether numbers that a list of tiles needs in ascending order are not; by all threads of a block.
__device__ __forceinline__ bool descend(const Problem& problem, const Sequences& sequences, TilesOf of) {
  bool found = false;
  for (int64_t b = threadIdx.x; b < problem.batch; b += blockDim.x) {
    found |= sequences.cu_q[b] > sequences.cu_q[b + 1];
    if (of == TilesOf::kKeys) found |= sequences.cu_k[b] > sequences.cu_k[b + 1];
  }
  return __syncthreads_or(found) != 0;
}

}  // namespace flash_ext::cuda
