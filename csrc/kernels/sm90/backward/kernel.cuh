// Backward on Hopper: one producer warp brings tiles of Q and dO by TMA past a tile of K and V that stays, two consumer
// warpgroups of 64 keys each multiply them by wgmma.
//
//   S^T = K Q^T   P^T = e^(S^T - lse)   dP^T = V dO^T   dS^T = P^T o (dP^T - delta)
//   dV += P^T dO       dK += dS^T Q       dQ += dS K
//
// FlashAttention-3 (arXiv:2407.08608), section 3.1 and appendix B.1: scores are computed transposed, so that P^T and
// dS^T are register operands of dV and dK. dS also goes through shared memory, because dQ sums over the keys of both
// warpgroups, which leaves by bulk reductions to a float array in the order of the fragments (rows.cuh), in
// whatever order blocks come, or in one order (order.cuh). Walk::kStored: where one tile of keys is all there is,
// dQ is stored as it is.
// Called by run.cuh. Invariant: a ring's barriers as in pipeline.cuh, those of dS by an arrival of each warp. A
// stage of dS is written again when both warpgroups have handed it back, or where they do not (Traits::kReturnsDs),
// only after both have passed the barrier of the next one, before which each waited for its own dQ of this one. A
// warp's staging is its own, for dQ and, after it, for dV and dK. Walk::kOrdered: the staging of all warps is full when
// each has arrived, and empty when the adder has read it.
#pragma once

#include "kernels/sm90/backward/order.cuh"
#include "kernels/sm90/backward/producer.cuh"
#include "kernels/sm90/backward/scores.cuh"

