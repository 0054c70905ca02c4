// What a block of backward works on: the parameters of the kernel and the tiles of keys, of dense calls (KeyWork) and
// of packed sequences (PackedKeyWork), whose lengths and places are their own.
//
// Called by parts.cuh and all that reads a tile of keys (device), and by run.cuh (host). Invariant: the numbers and dQ
// of a tile of queries lie at first_tile() and its own number behind it, those of the next head m_blocks further.
#pragma once

#include "core/args.h"
#include "core/sequences.h"
#include "kernels/sm90/backward/config.h"
#include "kernels/sm90/pipeline.cuh"
#include "kernels/sm90/scores.cuh"
#include "kernels/sm90/softmax.cuh"

namespace flash_ext::sm90 {

struct BackwardParams {
  TensorMap q, k, v, d_out, dk, dv;
  TensorMap dq_rows;    // Persistence::kStored
  const float* stats;   // [b, h_q, m_blocks, kQueryStats, block_m], see rows.cuh
  const float* bounds;  // [b, h_q, 2], fp16: largest |dO row| and |delta|
  float* dq;  // [b, h_q, m_blocks, block_m * head dim], in the order of the fragments; not Persistence::kStored
  TileSchedule schedule;
  TileBand band;
  int tiles;
  int len_q, m_blocks;
  int heads_q, group_size;  // query heads; of a key head
  int inner_batch;
  int head_dim_v;
  float scale, to_log2;
  float inverse_scale;  // of a score, in units of q k^T
  // Persistence::kOrdered
  uint32_t* dq_semaphore;  // [b, h_q, m_blocks]: tiles of keys that dq has; and one more: those that are handed out
  int dq_semaphore_count;  // without that one
  bool walks;              // a block takes another when it is through

  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ TileRanges<kBlockM, kBlockN> tile_ranges() const {
    return {band.lower, band.upper, len_q, band.len_k};
  }
  __device__ __forceinline__ bool is_boundary(int first_query, int queries, int first_key, int keys) const {
    return band.is_boundary(first_query, queries, first_key, keys) || first_query + queries > len_q;
  }
};

// Of dq and dk, made of the dS that the main kernel computes: with dropout it is (1 - p) dS (dropout.cuh).
__host__ __device__ __forceinline__ float gradient_scale(const Problem& problem) {
  return static_cast<float>(problem.dropout_p > 0.0 ? problem.scale / (1.0 - problem.dropout_p) : problem.scale);
}

struct ScoredBackwardParams : BackwardParams {
  ScoreParams scores;
};

__device__ __forceinline__ const DropoutParams& dropout_of(const ScoredBackwardParams& params) {
  return params.scores.dropout;
}
__device__ __forceinline__ DropoutParams dropout_of(const BackwardParams&) { return {nullptr, 0, 1.f, {}}; }
__device__ __forceinline__ bool has_mask(const ScoredBackwardParams& params) {
  return params.scores.mask.data != nullptr;
}
__device__ __forceinline__ constexpr bool has_mask(const BackwardParams&) { return false; }

struct CappedBackwardParams : BackwardParams {
  SoftcapParams softcap;  // in units of q k^T
};

// Of packed sequences; band: with a diagonal that begins at the first key, m_blocks: most_packed_tiles of queries, of
// all sequences behind each other (first_packed_tile), and there is no batch.
template <class Base>
struct PackedBackwardParams : Base {
  const PackedTile* tiles_of_keys;
  const int64_t* tile_count;  // of that list
  int diagonal_mask;          // -1: a sequence's diagonal ends at its last key; 0: it begins at the first
};

// How many tiles of keys Persistence::kOrdered hands out.
template <class Base>
__device__ __forceinline__ uint32_t tile_count(const PackedBackwardParams<Base>& params) {
  return static_cast<uint32_t>(*params.tile_count) * static_cast<uint32_t>(params.schedule.kv_heads);
}

// One tile of the grid: block_n keys of one key head, and the tiles of queries that see them, of each query head.
struct alignas(16) KeyWork {
  int head_k, b0, b1;
  int first_key;
  int first_m, last_m;  // of queries; equal where there is none
  int row;              // flat (batch, first query head)
  int step = 0;  // Persistence::kOrdered: from a tile of queries to the next, 1 or -1; 0: there is no tile of keys

