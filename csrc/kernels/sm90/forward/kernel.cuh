// Forward on Hopper: one producer warp brings tiles of Q, K and V by TMA, two to four consumer warpgroups of 64 queries
// each multiply them by wgmma.
//
//   S = Q K^T     P = e^(S - m)     l += rowsum(P)     O += P V          out = O / l     lse = m + log l
//
// FlashAttention-3 (arXiv:2407.08608), algorithms 1 and 2: K and V go through rings of their own, P stays in registers,
// softmax of the next tile of keys runs under O += P V of this one, and so it does from one tile of queries to the
// next: the first S of the next is issued together with the last P V of this one. Keys are walked from the last tile to
// the first, so that the diagonal and the tail, which are masked, come first. The producer finds a block's next tile
// and publishes it to the consumers (work.cuh). With a bias or mask three more warps load those (scores.cuh). What is
// of e4m3 stands in fp8.cuh. Called by run.cuh. Invariant: a ring's full barrier is completed by TMA (that of the works
// by the producer), its empty barrier by one arrival of each warp that reads it, after the wait that proves its wgmma
// finished. Where Q has two stages out goes through the rows of Q that its warp alone owns, and Q's stage is handed
// back when that store has read it; where it has one, out goes from registers and Q's stage after the tile's last S.
#pragma once

#include "kernels/sm90/forward/packed.cuh"
#include "kernels/sm90/forward/parts.cuh"

namespace flash_ext::sm90 {

// ---- producer -------------------------------------------------------------------------------------------------------

// Order: K of the last tile, Q, then K of the next tile before V of this one, as the consumers ask for them, and on in
// the same way from one tile of queries to the next. listed: of packed sequences, tiles of a head.
template <class Traits>
__device__ __forceinline__ void produce(const typename Traits::Params& params, const typename Traits::Rings& rings,
                                        int listed) {
  using Work = typename Traits::Work;
  using Found = typename Work::Found;
  constexpr int kBlockN = Traits::kBlockN, kConsumers = Traits::kConsumers;
  typename Traits::QState q;
  typename Traits::KvState k, v;
  typename Traits::WorkState w;
  const auto load_k = [&](const Work& work, int n) {
    barrier_wait(rings.k.empty(k.stage), k.phase ^ 1);
    const auto [map, at] = work.template k_box<kBlockN>(params, n * kBlockN);
    load_tile<kBlockN, Traits::kPanels>(rings.k, k.stage, map, at);
    k.advance();
  };
  const auto load_v = [&](const Work& work, int n) {
    barrier_wait(rings.v.empty(v.stage), v.phase ^ 1);
    const auto [map, at] = work.template v_box<kBlockN>(params, n * kBlockN);
    barrier_expect(rings.v.full(v.stage), Traits::kValuePanels * panel_size(Traits::kValueBoxRows));
    load_panels<Traits::kValueRows, Traits::kValuePanels>(rings.v.tile(v.stage), rings.v.full(v.stage), map, at);
    v.advance();
  };
  const auto q_box = [&](const Work& work, int consumer) {
    return work.q_box(params, work.template place<Traits>(params, work.first_query + consumer * 64));
  };
  const auto load_q = [&](const Work& work) {
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int i = q.stage * kConsumers + consumer;
      barrier_wait(rings.q.empty(i), q.phase ^ 1);
      const auto [map, at] = q_box(work, consumer);
      load_tile<64, Traits::kPanels>(rings.q, i, map, at);
    }
    q.advance();
  };
  const auto prefetch_q = [&](const Work& work) {
#pragma unroll 1
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      auto [map, at] = q_box(work, consumer);
#pragma unroll
      for (int panel = 0; panel < Traits::kPanels; ++panel) {
        tma_prefetch(&map.map, at);
        at.col += kPanelCols;
      }
    }
  };
  // A tile, to the consumers.
  const auto publish = [&](const Found& found) {
    const Work work = Work::template at<Traits>(params, found);
    barrier_wait(rings.works.empty(w.stage), w.phase ^ 1);
    store_shared(rings.works.tile(w.stage), work);
    barrier_arrive(rings.works.full(w.stage));
    w.advance();
    return work;
  };
  if constexpr (Traits::kScored) {
    if (params.scores.ranges.data != nullptr) grid_dependency_wait();
  }
  uint32_t linear = blockIdx.x, asked = 0;
  Found found = Work::template find<Traits>(params, linear, listed);
  Work work = publish(found), next = {};
  load_k(work, work.last_n - 1);
  load_q(work);
  if (params.counter != nullptr) grid_dependency_wait();  // it is zero from here on
  while (work.any()) {
    // Late, so that a counter finds who is free, and early enough for Q to be in L2 when its stage is empty. In steps,
    // with a tile of keys between them, because the number and what a list says of it are answers from L2: who waits
    // for one brings no keys meanwhile.
    const int first_n = work.first_n, top_n = work.last_n - 1;
    const int publish_n = min(first_n + 2, top_n), find_n = min(first_n + 3, top_n), ask_n = min(first_n + 4, top_n);
    for (int n = top_n; n >= first_n; --n) {
      if (n == ask_n) asked = ask_tile(params, linear);
      if (n == find_n) {
        linear = gridDim.x + from_here(asked);
        found = Work::template find<Traits>(params, linear, listed);
      }
      if (n == publish_n) {
        next = publish(found);
        if (next.any()) prefetch_q(next);
      }
      if (n > work.first_n) {
        load_k(work, n - 1);
      } else if (next.any()) {
        load_k(next, next.last_n - 1);
      }
      load_v(work, n);
    }
    if (next.any()) load_q(next);
    work = next;
  }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

