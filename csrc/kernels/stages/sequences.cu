// One launch makes a list and clears rows, see sequences.h. Its first block sorts the sequences by what their longest
// tile has to do, in steps of half a power of two; then a thread finds each entry's sequence in that order by a binary
// search, in the same block or, of a long list, in a kernel of its own. Few sequences each count who stands before
// them. Tiles of a sequence follow each other, those of queries from the longest on, those of keys from the first on,
// which is the order that sums wait for. Where the numbers in memory do not ascend, sequences overlap, and there are no
// tiles: an order of sums has no end there. But keys may overlap in a list of queries: slots of a cache do.
#include <cmath>

#include "core/tile_schedule.h"
#include "gpu/host/launch.h"
#include "gpu/ptx/grid.cuh"
#include "kernels/stages/find_sequence.cuh"
#include "kernels/stages/list_few.cuh"
#include "kernels/stages/sequences.h"

namespace flash_ext::cuda {
namespace {

constexpr int kThreads = 256, kSortWarps = 32, kSortThreads = 32 * kSortWarps;
constexpr int64_t kShortList = 4 * kSortThreads;  // entries that one block finds
constexpr int kFewThreads = 256;                  // of a block where the list is short and sequences are few
constexpr int kMostCleared = 3;

FLASH_DEVICE int64_t rows_of(const Problem& problem, TilesOf of) {
  return of == TilesOf::kQueries ? problem.rows_q : problem.rows_k;
}

// The sum over the lanes before this one, and of all in `total`.
__device__ unsigned sum_before(unsigned x, unsigned& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  unsigned sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(~0u, sum, 31);
  return sum - x;
}

// A block. A warp has successive sequences, 32 at a time. NOTE: counters are 32-bit and wrap where sequences overlap,
// which have no tiles then.
__device__ void sort_sequences(const Problem& problem, const Sequences& sequences, const Tiling& tiling,
                               const ListScratch& scratch) {
  __shared__ unsigned tiles[kBuckets][kSortWarps], counts[kBuckets][kSortWarps];  // then where the next one stands
  __shared__ unsigned tiles_before[kBuckets], counts_before[kBuckets];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < kBuckets * kSortWarps; i += kSortThreads) {
    tiles[i / kSortWarps][i % kSortWarps] = counts[i / kSortWarps][i % kSortWarps] = 0;
  }
  const bool descends = descend(problem, sequences, tiling.of);  // behind a barrier

  const int64_t share = block_count(block_count(problem.batch, kSortWarps), 32) * 32;
  const int64_t begin = warp * share, end = min(begin + share, problem.batch);
  for (int64_t b = begin + lane; b < end; b += 32) {
    const Tiles own = tiles_of(tiling, sequence_of(problem, sequences, b));
    const int bucket = bucket_of(own.longest);
    atomicAdd(&tiles[bucket][warp], static_cast<unsigned>(own.count));
    atomicAdd(&counts[bucket][warp], 1u);
  }
  __syncthreads();

  for (int bucket = warp; bucket < kBuckets; bucket += kSortWarps) {  // a lane a warp's numbers
    unsigned of_tiles, of_counts;
    tiles[bucket][lane] = sum_before(tiles[bucket][lane], of_tiles);
    counts[bucket][lane] = sum_before(counts[bucket][lane], of_counts);
    if (lane == 0) tiles_before[bucket] = of_tiles, counts_before[bucket] = of_counts;
  }
  __syncthreads();
  if (warp == 0) {
    unsigned all_tiles = 0, all_counts = 0;
    for (int bucket = lane; bucket < kBuckets; bucket += 32) {
      unsigned of_tiles, of_counts;
      tiles_before[bucket] = all_tiles + sum_before(tiles_before[bucket], of_tiles);
      counts_before[bucket] = all_counts + sum_before(counts_before[bucket], of_counts);
      all_tiles += of_tiles;
      all_counts += of_counts;
    }
    if (lane == 0) scratch.first[problem.batch] = descends ? 0 : all_tiles;
  }
  __syncthreads();

