// The steps of a consumer warpgroup of the main backward kernel, in the order in which its main loop (kernel.cuh) takes
// them: a tile of keys begins, S^T of a tile of queries becomes P^T, dP^T becomes dS^T, dS is shared with the other
// warpgroup, dQ leaves, dK and dV leave.
//
// Called by kernel.cuh. Invariant: fragments are [keys, queries]. S^T, dK and dV are the kernel's own and handed on; as
// members they made ptxas order the loads of delta otherwise, 2 to 3 % at head dim 64.
#pragma once

#include "kernels/sm90/backward/order.cuh"
#include "kernels/sm90/backward/scores.cuh"

namespace flash_ext::sm90 {

template <class Traits>
struct BackwardConsumer {
  using T = typename Traits::T;
  static constexpr BackwardShape kShape = Traits::kShape;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kDqCols = Traits::kDqCols, kTile = kBlockM * kHeadDim;
  static constexpr bool kDefers = kShape.defers;
  using Scores = float[kBlockM / 2];     // S^T, dP^T
  using Gradient = float[kHeadDim / 2];  // dK, dV
  using DqPart = float[kDqCols / 2];     // this warpgroup's: 64 queries, or all and half of the columns
  using Packed = uint32_t[kBlockM / 4];  // P^T, dS^T
  static constexpr bool kSoftcap = Traits::kSoftcap;
  using Sloped = uint32_t[kSoftcap ? kBlockM / 4 : 1];                      // P (1 - tanh^2), of which dS is made
  using KeyPart = uint32_t[Traits::kKSteps > 0 ? 4 * Traits::kKSteps : 1];  // of K, as S^T takes it from registers
  using Inside = typename TileRanges<kBlockM, 64>::Inside;

  using Work = typename Traits::Work;
  static constexpr bool kRereads = Traits::kPacked && Traits::kScored;
  using DqAddress = std::conditional_t<Traits::kNumbersDq, int, float*>;

  const typename Traits::Params& params;
  const typename Traits::Tiles& tiles;
  const int consumer, lane, warp, warp_row;
  const Ring<Traits::kKvBytes> k_ring, v_ring;
  const Ring<Traits::kQBytes> q_ring, d_out_ring;
  const Ring<Traits::kDsBytes> ds_ring;
  const uint64_t k_desc, v_desc, dq_b_desc;  // A of S^T and dP^T, B of dQ
  const int ds_panel;                        // A of dQ: where in a tile of dS
  const uint32_t staging;                    // this warp's

  uint32_t done = 0, phase = 0;                     // tiles of queries so far; of K and V
  typename Traits::DsState ds_place{}, dq_place{};  // dS that is written next, and that dQ reads next
  Place2 work_place{};                              // ordered

  // Of a tile of keys.
  uint32_t linear = 0;
  typename Traits::Work work;
  int kept_row;
  int total, left;  // tiles of queries of all its heads; from this one on
  DqAddress dq;     // this warp's part of the next that is added; kNumbersDq: the number of that tile
  int64_t kept_jump;
  typename Traits::Place place;
  ScoreState scores{0};
  Inside inside;
  float ds_scale, ds_unscale;
  QueryPlace at;  // ordered: its m is what the producer says
  int dq_m;       // kDefers: that of `dq`

  __device__ __forceinline__ BackwardConsumer(const typename Traits::Params& params_,
                                              const typename Traits::Tiles& tiles_, int consumer_)
      : params(params_),
        tiles(tiles_),
        consumer(consumer_),
        lane(threadIdx.x % 32),
        warp(consumer_ * 4 + threadIdx.x / 32 % 4),
        warp_row(warp * 16),
        k_ring(tiles_.k()),
        v_ring(tiles_.v()),
        q_ring(tiles_.q()),
        d_out_ring(tiles_.d_out()),
        ds_ring(tiles_.ds()),
        k_desc(k_major(k_ring.tile(0) + consumer_ * 64 * kPanelBytes)),
        v_desc(k_major(v_ring.tile(0) + consumer_ * 64 * kPanelBytes)),
        dq_b_desc(mn_major(k_ring.tile(0) + (Traits::kSplitsQueries ? 0 : consumer_ * panel_size(kBlockN)), kBlockN)),
        ds_panel(Traits::kSplitsQueries ? consumer_ * panel_size(kBlockN) : 0),
        staging(tiles_.staging(warp)) {}

  // ---- A tile of keys

