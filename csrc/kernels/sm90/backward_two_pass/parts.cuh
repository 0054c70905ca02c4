// Backward on Hopper in two kernels, so that nothing is reduced in global memory: S and dP are computed twice, 7
// products instead of 5.
//
//   keys     a tile of 128 keys a block, 64 a warpgroup: S^T, dP^T, dV += P^T dO and dK += dS^T Q. Above head dim
//            128 a tile of 64: the first warpgroup has S^T, P^T and dV, the second dP^T, dS^T and dK; P^T goes from
//            one to the other through shared memory. Above 256 another block has the other half of the columns
//   queries  a tile of 128 queries a block, 64 a warpgroup: S, dP, dS and dQ += dS K, over at most 64 keys at a
//            time. Above 256 64 queries, of whose dQ each warpgroup has half of the columns
//
// V, dO and dV may have fewer columns than the others (kValueDim).
//
// It serves head dims above 128, whose dK and dV together do not fit the registers of a warpgroup; scores of all kinds
// together and in one order; and calls that want some of the gradients, of which it leaves a kernel out.
// Called by run.cuh. Invariant: a ring's barriers as in pipeline.cuh; sums have an order of their shapes alone.
#pragma once

#include "kernels/sm90/backward/parts.cuh"
#include "kernels/sm90/backward_two_pass/config.h"

namespace flash_ext::sm90 {

// Named barriers: this and those behind it are the consumer warpgroups' own.
constexpr int kOwnBarrier = 1, kIssueBarrier = 3;

// The two consumer warpgroups issue their products in turns, so that those of one run under what the other computes.
// The second lets the first begin, and has nobody to let behind its last tile.
// NOTE: without, both came to compute at the same time, and a quarter of the queries' kernel had no product in flight.
template <class Traits>
__device__ __forceinline__ void begin_issue(int consumer) {
  if constexpr (Traits::kShape.turns) named_barrier_sync(kIssueBarrier + consumer, 256);
}
template <class Traits>
__device__ __forceinline__ void end_issue(int consumer) {
  if constexpr (Traits::kShape.turns) named_barrier_arrive(kIssueBarrier + 1 - consumer, 256);
}

struct TwoPassParams {
  TensorMap q, k, v, d_out, dk, dv, dq;
  const float* stats;   // [b, h_q, tiles of 64 queries, kQueryStats, 64], see backward/rows.cuh
  const float* bounds;  // fp16: [b, h_q, 2], the largest |dO row| and |delta|, then [b, h_k], the largest |V|
  TileSchedule keys, queries;
  TileBand band;
  int len_q, padded;
  int heads_q, group_size;  // query heads; of a key head
  int batch, inner_batch;
  int head_dim_v;
  float scale, to_log2;  // of dQ and dK; of s
  float natural;         // what one of s is in natural units
  bool wants_dk, wants_dv;
  SoftcapParams softcap;  // in units of q k^T
  float inverse_scale;  // 1 / natural. NOTE: last. In front of `softcap` ptxas spilled 12 bytes in fp16 with a softcap.

  __device__ __forceinline__ bool is_boundary(int first_query, int queries, int first_key, int keys) const {
    return band.is_boundary(first_query, queries, first_key, keys) || first_query + queries > len_q;
  }

