// Two kernels make a list, see sequences.h: one block of threads sorts the sequences by what their longest tile has to
// do, in steps of half a power of two, then a thread finds each entry's sequence in that order by a binary search.
// Tiles of a sequence follow each other, those of queries from the longest on, those of keys from the first on, which
// is the order that sums wait for. Where the numbers in memory do not ascend, sequences overlap, and there are no
// tiles: an order of sums has no end there. But keys may overlap in a list of queries: slots of a cache do.
#include <cmath>

#include "core/tile_schedule.h"
#include "gpu/host/launch.h"
#include "kernels/stages/find_sequence.cuh"
#include "kernels/stages/sequences.h"

namespace flash_ext::cuda {
namespace {

constexpr int kThreads = 256, kSortWarps = 32, kBuckets = 64;

struct ListScratch {
  PackedTile* tiles;  // [most_packed_tiles]
  int64_t* first;     // [b + 1], of the sequences in order the first tile; behind them how many tiles there are
  int32_t* order;     // [b]
  int64_t count;      // most_packed_tiles
};

int64_t rows_of(const Problem& problem, TilesOf of) {
  return of == TilesOf::kQueries ? problem.rows_q : problem.rows_k;
}

// What a sequence has of tiles.
struct Tiles {
  int64_t count;
  int64_t longest;  // how many keys (queries) the one sees that sees most
  bool last_first;
};

__device__ Tiles tiles_of(const Problem& problem, const Sequence& sequence, TilesOf of, int64_t block) {
  const bool is_query = of == TilesOf::kQueries;
  const int64_t len = is_query ? sequence.len_q : sequence.len_k, count = block_count(len, block);
  if (count == 0) return {0, 0, false};
  const Band band = make_band(problem, sequence);
  const auto seen = [&](int64_t tile) {
    const Range own = {tile * block, min((tile + 1) * block, len)};
    return (is_query ? band.keys(own, sequence.len_k) : band.queries(own, sequence.len_q)).size();
  };
  const int64_t first = seen(0), last = seen(count - 1);
  return {count, max(max(first, last), seen(count / 2)), is_query && last > first};
}

// 0: the most to do.
__device__ int bucket_of(int64_t work) {
  if (work <= 0) return kBuckets - 1;
  int exponent = 0;
  while (work >> (exponent + 1) > 0) ++exponent;
  const int half = exponent > 0 ? static_cast<int>(work >> (exponent - 1) & 1) : 0;
  return kBuckets - 2 - (2 * exponent + half);
}

// A warp has successive sequences, 32 at a time. NOTE: counters are 32-bit and wrap where sequences overlap, which have
// no tiles then.
__global__ void __launch_bounds__(32 * kSortWarps)
    sort_kernel(const __grid_constant__ Problem problem, Sequences sequences, TilesOf of, int64_t block,
                ListScratch scratch) {
  __shared__ unsigned tiles[kBuckets][kSortWarps], counts[kBuckets][kSortWarps];  // then where the next one stands
  __shared__ unsigned tiles_before[kBuckets + 1], counts_before[kBuckets + 1];
  __shared__ int descends;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < kBuckets * kSortWarps; i += 32 * kSortWarps) {
    tiles[i / kSortWarps][i % kSortWarps] = counts[i / kSortWarps][i % kSortWarps] = 0;
  }
  if (threadIdx.x == 0) descends = 0;
  __syncthreads();

  const int64_t share = block_count(block_count(problem.batch, kSortWarps), 32) * 32;
  const int64_t begin = warp * share, end = min(begin + share, problem.batch);
  for (int64_t b = begin + lane; b < end; b += 32) {
    const bool of_keys = of == TilesOf::kKeys && sequences.cu_k[b] > sequences.cu_k[b + 1];
    if (of_keys || sequences.cu_q[b] > sequences.cu_q[b + 1]) descends = 1;
    const Tiles own = tiles_of(problem, sequence_of(problem, sequences, b), of, block);
    const int bucket = bucket_of(own.longest);
    atomicAdd(&tiles[bucket][warp], static_cast<unsigned>(own.count));
    atomicAdd(&counts[bucket][warp], 1u);
  }
  __syncthreads();

  const auto begin_after = [](unsigned& x, unsigned& sum) {
    const unsigned size = x;
    x = sum;
    sum += size;
  };
  if (threadIdx.x < kBuckets) {
    unsigned of_tiles = 0, of_counts = 0;
    for (int i = 0; i < kSortWarps; ++i) {
      begin_after(tiles[threadIdx.x][i], of_tiles);
      begin_after(counts[threadIdx.x][i], of_counts);
    }
    tiles_before[threadIdx.x] = of_tiles;
    counts_before[threadIdx.x] = of_counts;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned of_tiles = 0, of_counts = 0;
    for (int i = 0; i < kBuckets; ++i) {
      begin_after(tiles_before[i], of_tiles);
      begin_after(counts_before[i], of_counts);
    }
    scratch.first[problem.batch] = descends != 0 ? 0 : of_tiles;
  }
  __syncthreads();