  template <int kBlockM, int kBlockN>
  static __device__ __forceinline__ KeyWork at(const BackwardParams& params, uint32_t linear) {
    const Tile tile = params.schedule.at<uint32_t>(linear);
    const int b = static_cast<int>(tile.b);
    KeyWork work;
    work.head_k = static_cast<int>(tile.head);
    work.b1 = b / params.inner_batch;
    work.b0 = b - work.b1 * params.inner_batch;
    work.first_key = static_cast<int>(tile.block) * kBlockN;
    work.step = params.schedule.last_first ? 1 : -1;
    work.row = b * params.heads_q + work.head_k * params.group_size;
    const auto met = params.template tile_ranges<kBlockM, kBlockN>().of_keys(work.first_key);
    work.first_m = met.first;
    work.last_m = met.last;
    return work;
  }

  // The first of the tiles of queries in the order of Persistence::kOrdered.
  __device__ __forceinline__ int begin_m() const { return step > 0 ? first_m : last_m - 1; }

  // Of queries of the query head of this number among those of the key head.
  __device__ __forceinline__ int64_t first_tile(const BackwardParams& params, int member) const {
    return int64_t{row + member} * params.m_blocks;
  }
  // The same, in 32 bits.
  __device__ __forceinline__ int first_tile_number(const BackwardParams& params, int member) const {
    return (row + member) * params.m_blocks;
  }
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ TileRanges<kBlockM, kBlockN> ranges(const BackwardParams& params) const {
    return params.template tile_ranges<kBlockM, kBlockN>();
  }

  // Boxes of q, d_out and dq, and of k, v, dk and dv.
  __device__ __forceinline__ BoxStart query_box(const BoxSteps& steps, int head, int row_) const {
    return {0, row_, head * steps.head, b0 * steps.b0, b1 * steps.b1};
  }
  __device__ __forceinline__ BoxStart key_box(const BoxSteps& steps, int head, int row_) const {
    return query_box(steps, head, row_);
  }
};

static_assert(sizeof(KeyWork) == kKeyWorkBytes);

// Of its keys, in memory.
template <class Traits>
__device__ __forceinline__ const MaskRange* range_of(const typename Traits::Params& params, const KeyWork& work) {
  const int b = work.row / params.heads_q, tile = work.first_key / Traits::kBlockN;
  return params.scores.ranges.find(b, work.head_k, tile);
}

// The same without the tiles of queries that a mask hides from all of the keys.
template <class Traits>
__device__ __forceinline__ KeyWork key_work(const typename Traits::Params& params, uint32_t linear) {
  constexpr int kBlockM = Traits::kBlockM;
  KeyWork work = KeyWork::at<kBlockM, Traits::kBlockN>(params, linear);
  if constexpr (Traits::kHasRanges) {
    const int2 range = __ldg(reinterpret_cast<const int2*>(range_of<Traits>(params, work)));
    work.first_m = max(work.first_m, range.x / kBlockM);
    work.last_m = max((min(work.last_m * kBlockM, range.y) + kBlockM - 1) / kBlockM, work.first_m);
  }
  return work;
}

// How far a sequence reaches.
struct alignas(16) SequenceEdges {
  int len_q;
  TileBand band;

