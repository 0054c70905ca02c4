// Backward on Hopper for head dims above 128, whose dK and dV together do not fit the registers of a warpgroup, in two
// kernels, so that nothing is reduced in global memory: S and dP are computed twice, 7 products instead of 5.
//
//   keys     a tile of 64 keys a block: warpgroup 0 has S^T, P^T and dV += P^T dO, warpgroup 1 dP^T, dS^T and dK +=
//   dS^T Q;
//            P^T goes from the first to the second through shared memory, lane by lane
//   queries  a tile of 128 queries a block, 64 a warpgroup: S, dP, dS and dQ += dS K, over tiles of 64 keys
//
// Called by run_bwd_wide.cuh. Invariant: a ring's barriers as in pipeline.cuh; the order of all sums depends on nothing
// but the shapes: the same bits in every run.
#pragma once

#include "kernels/sm90/bwd_parts.cuh"

namespace flash_ext::sm90 {

struct WideParams {
  TensorMap q, k, v, d_out, dk, dv, dq;
  const float* stats;   // [b, h_q, tiles of 64 queries, kQueryStats, 64], see bwd_rows.cuh
  const float* bounds;  // fp16: [b, h_q, 2], the largest |dO row| and |delta|, then [b, h_k], the largest |V|
  TileSchedule keys, queries;
  TileBand band;
  int len_q, padded;
  int heads_q, group_size;  // query heads; of a key head
  int batch, inner_batch;
  int head_dim_v;
  float scale, to_log2;
  SoftcapParams softcap;  // in units of q k^T
  float inverse_scale;    // NOTE: last. In front of `softcap` ptxas spilled 12 bytes in fp16 with a softcap.

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

template <class T_, int kHeadDim_, bool kCaps_>
struct WideTraits {
  using T = T_;
  static constexpr bool kCaps = kCaps_;  // with a softcap
  static constexpr int kHeadDim = kHeadDim_, kPanels = panels(kHeadDim);
  static constexpr int kBlock = WideShape::block, kStages = WideShape::stages, kThreads = WideShape::threads;
  static constexpr int kTileBytes = tile_bytes(kBlock, kHeadDim), kPBytes = kBlock * kBlock * 2;
  static constexpr int kStatsBytes = kQueryStats * kBlock * 4;
  static constexpr bool kScaled = std::is_same_v<T, __half>;  // as of BackwardTraits
  static constexpr WideKeysSmem kKeys = wide_keys_smem(kHeadDim);
  static constexpr WideQueriesSmem kQueries = wide_queries_smem(kHeadDim);
  using Place = RingPlace<kStages>;

  // Shared memory of the keys' kernel.
  struct Keys {
    uint32_t base;
    __device__ __forceinline__ uint32_t k() const { return base + kKeys.k; }
    __device__ __forceinline__ uint32_t v() const { return base + kKeys.v; }
    __device__ __forceinline__ uint32_t k_full() const { return base + kKeys.barriers; }
    __device__ __forceinline__ uint32_t v_full() const { return base + kKeys.barriers + 8; }
    __device__ __forceinline__ Ring<kTileBytes> q() const { return {base + kKeys.q, base + kKeys.barriers + 16}; }
    __device__ __forceinline__ Ring<kTileBytes> d_out() const {
      return {base + kKeys.d_out, base + kKeys.barriers + 16 + 16 * kStages};
    }
    __device__ __forceinline__ Ring<kPBytes> p() const {
      return {base + kKeys.p, base + kKeys.barriers + 16 + 32 * kStages};
    }
    // Of a stage of Q, in the order of QueryStat.
    __device__ __forceinline__ uint32_t lse(int stage) const { return base + kKeys.stats + stage * kStatsBytes; }
    __device__ __forceinline__ uint32_t far(int stage) const { return lse(stage) + kFarStat * kBlock * 4; }
    __device__ __forceinline__ uint32_t delta(int stage) const { return lse(stage) + kDeltaStat * kBlock * 4; }
  };
  // Of the queries' kernel.
  struct Queries {
    uint32_t base;
    __device__ __forceinline__ uint32_t q(int consumer) const { return base + kQueries.q + consumer * kTileBytes; }
    __device__ __forceinline__ uint32_t d_out(int consumer) const {
      return base + kQueries.d_out + consumer * kTileBytes;
    }
    __device__ __forceinline__ uint32_t q_full() const { return base + kQueries.barriers; }
    __device__ __forceinline__ uint32_t d_out_full() const { return base + kQueries.barriers + 8; }
    __device__ __forceinline__ Ring<kTileBytes> k() const { return {base + kQueries.k, base + kQueries.barriers + 16}; }
    __device__ __forceinline__ Ring<kTileBytes> v() const { return {base + kQueries.v, base + kQueries.barriers + 48}; }
  };
};

// A tile of either schedule, and the range of tiles of the other side that meet it.
struct WideWork {
  int head, b0, b1, b;
  int first_row;    // key or query
  int first, last;  // tiles of the other side; equal where there is none

  template <int kRows, int kOther>
  static __device__ __forceinline__ WideWork of_keys(const WideParams& params) {
    WideWork work = at<kRows>(params, params.keys);
    const int last_key = min(work.first_row + kRows, params.band.len_k) - 1;
    work.range<kOther>(max(work.first_row - params.band.upper, 0), min(last_key - params.band.lower + 1, params.len_q));
    return work;
  }
  template <int kRows, int kOther>
  static __device__ __forceinline__ WideWork of_queries(const WideParams& params) {
    WideWork work = at<kRows>(params, params.queries);
    const int last_query = min(work.first_row + kRows, params.len_q) - 1;
    work.range<kOther>(max(work.first_row + params.band.lower, 0),
                       min(last_query + params.band.upper + 1, params.band.len_k));
    return work;
  }
  __device__ __forceinline__ BoxStart box(const BoxSteps& steps, int box_head, int row) const {
    return {0, row, box_head * steps.head, b0 * steps.b0, b1 * steps.b1};
  }

 private:
  template <int kRows>
  static __device__ __forceinline__ WideWork at(const WideParams& params, const TileSchedule& schedule) {
    const Tile tile = schedule.at<uint32_t>(blockIdx.x);
    WideWork work;
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

template <class Traits>
__device__ __forceinline__ void load_wide(uint32_t tile, uint32_t barrier, const TensorMap& map, BoxStart at) {
#pragma unroll
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
    tma_load(tile + panel * panel_size(Traits::kBlock), &map.map, barrier, at);
    at.col += kPanelCols;
  }
}

// 16 rows of a warp through a tile of 64 rows, of which it owns them, then by TMA.
template <class Traits>
__device__ __forceinline__ void store_wide(const float (&c)[Traits::kHeadDim / 2], float factor, uint32_t tile,
                                           int warp_row, const TensorMap& map, BoxStart at) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Traits::kHeadDim / 16; ++k) {
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = pack(c[8 * k + 2 * i] * factor, c[8 * k + 2 * i + 1] * factor, typename Traits::T());
    }
    stmatrix_x4(tile + tile_offset(Traits::kBlock, warp_row + lane % 16, 16 * k + lane / 16 * 8), r[0], r[1], r[2],
                r[3]);
  }
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      tma_store(&map.map, tile + panel * panel_size(Traits::kBlock) + warp_row * kPanelBytes, at);
      at.col += kPanelCols;
    }
    bulk_commit();
    bulk_wait_read();
  }
}

}  // namespace flash_ext::sm90
