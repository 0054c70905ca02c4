// The tiles of backward, what each keeps in shared memory, and the order in which tiles run. Host and device read the
// same functions, so that plan(), the launch and the kernel cannot disagree.
//
// Called by rows.cpp, kernel.cuh, order.cuh, rows.cuh and run.cuh. Invariant: as of config.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/band.h"
#include "core/portable.h"
#include "core/score_kind.h"
#include "core/sequences.h"
#include "core/tile_schedule.h"
#include "kernels/sm90/config.h"
#include "kernels/sm90/descriptor.h"

namespace flash_ext::sm90 {

// Two consumer warpgroups own 64 keys each; dQ of a tile is split among them by queries or by columns.
struct BackwardShape {
  int block_m;    // queries
  int stages;     // of Q and of dO
  int ds_stages;  // of dS
  int k_steps;    // of 16 columns of K that S^T takes from registers, because the products saturate shared memory
  bool defers;    // dQ of a tile of queries is computed during the next, so that no warpgroup waits for the other's dS
  bool scored;    // with a bias, a mask or dropout, which the producer's other three warps bring (scores.cuh)

  static constexpr int consumers = 2, block_n = 128, threads = 384;
  // A launch gives every thread 168 of the 65,536: 128 * (24 + 2 * 240) and 128 * (56 + 2 * 224).
  constexpr int producer_registers() const { return scored ? 56 : 24; }
  constexpr int consumer_registers() const { return scored ? 224 : 240; }
  // Of what dropout drops in a tile of queries and keys, a bit a pair.
  constexpr int drop_bytes() const { return block_m * block_n / 8; }
  // Columns of dQ that a warpgroup computes, of head_dim; the queries are split where that is all of them.
  constexpr int dq_cols(int head_dim) const { return block_m == 128 ? head_dim : head_dim / 2; }
};

// Which kernel a call needs.
inline ScoreKind score_kind_of(const Problem& problem) {
  if (problem.dropout_p > 0.0) return ScoreKind::kDropout;
  if (problem.softcap != 0.0) return ScoreKind::kSoftcap;
  return is_scored(problem) ? ScoreKind::kScores : ScoreKind::kNone;
}
constexpr bool is_scored(ScoreKind kind) { return kind == ScoreKind::kScores || kind == ScoreKind::kDropout; }

constexpr BackwardShape backward_shape(int head_dim, ScoreKind kind = ScoreKind::kNone) {
  // NOTE: with 224 registers one step spills 4 to 16 bytes.
  if (is_scored(kind)) return {head_dim <= 64 ? 128 : 64, 2, 1, 0, false, true};
  if (kind == ScoreKind::kSoftcap) return {head_dim <= 64 ? 128 : 64, 2, 2, 0, false, false};
  if (head_dim <= 64) return {128, 2, 2, 4, true, false};
  return {64, 2, 2, 4, false, false};
}

// Numbers that a query has beside Q and dO (rows.cuh), by tile of queries: of all its queries the first, and so on.
enum QueryStat { kLseStat, kRenormStat, kDeltaStat, kQueryStats };

// How blocks find their tiles of keys.
enum class Persistence : uint8_t {
  kOne,      // a block each
  kEvery,    // every gridDim.x-th
  kRanged,   // every gridDim.x-th; and tiles of queries that a mask hides are left out (core/mask_ranges.h)
  kStored,   // every gridDim.x-th; and dQ of a tile of queries is complete (is_dq_stored)
  kOrdered,  // the next of a counter; and dQ is added up in one order (order.cuh)
};

// Which tiles of queries and of keys meet: some pair of theirs may be in the band. lower < upper, because rows.cpp
// refuses a band of one key, and both are far from the ends of int.
template <int kBlockM, int kBlockN>
struct TileRanges {
  int lower, upper, len_q, len_k;

  struct Tiles {
    int first, last;  // equal where there is none
  };

  // The tiles of queries that these keys meet.
  FLASH_DEVICE Tiles of_keys(int first_key) const {
    const int end_key = first_key + kBlockN < len_k ? first_key + kBlockN : len_k;
    const int first_query = first_key > upper ? first_key - upper : 0;
    const int end_query = end_key - lower < len_q ? end_key - lower : len_q;
    const int first = first_query / kBlockM;
    return {first, end_query > first_query ? (end_query + kBlockM - 1) / kBlockM : first};
  }