namespace flash_ext::sm90 {

template <class Traits>
__device__ __forceinline__ void consume_backward(const typename Traits::Params& params,
                                                 const typename Traits::Tiles& tiles, int consumer) {
  using T = typename Traits::T;
  constexpr BackwardShape kShape = Traits::kShape;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kDqCols = Traits::kDqCols, kTile = kBlockM * kHeadDim;
  constexpr bool kDefers = kShape.defers;
  const int lane = threadIdx.x % 32, warp = consumer * 4 + threadIdx.x / 32 % 4;
  const int warp_row = warp * 16;
  const Ring<Traits::kKvBytes> k_ring = tiles.k(), v_ring = tiles.v();
  const Ring<Traits::kQBytes> q_ring = tiles.q(), d_out_ring = tiles.d_out();
  const Ring<Traits::kDsBytes> ds_ring = tiles.ds();
  const uint64_t k_desc = k_major(k_ring.tile(0) + consumer * 64 * kPanelBytes);
  const uint64_t v_desc = k_major(v_ring.tile(0) + consumer * 64 * kPanelBytes);
  // dQ = dS K, this warpgroup's part: 64 queries (a panel of dS) or 64 columns (a panel of K).
  const uint64_t dq_b_desc =
      mn_major(k_ring.tile(0) + (Traits::kSplitsQueries ? 0 : consumer * panel_size(kBlockN)), kBlockN);
  const int ds_panel = Traits::kSplitsQueries ? consumer * panel_size(kBlockN) : 0;
  const uint32_t staging = tiles.staging(warp);
  uint32_t done = 0, phase = 0;                 // tiles of queries so far; of K and V
  typename Traits::DsPlace ds_place, dq_place;  // dS that is written next, and that dQ reads next

  Place2 work_place;  // ordered
  const auto find_work = [&](uint32_t linear) {
    if constexpr (Traits::kOrdered) {
      return uniform(read_work<Traits>(tiles, work_place));
    } else {
      KeyWork work = KeyWork::at<kBlockM, kBlockN>(params, linear);
      if constexpr (Traits::kStored) work.first_m = 0, work.last_m = params.m_blocks;
      return work;
    }
  };

  // params.tiles: there is no more. NOTE: a break at the end of work would be divergent (see uniform).
  const auto next = [&](uint32_t linear) -> uint32_t {
    if constexpr (!Traits::kOrdered) return linear;
    return uniform(read_work<Traits>(tiles, work_place).step == 0 ? params.tiles : 0);
  };

  for (uint32_t linear = next(blockIdx.x); linear < params.tiles; linear = next(linear + gridDim.x)) {
    const KeyWork work = find_work(linear);
    const int kept_row = work.first_key + warp_row + lane / 4;
    const auto row = [&] { return Traits::kFindsRow ? work.first_key + find_row(consumer) : kept_row; };
    const int total = (work.last_m - work.first_m) * params.group_size;
    float* dq = params.dq + (int64_t{work.row} * params.m_blocks + work.first_m) * kTile +
                (staging - tiles.staging(0)) / sizeof(float);
    // From the end of what a head gets to the start of what the next one does.
    const int64_t dq_jump = int64_t{params.m_blocks - (work.last_m - work.first_m)} * kTile;
    typename Traits::Place place{static_cast<int>(done % kShape.stages), done / kShape.stages % 2};
    [[maybe_unused]] ScorePlace scores = [&] {  // found anew, too
      if constexpr (Traits::kScored) return ScorePlace(params.scores.stages, done * (kBlockM / kScoreRows));
      return ScorePlace(0);
    }();
    if constexpr (!Traits::kOrdered) done += total;
    [[maybe_unused]] auto inside = params.template tile_ranges<kBlockM, 64>().inside(work.first_key + consumer * 64);
    if constexpr (Traits::kMayBeFar && !Traits::kOrdered) inside.count *= !any_far<kBlockM>(params, work);
    float dk_acc[kHeadDim / 2], dv_acc[kHeadDim / 2], s_acc[kBlockM / 2];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk_acc[i] = dv_acc[i] = 0.f;
    float ds_scale = 1.f, ds_unscale = 1.f;

    int m = work.first_m;  // the tile of queries; ordered: what the producer says
    [[maybe_unused]] int head = work.head_k * params.group_size;
    [[maybe_unused]] int dq_m = work.first_m;  // kDefers: that of `dq`
    // dQ of a tile of queries, by its number in this block, from its staging. NOTE: the tile of keys is found anew,
    // because keeping it through the loop spilled 16 bytes.
    const auto store_dq = [&](int tile) {
      const KeyWork now = find_work(no_hoist(linear));
      const int member = tile / params.m_blocks;
      BoxStart at = now.box(params.dq_rows.steps, now.head_k * params.group_size + member,
                            (tile - member * params.m_blocks) * kBlockM + warp_row % kBlockM);
      if constexpr (!Traits::kSplitsQueries) at.col = consumer * kDqCols;
      tma_store(&params.dq_rows.map, staging, at);
    };
    // dQ of a tile of queries, from its staging to global memory; after a fence. tile: its number in this block,
    // parity: of that.
    const auto add_dq = [&](int parity, [[maybe_unused]] int tile) {
      if constexpr (Traits::kOrdered) {
        if (lane == 0) barrier_arrive(tiles.dq_full(parity));
      } else {
        if (elect_one()) {
          if constexpr (Traits::kStored) {
            store_dq(tile);
          } else {
            bulk_add(dq, staging, Traits::kStagingBytes);
          }
          bulk_commit();
        }
        dq += kTile;
        if constexpr (kDefers) {
          if (++dq_m == work.last_m) {
            dq_m = work.first_m;
            dq += dq_jump;
          }
        } else if (m == work.first_m) {
          dq += dq_jump;
        }
      }
    };
    // kDefers: as it says; else dS is written and read at the tile's own place.
    const auto ds_place_of = [&](const typename Traits::DsPlace& own) -> typename Traits::DsPlace {
      if constexpr (kDefers) {
        return own;
      } else if constexpr (Traits::kReturnsDs) {  // one stage
        return {0, static_cast<uint32_t>(place.stage)};
      } else {
        return {place.stage, place.phase};
      }
    };
    const auto issue_dq = [&](float(&dq_acc)[kDqCols / 2]) {
      const auto at = ds_place_of(dq_place);
      barrier_wait(ds_ring.full(at.stage), at.phase);
      const uint64_t a = mn_major(ds_ring.tile(at.stage) + ds_panel, kBlockN);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {
        Wgmma<T, kDqCols>::template ss<1, 1>(dq_acc, a + mn_major_step(k), dq_b_desc + mn_major_step(k), k > 0);
      }
      wgmma_commit();
    };
    // parity: as above.
    const auto wait_staging = [&](int parity) {
      if constexpr (Traits::kOrdered) barrier_wait(tiles.dq_empty(), parity ^ 1);
      if (elect_one()) bulk_wait_read();
      __syncwarp();
    };
    const auto stage_dq = [&](float(&dq_acc)[kDqCols / 2]) {
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
    };
    uint32_t k_frag[Traits::kKSteps > 0 ? 4 * Traits::kKSteps : 1];
    const auto fence_k = [&] {
      if constexpr (Traits::kKSteps > 0) fence_registers(k_frag);
    };
    int left = total;
    // NOTE: with scores, or a softcap in fp16, there are no registers for `inside`: 4 to 12 bytes were spilled. With a
    // softcap in bf16 the other way spilled 8.
    const auto is_boundary = [&] {
      if constexpr (!Traits::kScored && !(Traits::kCaps && Traits::kScaled)) return !inside.has(m);
      return params.is_boundary(m * kBlockM, kBlockM, work.first_key + consumer * 64, 64);
    };
    // One tile of queries, whose S^T and dO are there. kDefers: dQ is that of the one before, and there is none if
    // kFirst. kLast: no tile follows, whose S^T would be computed. kWhole: no pair is hidden, and no row is far.
    const auto step = [&]<bool kFirst, bool kLast, bool kWhole>(std::bool_constant<kFirst>, std::bool_constant<kLast>,
                                                                std::bool_constant<kWhole>) {
      float dp_acc[kBlockM / 2], dq_acc[Traits::kDqCols / 2];
      uint32_t p_frag[kBlockM / 4], ds_frag[kBlockM / 4];
      [[maybe_unused]] KeptOfMask<Traits> kept;
      [[maybe_unused]] float slope = 0.f;
      if constexpr (Traits::kScored) slope = params.scores.alibi.of(head, work.b0, work.b1);
      const auto issue_dp = [&] {
        wgmma_fence();
        issue_scores<T, kBlockN, kBlockM, kHeadDim>(dp_acc, v_desc, d_out_ring.tile(place.stage));
      };
      if constexpr (!Traits::kLateDp) issue_dp();
      if constexpr (Traits::kScored) {
        const int distance = row() - (m * kBlockM + lane % 4 * 2) - params.scores.alibi.offset;
        take_backward_scores<Traits, !kWhole>(s_acc, dv_acc, kept, params, tiles, place.stage, scores, warp_row, slope,
                                              distance);
      }
      if constexpr (Traits::kCaps) cap_scores<T, true>(s_acc, params.softcap);
      if (!kWhole && Traits::kMayBeFar && is_boundary() && is_far_tile(tiles.stats_far(place.stage))) {
        subtract_far(s_acc, tiles.stats_far(place.stage), params.scale, params.inverse_scale);
      }
      [[maybe_unused]] uint32_t sloped_p[Traits::kCaps ? kBlockM / 4 : 1];  // P (1 - tanh^2), of which dS is made
      probabilities<Traits>(p_frag, sloped_p, s_acc, params, tiles.stats_lse(place.stage));
      if (!kWhole && has_mask(params)) mark_hidden(p_frag, kept);
      if (!kWhole && is_boundary())
        mark_hidden(p_frag, KeptColumns::of_keys(params.band, params.len_q, row(), m * kBlockM));
      fence_registers(p_frag);
      if constexpr (Traits::kLateDp) {
        fence_registers(sloped_p);
        issue_dp();
      }
      // NOTE: with dropout dP is waited for before dV is issued, because dS takes the P that dV does not, and there are
      // no registers for both.
      if constexpr (Traits::kDrops) {
        wgmma_wait<0>();
        fence_registers(dp_acc);
        drop<Traits>(p_frag, ds_frag, dp_acc, tiles, place, warp_row, ds_scale);
      }
      fence_registers(p_frag);
      fence_registers(dv_acc);
      wgmma_fence();
      issue_keys<T, kBlockM, kHeadDim>(dv_acc, p_frag, d_out_ring.tile(place.stage));
      if constexpr (!Traits::kDrops) {
        wgmma_wait<1>();
        fence_registers(dp_acc);
        with_queries(dp_acc, tiles.stats_delta(place.stage), [&](float x, float y, float2 delta, int i) {
          uint32_t p = p_frag[i / 2];
          if constexpr (Traits::kCaps) p = sloped_p[i / 2];
          ds_frag[i / 2] = ds_of<Traits>(p, x, y, delta, ds_scale);
        });
      }
      if (!kWhole && (has_mask(params) || is_boundary())) clear_marked(ds_frag, p_frag);
      if (!kWhole && Traits::kScored && is_far_tile(tiles.stats_far(place.stage))) {
        clear_emptied(ds_frag, tiles.stats_lse(place.stage));
      }
      if constexpr (kLast) {
        if (lane == 0) barrier_arrive(v_ring.empty(0));
      }
      const auto ds_at = ds_place_of(ds_place);
      if constexpr (Traits::kReturnsDs) barrier_wait(ds_ring.empty(ds_at.stage), ds_at.phase ^ 1);
      store_packed<kBlockN>(ds_frag, ds_ring.tile(ds_at.stage), warp_row);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(ds_ring.full(ds_at.stage));
      ds_place.advance();
      if (total - left > kDefers) add_dq(place.stage ^ !kDefers, total - left - 1 - kDefers);
      if (++m == work.last_m) {
        m = work.first_m;
        ++head;
      }
      fence_registers(ds_frag);
      fence_registers(dk_acc);
      wgmma_fence();
      issue_keys<T, kBlockM, kHeadDim>(dk_acc, ds_frag, q_ring.tile(place.stage));
      constexpr bool kHasDq = !kDefers || !kFirst;
      if constexpr (kHasDq) issue_dq(dq_acc);
      wgmma_wait<kHasDq>();
      fence_registers(dk_acc);
      fence_registers(dv_acc);
      fence_registers(p_frag);
      fence_registers(ds_frag);
      __syncwarp();  // all lanes have read their lse and delta
      if (lane == 0) {
        barrier_arrive(q_ring.empty(place.stage));
        barrier_arrive(d_out_ring.empty(place.stage));
      }
      place.advance();
      if constexpr (!kLast) {
        barrier_wait(q_ring.full(place.stage), place.phase);
        fence_k();
        wgmma_fence();
        issue_scores<T, kBlockN, kBlockM, kHeadDim, Traits::kKSteps>(s_acc, k_frag, k_desc, q_ring.tile(place.stage));
      }
      if constexpr (kHasDq) {
        wait_staging(place.stage ^ !kDefers);
        wgmma_wait<!kLast>();
        stage_dq(dq_acc);
      }
      if constexpr (kLast) {
        if constexpr (kDefers) {
          if constexpr (kHasDq) {
            fence_async_proxy();
            __syncwarp();
            add_dq(place.stage, total - 2);
          }
          issue_dq(dq_acc);
          wait_staging(place.stage ^ 1);
          wgmma_wait<0>();
          stage_dq(dq_acc);
        }
        if (lane == 0) barrier_arrive(k_ring.empty(0));
        fence_async_proxy();
        __syncwarp();
        add_dq(place.stage ^ 1, total - 1);
      } else {
        wgmma_wait<0>();
        fence_registers(s_acc);
        fence_k();
      }
    };

    if (total > 0) {
      barrier_wait(k_ring.full(0), phase);
      if constexpr (Traits::kMayBeFar && Traits::kOrdered) {
        inside.count *= load_shared_float(tiles.meets_far()) == 0.f;
      }
      load_fragments<kBlockN, Traits::kKSteps>(k_frag, k_ring.tile(0), warp_row);
      barrier_wait(q_ring.full(place.stage), place.phase);
      fence_k();
      wgmma_fence();
      issue_scores<T, kBlockN, kBlockM, kHeadDim, Traits::kKSteps>(s_acc, k_frag, k_desc, q_ring.tile(place.stage));
      barrier_wait(v_ring.full(0), phase);
      if constexpr (Traits::kScaled) {
        const float scale = scale_of_ds<Traits>(params, work, tiles);
        ds_scale = scale * (1.f / 1024.f);
        ds_unscale = 1.f / scale;
      }
      wgmma_wait<0>();
      fence_registers(s_acc);
      fence_k();
      const std::false_type no;
      const std::true_type yes;
      const auto wait_tile = [&] {
        barrier_wait(d_out_ring.full(place.stage), place.phase);
        if constexpr (Traits::kOrdered) m = uniform(load_shared_int(tiles.m_block(place.stage)));
      };
      const auto next_step = [&](auto first, auto last) {
        wait_tile();
        if constexpr (Traits::kHasWholeStep && !(first && last) && (Traits::kMayBeFar || !(first || last))) {
          if (!has_mask(params) && !is_boundary() && !(Traits::kScored && is_far_tile(tiles.stats_far(place.stage)))) {
            return step(first, last, yes);
          }
        }
        step(first, last, no);
      };
      const auto rest = [&] {
        for (; left > 1; --left) next_step(no, no);
        next_step(no, yes);
      };
      if constexpr (!kDefers) {
        rest();
      } else if (total == 1) {
        next_step(yes, yes);
      } else {
        next_step(yes, no);
        --left;
        rest();
      }
      if constexpr (Traits::kOrdered) {
        barrier_wait(tiles.dq_empty(), place.stage ^ 1);
        done = place.stage + place.phase * kShape.stages;
      }
      phase ^= 1;
    }
    // NOTE: found anew, because keeping it through the loop costs registers.
    const KeyWork end = find_work(linear);
    if constexpr (Traits::kOrdered) {
      __syncwarp();
      if (lane == 0) barrier_arrive(tiles.works().empty(work_place.stage()));
      ++work_place.count;
    }
    const int first_row = end.first_key + warp_row;
    store_gradient<Traits>(dv_acc, (Traits::kScaled ? 1.f / 1024.f : 1.f) * dropout_of(params).scale, staging,
                           params.dv, end.box(params.dv.steps, end.head_k, first_row));
    store_gradient<Traits>(dk_acc, params.scale * ds_unscale, staging, params.dk,
                           end.box(params.dk.steps, end.head_k, first_row));
    if constexpr (Traits::kWalk == Walk::kOne) break;
  }
  if (elect_one()) bulk_wait_read();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kShape.threads, 1)
    backward_kernel(const __grid_constant__ typename Traits::Params params) {
  constexpr BackwardShape kShape = Traits::kShape;
  const typename Traits::Tiles tiles{tile_base()};
  if (threadIdx.x == 0) {
    constexpr int kWarps = Traits::kWarps;
    init_ring(tiles.k(), 1, kWarps);
    init_ring(tiles.v(), 1, kWarps);
    init_ring(tiles.q(), kShape.stages, kWarps);
    init_ring(tiles.d_out(), kShape.stages, kWarps);
    init_ring(tiles.ds(), kShape.ds_stages, kWarps, kWarps);
    if constexpr (Traits::kScored) {
      init_ring(tiles.scores(), kScoreStages, kWarps, slot_arrivals(params.scores));
      init_ring(tiles.drops(), kShape.stages, kWarps, 32 * drop_warps(params.scores));
    }
    if constexpr (Traits::kOrdered) {
      for (int parity = 0; parity < 2; ++parity) barrier_init(tiles.dq_full(parity), kWarps);
      barrier_init(tiles.dq_empty(), 1);
      init_ring(tiles.works(), 2, kWarps + 3);  // the keys' producer, two adders
    }
    fence_barrier_init();
    for (const TensorMap* map : {&params.q, &params.k, &params.v, &params.d_out, &params.dk, &params.dv}) {
      prefetch_map(&map->map);
    }
  }
  follow_previous_kernel<Traits>();  // prepare's numbers
  const int warpgroup = enter_warpgroup<kShape.producer_registers(), kShape.consumer_registers()>();
  if (warpgroup == 0) {
    if constexpr (Traits::kOrdered) {
      if (threadIdx.x < 32) {
        if (elect_one()) load_queries_in_order<Traits>(params, tiles);
      } else if (threadIdx.x < 64) {
        load_keys_in_order<Traits>(params, tiles);
      } else if (threadIdx.x < 96) {
        if (elect_one()) add_in_order<Traits, 0>(params, tiles);
      } else {
        if (elect_one()) add_in_order<Traits, 1>(params, tiles);
      }
    } else {
      if (threadIdx.x < 32 && elect_one()) produce_backward<Traits>(params, tiles);
      if constexpr (Traits::kScored) {
        if (threadIdx.x >= 32) load_backward_scores<Traits>(params, tiles);
      }
    }
  } else {
    const int consumer = warpgroup - 1;
    consume_backward<Traits>(params, tiles, consumer);
  }
}

}  // namespace flash_ext::sm90
