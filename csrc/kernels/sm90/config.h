// The tiles of this backend, what each keeps in shared memory, how the warpgroups take turns and in which order tiles
// run. Host and device read the same functions, so that plan(), the launch and the kernel cannot disagree.
//
// Called by rows.cpp and cost.h, and by the kernels through their own config. Invariant: every tile starts at a
// multiple of 1024 bytes (descriptor.h); registers of all warpgroups together fit the 65,536 of a multiprocessor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/band.h"
#include "core/portable.h"
#include "core/sequences.h"
#include "core/tile_schedule.h"
#include "kernels/sm90/descriptor.h"

namespace flash_ext::sm90 {

// In both, S of the next tile of keys and O of this one are issued together and softmax of the next runs under O.
enum class Schedule : uint8_t {
  kOverlap,   // warpgroups are on their own
  kPingPong,  // one warpgroup after the other issues its products
};

constexpr int kSpeculates = 0;  // P first, then a look at its sum; see SpeculativeSoftmax

// Columns of V that one forward kernel sums up. Above head dim 256 a warpgroup's registers hold half of out, so there
// is a launch for each half, and each makes all of S and P.
constexpr int value_dim(int head_dim) { return head_dim <= 256 ? head_dim : head_dim / 2; }

constexpr int kNarrowValues = 128;  // columns of V that have kernels of their own beside more of K

constexpr int kOnesRows = 8;  // of a tile of V of e4m3, the first of them ones, see forward/fp8.cuh

struct ForwardShape {
  int consumers;  // warpgroups of 64 queries
  int block_n;    // keys
  int stages;     // of K and of V
  int q_stages;   // 2: the next tile's Q arrives during this one, and out leaves through Q's stage
  Schedule schedule;
  int split;  // columns of S whose maximum is taken before the first exponential, the others' is taken meanwhile; or
              // kSpeculates
  bool shares_keys = false;  // the keys of a tile of queries may be several blocks', see forward/splits.h
  bool scored = false;       // with a bias or mask, which the producer's other three warps bring, slopes or dropout
  bool fp8 = false;          // Q, K and V of e4m3, see forward/fp8.cuh
  int narrow = 0;            // columns of V, where they are fewer than those of Q and K; 0: as many

  constexpr int block_m() const { return consumers * 64; }
  // Of a row of Q and K, in numbers of 16 bits: two of e4m3 are one.
  constexpr int columns(int head_dim) const { return fp8 ? head_dim / 2 : head_dim; }
  constexpr int values(int head_dim) const { return narrow > 0 ? narrow : value_dim(head_dim); }
  // The tile of V, of e4m3 transposed.
  constexpr int value_rows(int head_dim) const { return fp8 ? values(head_dim) + kOnesRows : block_n; }
  constexpr int value_columns(int head_dim) const { return fp8 ? block_n / 2 : values(head_dim); }
  // Registers of P packed, of a thread.
  constexpr int p_registers() const { return block_n / (fp8 ? 8 : 4); }
  constexpr int threads() const { return (consumers + 1) * 128; }
  // What setmaxnreg gives. A launch gives every thread the same number, a multiple of 8: 168, 128 and 96 of 65,536, and
  // 128 * (24 + 2 * 240), 128 * (32 + 3 * 160) and 128 * (32 + 4 * 112) are what that makes; with loaders of scores
  // 128 * (72 + 2 * 216) and 128 * (56 + 3 * 152). Of packed sequences consumers have bands in registers, the producer
  // an entry of the list: 128 * (56 + 2 * 224) and 128 * (40 + 2 * 232).
  constexpr int producer_registers(bool packed = false) const {
    if (scored) return consumers == 2 && !packed ? 72 : 56;
    return consumers == 2 ? (packed ? 40 : 24) : 32;
  }
  constexpr int consumer_registers(bool packed = false) const {
    if (scored) return consumers == 2 ? (packed ? 224 : 216) : 152;
    return consumers == 2 ? (packed ? 232 : 240) : consumers == 3 ? 160 : 112;
  }