  // The tiles of queries, whole ones, of which each sees all of these keys.
  struct Inside {
    int first;
    uint32_t count;
    FLASH_DEVICE bool has(int m_block) const { return static_cast<uint32_t>(m_block - first) < count; }
  };
  FLASH_DEVICE Inside inside(int first_key) const {
    const auto floor_div = [](int x) { return (x & -kBlockM) / kBlockM; };  // a power of two
    const int first = floor_div(first_key + kBlockN - 1 - upper + kBlockM - 1);
    const int last = first_key - lower < len_q - 1 ? first_key - lower : len_q - 1;
    const int end = floor_div(last - kBlockM + 1) + 1;
    return {first, first_key + kBlockN <= len_k && end > first ? static_cast<uint32_t>(end - first) : 0};
  }

  // The first and the last tile of keys that a tile of queries meets, if it meets any; then it meets all between, too.
  FLASH_DEVICE int first_keys_of(int m_block) const {
    const int first_key = m_block * kBlockM + lower;
    return first_key > 0 ? first_key / kBlockN : 0;
  }
  FLASH_DEVICE int last_keys_of(int m_block) const {
    const int end_query = (m_block + 1) * kBlockM < len_q ? (m_block + 1) * kBlockM : len_q;
    const int end_key = end_query + upper < len_k ? end_query + upper : len_k;
    return (end_key - 1) / kBlockN;
  }