  // Numbers of `work`. NOTE: kRereads: beside scores there are no registers for them, 4 to 48 bytes were spilled.
  __device__ __forceinline__ int number(int kept, size_t offset) const {
    return kRereads ? load_shared_int(tiles.packed_work() + static_cast<uint32_t>(offset)) : kept;
  }
  __device__ __forceinline__ int first_key() const { return number(work.first_key, offsetof(Work, first_key)); }
  __device__ __forceinline__ int first_m() const { return number(work.first_m, offsetof(Work, first_m)); }
  __device__ __forceinline__ int last_m() const { return number(work.last_m, offsetof(Work, last_m)); }
  __device__ __forceinline__ int all() const { return kRereads ? (last_m() - first_m()) * params.group_size : total; }
  __device__ __forceinline__ int element() const { return number(work.b0, offsetof(Work, b0)); }

  __device__ __forceinline__ typename Traits::Work find_work(uint32_t number) const {
    if constexpr (Traits::kOrdered) {
      return uniform(read_work<Traits>(tiles, work_place));
    } else if constexpr (Traits::kPacked) {
      return packed_work<Traits>(tiles);
    } else {
      KeyWork found = key_work<Traits>(params, number);
      if constexpr (Traits::kHasRanges) found.first_m = uniform(found.first_m), found.last_m = uniform(found.last_m);
      if constexpr (Traits::kStored) found.first_m = 0, found.last_m = params.m_blocks;
      return found;
    }
  }

  // params.tiles: there is no more. NOTE: a break at the end of work would be divergent (see uniform).
  __device__ __forceinline__ uint32_t next(uint32_t number) const {
    if constexpr (!Traits::kOrdered) return number;
    return uniform(read_work<Traits>(tiles, work_place).step == 0 ? params.tiles : 0);
  }

  __device__ __forceinline__ void begin(uint32_t number, Gradient& dk, Gradient& dv) {
    linear = number;
    work = find_work(linear);
    kept_row = work.first_key + warp_row + lane / 4;
    total = left = (work.last_m - work.first_m) * params.group_size;
    if constexpr (Traits::kNumbersDq) {
      dq = static_cast<int>(work.first_tile(params, 0)) + work.first_m;
    } else {
      dq = params.dq + (work.first_tile(params, 0) + work.first_m) * kTile +
           (staging - tiles.staging(0)) / sizeof(float);
    }
    kept_jump = find_jump(params.m_blocks);
    place = {static_cast<int>(done % kShape.stages), done / kShape.stages % 2};
    if constexpr (Traits::kScored) {  // found anew, too
      scores = ScoreState(params.scores.stages, done * (kBlockM / kScoreRows));
    }
    if constexpr (!Traits::kOrdered) done += total;
    inside = work.template ranges<kBlockM, 64>(params).inside(work.first_key + consumer * 64);
    if constexpr (Traits::kMayRenorm && !Traits::kOrdered) inside.count *= !any_renorm<kBlockM>(params, work);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
    ds_scale = ds_unscale = 1.f;
    at = {work.first_m, work.head_k * params.group_size};
    dq_m = work.first_m;
  }

  // K, Q and V of it are there; S^T of its first tile of queries, too.
  __device__ __forceinline__ void begin_products(Scores& s, KeyPart& k) {
    barrier_wait(k_ring.full(0), phase);
    if constexpr (Traits::kMayRenorm && Traits::kOrdered) {
      inside.count *= load_shared_float(tiles.meets_renorm()) == 0.f;
    }
    load_fragments<kBlockN, Traits::kKSteps>(k, k_ring.tile(0), warp_row);
    issue_s(s, k);
    barrier_wait(v_ring.full(0), phase);
    if constexpr (Traits::kScaled) {
      const float scale = scale_of_ds<Traits>(params, work, tiles);
      ds_scale = scale * (1.f / 1024.f);
      ds_unscale = 1.f / scale;
    }
    wait_s(s, k);
  }

  __device__ __forceinline__ void end_products() {
    if constexpr (Traits::kOrdered) {
      barrier_wait(tiles.dq_empty(), place.stage ^ 1);
      done = place.stage + place.phase * kShape.stages;
    }
    phase ^= 1;
  }

