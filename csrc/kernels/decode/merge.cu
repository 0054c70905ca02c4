// Merges the parts of works that several blocks had, see merge.cuh; and which kernel a call has.
//
// A thread takes four columns; a line of threads has a row. Which blocks have parts of it is computed anew. Called by
// torch/cache_kernel.cpp. Invariant: the order of the sum follows from the plan and the lengths alone.
#include <atomic>

#include "core/library.h"
#include "gpu/host/launch.h"
#include "gpu/ptx/grid.cuh"
#include "kernels/decode/merge.cuh"
#include "kernels/decode/units.h"

namespace flash_ext {
namespace decode {
namespace {

constexpr int kMergeThreads = 128, kBatch = 8;  // parts whose loads are in flight together
constexpr int64_t kLoneRows = 4096;             // of the call: a block each; else kBlockRows
constexpr int kBlockRows = 16;

// Four columns of a row over some keys.
struct Merged {
  float max = -INFINITY, sum = 0.f;
  float4 out = {};

  template <int kCount>
  __device__ __forceinline__ void join(const Merged (&more)[kCount]) {
    const float before = max;
#pragma unroll
    for (int k = 0; k < kCount; ++k) max = fmaxf(max, more[k].max);
    const float kept = merge_factor(before, max);
    sum *= kept;
    out = make_float4(out.x * kept, out.y * kept, out.z * kept, out.w * kept);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float factor = merge_factor(more[k].max, max);
      const float4& add = more[k].out;
      sum = fmaf(more[k].sum, factor, sum);
      out = make_float4(fmaf(add.x, factor, out.x), fmaf(add.y, factor, out.y), fmaf(add.z, factor, out.z),
                        fmaf(add.w, factor, out.w));
    }
  }
};

// Where the parts of a work are.
struct PartsOfWork {
  int first, behind, step, count;  // part 0, and what is added to n steps for part n