  FLASH_DEVICE bool meets_keys(int m_block) const {
    const int first_key = first_keys_of(m_block) * kBlockN;
    const Tiles tiles = of_keys(first_key);
    return first_key < len_k && tiles.first <= m_block && m_block < tiles.last;
  }
};

constexpr int kKeyWorkBytes = 32;        // of a tile of keys that one thread publishes, see work.cuh
constexpr int kPackedKeyWorkBytes = 64;  // of packed sequences

struct BackwardSmem {
  int k = 0, v = 0, q = 0, d_out = 0, ds = 0, dq = 0, scores = 0, drops = 0, drop_keys = 0, stats = 0;  // offsets
  int maxima = 0, barriers = 0, walk = 0;
  int total = 0;  // and what it takes to align the first tile
};

// Bias and mask lie in a ring of slots, for 64 queries and all keys of a tile each.
constexpr int kScoreRows = 64;
constexpr int kMaskBytes = kScoreRows * BackwardShape::block_n / 8;  // of a slot, a bit a pair

constexpr int kDropKeyBytes = 3 * 64;  // of the warps that draw

// work_bytes: of each of two tiles of keys that are published.
constexpr BackwardSmem backward_smem(BackwardShape shape, int head_dim, int work_bytes = kKeyWorkBytes) {
  BackwardSmem smem;
  smem.v = smem.k + tile_bytes(shape.block_n, head_dim);
  smem.q = smem.v + tile_bytes(shape.block_n, head_dim);
  smem.d_out = smem.q + shape.stages * tile_bytes(shape.block_m, head_dim);
  smem.ds = smem.d_out + shape.stages * tile_bytes(shape.block_m, head_dim);
  smem.dq = smem.ds + shape.ds_stages * tile_bytes(shape.block_n, shape.block_m);
  smem.scores = smem.dq + shape.block_m * head_dim * 4;
  const int stats = kQueryStats * shape.stages * shape.block_m * 4, maxima = shape.consumers * 4 * 4;
  const int barriers = 16 * (2 + 2 * shape.stages + shape.ds_stages + (shape.scored ? kScoreStages + shape.stages : 0));
  const int walk = 8 * 8 + 2 * work_bytes + 16;
  const int left = kSharedMemoryLimit - kTileAlign - smem.scores - stats - maxima - barriers - walk;
  const int drops = shape.stages * shape.drop_bytes();
  smem.drops = smem.scores + (shape.scored ? (left - drops - kDropKeyBytes) / 16 * 16 : 0);
  smem.drop_keys = smem.drops + (shape.scored ? drops : 0);
  smem.stats = smem.drop_keys + (shape.scored ? kDropKeyBytes : 0);
  smem.maxima = smem.stats + stats;
  smem.barriers = smem.maxima + maxima;
  smem.walk = smem.barriers + barriers;
  smem.total = smem.walk + walk + kTileAlign;
  return smem;
}

// Tiles of keys, those with the most queries first, inside sections of heads whose Q, dO and dQ stay in L2.
// sms: the multiprocessors, each of which runs one tile at a time.
//
// Of packed sequences a head has the tiles of their list (core/sequences.h), which has its order, or fewer.
inline TileSchedule backward_schedule(const Problem& problem, int block_n, int64_t sms) {
  TileSchedule schedule;
  if (problem.packed) {
    schedule.blocks = most_packed_tiles(problem, problem.rows_k, block_n);
    schedule.heads_k = schedule.kv_heads = problem.heads_k;
    const int64_t bytes = problem.rows_q * (problem.head_dim * (2 + 4) + problem.head_dim_v * 2);
    schedule.section = heads_per_section(bytes * problem.heads_q / problem.heads_k, kL2Budget);
    return schedule;
  }
  schedule.blocks = block_count(problem.len_k, block_n);
  schedule.heads_k = problem.heads_k;
  schedule.kv_heads = problem.batch * problem.heads_k;
  schedule.batch = problem.batch;
  const int64_t head_bytes = problem.len_q * (problem.head_dim * (2 + 4) + problem.head_dim_v * 2);
  const int64_t l2_heads = heads_per_section(head_bytes * problem.heads_q / problem.heads_k, kL2Budget);
  const Band band = make_band(problem);
  set_sections(schedule, l2_heads, sms, [&](int64_t block) {
    const int64_t end = (block + 1) * block_n;
    return band.queries({block * block_n, end < problem.len_k ? end : problem.len_k}, problem.len_q).size();
  });
  return schedule;
}

// Queries that see a key.
inline int64_t queries_of(const Problem& problem, int64_t key) {
  return make_band(problem).queries({key, key + 1}, problem.len_q).size();
}

// For Persistence::kOrdered: those with the fewest queries first; order.cuh says why. Of packed sequences each has an
// order of its own, which the kernel finds; and a section's heads need room in L2 for one of them after the other, not
// for all.
inline TileSchedule ordered_schedule(const Problem& problem, int block_n) {
  if (problem.packed) {
    Problem longest = problem;
    longest.rows_q = std::min(problem.rows_q, problem.len_q);
    TileSchedule schedule = backward_schedule(longest, block_n, 0);
    schedule.section = std::min(schedule.section, schedule.kv_heads);
    return schedule;
  }
  TileSchedule schedule = backward_schedule(problem, block_n, 0);
  schedule.last_first = queries_of(problem, 0) > queries_of(problem, problem.len_k - 1);
  return schedule;
}

// By the mean of what sees a key.
inline bool has_few_queries(const Problem& problem) {
  return (queries_of(problem, problem.len_k / 4) + queries_of(problem, problem.len_k * 3 / 4)) / 2 <= 1024;
}

// Whether one tile of keys is all there is, and all tiles of queries meet it: a tile's dQ is complete when it is
// computed, and stored as it is; no sums in float, and no order of them. NOTE: not with what spills in one of the two
// types: dropout at head dim 64 4 (bf16) and 132 bytes, a softcap at 64 4 (bf16), scores at 128 12 (fp16).
constexpr int kMostStoredScores = 64;  // head dim
inline bool is_dq_stored(const Problem& problem) {
  constexpr int64_t kFewest = 64;  // queries of a tile
  if (problem.packed) return false;
  const ScoreKind kind = score_kind_of(problem);
  if (problem.len_k > BackwardShape::block_n || kind == ScoreKind::kDropout || kind == ScoreKind::kSoftcap)
    return false;
  if (kind == ScoreKind::kScores && std::max(problem.head_dim, problem.head_dim_v) > kMostStoredScores) return false;
  const Range queries = make_band(problem).queries({0, problem.len_k}, problem.len_q);
  return queries.first < kFewest && queries.last > (problem.len_q - 1) / kFewest * kFewest;
}

// Whether blocks walk over tiles, so that Q and dO of the next one arrive under the end of this one. It pays where
// tiles are short and differ (an H200, causal, 16k tokens, TFLOP/s at S = 512 / 1k / 2k / 4k: head dim 64
// 202/300/386/462 against 173/265/373/461, head dim 128 223/337/435/494 against 211/311/413/495; later, beside the
// present order of the others, head dim 64 still 10 %, 128 0 to 2 %); elsewhere it cost up to 10 %, and a third at
// S = 16k, causal, head dim 128. What a block takes is fixed, so each needs many: with 8 tiles a block both took the
// same time, with 6 the other way took 12 % less, with 2 up to 28 %. Where many heads read a tile of keys, tiles differ
// as many times as much: 16x64/8x2048, head dim 128, took 8.7 ms, 16x64/8x2176 the other way 6.8.
inline bool is_even(const Problem& problem) { return queries_of(problem, 0) == queries_of(problem, problem.len_k - 1); }
inline bool is_backward_persistent(const Problem& problem, int64_t sms) {
  if (problem.packed) return false;
  const int64_t tiles = problem.batch * problem.heads_k * block_count(problem.len_k, BackwardShape::block_n);
  if (is_dq_stored(problem)) return has_few_queries(problem) && tiles >= 2 * sms;
  if (problem.heads_q > 2 * problem.heads_k) return false;
  return has_few_queries(problem) && !is_even(problem) && tiles >= 8 * sms;
}

// Whether dQ is added up in one order: where that is asked for, and where it is faster, because dQ is not filled with
// zeros first, and what is added up becomes dQ while the last tiles run (finish_kernel). Blocks then always walk: one
// tile of keys a block took up to 15 % more, 3 % less at best. An H200, bf16, 16k tokens, time in order over that in
// any: full, head dim 128, 1k 0.94, 1.5k 1.05, 2k 1.05 to 1.07; 64: 1k 1.01. Causal, 2k 0.97; 64: 1k 1.03. Before dQ
// was finished early: S = 512 0.97, causal 0.94, and with 32 to 256 tiles of keys 0.98 to 1.10, because there are few
// to wait for. Heads of a group: a tile of keys takes as many times as long, and those with the most queries come last.
// Head dim 128, 32k tokens, groups of 2, 4 and 8: full, 512 0.99, 0.98 and 1.02, 1k 1.05, 1.09 and 1.06; causal, 512
// 0.93, 1.03 and 0.94, 1k 0.97, 1.17 and 1.18, 2k 0.97, 1.29 and 1.29.
inline bool is_ordered(const Problem& problem) {
  if (is_dq_stored(problem)) return false;
  if (problem.deterministic) return true;
  if (is_scored(problem) || problem.packed) return false;  // packed sequences have a row for each (rows.cpp)
  const int64_t length = problem.len_q > problem.len_k ? problem.len_q : problem.len_k;
  if (is_even(problem) && length <= 512) return true;
  const int64_t tiles = problem.batch * problem.heads_k * block_count(problem.len_k, BackwardShape::block_n);
  const int64_t group = problem.heads_q / problem.heads_k;
  int64_t longest = is_even(problem) ? (group == 1 ? 1024 : 512) : (group <= 2 ? 2048 : 512);
  if (problem.head_dim <= 64 && problem.head_dim_v <= 64) longest = 512;
  return tiles >= 512 && length <= longest;
}

// Of the main kernel, up to head dim 128. Where what a block takes is fixed, heads are counted by L2 alone: with
// set_sections causal calls of 16k tokens took 2 % longer.
inline TileSchedule key_schedule(const Problem& problem, int block_n, int64_t sms) {
  if (is_ordered(problem)) return ordered_schedule(problem, block_n);
  return backward_schedule(problem, block_n, is_backward_persistent(problem, sms) ? 0 : sms);
}

// Whether the gradient of a bias is computed here (bias_gradient/kernel.cuh), and not by sm80's pass.
inline bool has_bias_gradient(const Problem& problem) {
  return problem.wants_dbias && !problem.has_mask && problem.bias_dtype == problem.dtype && problem.dropout_p == 0.0;
}

}  // namespace flash_ext::sm90