  // What dS of these query heads of one key head is multiplied by to become fp16.
  __device__ __forceinline__ float ds_scale(int b, int first_head, int heads) const {
    float d_out = 0.f, delta = 0.f;
    const int row = b * heads_q + first_head;
    for (int i = row; i < row + heads; ++i) {
      d_out = fmaxf(d_out, bounds[2 * i]);
      delta = fmaxf(delta, bounds[2 * i + 1]);
    }
    const float v_max = bounds[2 * batch * heads_q + row / group_size];
    return power_below(v_max * sqrtf(static_cast<float>(head_dim_v)) * d_out + delta);
  }
};

struct ScoredTwoPassParams : TwoPassParams {
  ScoreParams keys_scores, queries_scores;  // they differ in their number of slots
};

__device__ __forceinline__ const DropoutParams& dropout_of(const ScoredTwoPassParams& params) {
  return params.keys_scores.dropout;
}
__device__ __forceinline__ DropoutParams dropout_of(const TwoPassParams&) { return {nullptr, 0, 1.f, {}}; }

template <class T_, int kHeadDim_, ScoreKind kScoreKind, bool kNarrow = false>
struct TwoPassTraits {
  using T = T_;
  static constexpr TwoPassShape kShape = two_pass_shape(kHeadDim_, kScoreKind, kNarrow);
  static constexpr bool kSoftcap = kScoreKind == ScoreKind::kSoftcap;  // a softcap alone
  static constexpr bool kScored = kShape.scored;
  // P says what is hidden. Else the band alone hides, which both warpgroups know.
  static constexpr bool kMarks = kScored || !kShape.splits_gradients();
  using Params = std::conditional_t<kScored, ScoredTwoPassParams, TwoPassParams>;
  using Function = void;  // in the place of the softcap, see cap_or_call
  static constexpr int kHeadDim = kHeadDim_, kPanels = panels(kHeadDim);                       // of Q and K
  static constexpr int kValueDim = kShape.values(kHeadDim), kValuePanels = panels(kValueDim);  // of V and dO
  // Of dQ and dK and of dV, columns that a warpgroup sums up.
  static constexpr int kCols = value_dim(kHeadDim), kValueCols = value_dim(kValueDim);
  static constexpr bool kHalves = kShape.halves;
  static_assert(kHalves == (kCols < kHeadDim));
  static constexpr int kBlock = TwoPassShape::block, kStages = kShape.stages, kThreads = TwoPassShape::threads;
  // Of the keys' kernel: its tile, how many blocks sum up its columns, and the tile of queries which it walks over.
  static constexpr int kKeys = kShape.keys;
  static constexpr uint32_t kKeysBlocks = kHalves ? 2 : 1;
  static constexpr int kQueries = kShape.queries;
  static constexpr int kQBytes = tile_bytes(kQueries, kHeadDim), kOutBytes = tile_bytes(kQueries, kValueDim);
  static constexpr int kPBytes = kShape.p_bytes(), kStatsBytes = kQueryStats * kQueries * 4;
  // Of the queries' kernel: its tile, a warpgroup's part of it, and that of keys which it walks over.
  static constexpr int kQueryRows = kShape.query_rows(), kWalkedKeys = kShape.walked_keys;
  static constexpr int kQRowsBytes = tile_bytes(kBlock, kHeadDim), kOutRowsBytes = tile_bytes(kBlock, kValueDim);
  static constexpr int kKBytes = tile_bytes(kWalkedKeys, kHeadDim), kVBytes = tile_bytes(kWalkedKeys, kValueDim);
  // Rows that TMA brings at once.
  static constexpr int kQueryBox = kQueries, kKeyBox = kShape.key_box();
  static constexpr bool kScaled = is_scaled<T>;
  static constexpr KeysSmem kKeysSmem = keys_smem(kShape, kHeadDim);
  static constexpr QueriesSmem kQueriesSmem = queries_smem(kShape, kHeadDim);
  static_assert(two_pass_fits(kShape, kHeadDim));
  using Place = RingState<kStages>;
  using VPlace = RingState<kShape.v_stages>;  // of the queries' kernel

