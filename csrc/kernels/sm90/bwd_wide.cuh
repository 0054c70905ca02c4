// The two kernels of backward for head dims above 128, see bwd_wide_parts.cuh. Called by run_bwd_wide.cuh.
#pragma once

#include "kernels/sm90/bwd_wide_parts.cuh"

namespace flash_ext::sm90 {

// ---- keys -----------------------------------------------------------------------------------------------------------

template <class Traits>
__device__ __forceinline__ void produce_for_keys(const WideParams& params, const typename Traits::Keys& tiles) {
  const WideWork work = WideWork::of_keys<Traits::kBlock, Traits::kBlock>(params);
  typename Traits::Place place;
  barrier_expect(tiles.k_full(), Traits::kTileBytes);
  load_wide<Traits>(tiles.k(), tiles.k_full(), params.k, work.box(params.k.steps, work.head, work.first_row));
  bool first = true;
  for (int member = 0; member < params.group_size; ++member) {
    const int head = work.head * params.group_size + member;
    const float* stats = params.stats + (int64_t{work.b} * params.heads_q + head) * params.padded * kQueryStats;
    for (int m = work.first; m < work.last; ++m) {
      const int row = m * Traits::kBlock;
      const auto load = [&](const Ring<Traits::kTileBytes>& ring, const TensorMap& map, int more) {
        const uint32_t full = ring.full(place.stage);
        barrier_wait(ring.empty(place.stage), place.phase ^ 1);
        barrier_expect(full, Traits::kTileBytes + more);
        load_wide<Traits>(ring.tile(place.stage), full, map, work.box(map.steps, head, row));
      };
      load(tiles.q(), params.q, Traits::kStatsBytes);
      bulk_load(tiles.lse(place.stage), stats + row * kQueryStats, tiles.q().full(place.stage), Traits::kStatsBytes);
      if (first) {
        barrier_expect(tiles.v_full(), Traits::kTileBytes);
        load_wide<Traits>(tiles.v(), tiles.v_full(), params.v, work.box(params.v.steps, work.head, work.first_row));
        first = false;
      }
      load(tiles.d_out(), params.d_out, 0);
      place.advance();
    }
  }
}

// One gradient of 64 keys: kValues: dV, and P^T for the other warpgroup; else dK.
template <class Traits, bool kValues>
__device__ __forceinline__ void consume_keys(const WideParams& params, const typename Traits::Keys& tiles) {
  using T = typename Traits::T;
  constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const WideWork work = WideWork::of_keys<kBlock, kBlock>(params);
  const int row = work.first_row + warp_row + lane / 4;
  const Ring<Traits::kTileBytes> q_ring = tiles.q(), d_out_ring = tiles.d_out();
  const Ring<Traits::kPBytes> p_ring = tiles.p();
  // This thread's 64 bytes of P^T, 16 at a time with the other lanes'.
  const auto p_at = [&](int stage) { return p_ring.tile(stage) + threadIdx.x % 128 * 16; };
  const auto& score_ring = kValues ? q_ring : d_out_ring;  // B of S^T or dP^T
  const auto& sum_ring = kValues ? d_out_ring : q_ring;    // B of dV or dK
  const uint64_t a_desc = k_major(kValues ? tiles.k() : tiles.v());
  float acc[kHeadDim / 2], s_acc[kBlock / 2];
#pragma unroll
  for (float& x : acc) x = 0.f;
  typename Traits::Place place;
  int m = work.first;
  const float ds_scale =
      Traits::kScaled && !kValues ? params.ds_scale(work.b, work.head * params.group_size, params.group_size) : 1.f;

  [[maybe_unused]] bool far = false;  // of a tile of queries
  if constexpr (kValues && !Traits::kCaps) {
    const int head = work.head * params.group_size;
    far = any_far<kBlock>(params.stats + (int64_t{work.b} * params.heads_q + head) * params.padded * kQueryStats,
                          params.group_size, params.padded / kBlock, work.first, work.last);
  }

  const auto issue_score = [&](const typename Traits::Place& at) {
    barrier_wait(score_ring.full(at.stage), at.phase);
    wgmma_fence();
    issue_scores<T, kBlock, kBlock, kHeadDim>(s_acc, a_desc, score_ring.tile(at.stage));
  };
  // kLast: no tile follows, whose scores would be computed.
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    uint32_t frag[kBlock / 4];
    const auto clear = [&](uint32_t(&packed)[kBlock / 4]) {
      if (params.is_boundary(m * kBlock, kBlock, work.first_row, kBlock)) {
        clear_hidden(packed, KeptColumns::of_keys(params.band, params.len_q, row, m * kBlock));
      }
    };
    if constexpr (kValues) {
      if constexpr (Traits::kCaps) cap_scores<T, true>(s_acc, params.softcap);
      if (far && is_far_tile(tiles.far(place.stage))) {
        subtract_far(s_acc, tiles.far(place.stage), params.scale, params.inverse_scale);
      }
      uint32_t for_ds[kBlock / 4];  // P of dS: with a softcap P (1 - tanh^2)
      with_queries(s_acc, tiles.lse(place.stage), [&](float s_x, float s_y, float2 minus_lse, int i) {
        const float x = exp2_fast(fmaf(s_x, params.to_log2, minus_lse.x));
        const float y = exp2_fast(fmaf(s_y, params.to_log2, minus_lse.y));
        for_ds[i / 2] = frag[i / 2] = pack(x, y, T());
        if constexpr (Traits::kCaps) {
          for_ds[i / 2] = pack(x * slope_of(s_x, params.softcap), y * slope_of(s_y, params.softcap), T());
        }
      });
      barrier_wait(p_ring.empty(place.stage), place.phase ^ 1);
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        const uint32_t words[4] = {for_ds[4 * i], for_ds[4 * i + 1], for_ds[4 * i + 2], for_ds[4 * i + 3]};
        store_shared(p_at(place.stage) + i * 2048, words);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(p_ring.full(place.stage));
      clear(frag);
    } else {
      barrier_wait(q_ring.full(place.stage), place.phase);  // and with Q its delta
      barrier_wait(p_ring.full(place.stage), place.phase);
      uint32_t p[kBlock / 4];
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        const uint4 words = load_shared4(p_at(place.stage) + i * 2048);
        p[4 * i] = words.x;
        p[4 * i + 1] = words.y;
        p[4 * i + 2] = words.z;
        p[4 * i + 3] = words.w;
      }
      with_queries(s_acc, tiles.delta(place.stage), [&](float& x, float& y, float2 delta, int i) {
        float p_x, p_y;
        unpack(p[i / 2], p_x, p_y, T());
        x -= delta.x;
        y -= delta.y;
        if constexpr (Traits::kScaled) {
          x *= ds_scale * (1.f / 1024.f);
          y *= ds_scale * (1.f / 1024.f);
        }
        frag[i / 2] = pack(p_x * x, p_y * y, T());
      });
      clear(frag);
      __syncwarp();
      if (lane == 0) barrier_arrive(p_ring.empty(place.stage));
    }
    if constexpr (kValues) barrier_wait(d_out_ring.full(place.stage), place.phase);
    fence_registers(frag);
    fence_registers(acc);
    wgmma_fence();
    issue_keys<T, kBlock, kHeadDim>(acc, frag, sum_ring.tile(place.stage));
    typename Traits::Place next = place;
    next.advance();
    if constexpr (!kLast) issue_score(next);
    wgmma_wait<kLast ? 0 : 1>();
    fence_registers(acc);
    fence_registers(frag);
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(q_ring.empty(place.stage));
      barrier_arrive(d_out_ring.empty(place.stage));
    }
    place = next;
    if (++m == work.last) m = work.first;
    if constexpr (!kLast) {
      wgmma_wait<0>();
      fence_registers(s_acc);
    }
  };

  const int total = (work.last - work.first) * params.group_size;
  barrier_wait(tiles.k_full(), 0);
  if (total > 0) {
    if constexpr (!kValues) barrier_wait(tiles.v_full(), 0);
    issue_score(place);
    wgmma_wait<0>();
    fence_registers(s_acc);
    for (int left = total; left > 1; --left) step(std::false_type());
    step(std::true_type());
  }
  // K is read by the first warpgroup alone, V by the second: each tile becomes its owner's staging.
  named_barrier_sync(kValues ? 1 : 2, 128);
  const TensorMap& map = kValues ? params.dv : params.dk;
  const float factor = kValues ? (Traits::kScaled ? 1.f / 1024.f : 1.f) : params.scale / ds_scale;
  store_wide<Traits>(acc, factor, kValues ? tiles.k() : tiles.v(), warp_row, map,
                     work.box(map.steps, work.head, work.first_row + warp_row));
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) keys_kernel(const __grid_constant__ WideParams params) {
  char* const smem = dynamic_shared();
  const typename Traits::Keys tiles{(shared_address(smem) + kTileAlign - 1) & ~(kTileAlign - 1)};
  if (threadIdx.x == 0) {
    barrier_init(tiles.k_full(), 1);
    barrier_init(tiles.v_full(), 1);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      for (const auto& ring : {tiles.q(), tiles.d_out()}) {
        barrier_init(ring.full(stage), 1);
        barrier_init(ring.empty(stage), 8);
      }
      barrier_init(tiles.p().full(stage), 4);
      barrier_init(tiles.p().empty(stage), 4);
    }
    fence_barrier_init();
  }
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();  // prepare's numbers
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    fewer_registers<WideShape::producer_registers>();
    if (threadIdx.x < 32 && elect_one()) produce_for_keys<Traits>(params, tiles);
  } else if (warpgroup == 1) {
    more_registers<WideShape::consumer_registers>();
    consume_keys<Traits, true>(params, tiles);
  } else {
    more_registers<WideShape::consumer_registers>();
    consume_keys<Traits, false>(params, tiles);
  }
}