  // NOTE: the tile is found anew, because keeping it through the loop costs registers.
  __device__ __forceinline__ void store(const Gradient& dk, const Gradient& dv) {
    const typename Traits::Work end = find_work(linear);
    if constexpr (Traits::kOrdered) {
      __syncwarp();
      if (lane == 0) barrier_arrive(tiles.works().empty(work_place.stage()));
      ++work_place.count;
    }
    const int first_row = end.first_key + warp_row;
    store_gradient<Traits>(dv, (Traits::kScaled ? 1.f / 1024.f : 1.f) * dropout_of(params).scale, staging, params.dv,
                           end.key_box(params.dv.steps, end.head_k, first_row));
    store_gradient<Traits>(dk, params.scale * ds_unscale, staging, params.dk,
                           end.key_box(params.dk.steps, end.head_k, first_row));
  }

  // ---- S^T and P^T of a tile of queries

  // NOTE: with scores, or a softcap in fp16, there are no registers for `inside`: 4 to 12 bytes were spilled. With a
  // softcap in bf16 the other way spilled 8.
  __device__ __forceinline__ bool is_boundary() const {
    if constexpr (!Traits::kScored && !(kSoftcap && Traits::kScaled)) return !inside.has(at.m);
    const int query = at.m * kBlockM, key = first_key() + consumer * 64;
    if constexpr (Traits::kPacked) {
      return uniform(packed_edges(packed_work_at<Traits>(tiles, work_place)).is_boundary(query, kBlockM, key, 64)) != 0;
    }
    return params.is_boundary(query, kBlockM, key, 64);
  }
  __device__ __forceinline__ KeptColumns kept_by_band() const {
    if constexpr (Traits::kPacked) {
      const SequenceEdges edges = packed_edges(packed_work_at<Traits>(tiles, work_place));
      return KeptColumns::of_keys(edges.band, edges.len_q, row(), at.m * kBlockM);
    } else {
      return KeptColumns::of_keys(params.band, params.len_q, row(), at.m * kBlockM);
    }
  }
  __device__ __forceinline__ bool needs_renorm() const { return has_renorm(tiles.stats_renorm(place.stage)); }
  __device__ __forceinline__ int row() const { return Traits::kFindsRow ? first_key() + find_row(consumer) : kept_row; }

  __device__ __forceinline__ void wait_d_out() {
    barrier_wait(d_out_ring.full(place.stage), place.phase);
    if constexpr (Traits::kOrdered) at.m = uniform(load_shared_int(tiles.m_block(place.stage)));
  }

  static __device__ __forceinline__ void fence(KeyPart& k) {
    if constexpr (Traits::kKSteps > 0) fence_registers(k);
  }
  // S^T = K Q^T of the tile at `place`.
  __device__ __forceinline__ void issue_s(Scores& s, KeyPart& k) const {
    barrier_wait(q_ring.full(place.stage), place.phase);
    fence(k);
    wgmma_fence();
    issue_scores<T, kBlockN, kBlockM, kHeadDim, Traits::kKSteps>(s, k_desc, q_ring.tile(place.stage), k);
  }
  static __device__ __forceinline__ void wait_s(Scores& s, KeyPart& k) {
    wgmma_wait<0>();
    fence_registers(s);
    fence(k);
  }
  // dP^T = V dO^T
  __device__ __forceinline__ void issue_dp(Scores& dp) const {
    wgmma_fence();
    issue_scores<T, kBlockN, kBlockM, kHeadDim>(dp, v_desc, d_out_ring.tile(place.stage));
  }

  // Of ALiBi: what a distance from the diagonal is less than j - i, and the slope.
  __device__ __forceinline__ int diagonal() const {
    if constexpr (Traits::kPacked) {
      const SequenceEdges edges = packed_edges(packed_work_at<Traits>(tiles, work_place));
      return (edges.band.len_k - edges.len_q) & params.diagonal_mask;
    } else {
      return params.scores.alibi.offset;
    }
  }
  __device__ __forceinline__ float slope() const {
    if constexpr (Traits::kScored) return params.scores.alibi.of(at.head, element(), work.b1);
    return 0.f;
  }

  // P^T = e^(S^T - lse), and -0 where a pair is hidden; scores, a softcap and renormalised rows come before.
  template <bool kWhole>
  __device__ __forceinline__ void make_p(Packed& p, Sloped& sloped, Scores& s, Gradient& dv,
                                         [[maybe_unused]] float slope) {
    [[maybe_unused]] KeptOfMask<Traits> kept;
    if constexpr (Traits::kScored) {
      const int distance = row() - (at.m * kBlockM + lane % 4 * 2) - diagonal();
      take_backward_scores<Traits, !kWhole>(s, dv, kept, params, tiles, place.stage, scores, warp_row, slope, distance);
    }
    if constexpr (kSoftcap) cap_scores<T, true>(s, params.softcap);
    if (!kWhole && Traits::kMayRenorm && is_boundary() && needs_renorm()) {
      subtract_renorm(s, tiles.stats_renorm(place.stage), params.scale, params.inverse_scale);
    }
    probabilities<Traits>(p, s, params, tiles.stats_lse(place.stage),
                          [&](float x, float y, float s_x, float s_y, int pair) {
                            if constexpr (kSoftcap) sloped[pair] = pack_sloped<T>(x, y, s_x, s_y, params.softcap);
                          });
    if (!kWhole && has_mask(params)) mark_hidden(p, kept);
    if (!kWhole && is_boundary()) {
      mark_hidden(p, kept_by_band());
    }
    fence_registers(p);
  }