  // Shared memory of the keys' kernel. Barriers: K and V, then those of the rings.
  struct Keys {
    uint32_t base;
    __device__ __forceinline__ uint32_t k() const { return base + kKeysSmem.k; }
    __device__ __forceinline__ uint32_t v() const { return base + kKeysSmem.v; }
    __device__ __forceinline__ uint32_t k_full() const { return base + kKeysSmem.barriers; }
    __device__ __forceinline__ uint32_t v_full() const { return base + kKeysSmem.barriers + 8; }
    __device__ __forceinline__ Ring<kQBytes> q() const { return {base + kKeysSmem.q, base + kKeysSmem.barriers + 16}; }
    __device__ __forceinline__ Ring<kOutBytes> d_out() const {
      return {base + kKeysSmem.d_out, base + kKeysSmem.barriers + 16 + 16 * kStages};
    }
    __device__ __forceinline__ Ring<kPBytes> p() const {
      return {base + kKeysSmem.p, base + kKeysSmem.barriers + 16 + 32 * kStages};
    }
    // Of a stage of Q, in the order of QueryStat.
    __device__ __forceinline__ uint32_t lse(int stage) const { return base + kKeysSmem.stats + stage * kStatsBytes; }
    __device__ __forceinline__ uint32_t renorm(int stage) const { return lse(stage) + kRenormStat * kQueries * 4; }
    __device__ __forceinline__ uint32_t delta(int stage) const { return lse(stage) + kDeltaStat * kQueries * 4; }
    // kScored: slots of bias and mask, whose size is a parameter; Philox' keys of a warp.
    __device__ __forceinline__ Ring<0> scores() const {
      return {base + kKeysSmem.scores, base + kKeysSmem.barriers + 16 + 48 * kStages};
    }
    __device__ __forceinline__ uint32_t draw_keys(int warp) const {
      return base + kKeysSmem.draw_keys + warp * DropoutDraws::kKeyBytes;
    }
  };
  static_assert(kDrawKeyBytes == 8 * DropoutDraws::kKeyBytes);
  // Of the queries' kernel.
  struct Queries {
    uint32_t base;
    __device__ __forceinline__ uint32_t q(int consumer) const { return base + kQueriesSmem.q + consumer * kQRowsBytes; }
    __device__ __forceinline__ uint32_t d_out(int consumer) const {
      return base + kQueriesSmem.d_out + consumer * kOutRowsBytes;
    }
    __device__ __forceinline__ uint32_t q_full() const { return base + kQueriesSmem.barriers; }
    __device__ __forceinline__ uint32_t d_out_full() const { return base + kQueriesSmem.barriers + 8; }
    __device__ __forceinline__ Ring<kKBytes> k() const {
      return {base + kQueriesSmem.k, base + kQueriesSmem.barriers + 16};
    }
    __device__ __forceinline__ Ring<kVBytes> v() const {
      return {base + kQueriesSmem.v, base + kQueriesSmem.barriers + 16 + 16 * kStages};
    }
    __device__ __forceinline__ Ring<0> scores() const {
      return {base + kQueriesSmem.scores, base + kQueriesSmem.barriers + 16 * (1 + kStages + kShape.v_stages)};
    }
  };
};

// A tile of either schedule, and the range of tiles of the other side that meet it.
struct TwoPassWork {
  int head, b0, b1, b;
  int first_row;    // key or query
  int first, last;  // tiles of the other side; equal where there is none

  template <class Traits>
  static __device__ __forceinline__ TwoPassWork of_keys(const typename Traits::Params& params) {
    TwoPassWork work = at<Traits::kKeys>(params, params.keys, blockIdx.x / Traits::kKeysBlocks);
    const int last_key = min(work.first_row + Traits::kKeys, params.band.len_k) - 1;
    const MaskRange seen = [&]() -> MaskRange {
      if constexpr (Traits::kScored)
        return params.keys_scores.ranges.at(work.b, work.head, work.first_row / Traits::kKeys);
      return {0, INT32_MAX};
    }();
    work.range<Traits::kQueries>(max(work.first_row - params.band.upper, seen.first),
                                 min(min(last_key - params.band.lower + 1, params.len_q), seen.last));
    return work;
  }
  template <class Traits>
  static __device__ __forceinline__ TwoPassWork of_queries(const typename Traits::Params& params) {
    TwoPassWork work = at<Traits::kQueryRows>(params, params.queries, blockIdx.x);
    const int last_query = min(work.first_row + Traits::kQueryRows, params.len_q) - 1;
    const MaskRange seen = [&]() -> MaskRange {
      if constexpr (Traits::kScored) {
        return params.queries_scores.ranges.at(work.b, work.head, work.first_row / Traits::kQueryRows);
      }
      return {0, INT32_MAX};
    }();
    work.range<Traits::kWalkedKeys>(max(work.first_row + params.band.lower, seen.first),
                                    min(min(last_query + params.band.upper + 1, params.band.len_k), seen.last));
    return work;
  }
  __device__ __forceinline__ BoxStart box(const BoxSteps& steps, int box_head, int row) const {
    return {0, row, box_head * steps.head, b0 * steps.b0, b1 * steps.b1};
  }