  for (int64_t at = begin; at < end; at += 32) {
    const int64_t b = at + lane;
    const bool inside = b < end;
    Tiles own = {};
    if (inside) own = tiles_of(tiling, sequence_of(problem, sequences, b));
    const int bucket = inside ? bucket_of(own.longest) : -1;
    const unsigned count = static_cast<unsigned>(own.count);
    unsigned before = 0, rank = 0;  // of this warp's in the bucket
    bool is_last = true;
    const int present = static_cast<int>(min(int64_t{32}, end - at));
    for (int other = 0; other < present; ++other) {
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

__device__ void fill_entry(const Problem& problem, const Sequences& sequences, const Tiling& tiling,
                           const ListScratch& scratch, int64_t index) {
  const int64_t listed = scratch.first[problem.batch];
  PackedTile tile = {-1, 0, {}, static_cast<int>(listed)};
  if (index < listed) {
    int64_t low = 0, high = problem.batch;  // the first sequence that begins behind this tile
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (scratch.first[middle] <= index ? low : high) = scratch.first[middle] <= index ? middle + 1 : middle;
    }
    tile.b = scratch.order[low - 1];
    tile.sequence = sequence_of(problem, sequences, tile.b);
    const Tiles own = tiles_of(tiling, tile.sequence);
    tile.block = static_cast<int>(index - scratch.first[low - 1]);
    if (own.last_first) tile.block = own.count - 1 - tile.block;
  }
  scratch.tiles[index] = tile;
}

__global__ void __launch_bounds__(kThreads)
    fill_kernel(const __grid_constant__ Problem problem, Sequences sequences, Tiling tiling, ListScratch scratch) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index < scratch.count) fill_entry(problem, sequences, tiling, scratch, index);
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

// A warp: zeros in the rows from `first` on that have a bit, a T of `elements` columns at a time.
template <class T>
__device__ void clear_rows(const UnusedRows& rows, int64_t first, unsigned unused, int elements = 1) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 32 && unused >> i != 0; ++i) {
    if ((unused >> i & 1) == 0) continue;
    T* to = static_cast<T*>(rows.view.data) + (first + i) * rows.view.row_stride / elements;
    for (int64_t head = 0; head < rows.heads; ++head, to += rows.view.head_stride / elements) {
      for (int64_t col = lane; col < rows.cols / elements; col += 32) to[col * rows.view.col_stride] = T{};
    }
  }
}

// Whether rows of heads are whole chunks of 16 bytes, `elements` columns each.
__device__ bool has_whole_chunks(const UnusedRows& rows, int elements) {
  const TensorView& view = rows.view;
  return view.col_stride == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && rows.cols % elements == 0 &&
         view.row_stride % elements == 0 && view.head_stride % elements == 0;
}

// What block 0 does not, each of the others for a row a thread, of queries and behind them of keys.
struct Clearing {
  UnusedRows rows[kMostCleared];  // without data: none
  float* lse;                     // of queries; null: none
  int64_t blocks_q, blocks_k;
};

__device__ void clear_unused(const Problem& problem, const Sequences& sequences, TilesOf listed,
                             const Clearing& clearing, int64_t block) {
  const bool all = descend(problem, sequences, listed);
  const TilesOf of = block < clearing.blocks_q ? TilesOf::kQueries : TilesOf::kKeys;
  const int64_t row = (block - (of == TilesOf::kKeys ? clearing.blocks_q : 0)) * blockDim.x + threadIdx.x;
  const bool unused = row < rows_of(problem, of) && (all || is_unused(problem, sequences, of, row));
  const unsigned of_warp = __ballot_sync(~0u, unused);
  for (const UnusedRows& rows : clearing.rows) {
    if (rows.view.data == nullptr || rows.of != of) continue;
    const int64_t first = row - threadIdx.x % 32;
    if (const int elements = 16 / rows.element_bytes; has_whole_chunks(rows, elements)) {
      clear_rows<uint4>(rows, first, of_warp, elements);
    } else if (rows.element_bytes == 2) {
      clear_rows<uint16_t>(rows, first, of_warp);
    } else {
      clear_rows<uint32_t>(rows, first, of_warp);
    }
  }
  if (!unused || of != TilesOf::kQueries || clearing.lse == nullptr) return;
  for (int64_t head = 0; head < problem.heads_q; ++head) clearing.lse[head * problem.rows_q + row] = -INFINITY;
}