  // ---- dV, dS^T and dK

  // dV += P^T dO
  __device__ __forceinline__ void issue_dv(Gradient& dv, Packed& p) const {
    issue_gradient<T, kBlockM, kHeadDim>(dv, p, d_out_ring, place.stage);
  }

  // dV += P^T dO and, when dP^T is there, dS^T = P^T o (dP^T - delta).
  // NOTE: with dropout dP is waited for before dV is issued, because dS takes the P that dV does not, and there are no
  // registers for both.
  __device__ __forceinline__ void add_dv_and_make_ds(Gradient& dv, Packed& ds, Packed& p, const Sloped& sloped,
                                                     Scores& dp) const {
    if constexpr (Traits::kDropout) {
      wgmma_wait<0>();
      fence_registers(dp);
      drop<Traits>(p, ds, dp, tiles, place, warp_row, ds_scale);
      issue_dv(dv, p);
    } else {
      issue_dv(dv, p);
      wgmma_wait<1>();
      fence_registers(dp);
      with_queries(dp, tiles.stats_delta(place.stage), [&](float x, float y, float2 delta, int i) {
        ds[i / 2] = ds_of<Traits>(kSoftcap ? sloped[kSoftcap ? i / 2 : 0] : p[i / 2], x, y, delta, ds_scale);
      });
    }
  }

  // dS is 0 where make_p() has marked P, and of queries without keys.
  __device__ __forceinline__ void clear_hidden_ds(Packed& ds, const Packed& p) const {
    if (has_mask(params) || is_boundary()) clear_marked(ds, p);
    if (Traits::kScored && needs_renorm()) clear_emptied(ds, tiles.stats_lse(place.stage));
  }

  // Where dS is written or read: kDefers: at `own`, else at the place of the tile of queries.
  __device__ __forceinline__ typename Traits::DsState ds_place_of(const typename Traits::DsState& own) const {
    if constexpr (kDefers) {
      return own;
    } else if constexpr (Traits::kReturnsDs) {  // one stage
      return {0, static_cast<uint32_t>(place.stage)};
    } else {
      return {place.stage, place.phase};
    }
  }

  // dS to shared memory; each warp arrives at its full barrier.
  __device__ __forceinline__ void share_ds(const Packed& ds) {
    const auto to = ds_place_of(ds_place);
    const uint32_t full = ds_ring.full(to.stage);
    if constexpr (Traits::kReturnsDs) barrier_wait(ds_ring.empty(to.stage), to.phase ^ 1);
    store_packed<kBlockN>(ds, ds_ring.tile(to.stage), warp_row);
    publish();
    if (lane == 0) barrier_arrive(full);
    ds_place.advance();
  }
  // What this warp has written to shared memory may be read by TMA and by wgmma.
  static __device__ __forceinline__ void publish() {
    fence_async_proxy();
    __syncwarp();
  }

  // dK += dS^T Q
  __device__ __forceinline__ void issue_dk(Gradient& dk, Packed& ds) const {
    issue_gradient<T, kBlockM, kHeadDim>(dk, ds, q_ring, place.stage);
  }

  // ---- dQ

  // dQ = dS K, when dS of both warpgroups is there.
  __device__ __forceinline__ void issue_dq(DqPart& dq_acc) const {
    const auto from = ds_place_of(dq_place);
    barrier_wait(ds_ring.full(from.stage), from.phase);
    const uint64_t a = mn_major(ds_ring.tile(from.stage) + ds_panel, kBlockN);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {
      Wgmma<T, kDqCols>::template ss<1, 1>(dq_acc, a + mn_major_step(k), dq_b_desc + mn_major_step(k), k > 0);
    }
    wgmma_commit();
  }