  // In pieces.
  __device__ __forceinline__ PartsOfWork(const DecodeArgs& args, const DecodePlan& plan, int b, int work, int tiles)
      : first(first_piece(args, plan, b, work)), behind(first), step(1) {
    const int piece = piece_of(plan, tiles);
    count = (tiles + piece - 1) / piece;
  }
  // In runs: place.x is the work's first tile among all, place.y the tiles of a run. A block has two parts.
  __device__ __forceinline__ PartsOfWork(int2 place, int tiles) : step(2) {
    const int block = place.x / place.y;
    behind = 2 * block;
    first = behind + (place.x > block * place.y ? 1 : 0);
    count = (place.x + tiles - 1) / place.y - block + 1;
  }
  __device__ __forceinline__ int part(int n) const { return n == 0 ? first : behind + n * step; }
};

// Parts begin, begin + step, ... of a row.
__device__ __forceinline__ Merged merge_every(const Parts& parts, const PartsOfWork& from, int begin, int step, int row,
                                              int head_dim, int col) {
  Merged merged;
#pragma unroll 1
  for (int n = begin; n < from.count; n += kBatch * step) {
    Merged parts_of[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (n + k * step >= from.count) break;
      const int part = from.part(n + k * step);
      const float2 sums = parts.sums_of(part)[row];
      const int64_t line_of_part = int64_t{part} * parts.rows + row;
      parts_of[k] = {sums.x, sums.y, *reinterpret_cast<const float4*>(parts.out + line_of_part * head_dim + col)};
    }
    merged.join(parts_of);
  }
  return merged;
}

// kAlone: a block has one row, whose parts its lines of threads share; else each line has a row at a time. Of pieces
// either sums every so many parts first, and then these sums, so that bits do not follow from how many rows there are.
template <bool kAlone>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ DecodePlan plan,
                 const __grid_constant__ Parts parts, int tile_keys) {
  const int chunks = kAlone ? plan.part_rows : (plan.part_rows + kBlockRows - 1) / kBlockRows;
  const int at = static_cast<int>(blockIdx.x) / chunks, works = works_of(args, plan);
  const int first_row = static_cast<int>(blockIdx.x) % chunks * (kAlone ? 1 : kBlockRows);
  Segment segment;
  segment.b = at / works;
  segment.head = at % works / plan.row_tiles;
  segment.row_tile = at % plan.row_tiles;
  const int tiles = tiles_of(keys_of_sequence(args, segment.b), tile_keys);
  int2 place = {};
  if (plan.piece_tiles == 0 && !plan.tells_places) {
    const Deal deal = Deal::make(args, plan, tile_keys);
    place = make_int2(deal.before_sequence(args, plan, segment.b, tile_keys) + at % works * tiles, deal.run);
  }
#if __CUDA_ARCH__ >= 900
  if (plan.dependent) grid_dependency_wait();  // of every block: what comes behind on the stream relies on it
#endif
  if (plan.tells_places) place = parts.places[at];
  const PartsOfWork from =
      plan.piece_tiles > 0 ? PartsOfWork(args, plan, segment.b, at % works, tiles) : PartsOfWork(place, tiles);
  if (from.count == 1) return;  // all written
  const int head_dim = args.head_dim, quarter = head_dim / 4, lines = kMergeThreads / quarter;
  const int line = static_cast<int>(threadIdx.x) / quarter, col = static_cast<int>(threadIdx.x) % quarter * 4;
  const int step = kAlone || plan.piece_tiles > 0 ? lines : 1;  // of parts that are summed first
  const int rows = min(plan.part_rows, first_row + (kAlone ? 1 : kBlockRows));
  for (int row = first_row + (kAlone ? 0 : line); row < rows; row += lines) {
    Merged merged = merge_every(parts, from, kAlone ? line : 0, step, row, head_dim, col);
    if constexpr (!kAlone) {
#pragma unroll 1
      for (int begin = 1; begin < step; ++begin) {
        const Merged next[1] = {merge_every(parts, from, begin, step, row, head_dim, col)};
        merged.join(next);
      }
    } else {
      __shared__ Merged others[kMergeThreads];
      others[threadIdx.x] = merged;
      __syncthreads();
      if (line > 0) return;
#pragma unroll 1
      for (int other = 1; other < lines; ++other) {
        const Merged next[1] = {others[other * quarter + static_cast<int>(threadIdx.x)]};
        merged.join(next);
      }
    }
    const QueryRow to(args, plan, segment, row);
    if (!to.exists) break;
    finish_row(args, segment, to, col, merged.out, merged.max, merged.sum);
    if (kAlone) break;
  }
}

// Whether the merge waits for the kernel before it by itself: code for 9.0 does, and what a driver makes of PTX of 8.0
// does not. Asked once a compute capability, of the current device.
bool may_depend(int compute_capability) {
  static std::atomic<signed char> known[256] = {};  // 1: yes, -1: no
  if (compute_capability < 90 || compute_capability > 255) return false;
  std::atomic<signed char>& answer = known[compute_capability];
  if (answer == 0) answer = cuda::is_made_for(merge_kernel<true>, 90) ? 1 : -1;
  return answer == 1;
}

const Unit* unit_of(const DecodeArgs& args, bool many_rows) {
  for (const std::span<const Unit> units : {bf16_units(), fp16_units(), fp8_units()}) {
    for (const Unit& unit : units) {
      const bool fits = unit.fp8 == args.fp8 && (unit.fp8 || unit.dtype == args.dtype);
      if (fits && unit.head_dim == args.head_dim && (unit.tile_rows > 16) == many_rows) return &unit;
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace decode

DecodePlan plan_decode(const DecodeArgs& args, const DeviceInfo& device, bool batch_invariant) {
  using namespace decode;
  // NOTE: beyond these a packed call was faster, which copies pages and e4m3 first. One H100, 8 sequences of 8k keys:
  // 256 rows 271 us against 218, 128 rows 167 against 215; of pages of 64, 256 rows 376 against 420.
  // In any layout the same with batch_invariant.
  const int64_t most_rows = args.fp8 || args.table != nullptr || batch_invariant ? 256 : 128;
  // Beyond these the kernel tells the merge where parts are, else each block of the merge adds up the lengths. NOTE: up
  // to 32 a lane has one, before the kernel has ended; of 256 that took 11 us longer than to be told (one H200).
  constexpr int kManySequences = 32;
  DecodePlan plan;
  const int64_t rows = int64_t{args.len_q} * (args.heads_q / args.heads_k);
  const Unit* const unit = unit_of(args, rows > 16);
  if (unit == nullptr || rows > most_rows || device.compute_capability < 80) return plan;
  // Blocks that a multiprocessor holds, and places of the ring that they leave room for.
  constexpr int64_t kReserved = 1024;
  int blocks = unit->most_blocks;
  for (plan.stages = kMaxStages; plan.stages >= 2; --plan.stages) {
    plan.shared_bytes = unit->shared_bytes(plan.stages);
    if (plan.shared_bytes + unit->static_bytes > device.shared_memory_per_block) continue;
    const int64_t fit = device.shared_memory_per_multiprocessor / (plan.shared_bytes + unit->static_bytes + kReserved);
    if (fit >= blocks) break;
    if (plan.stages == 2 && fit > 0) {
      blocks = static_cast<int>(fit);
      break;
    }
  }
  if (plan.stages < 2) return plan;
  plan.tile_rows = unit->tile_rows;
  plan.row_tiles = static_cast<int>((rows + plan.tile_rows - 1) / plan.tile_rows);
  plan.group = args.heads_q / args.heads_k;
  plan.of_group = plan.group == 1 ? 0 : UINT32_MAX / static_cast<unsigned>(plan.group) + 1;
  plan.least_tiles = batch_invariant ? 1 : kLeastRunKeys / unit->tile_keys;
  plan.part_rows = static_cast<int>(std::min<int64_t>(rows, plan.tile_rows));
  plan.dependent = may_depend(device.compute_capability);
  // Rows times pieces are bounded, and so is what scratch has of a sequence.
  constexpr int64_t kPieceRows = 512, kLeastPieces = 4, kMostPieces = 64;
  const int64_t keys = std::min<int64_t>(args.capacity, int64_t{args.left} + args.right + args.len_q);
  const int64_t tiles = std::max<int64_t>(1, (keys + unit->tile_keys - 1) / unit->tile_keys);
  const int64_t works = int64_t{args.batch} * args.heads_k * plan.row_tiles;
  int64_t pieces = tiles;
  if (batch_invariant) {
    plan.piece_tiles = kLeastPieceKeys / unit->tile_keys;
    plan.most_pieces = static_cast<int>(std::clamp(kPieceRows / rows, kLeastPieces, kMostPieces));
    pieces = std::min<int64_t>(plan.most_pieces, (tiles + plan.piece_tiles - 1) / plan.piece_tiles);
    plan.pieces = static_cast<int>(pieces);
  }
  plan.grid = static_cast<int>(std::min<int64_t>(int64_t{device.multiprocessors} * blocks, works * pieces));
  plan.too_large = works * tiles + 2 * plan.grid >= INT32_MAX / 2;  // work.cuh counts in 32 bits
  plan.runs = !plan.too_large;
  plan.merges = pieces > 1;
  plan.tells_places = plan.merges && !batch_invariant && args.batch > kManySequences;
  plan.parts = !plan.merges ? 0 : batch_invariant ? works * pieces : 2 * plan.grid;
  plan.scratch_bytes = plan.parts * plan.part_rows * (args.head_dim + 2) * 4 + (plan.tells_places ? 8 * works : 0);
  return plan;
}

void run_decode(const DecodeArgs& args, const DecodePlan& plan, void* scratch) {
  using namespace decode;
  const Unit* const unit = unit_of(args, plan.tile_rows > 16);
  // Rows of out begin at multiples of 16 bytes, sums and places at such of 8.
  const int64_t all_rows = plan.parts * plan.part_rows;
  auto* const out = static_cast<float*>(scratch);
  auto* const sums = reinterpret_cast<float2*>(out + all_rows * args.head_dim);
  const Parts parts{sums, out, plan.part_rows, reinterpret_cast<int2*>(sums + all_rows)};
  unit->run(args, plan, parts);
  if (!plan.merges) return;
  const int64_t works = int64_t{args.batch} * args.heads_k * plan.row_tiles;
  const bool alone = works * plan.part_rows <= kLoneRows;
  const dim3 grid = cuda::grid_of(works * (alone ? plan.part_rows : (plan.part_rows + kBlockRows - 1) / kBlockRows));
  const auto kernel = alone ? merge_kernel<true> : merge_kernel<false>;
  if (plan.dependent) {
    cuda::launch_dependent(kernel, grid, kMergeThreads, 0, args.stream, args, plan, parts, unit->tile_keys);
  } else {
    cuda::launch(kernel, grid, kMergeThreads, 0, args.stream, args, plan, parts, unit->tile_keys);
  }
}

}  // namespace flash_ext