  __device__ __forceinline__ bool is_boundary(int first_query, int queries, int first_key, int keys) const {
    return band.is_boundary(first_query, queries, first_key, keys) || first_query + queries > len_q;
  }
  // Queries that see a key.
  __device__ __forceinline__ int queries_of(int key) const {
    return max(min(len_q, key + 1 - band.lower) - max(0, key - band.upper), 0);
  }
};

// As KeyWork, of one sequence.
struct alignas(16) PackedKeyWork {
  int head_k, b0;  // b0: the sequence; -1: there is no tile of keys
  int first_key;
  int first_m, last_m;
  int row;
  int first;  // the tiles of queries of the sequence and its first query head begin there
  int row_q, row_k;
  int step;  // Persistence::kOrdered, as KeyWork's
  SequenceEdges edges;

  static constexpr int b1 = 0;

  // kOrdered: of tile_count() tiles, and of those of a sequence the ones with the fewest queries first. The list has
  // all of a sequence one behind the other, from its first key on. What comes first follows from the sequence alone,
  // by the rule that ordered_schedule has for dense calls.
  template <int kBlockM, int kBlockN, bool kOrdered = false, class Params>
  static __device__ __forceinline__ PackedKeyWork at(const Params& params, uint32_t linear) {
    const Tile tile = [&] {
      if constexpr (!kOrdered) return params.schedule.template at<uint32_t>(linear);
      TileSchedule own;  // NOTE: of the other fields the compiler knows what they are, and there are 24 registers
      own.blocks = static_cast<uint32_t>(*params.tile_count);
      own.heads_k = own.kv_heads = params.schedule.kv_heads;
      own.section = params.schedule.section;
      return own.template at<uint32_t>(linear);
    }();
    const PackedTile entry = params.tiles_of_keys[static_cast<uint32_t>(tile.block)];
    const Sequence& sequence = entry.sequence;
    PackedKeyWork work;
    work.head_k = static_cast<int>(tile.head);
    work.b0 = entry.b;
    work.first_key = entry.block * kBlockN;
    work.row = entry.b * params.heads_q + work.head_k * params.group_size;
    work.first = work.head_k * params.group_size * params.m_blocks + first_packed_tile(sequence, entry.b, kBlockM);
    work.row_q = sequence.row_q;
    work.row_k = sequence.row_k;
    const int diagonal = (sequence.len_k - sequence.len_q) & params.diagonal_mask;
    work.edges = {sequence.len_q, {params.band.lower + diagonal, params.band.upper + diagonal, sequence.len_k}};
    if constexpr (kOrdered) {
      const bool last_first = work.edges.queries_of(0) > work.edges.queries_of(sequence.len_k - 1);
      work.step = last_first ? 1 : -1;
      if (last_first) work.first_key = ((sequence.len_k - 1) / kBlockN - entry.block) * kBlockN;
    }
    const auto met = work.ranges<kBlockM, kBlockN>(params).of_keys(work.first_key);
    work.first_m = met.first;
    work.last_m = met.last;
    return work;
  }

  __device__ __forceinline__ int begin_m() const { return step > 0 ? first_m : last_m - 1; }
  __device__ __forceinline__ int64_t first_tile(const BackwardParams& params, int member) const {
    return first_tile_number(params, member);
  }
  __device__ __forceinline__ int first_tile_number(const BackwardParams& params, int member) const {
    return first + member * params.m_blocks;
  }
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ TileRanges<kBlockM, kBlockN> ranges(const BackwardParams&) const {
    return {edges.band.lower, edges.band.upper, edges.len_q, edges.band.len_k};
  }

  __device__ __forceinline__ BoxStart query_box(const BoxSteps& steps, int head, int row_) const {
    return {0, cuda::kPackedEnd - edges.len_q + row_, head * steps.head, row_q + edges.len_q, cuda::kPackedEnd};
  }
  __device__ __forceinline__ BoxStart key_box(const BoxSteps& steps, int head, int row_) const {
    const int len_k = edges.band.len_k;
    return {0, cuda::kPackedEnd - len_k + row_, head * steps.head, row_k + len_k, cuda::kPackedEnd};
  }
};

static_assert(sizeof(PackedKeyWork) == kPackedKeyWorkBytes);

}  // namespace flash_ext::sm90