  constexpr bool operator==(const ForwardShape&) const = default;
};

// Which tiles a call gets.
enum class Tiles : uint8_t {
  kLarge,   // read K and V least often
  kSmall,   // fewer queries or keys a tile waste less on the diagonal, at the ends of rows and on the last round
  kSplit,   // few queries: small tiles and deep rings, because loads of K and V take the time, and one more axis: keys
  kScored,  // with a bias, mask, slopes or dropout (scores.cuh): what hides the longer softmax best is a third
            // consumer, where registers allow it
  kNarrow,  // values of at most 128 columns beside keys of 129 to 192, as kLarge otherwise
  kFp8,
};

// docs/lab/2026-11-21-hopper-forward.md says what else was measured.
constexpr ForwardShape forward_shape(int head_dim, Tiles tiles) {
  if (tiles == Tiles::kFp8) {
    if (head_dim <= 64) return {3, 128, 3, 2, Schedule::kOverlap, kSpeculates, false, false, true};
    if (head_dim <= 128) return {2, 192, 2, 1, Schedule::kPingPong, kSpeculates, false, false, true};
    return {2, 128, 2, 1, Schedule::kPingPong, kSpeculates, false, false, true};
  }
  if (tiles == Tiles::kNarrow)
    return {2, 128, 2, 1, Schedule::kPingPong, kSpeculates, false, false, false, kNarrowValues};
  if (head_dim > 384) {  // NOTE: a second stage of 64 keys does not fit beside 128 queries
    return tiles == Tiles::kScored ? ForwardShape{2, 32, 1, 1, Schedule::kOverlap, 32, false, true}
                                   : ForwardShape{2, 32, 2, 1, Schedule::kOverlap, 32};
  }
  if (head_dim > 256) {
    return tiles == Tiles::kScored ? ForwardShape{2, 32, 2, 1, Schedule::kOverlap, 32, false, true}
                                   : ForwardShape{2, 48, 2, 1, Schedule::kOverlap, 48};
  }
  if (tiles == Tiles::kSplit) {
    if (head_dim <= 64) return {3, 128, 6, 1, Schedule::kPingPong, 128, true};
    if (head_dim <= 128) return {2, 128, 3, 1, Schedule::kOverlap, 32, true};
    if (head_dim <= 192) return {2, 64, 3, 1, Schedule::kPingPong, 32, true};
    return {2, 64, 2, 1, Schedule::kPingPong, 32, true};
  }
  if (tiles == Tiles::kScored) {
    if (head_dim <= 64) return {3, 96, 2, 2, Schedule::kOverlap, 96, false, true};
    if (head_dim <= 128) return {3, 80, 2, 1, Schedule::kOverlap, 80, false, true};
    if (head_dim <= 192) return {2, 80, 2, 1, Schedule::kOverlap, 80, false, true};
    return {2, 48, 2, 1, Schedule::kOverlap, 48, false, true};
  }
  const bool few = tiles == Tiles::kSmall;
  if (head_dim <= 64 && few) return {4, 64, 4, 2, Schedule::kOverlap, kSpeculates};
  if (head_dim <= 64) return {3, 128, 3, 2, Schedule::kPingPong, kSpeculates};
  if (head_dim <= 128 && few) return {2, 128, 2, 2, Schedule::kOverlap, 32};
  if (head_dim <= 96) return {3, 96, 2, 2, Schedule::kPingPong, kSpeculates};
  if (head_dim <= 128) return {3, 80, 2, 2, Schedule::kOverlap, 80};
  if (head_dim <= 192) return {2, 96, 2, 1, Schedule::kPingPong, 48};
  return {2, 64, 2, 1, Schedule::kPingPong, 32};
}

inline bool has_narrow_values(const Problem& problem, int head_dim) {
  return head_dim == 192 && problem.head_dim_v <= kNarrowValues;
}

inline bool is_scored(const Problem& problem) {
  return problem.has_mask || problem.has_bias || problem.has_alibi || problem.softcap != 0.0 || problem.dropout_p > 0.0;
}

// Whether a bias or mask can be read in chunks of 16 bytes. element: bytes. A dimension of one index has no stride.
inline bool reads_chunks(const Problem& problem, const TensorView& view, int element) {
  const auto is_aligned = [&](int64_t size, int64_t stride) { return size <= 1 || stride * element % 16 == 0; };
  bool aligned = view.col_stride == 1 && reinterpret_cast<uint64_t>(view.data) % 16 == 0 &&
                 is_aligned(problem.len_q, view.row_stride) && is_aligned(problem.heads_q, view.head_stride);
  for (int i = 0; i < problem.batch_rank; ++i) {
    aligned = aligned && is_aligned(problem.batch_size[i], view.batch_stride[i]);
  }
  return aligned;
}

// Keys that a query sees.
inline int64_t keys_of(const Problem& problem, int64_t query) {
  return make_band(problem).keys({query, query + 1}, problem.len_k).size();
}

// By the mean of what queries see. Measured at powers of two: at head dim 64 it is 512 that is few and 1024 that is
// many, beyond that 1024 and 2048.
inline bool has_few_keys(const Problem& problem, int head_dim) {
  const int64_t sum = keys_of(problem, problem.len_q / 4) + keys_of(problem, problem.len_q * 3 / 4);
  return sum / 2 <= (head_dim <= 64 ? 768 : 1536);
}

// A block for each multiprocessor walks the tiles. Where all take the same time it takes every grid-th, and heads
// follow each other, so that the first round does not wait for all of K and V at once. Else it asks a counter for the
// next, longest first inside sections of key heads whose K and V stay in L2; that costs a memset before the launch.
struct ForwardOrder {
  TileSchedule schedule;
  bool counted;
  int64_t grid;
};

constexpr int kCounterBytes = 64;  // scratch of a counted order

constexpr int64_t kL2OfKeys = 16 << 20;  // of kL2Budget, where tiles of queries read keys and values alone

// Of packed sequences, how many keys of a head tiles read at a time (prepare_packed's `together`): what L2 keeps. NOTE:
// a quarter where sequences are short, because then all of it is asked of memory within two tiles' time: 32 causal ones
// of 512 at head dim 128 took 7 % longer.
inline int packed_rows_together(const Problem& problem) {
  const bool is_short = problem.rows_k <= 512 * problem.batch;
  return static_cast<int>((is_short ? kL2OfKeys / 4 : kL2OfKeys) / ((problem.head_dim + problem.head_dim_v) * 2));
}

// Of packed sequences: a head has the tiles of their list (core/sequences.h), what takes longest first, or fewer: only
// the device knows how many. Its K and V are those of all sequences. How long tiles take is not known either; here they
// fall evenly from the longest sequence's keys on, with the right mean.
inline ForwardOrder packed_order(const Problem& problem, int block_m, int multiprocessors) {
  TileSchedule schedule;
  schedule.blocks = most_packed_tiles(problem, problem.rows_q, block_m);
  schedule.heads_k = schedule.kv_heads = problem.heads_k;
  schedule.group = problem.heads_q / problem.heads_k;
  const int64_t longest = problem.len_k, keys = problem.rows_k / problem.batch;
  const int64_t mean = make_band(problem).unbounded() ? keys : keys / 2;
  const int64_t shortest = std::min(std::max<int64_t>(2 * mean - longest, 1), longest), last = schedule.blocks - 1;
  set_sections(schedule, heads_per_section(problem.rows_k * (problem.head_dim + problem.head_dim_v) * 2, kL2OfKeys),
               multiprocessors,
               [&](int64_t block) { return last > 0 ? longest - (longest - shortest) * block / last : longest; });
  const int64_t tiles = schedule.size();
  const int64_t grid = multiprocessors > 0 && multiprocessors < tiles ? multiprocessors : tiles;
  return {schedule, grid < tiles, grid};
}

// multiprocessors: 0 where unknown.
inline ForwardOrder forward_order(const Problem& problem, int block_m, int multiprocessors) {
  if (problem.packed) return packed_order(problem, block_m, multiprocessors);
  const bool alike = (problem.len_q % block_m == 0 || problem.len_q < block_m) &&
                     keys_of(problem, 0) == keys_of(problem, problem.len_q - 1);
  const int64_t kv_head_bytes = problem.len_k * (problem.head_dim + problem.head_dim_v) * 2;
  ForwardOrder order{
      make_tile_schedule(problem, block_m, kv_head_bytes, alike ? 0 : kL2OfKeys, alike ? 0 : multiprocessors), false,
      0};
  const int64_t tiles = order.schedule.size();
  order.grid = multiprocessors > 0 && multiprocessors < tiles ? multiprocessors : tiles;
  order.counted = !alike && order.grid < tiles;
  return order;
}

struct ForwardSmem {
  int q = 0, k = 0, v = 0, scores = 0, sums = 0, rows = 0, works = 0, barriers = 0;  // offsets
  int total = 0;  // and what it takes to align the first tile
};

// Of e4m3, where O of the tiles before these is (forward/fp8.cuh): in shared memory, of which a warp has a multiple of
// 1024 bytes, because out goes through it, too; above head dim 128 in scratch, of each block.
constexpr bool sum_is_shared(int head_dim) { return head_dim <= 128; }
constexpr int tiles_of_sum(int head_dim) { return sum_is_shared(head_dim) ? 8 : 16; }
constexpr int sum_registers(int head_dim) { return (value_dim(head_dim) + kOnesRows) / 2; }
constexpr int sum_bytes(int head_dim) {  // of a warp
  return sum_is_shared(head_dim) ? (sum_registers(head_dim) * 32 * 4 + 1023) / 1024 * 1024 : 0;
}
// What a thread has in shared memory for each of its two rows (forward/fp8.cuh's RowNumbers).
constexpr int row_numbers(int head_dim) { return sum_is_shared(head_dim) ? 2 : 3; }
inline int64_t sum_scratch_bytes(const Problem& problem, ForwardShape shape, int head_dim, int64_t grid) {
  const bool is_needed = !sum_is_shared(head_dim) && problem.len_k > tiles_of_sum(head_dim) * shape.block_n;
  return is_needed ? grid * shape.block_m() * 2 * sum_registers(head_dim) * 4 : 0;
}

constexpr int kSharedMemoryLimit = 227 * 1024;  // of one block on 9.0
constexpr int kWorks = 2;                       // of the tiles that the producer has published
constexpr int kWorkBytes = 32;                  // of each, see forward/work.cuh
constexpr int kFp8WorkBytes = 48;               // forward/fp8.cuh
constexpr int kPackedWorkBytes = 48;            // of packed sequences, forward/packed.cuh
constexpr int kScoreStages = 4;                 // of bias and mask, at most; how many fit depends on what there is

constexpr ForwardSmem forward_smem(ForwardShape shape, int head_dim, int work_bytes = kWorkBytes) {
  const int rings = kWorks + shape.q_stages * shape.consumers + 2 * shape.stages + (shape.scored ? kScoreStages : 0);
  const int small = kWorks * work_bytes + 16 * rings;
  ForwardSmem smem;
  smem.k = shape.q_stages * tile_bytes(shape.block_m(), shape.columns(head_dim));
  smem.v = smem.k + shape.stages * tile_bytes(shape.block_n, shape.columns(head_dim));
  smem.scores = smem.v + shape.stages * tile_bytes(shape.value_rows(head_dim), shape.value_columns(head_dim));
  const int left = kSharedMemoryLimit - kTileAlign - smem.scores - small;
  smem.sums = smem.scores + (shape.scored ? left / 16 * 16 : 0);
  smem.rows = smem.sums + (shape.fp8 ? shape.consumers * 4 * sum_bytes(head_dim) : 0);
  smem.works = smem.rows + (shape.fp8 ? shape.block_m() * 2 * row_numbers(head_dim) * 8 : 0);
  smem.barriers = smem.works + kWorks * work_bytes;
  smem.total = smem.works + small + kTileAlign;
  return smem;
}

// A row of a tile of bias or mask: an odd number of 16-byte chunks, so that eight rows lie in different banks.
constexpr int score_pitch(int block_n, int element_bytes) { return (block_n * element_bytes / 16 | 1) * 16; }

constexpr bool fits(int head_dim) {
  const ForwardShape scored = forward_shape(head_dim, Tiles::kScored);
  const ForwardSmem smem = forward_smem(scored, head_dim, kPackedWorkBytes);
  const int largest = scored.block_m() * (score_pitch(scored.block_n, 4) + score_pitch(scored.block_n, 1));
  for (const Tiles tiles : {Tiles::kLarge, Tiles::kSmall, Tiles::kSplit}) {
    if (forward_smem(forward_shape(head_dim, tiles), head_dim, kPackedWorkBytes).total > kSharedMemoryLimit) {
      return false;
    }
  }
  return smem.works - smem.scores >= largest;
}
static_assert(forward_smem(forward_shape(64, Tiles::kFp8), 64, kFp8WorkBytes).total <= kSharedMemoryLimit);
static_assert(forward_smem(forward_shape(128, Tiles::kFp8), 128, kFp8WorkBytes).total <= kSharedMemoryLimit);
static_assert(forward_smem(forward_shape(256, Tiles::kFp8), 256, kFp8WorkBytes).total <= kSharedMemoryLimit);
static_assert(forward_smem(forward_shape(192, Tiles::kNarrow), 192, kPackedWorkBytes).total <= kSharedMemoryLimit);
static_assert(fits(64) && fits(96) && fits(128) && fits(192) && fits(256) && fits(384) && fits(512));

}  // namespace flash_ext::sm90