  // The staging is free. parity: of the tile of queries whose dQ comes next.
  __device__ __forceinline__ void wait_staging(int parity) const {
    if constexpr (Traits::kOrdered) barrier_wait(tiles.dq_empty(), parity ^ 1);
    if (elect_one()) bulk_wait_read();
    __syncwarp();
  }

  // dQ to the staging, in the order of the fragments or (kStored) as TMA takes it. dS goes back.
  __device__ __forceinline__ void stage_dq(DqPart& dq_acc) {
    fence_registers(dq_acc);
    if (Traits::kReturnsDs && lane == 0) barrier_arrive(ds_ring.empty(ds_place_of(dq_place).stage));
    dq_place.advance();
    if constexpr (Traits::kStored) {
      stage_gradient<T>(dq_acc, params.scale * ds_unscale, staging);
    } else {
#pragma unroll
      for (int i = 0; i < kDqCols / 8; ++i) {
        if constexpr (Traits::kScaled) {
#pragma unroll
          for (int j = 4 * i; j < 4 * i + 4; ++j) dq_acc[j] *= ds_unscale;
        }
        store_shared4(staging + i * 512 + lane * 16, dq_acc[4 * i], dq_acc[4 * i + 1], dq_acc[4 * i + 2],
                      dq_acc[4 * i + 3]);
      }
    }
  }

  // dQ of a tile of queries, by its number in this block, from its staging. NOTE: the tile of keys is found anew,
  // because keeping it through the loop spilled 16 bytes.
  __device__ __forceinline__ void store_dq(int tile) const {
    const KeyWork now = find_work(no_hoist(linear));
    const int member = tile / params.m_blocks;
    BoxStart to = now.query_box(params.dq_rows.steps, now.head_k * params.group_size + member,
                                (tile - member * params.m_blocks) * kBlockM + warp_row % kBlockM);
    if constexpr (!Traits::kSplitsQueries) to.col = consumer * kDqCols;
    tma_store(&params.dq_rows.map, staging, to);
  }

  __device__ __forceinline__ float* dq_address() const {
    if constexpr (Traits::kNumbersDq) {
      return params.dq + int64_t{dq} * kTile + (staging - tiles.staging(0)) / sizeof(float);
    } else {
      return dq;
    }
  }

  // Of `dq`, from the end of one head to the start of the next. NOTE: kept with a softcap, head dim 64 spilled 8 bytes.
  static constexpr int kDqStep = Traits::kNumbersDq ? 1 : kTile;
  __device__ __forceinline__ int64_t find_jump(int m_blocks) const {
    return int64_t{m_blocks - (last_m() - first_m())} * kDqStep;
  }
  __device__ __forceinline__ int64_t dq_jump() const {
    if constexpr (Traits::kLateDp || kRereads) return find_jump(no_hoist(params.m_blocks));
    return kept_jump;
  }

  // dQ of a tile of queries, from its staging to global memory; after a fence. tile: its number in this block,
  // parity: of that.
  __device__ __forceinline__ void add_dq(int parity, [[maybe_unused]] int tile) {
    if constexpr (Traits::kOrdered) {
      if (lane == 0) barrier_arrive(tiles.dq_full(parity));
    } else {
      if (elect_one()) {
        if constexpr (Traits::kStored) {
          store_dq(tile);
        } else {
          bulk_add(dq_address(), staging, Traits::kStagingBytes);
        }
        bulk_commit();
      }
      if constexpr (kDefers) {
        ++dq_m;
        dq += kDqStep + (dq_m == last_m() ? dq_jump() : 0);
        if (dq_m == last_m()) dq_m = first_m();
      } else {
        dq += kDqStep;
        if (at.m == first_m()) dq += dq_jump();
      }
    }
  }

  // dQ of the tile before, which share_ds() has fenced.
  __device__ __forceinline__ void add_last_dq() {
    if (all() - left > kDefers) add_dq(place.stage ^ !kDefers, all() - left - 1 - kDefers);
  }

  // Behind the last tile of queries. kStaged: dQ of the tile before it is in the staging (kDefers).
  template <bool kStaged>
  __device__ __forceinline__ void finish_dq(DqPart& dq_acc) {
    if constexpr (kDefers) {
      if constexpr (kStaged) {
        publish();
        add_dq(place.stage, all() - 2);
      }
      issue_dq(dq_acc);
      wait_staging(place.stage ^ 1);
      wgmma_wait<0>();
      stage_dq(dq_acc);
    }
    if (lane == 0) barrier_arrive(k_ring.empty(0));
    publish();
    add_dq(place.stage ^ 1, all() - 1);
  }
};

}  // namespace flash_ext::sm90