// ---- queries --------------------------------------------------------------------------------------------------------

template <class Traits>
__device__ __forceinline__ void produce_for_queries(const WideParams& params, const typename Traits::Queries& tiles) {
  constexpr int kBlock = Traits::kBlock;
  const WideWork work = WideWork::of_queries<2 * kBlock, kBlock>(params);
  const int head_k = work.head / params.group_size;
  typename Traits::Place k;
  RingPlace<1> v;
  const auto load_rows = [&](uint32_t first, uint32_t barrier, const TensorMap& map) {
    barrier_expect(barrier, 2 * Traits::kTileBytes);
    for (int consumer = 0; consumer < 2; ++consumer) {
      load_wide<Traits>(first + consumer * Traits::kTileBytes, barrier, map,
                        work.box(map.steps, work.head, work.first_row + consumer * kBlock));
    }
  };
  const auto load = [&](const Ring<Traits::kTileBytes>& ring, auto& place, const TensorMap& map, int n) {
    barrier_wait(ring.empty(place.stage), place.phase ^ 1);
    barrier_expect(ring.full(place.stage), Traits::kTileBytes);
    load_wide<Traits>(ring.tile(place.stage), ring.full(place.stage), map, work.box(map.steps, head_k, n * kBlock));
    place.advance();
  };
  load_rows(tiles.q(0), tiles.q_full(), params.q);
  if (work.last > work.first) load(tiles.k(), k, params.k, work.first);
  load_rows(tiles.d_out(0), tiles.d_out_full(), params.d_out);
  for (int n = work.first; n < work.last; ++n) {
    load(tiles.v(), v, params.v, n);
    if (n + 1 < work.last) load(tiles.k(), k, params.k, n + 1);
  }
}