 private:
  template <int kRows>
  static __device__ __forceinline__ TwoPassWork at(const TwoPassParams& params, const TileSchedule& schedule,
                                                   uint32_t number) {
    const Tile tile = schedule.at<uint32_t>(number);
    TwoPassWork work;
    work.b = static_cast<int>(tile.b);
    work.head = static_cast<int>(tile.head);
    work.b1 = work.b / params.inner_batch;
    work.b0 = work.b - work.b1 * params.inner_batch;
    work.first_row = static_cast<int>(tile.block) * kRows;
    return work;
  }
  template <int kOther>
  __device__ __forceinline__ void range(int begin, int end) {
    first = begin / kOther;
    last = end > begin ? (end + kOther - 1) / kOther : first;
  }
};

// A thread's packed pairs to and from shared memory, 16 bytes at a time with the other 127 threads' of its warpgroup.
template <int kCount>
__device__ __forceinline__ void store_pairs(uint32_t address, const uint32_t (&pairs)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const uint32_t words[4] = {pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
    store_shared(address + i * 2048, words);
  }
}
template <int kCount>
__device__ __forceinline__ void load_pairs(uint32_t (&pairs)[kCount], uint32_t address) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const uint4 words = load_shared4(address + i * 2048);
    pairs[4 * i] = words.x;
    pairs[4 * i + 1] = words.y;
    pairs[4 * i + 2] = words.z;
    pairs[4 * i + 3] = words.w;
  }
}

// A tile of kRows rows, kBoxRows at a time; its barrier expects it already.
template <int kRows, int kBoxRows, int kPanels>
__device__ __forceinline__ void load_boxes(uint32_t tile, uint32_t barrier, const TensorMap& map, BoxStart at) {
#pragma unroll
  for (int first = 0; first < kRows; first += kBoxRows) {
    load_panels<kRows, kPanels>(tile + first * kPanelBytes, barrier, map, at);
    at.row += kBoxRows;
  }
}

// 16 rows of a warp, 2 kCount columns from `first_panel` on, through those of a tile of kRows rows, of which it owns
// them, then by TMA.
template <class Traits, int kRows, int kCount>
__device__ __forceinline__ void store_rows(const float (&c)[kCount], float factor, uint32_t tile, int warp_row,
                                           const TensorMap& map, BoxStart at, int first_panel = 0) {
  const int lane = threadIdx.x % 32;
  tile += first_panel * panel_size(kRows);
  at.col += first_panel * kPanelCols;
#pragma unroll
  for (int k = 0; k < kCount / 8; ++k) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = pack(c[8 * k + 2 * i] * factor, c[8 * k + 2 * i + 1] * factor, typename Traits::T());
    }
    stmatrix_x4(tile + tile_offset(kRows, warp_row + lane % 16, 16 * k + lane / 16 * 8), r[0], r[1], r[2], r[3]);
  }
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
#pragma unroll
    for (int panel = 0; panel < panels(2 * kCount); ++panel) {
      tma_store(&map.map, tile + panel * panel_size(kRows) + warp_row * kPanelBytes, at);
      at.col += kPanelCols;
    }
    bulk_commit();
    bulk_wait_read();
  }
}

}  // namespace flash_ext::sm90
