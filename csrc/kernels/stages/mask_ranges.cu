// See mask_ranges.h. A block has a tile and walks over the other side of the mask from both ends, in chunks, until
// something is visible: of a mask that hides little it reads next to nothing, of others what the kernels behind it
// then leave out. Called by sm80/ and sm90/.
#include <algorithm>

#include "core/tile_schedule.h"
#include "gpu/host/launch.h"
#include "gpu/ptx/grid.cuh"
#include "kernels/stages/mask_ranges.h"

namespace flash_ext::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kCols = 128, kChunk = 16, kChunks = kCols / kChunk;  // of a row at a time; bytes of a lane
constexpr int kRows = 64;                                          // of a chunk

struct MaskTiles {
  bool of_queries;
  int block, tiles;
  int64_t rows, cols;      // of the mask; 1 where it repeats one
  int64_t heads, members;  // that have ranges of their own; heads of the mask that share them
  bool own_batch;

  __device__ __host__ int64_t count(const Problem& problem) const {
    return (own_batch ? problem.batch : 1) * heads * tiles;
  }
};

// Of one head.
struct MaskHead {
  const char* data;
  int64_t row_stride, col_stride;

  // A lane's part of a row, kChunk columns from `col` on.
  __device__ __forceinline__ bool any_of_chunk(int64_t row, int64_t col, int64_t end_col) const {
    bool any = false;
    for (int64_t i = col; i < min(col + kChunk, end_col); ++i) any |= data[row * row_stride + i * col_stride] != 0;
    return any;
  }

  // Whether rows [row, end_row), at most kRows, have a visible pair in columns [col, end_col), at most kCols; for a
  // warp. NOTE: a few rows first, because most masks show something there; then all others at once: loads that waited
  // for each other took 111 us for a causal mask of 4096, and these 31.
  __device__ __forceinline__ bool any(int64_t row, int64_t end_row, int64_t col, int64_t end_col) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kStep = 32 / kChunks;
    row += lane / kChunks;
    col += lane % kChunks * kChunk;
    const char* const from = data + row * row_stride + col;
    const bool whole = col >= end_col || (col_stride == 1 && end_col - col >= kChunk && row_stride % kChunk == 0 &&
                                          reinterpret_cast<uint64_t>(from) % kChunk == 0);
    bool seen = false;
    if (__any_sync(~0u, !whole)) {
      for (int i = 0; i < kRows && !__any_sync(~0u, seen); i += kStep) {
        seen = row + i < end_row && any_of_chunk(row + i, col, end_col);
      }
      return __any_sync(~0u, seen);
    }
    const auto words = [&](int i) {
      const bool inside = row + i < end_row && col < end_col;
      const uint4 x = inside ? *reinterpret_cast<const uint4*>(from + i * row_stride) : uint4{};
      return x.x | x.y | x.z | x.w;
    };
    if (__any_sync(~0u, words(0) != 0)) return true;
    uint32_t all = 0;
#pragma unroll
    for (int i = kStep; i < kRows; i += kStep) all |= words(i);
    return __any_sync(~0u, all != 0);
  }
};