  for (int64_t at = begin; at < end; at += 32) {
    const int64_t b = at + lane;
    const bool inside = b < end;
    Tiles own = {0, 0, false};
    if (inside) own = tiles_of(problem, sequence_of(problem, sequences, b), of, block);
    const int bucket = inside ? bucket_of(own.longest) : -1;
    const unsigned count = static_cast<unsigned>(own.count);
    unsigned before = 0, rank = 0;  // of this warp's in the bucket
    bool is_last = true;
    for (int other = 0; other < 32; ++other) {
      const int other_bucket = __shfl_sync(~0u, bucket, other);
      const unsigned other_count = __shfl_sync(~0u, count, other);
      if (other_bucket != bucket) continue;
      if (other < lane) {
        before += other_count;
        ++rank;
      }
      is_last = is_last && other <= lane;
    }
    if (inside) {
      const unsigned first = tiles[bucket][warp] + before, place = counts[bucket][warp] + rank;
      scratch.first[counts_before[bucket] + place] = tiles_before[bucket] + first;
      scratch.order[counts_before[bucket] + place] = static_cast<int32_t>(b);
      before = first;
      rank = place;
    }
    __syncwarp();  // all lanes have read where the next one stands
    if (inside && is_last) {
      tiles[bucket][warp] = before + count;
      counts[bucket][warp] = rank + 1;
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ Problem problem, Sequences sequences,
                                                        TilesOf of, int64_t block, ListScratch scratch) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= scratch.count) return;
  PackedTile tile = {-1, 0, {}};
  if (index < scratch.first[problem.batch]) {
    int64_t low = 0, high = problem.batch;  // the first sequence that begins behind this tile
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (scratch.first[middle] <= index ? low : high) = scratch.first[middle] <= index ? middle + 1 : middle;
    }
    tile.b = scratch.order[low - 1];
    tile.sequence = sequence_of(problem, sequences, tile.b);
    const Tiles own = tiles_of(problem, tile.sequence, of, block);
    tile.block = static_cast<int>(index - scratch.first[low - 1]);
    if (own.last_first) tile.block = static_cast<int>(own.count) - 1 - tile.block;
  }
  scratch.tiles[index] = tile;
}

// ---- Rows of no sequence

__device__ bool is_unused(const Problem& problem, const Sequences& sequences, TilesOf of, int64_t row) {
  const bool is_query = of == TilesOf::kQueries;
  const int64_t b =
      is_query ? sequence_before<true>(problem, sequences, row) : sequence_before<false>(problem, sequences, row);
  if (b < 0) return true;
  const Sequence sequence = sequence_of(problem, sequences, b);
  const int64_t position = row - (is_query ? sequence.row_q : sequence.row_k);
  return position < 0 || position >= (is_query ? sequence.len_q : sequence.len_k);
}

// A thread asks for each row; a warp clears those of its 32 that are not used.
template <class T>
__global__ void __launch_bounds__(kThreads)
    clear_rows_kernel(const __grid_constant__ Problem problem, Sequences sequences, TilesOf of, const PackedTile* tiles,
                      int64_t rows, const __grid_constant__ TensorView view, int64_t heads, int64_t cols) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const unsigned unused = __ballot_sync(~0u, row < rows && (tiles->b < 0 || is_unused(problem, sequences, of, row)));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 32 && unused >> i != 0; ++i) {
    if ((unused >> i & 1) == 0) continue;
    T* to = static_cast<T*>(view.data) + (row - lane + i) * view.row_stride;
    for (int64_t head = 0; head < heads; ++head, to += view.head_stride) {
      for (int64_t col = lane; col < cols; col += 32) to[col * view.col_stride] = T(0);
    }
  }
}

__global__ void __launch_bounds__(kThreads) clear_lse_kernel(const __grid_constant__ Problem problem,
                                                             Sequences sequences, const PackedTile* tiles, float* lse) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= problem.rows_q) return;
  if (tiles->b >= 0 && !is_unused(problem, sequences, TilesOf::kQueries, row)) return;
  for (int64_t head = 0; head < problem.heads_q; ++head) lse[head * problem.rows_q + row] = -INFINITY;
}

dim3 grid_of_threads(int64_t threads) { return grid_of((threads + kThreads - 1) / kThreads); }

}  // namespace

int64_t packed_tiles_bytes(const Problem& problem, TilesOf of, int64_t block) {
  const int64_t tiles = most_packed_tiles(problem, rows_of(problem, of), block);
  const int64_t bytes = tiles * static_cast<int64_t>(sizeof(PackedTile)) + (problem.batch + 1) * 8 + problem.batch * 4;
  return (bytes + 127) / 128 * 128;
}

const PackedTile* list_packed_tiles(const Problem& problem, const Sequences& sequences, TilesOf of, int64_t block,
                                    void* memory, void* stream) {
  ListScratch scratch;
  scratch.count = most_packed_tiles(problem, rows_of(problem, of), block);
  scratch.tiles = static_cast<PackedTile*>(memory);
  scratch.first = reinterpret_cast<int64_t*>(scratch.tiles + scratch.count);
  scratch.order = reinterpret_cast<int32_t*>(scratch.first + problem.batch + 1);
  launch(sort_kernel, dim3(1), 32 * kSortWarps, 0, stream, problem, sequences, of, block, scratch);
  launch(fill_kernel, grid_of_threads(scratch.count), kThreads, 0, stream, problem, sequences, of, block, scratch);
  return scratch.tiles;
}

void clear_unused_rows(const Problem& problem, const Sequences& sequences, TilesOf of, const PackedTile* tiles,
                       const TensorView& view, int64_t heads, int64_t cols, int64_t element_bytes, void* stream) {
  const int64_t rows = rows_of(problem, of);
  if (rows == 0) return;
  const auto clear = [&]<class T>(T) {
    launch(clear_rows_kernel<T>, grid_of_threads(rows), kThreads, 0, stream, problem, sequences, of, tiles, rows, view,
           heads, cols);
  };
  element_bytes == 2 ? clear(uint16_t()) : element_bytes == 4 ? clear(uint32_t()) : clear(uint64_t());
}

void clear_unused_lse(const Problem& problem, const Sequences& sequences, const PackedTile* tiles, float* lse,
                      void* stream) {
  if (problem.rows_q == 0) return;
  launch(clear_lse_kernel, grid_of_threads(problem.rows_q), kThreads, 0, stream, problem, sequences, tiles, lse);
}

}  // namespace flash_ext::cuda