// kIsFew: as list_few has it, with fewer threads.
template <bool kIsFew>
__global__ void __launch_bounds__(kSortThreads)
    prepare_kernel(const __grid_constant__ Problem problem, Sequences sequences, Tiling tiling, float groups_a_row,
                   ListScratch scratch, const __grid_constant__ Clearing clearing, uint32_t* counter) {
  grid_dependency_launch();
  if (blockIdx.x > 0) return clear_unused(problem, sequences, tiling.of, clearing, int64_t{blockIdx.x} - 1);
  if (counter != nullptr && threadIdx.x == 0) *counter = 0;
  if constexpr (kIsFew) {
    list_few(problem, sequences, tiling, groups_a_row, scratch);
  } else {
    sort_sequences(problem, sequences, tiling, scratch);
    if (scratch.count > kShortList) return;
    __syncthreads();  // all have written
    for (int64_t i = threadIdx.x; i < scratch.count; i += kSortThreads) {
      fill_entry(problem, sequences, tiling, scratch, i);
    }
  }
}

}  // namespace

int64_t packed_tiles_bytes(const Problem& problem, TilesOf of, int64_t block) {
  const int64_t tiles = most_packed_tiles(problem, rows_of(problem, of), block);
  const int64_t bytes = tiles * static_cast<int64_t>(sizeof(PackedTile)) + (problem.batch + 1) * 8 + problem.batch * 4;
  return (bytes + 127) / 128 * 128;
}

const int64_t* packed_tile_count(const Problem& problem, TilesOf of, int64_t block, const PackedTile* tiles) {
  return reinterpret_cast<const int64_t*>(tiles + most_packed_tiles(problem, rows_of(problem, of), block)) +
         problem.batch;
}

const PackedTile* prepare_packed(const Problem& problem, const Sequences& sequences, TilesOf of, int64_t block,
                                 void* memory, const PackedResults& results, void* stream, int together) {
  ListScratch scratch;
  scratch.count = most_packed_tiles(problem, rows_of(problem, of), block);
  scratch.tiles = static_cast<PackedTile*>(memory);
  scratch.first = reinterpret_cast<int64_t*>(scratch.tiles + scratch.count);
  scratch.order = reinterpret_cast<int32_t*>(scratch.first + problem.batch + 1);
  Clearing clearing = {};
  clearing.lse = results.lse;
  bool clears[2] = {results.lse != nullptr, false};
  int count = 0;
  for (const UnusedRows& rows : results.rows) {
    if (rows.view.data == nullptr) continue;
    clearing.rows[count++] = rows;
    clears[rows.of == TilesOf::kKeys] = true;
  }
  const Tiling tiling = Tiling::make(problem, of, block);
  const bool is_few = problem.batch <= kFew && scratch.count <= kShortList;
  const int threads = is_few && scratch.count <= 2 * kFewThreads ? kFewThreads : kSortThreads;
  clearing.blocks_q = clears[0] ? block_count(problem.rows_q, threads) : 0;
  clearing.blocks_k = clears[1] ? block_count(problem.rows_k, threads) : 0;
  launch(is_few ? prepare_kernel<true> : prepare_kernel<false>, grid_of(1 + clearing.blocks_q + clearing.blocks_k),
         threads, 0, stream, problem, sequences, tiling, together > 0 ? 1.f / static_cast<float>(together) : 0.f,
         scratch, clearing, results.counter);
  if (scratch.count > kShortList) {
    launch(fill_kernel, grid_of(block_count(scratch.count, kThreads)), kThreads, 0, stream, problem, sequences, tiling,
           scratch);
  }
  return scratch.tiles;
}

}  // namespace flash_ext::cuda