template <class Traits>
__device__ __forceinline__ void consume_queries(const WideParams& params, const typename Traits::Queries& tiles,
                                                int consumer) {
  using T = typename Traits::T;
  constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const WideWork work = WideWork::of_queries<2 * kBlock, kBlock>(params);
  const int first_query = work.first_row + consumer * kBlock, row = first_query + warp_row + lane / 4;
  const Ring<Traits::kTileBytes> k_ring = tiles.k(), v_ring = tiles.v();
  const uint64_t q_desc = k_major(tiles.q(consumer)), d_out_desc = k_major(tiles.d_out(consumer));
  float dq_acc[kHeadDim / 2], s_acc[kBlock / 2], dp_acc[kBlock / 2];
#pragma unroll
  for (float& x : dq_acc) x = 0.f;
  // Queries are padded to whole tiles of 128 there.
  const float* const stats =
      params.stats + ((int64_t{work.b} * params.heads_q + work.head) * params.padded + first_query) * kQueryStats +
      row % kBlock;
  const auto stat = [&](QueryStat which, int half) { return stats[which * kBlock + half * 8]; };
  const float minus_lse[2] = {stat(kLseStat, 0), stat(kLseStat, 1)};
  const float delta[2] = {stat(kDeltaStat, 0), stat(kDeltaStat, 1)};
  [[maybe_unused]] const bool is_far = stat(kFarStat, 0) != kNotFar;  // of all rows of its tile
  // With 2^10 P, as -lse log2(e) has it.
  const float ds_scale = Traits::kScaled ? params.ds_scale(work.b, work.head, 1) : 1.f;
  typename Traits::Place k;
  RingPlace<1> v;

  const auto issue = [&](const typename Traits::Place& k_place, const RingPlace<1>& v_place) {
    barrier_wait(k_ring.full(k_place.stage), k_place.phase);
    wgmma_fence();
    issue_scores<T, kBlock, kBlock, kHeadDim>(s_acc, q_desc, k_ring.tile(k_place.stage));
    barrier_wait(v_ring.full(v_place.stage), v_place.phase);
    wgmma_fence();
    issue_scores<T, kBlock, kBlock, kHeadDim>(dp_acc, d_out_desc, v_ring.tile(v_place.stage));
  };
  const auto scores_are_there = [&] {
    wgmma_wait<0>();
    fence_registers(s_acc);
    fence_registers(dp_acc);
    fence_registers(dq_acc);
    if (lane == 0) barrier_arrive(v_ring.empty(v.stage));
    v.advance();
  };
  int n = work.first;
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    uint32_t ds_frag[kBlock / 4];
    if constexpr (Traits::kCaps) {
      cap_scores<T, false>(s_acc, params.softcap);
    } else if (is_far) {
      const float far[2] = {stat(kFarStat, 0), stat(kFarStat, 1)};
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) {
        s_acc[i] = fminf(fmaf(s_acc[i], params.scale, far[i / 2 % 2]), 0.f) * params.inverse_scale;
      }
    }
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 2) {
      const int half = i / 2 % 2;
      float ds[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float p = exp2_fast(fmaf(s_acc[i + j], params.to_log2, minus_lse[half]));
        if constexpr (Traits::kCaps) p *= slope_of(s_acc[i + j], params.softcap);
        const float dp = dp_acc[i + j] - delta[half];
        ds[j] = p * (Traits::kScaled ? dp * (ds_scale * (1.f / 1024.f)) : dp);
      }
      ds_frag[i / 2] = pack(ds[0], ds[1], T());
    }
    if (params.band.is_boundary(first_query, kBlock, n * kBlock, kBlock)) {
      clear_hidden(ds_frag, KeptColumns::of_queries(params.band, row, n * kBlock));
    }
    fence_registers(ds_frag);
    fence_registers(dq_acc);
    wgmma_fence();
    issue_keys<T, kBlock, kHeadDim>(dq_acc, ds_frag, k_ring.tile(k.stage));
    typename Traits::Place next = k;
    next.advance();
    if constexpr (kLast) {
      wgmma_wait<0>();
      fence_registers(dq_acc);
      fence_registers(ds_frag);
      if (lane == 0) barrier_arrive(k_ring.empty(k.stage));
    } else {
      issue(next, v);
      wgmma_wait<2>();
      fence_registers(dq_acc);
      fence_registers(ds_frag);
      if (lane == 0) barrier_arrive(k_ring.empty(k.stage));
      scores_are_there();
    }
    k = next;
    ++n;
  };
  barrier_wait(tiles.q_full(), 0);
  barrier_wait(tiles.d_out_full(), 0);
  if (work.last > work.first) {
    issue(k, v);
    scores_are_there();
    for (int left = work.last - work.first; left > 1; --left) step(std::false_type());
    step(std::true_type());
  }
  named_barrier_sync(1 + consumer, 128);  // all four warps have finished with Q
  store_wide<Traits>(dq_acc, params.scale / ds_scale, tiles.q(consumer), warp_row, params.dq,
                     work.box(params.dq.steps, work.head, first_query + warp_row));
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) queries_kernel(const __grid_constant__ WideParams params) {
  char* const smem = dynamic_shared();
  const typename Traits::Queries tiles{(shared_address(smem) + kTileAlign - 1) & ~(kTileAlign - 1)};
  if (threadIdx.x == 0) {
    barrier_init(tiles.q_full(), 1);
    barrier_init(tiles.d_out_full(), 1);
    const auto init = [](const auto& ring, int stages) {
      for (int stage = 0; stage < stages; ++stage) {
        barrier_init(ring.full(stage), 1);
        barrier_init(ring.empty(stage), 8);
      }
    };
    init(tiles.k(), Traits::kStages);
    init(tiles.v(), 1);
    fence_barrier_init();
  }
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();  // prepare's numbers
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    fewer_registers<WideShape::producer_registers>();
    if (threadIdx.x < 32 && elect_one()) produce_for_queries<Traits>(params, tiles);
  } else {
    more_registers<WideShape::consumer_registers>();
    consume_queries<Traits>(params, tiles, warpgroup - 1);
  }
}

}  // namespace flash_ext::sm90