__global__ void __launch_bounds__(kThreads, 1)
    mask_ranges_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ MaskTiles tiles,
                       MaskRange* ranges, uint32_t* counter) {
  grid_dependency_launch();
  if (counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
  const int64_t tile = blockIdx.x % tiles.tiles, rest = blockIdx.x / tiles.tiles;
  const int64_t head = rest % tiles.heads * tiles.members, b = rest / tiles.heads;
  const TensorView& view = args.mask;
  const char* const first_head = static_cast<const char*>(view.data) + batch_offset(args.problem, view, b);
  const int64_t begin = tile * tiles.block, length = tiles.of_queries ? tiles.rows : tiles.cols;
  const int64_t end = min(begin + tiles.block, length), other = tiles.of_queries ? tiles.cols : tiles.rows;
  // The other side in chunks, the tile in parts of a warp each: as many chunks at once as there are warps for.
  const int step = tiles.of_queries ? kCols : kRows, part_size = tiles.of_queries ? kRows : kCols;
  const int chunks = static_cast<int>((other + step - 1) / step), warp = static_cast<int>(threadIdx.x) / 32;
  const int parts = static_cast<int>((end - begin + part_size - 1) / part_size), at_once = kWarps / parts;
  const int64_t part_begin = begin + warp % parts * part_size, part_end = min(part_begin + part_size, end);

  // Whether this warp's part sees something of a chunk of the other side.
  const auto sees = [&](int chunk) {
    if (warp / parts >= at_once || chunk < 0 || chunk >= chunks) return false;
    const int64_t from = int64_t{chunk} * step, to = min(from + step, other);
    bool any = false;
    for (int64_t member = 0; member < tiles.members && !any; ++member) {
      const MaskHead of{first_head + (head + member) * view.head_stride, view.row_stride, view.col_stride};
      any = of.any(tiles.of_queries ? part_begin : from, tiles.of_queries ? part_end : to,
                   tiles.of_queries ? from : part_begin, tiles.of_queries ? to : part_end);
    }
    return any;
  };
  __shared__ int first, last;
  if (threadIdx.x == 0) first = chunks, last = -1;
  __syncthreads();
  bool found = false;
  for (int i = 0; i < chunks && !found; i += at_once) {
    const int chunk = i + warp / parts;
    const bool any = sees(chunk);
    if (any && threadIdx.x % 32 == 0) atomicMin(&first, chunk);
    found = __syncthreads_or(any) != 0;
  }
  for (int i = chunks - 1; found && i >= 0; i -= at_once) {
    const int chunk = i - warp / parts;
    const bool any = sees(chunk);
    if (any && threadIdx.x % 32 == 0) atomicMax(&last, chunk);
    if (__syncthreads_or(any) != 0) break;
  }
  if (threadIdx.x == 0) {
    const int64_t of_other = tiles.of_queries ? args.problem.len_k : args.problem.len_q;
    const int64_t past = last == chunks - 1 ? of_other : int64_t{last + 1} * step;
    ranges[blockIdx.x] = found ? MaskRange{first * step, static_cast<int>(past)} : MaskRange{};
  }
}

MaskTiles tiles_of(const ForwardArgs& args, RangesOf of, int block) {
  const Problem& problem = args.problem;
  const TensorView& mask = args.mask;
  MaskTiles tiles;
  tiles.of_queries = of == RangesOf::kQueries;
  tiles.block = block;
  tiles.rows = mask.row_stride == 0 ? 1 : problem.len_q;
  tiles.cols = mask.col_stride == 0 ? 1 : problem.len_k;
  tiles.tiles = static_cast<int>(block_count(tiles.of_queries ? tiles.rows : tiles.cols, block));
  const bool own_head = mask.head_stride != 0 && problem.heads_q > 1;
  tiles.heads = !own_head ? 1 : tiles.of_queries ? problem.heads_q : problem.heads_k;
  tiles.members = own_head ? problem.heads_q / tiles.heads : 1;
  tiles.own_batch = false;
  for (int i = 0; i < problem.batch_rank; ++i) {
    tiles.own_batch = tiles.own_batch || (mask.batch_stride[i] != 0 && problem.batch_size[i] > 1);
  }
  return tiles;
}

}  // namespace

int64_t mask_ranges_bytes(const Problem& problem, RangesOf of, int64_t block) {
  if (!problem.has_mask || problem.packed) return 0;
  const bool of_queries = of == RangesOf::kQueries;
  return problem.batch * (of_queries ? problem.heads_q : problem.heads_k) *
         block_count(of_queries ? problem.len_q : problem.len_k, block) * static_cast<int64_t>(sizeof(MaskRange));
}

MaskRanges find_mask_ranges(const ForwardArgs& args, RangesOf of, int block, void* scratch, uint32_t* counter) {
  const MaskTiles tiles = tiles_of(args, of, block);
  auto* const ranges = static_cast<MaskRange*>(scratch);
  launch(mask_ranges_kernel, grid_of(tiles.count(args.problem)), kThreads, 0, args.stream, args, tiles, ranges,
         counter);
  MaskRanges result;
  result.data = ranges;
  result.tile = tiles.tiles > 1 ? 1 : 0;
  result.head = tiles.heads > 1 ? tiles.tiles : 0;
  result.b = tiles.own_batch ? static_cast<int>(tiles.heads * tiles.tiles) : 0;
  return result;
}

}  // namespace flash_ext::cuda