template <class Traits>
__device__ __forceinline__ void consume(const typename Traits::Params& params, const typename Traits::Rings& rings,
                                        int consumer) {
  using T = typename Traits::T;
  using Work = typename Traits::Work;
  constexpr ForwardShape kShape = Traits::kShape;
  constexpr int kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim, kConsumers = Traits::kConsumers;
  // The next work is published before the tiles that a warpgroup leaves out below its own are there.
  static_assert(((kConsumers - 1) * 64 + kBlockN - 1) / kBlockN <= kShape.stages + 2);
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % 4 * 16;
  typename Traits::QState q;
  typename Traits::KvState k, v;
  typename Traits::WorkState w;
  [[maybe_unused]] ScoreState c(params);
  float o_acc[Traits::kORegisters], s_acc[kBlockN / 2];
  uint32_t p_frag[Traits::kPRegisters];
  [[maybe_unused]] const typename Traits::Sum sum = make_sum<Traits>(params, rings);
  typename Traits::Softmax softmax = make_softmax<Traits>(params, rings);
  Work work;
  [[maybe_unused]] float slope = 0.f;   // of the work's head
  int top_n = 0, bottom_n = 0;          // of the tiles [bottom_n, top_n) this warpgroup sees keys
  [[maybe_unused]] int tiles_done = 0;  // of keys, that O of the work before has met, but for the last
  [[maybe_unused]] const bool drops = dropout_of(params).rng_state != nullptr;
  // NOTE: read for each tile of keys at head dim 256, where keeping them costs registers that there are not.
  [[maybe_unused]] const std::conditional_t<(kHeadDim > 192), DropoutParams, DropoutDraws> draws(dropout_of(params));

  const auto q_index = [&] { return q.stage * kConsumers + consumer; };
  const auto release = [&](auto& ring, auto& place) {
    if (lane == 0) barrier_arrive(ring.empty(place.stage));
    place.advance();
  };
  const auto fence = [&] {
    fence_registers(s_acc, p_frag, o_acc);
    wgmma_fence();
  };
  // NOTE: the loops below hang on numbers that ptxas sees to be the same in all lanes, loads from uniform addresses
  // included. When it lost sight of that (by a second exit of the outer loop) the rings' places lay in ordinary
  // registers and each wgmma waited for moves of its descriptor to uniform ones: 10 to 15 % less at 16k keys.
  const auto next_work = [&] {
    barrier_wait(rings.works.full(w.stage), w.phase);
    load_shared(work, rings.works.tile(w.stage));
    w.advance();
    if constexpr (Traits::kFp8) softmax.to_log2 = fabsf(work.to_log2);
    if constexpr (Traits::kScored) {
      if (work.any()) slope = params.scores.alibi.of(work.head, work.b0, work.b1);
    }
  };
  // The band, on S of the tile n.
  const auto mask = [&](int n) {
    const int first_row = work.first_query + consumer * 64;
    const int row_mask = kShape.shares_keys ? params.shared.row_mask : -1;
    const int queries = kShape.shares_keys ? params.shared.queries : 64;
    const TileBand& band = work.band_of(params);
    if (band.is_boundary(first_row & row_mask, queries, n * kBlockN, kBlockN)) {
      mask_band(s_acc, band, first_row + warp_row + lane / 4, n * kBlockN, row_mask);
    }
  };
  // S of the tile n is there, and is not made again.
  const auto hand_back_k = [&](int n) {
    release(rings.k, k);
    if (!Traits::kStaged && n == bottom_n && lane == 0) barrier_arrive(rings.q.empty(q_index()));
  };
  const auto multiply_s_again = [&](int n) {
    multiply_again<Traits>(s_acc, rings.q.tile(q_index()), rings.k.tile(k.stage), warp_row);
    if constexpr (Traits::kFp8) negate_scores(s_acc, work.to_log2);
    mask(n);
  };
  // S of the tile n is there.
  const auto after_s = [&](int n) {
    if constexpr (Traits::kFp8) negate_scores(s_acc, work.to_log2);
    if constexpr (Traits::kScored) {
      const int row = consumer * 64 + warp_row, first = work.first_query + row + lane / 4 - lane % 4 * 2;
      take_scores<T, kBlockN, (kHeadDim <= 128), typename Traits::Function>(
          s_acc, params.scores, rings.scores, c, row, slope, first + work.diagonal_of(params) - n * kBlockN);
    }
    mask(n);
  };
  // P of the tile n is packed.
  const auto drop_p = [&](int n) {
    if constexpr (Traits::kScored) {
      if (!drops) return;
      const DropoutPlace& place = dropout_of(params).place;
      DropoutDraws(draws).apply<kBlockN>(
          p_frag, place.of_batch(work.batch(params))
                      .at(work.flat_head(params), work.first_query + consumer * 64 + warp_row, n * kBlockN));
    }
  };
  // index: of its Q, whose stage out goes through. Its Work is the one before next_work()'s, in the other of two
  // places.
  const auto finish = [&](int index) {
    fence_registers(o_acc, p_frag);
    if constexpr (Traits::kFp8) sum.join(o_acc, tiles_done);
    release(rings.v, v);
    Work done;
    load_shared(done, rings.works.tile(w.stage));
    __syncwarp();
    if (lane == 0) barrier_arrive(rings.works.empty(w.stage));
    const int row = done.first_query + consumer * 64 + warp_row;
    store_rows<Traits>(o_acc, params, rings, index, done, warp_row, row, softmax, consumer);
  };
  // After the store of finish() has read Q's stage.
  const auto hand_back = [&](int index) {
    if (Traits::kStaged && lane == 0) {
      bulk_wait_read();
      barrier_arrive(rings.q.empty(index));
    }
    if constexpr (Traits::kStagedInSum) {
      if (lane == 0) bulk_wait_read();
      __syncwarp();
    }
  };
  // Tiles of keys that this warpgroup does not see are waited for and handed back, each with its turn, because the
  // others count. A warp hands a tile back when all its lanes have seen that it came.
  const auto skip = [&](int tiles) {
    for (int i = 0; i < tiles; ++i) {
      barrier_wait(rings.k.full(k.stage), k.phase);
      __syncwarp();
      release(rings.k, k);
      if constexpr (Traits::kScored) skip_scores(params.scores, rings.scores, c);
      take_turn<Traits>(consumer);
      pass_turn<Traits>(consumer);
      barrier_wait(rings.v.full(v.stage), v.phase);
      __syncwarp();
      release(rings.v, v);
    }
  };
  // The first S of a tile on its own.
  const auto begin = [&] {
    skip(work.last_n - top_n);
    barrier_wait(rings.k.full(k.stage), k.phase);
    fence_registers(s_acc);
    wgmma_fence();
    issue_s<Traits>(s_acc, rings.q.tile(q_index()), rings.k.tile(k.stage));
    wgmma_wait<0>();
    fence_registers(s_acc);
  };

  // S of this tile of keys and O += P V of the one before, together.
  const auto issue_s_and_o = [&] {
    barrier_wait(rings.k.full(k.stage), k.phase);
    take_turn<Traits>(consumer);
    fence();
    issue_s<Traits>(s_acc, rings.q.tile(q_index()), rings.k.tile(k.stage));
    barrier_wait(rings.v.full(v.stage), v.phase);
    wgmma_fence();  // NOTE: after a loop ptxas injects one if there is none (C7519)
    issue_o<Traits>(o_acc, p_frag, rings.v.tile(v.stage));
    pass_turn<Traits>(consumer);
  };
  // The last O += P V of a tile of queries and the first S of the next, together.
  const auto issue_o_and_next_s = [&] {
    barrier_wait(rings.v.full(v.stage), v.phase);
    take_turn<Traits>(consumer);
    fence();
    issue_o<Traits>(o_acc, p_frag, rings.v.tile(v.stage));
    q.advance();
    barrier_wait(rings.q.full(q_index()), q.phase);
    barrier_wait(rings.k.full(k.stage), k.phase);
    wgmma_fence();
    issue_s<Traits>(s_acc, rings.q.tile(q_index()), rings.k.tile(k.stage));
    pass_turn<Traits>(consumer);
  };
  // The last O += P V on its own.
  const auto issue_last_o = [&] {
    barrier_wait(rings.v.full(v.stage), v.phase);
    if (work.any()) take_turn<Traits>(consumer);
    fence();
    issue_o<Traits>(o_acc, p_frag, rings.v.tile(v.stage));
    if (work.any()) pass_turn<Traits>(consumer);
  };

  // What a tile of keys n goes through, from the last to the first. All consumer warpgroups do the same, each with its
  // 64 queries:
  //
  //   wait for K[n]         (kPingPong) and for this warpgroup's turn
  //   issue                 S = Q K[n]^T
  //   wait for V[n + 1]
  //   issue                 O += P V[n + 1]; (kPingPong) the next warpgroup's turn
  //   wait S                each warp arrives at the empty barrier of K[n]; scores and band
  //   under O               m' = max(m, S); l, P = e^(S - m')
  //   wait O                each warp arrives at the empty barrier of V[n + 1]; O' = O e^(m - m') where m grew
  //                         P packed, dropout
  //
  // or, with a speculative softmax (SpeculativeSoftmax):
  //
  //   under O               P = e^(S - m) and its sum
  //   wait O                where the sum is too large m grows and O is rescaled; where P is beyond float, S once more
  //                         each warp arrives at the empty barriers of K[n] and V[n + 1]
  //
  // Shared memory: Q of each warpgroup and stage, K and V of each stage, slots of bias and mask, works (forward_smem).
  // The first S of a tile of queries is issued with the last O of the one before.
  if (consumer == kConsumers - 1) pass_turn<Traits>(consumer);
  const auto find_tiles = [&] {
    top_n = work.template top_of<Traits>(params, consumer);
    bottom_n = uniform(work.template bottom_of<Traits>(params, consumer, top_n));
  };
  next_work();
  find_tiles();
  barrier_wait(rings.q.full(q_index()), q.phase);
  begin();
  int done_index = -1;
  while (true) {
    hand_back_k(top_n - 1);
    after_s(top_n - 1);
    make_first_p<Traits>(softmax, s_acc, p_frag);
    drop_p(top_n - 1);
#pragma unroll
    for (float& x : o_acc) x = 0.f;
    if (done_index >= 0) hand_back(done_index);
    for (int n = top_n - 2; n >= bottom_n; --n) {
      issue_s_and_o();
      wgmma_wait<1>();
      fence_registers(s_acc);
      if (!Traits::kSpeculative) hand_back_k(n);
      after_s(n);
      float factor[2];
      const bool rescale = begin_p<Traits>(softmax, s_acc, factor);
      fence_registers(s_acc);
      // NOTE: a loop that runs once, because ptxas moves a wait to before the exponentials, which have to run under O's
      // product; it does not move it out of a loop. Not in the branches of `rescale`: warps of a warpgroup differ in
      // that, and all have to wait by the same instruction (.aligned; compute-sanitizer's synccheck).
      do {
        wgmma_wait<0>();
      } while (params.tiles == 0);
      fence_registers(o_acc);
      if (rescale) {
        mend_p<Traits>(softmax, s_acc, factor, [&] { multiply_s_again(n); });
        scale_rows<2 * Traits::kORegisters>(o_acc, factor);
        if constexpr (Traits::kFp8) sum.scale(factor, top_n - 2 - n);
      }
      if (Traits::kSpeculative) hand_back_k(n);
      fence_registers(p_frag);
      release(rings.v, v);
      end_p<Traits>(softmax, s_acc, p_frag);
      if constexpr (Traits::kFp8) sum.take(o_acc, top_n - 1 - n);
      drop_p(n);
    }
    // The last O of this tile and the first S of the next; out leaves under that S.
    done_index = q_index();
    tiles_done = top_n - 1 - bottom_n;
    const int below = bottom_n - work.first_n;
    next_work();
    find_tiles();
    if (work.any() && top_n == work.last_n && below == 0) {
      issue_o_and_next_s();
      wgmma_wait<1>();
      finish(done_index);
      wgmma_wait<0>();
      fence_registers(s_acc);
    } else {
      issue_last_o();
      wgmma_wait<0>();
      finish(done_index);
      skip(below);
      if (!work.any()) break;
      q.advance();
      barrier_wait(rings.q.full(q_index()), q.phase);
      begin();
    }
  }
  hand_back(done_index);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kShape.threads(), 1)
    forward_kernel(const __grid_constant__ typename Traits::Params params) {
  constexpr ForwardShape kShape = Traits::kShape;
  if constexpr (kShape.shares_keys) {
    grid_dependency_launch();  // combine may take its place; it waits for the end of this grid
    if (skip_part<Traits>(params)) return;
  }
  const typename Traits::Rings rings = Traits::rings(tile_base());
  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&params.q, &params.k, &params.v, &params.out}) prefetch_map(&map->map);
    if constexpr (Traits::kPacked) {
      const auto& inner = params.inner;
      for (const TensorMap* map : {&inner.q, &inner.k, &inner.v, &inner.out}) prefetch_map(&map->map);
    }
    constexpr int kReaders = 4 * Traits::kConsumers;  // warps
    init_ring(rings.works, kWorks, kReaders + (Traits::kScored ? kScoreLoaders / 32 : 0));
    init_ring(rings.q, Traits::kQTiles, 4);
    init_ring(rings.k, kShape.stages, kReaders);
    init_ring(rings.v, kShape.stages, kReaders);
    if constexpr (Traits::kScored) init_ring(rings.scores, kScoreStages, kReaders, 2 * kScoreLoaders);
    fence_barrier_init();
  }
  if constexpr (Traits::kFp8) write_ones<Traits>(rings);
  int listed = 0;
  if constexpr (Traits::kPacked) {
    const PackedTile& entry = PackedWork::likely_first(params, params.packed.tiles);
    grid_dependency_wait();  // for the list
    listed = entry.listed;
    if (blockIdx.x >= PackedWork::tiles_of(params, listed)) return;
  }
  __syncthreads();
  const int warpgroup =
      enter_warpgroup<kShape.producer_registers(Traits::kPacked), kShape.consumer_registers(Traits::kPacked)>();
  if (warpgroup == 0) {
    if (threadIdx.x < 32 && elect_one()) produce<Traits>(params, rings, listed);
    if constexpr (Traits::kScored) {
      if (threadIdx.x >= 32) load_scores<Traits>(params, rings);
    }
  } else {
    const int consumer = warpgroup - 1;
    consume<Traits>(params, rings, consumer);
  }
}

}  // namespace flash_ext::sm90
