// The first pass above head dim 128: a warpgroup has dV of a tile of keys, the other dK, see parts.cuh. Called by
// keys.cuh.
#pragma once

#include "kernels/sm90/backward_two_pass/key_rows.cuh"

namespace flash_ext::sm90 {

// A thread's kQueries bytes of P^T, 16 at a time with the other lanes', and its word of what is dropped.
template <class Traits>
__device__ __forceinline__ uint32_t p_at(const Ring<Traits::kPBytes>& ring, int stage) {
  return ring.tile(stage) + threadIdx.x % 128 * 16;
}
template <class Traits>
__device__ __forceinline__ uint32_t drops_at(const Ring<Traits::kPBytes>& ring, int stage) {
  return ring.tile(stage) + Traits::kBlock * Traits::kQueries * 2 + threadIdx.x % 128 * 4;
}

// What dS is made of, to the other warpgroup. Each warp arrives at the stage's full barrier.
template <class Traits>
__device__ __forceinline__ void pass_on(const Ring<Traits::kPBytes>& ring, const typename Traits::Place& place,
                                        const uint32_t (&for_ds)[Traits::kQueries / 4],
                                        [[maybe_unused]] uint32_t dropped) {
  barrier_wait(ring.empty(place.stage), place.phase ^ 1);
  store_pairs(p_at<Traits>(ring, place.stage), for_ds);
  if constexpr (Traits::kScored) store_shared(drops_at<Traits>(ring, place.stage), dropped);
  __syncwarp();
  warp_arrive(ring.full(place.stage));
}

// The same from the first warpgroup; returns what is dropped. The caller hands the stage back.
template <class Traits>
__device__ __forceinline__ uint32_t receive(const Ring<Traits::kPBytes>& ring, const typename Traits::Place& place,
                                            uint32_t (&for_ds)[Traits::kQueries / 4]) {
  barrier_wait(ring.full(place.stage), place.phase);
  load_pairs(for_ds, p_at<Traits>(ring, place.stage));
  if constexpr (Traits::kScored) return load_shared(drops_at<Traits>(ring, place.stage));
  return 0;
}

// One gradient of 64 keys, with kHalves the half of its columns that blockIdx.x says: kValues: dV, and P^T for the
// other warpgroup; else dK. With scores P that a mask hides is -0 there, and what dropout drops stands behind P, a word
// a thread: see DropoutDraws::transposed_bits. What a tile of queries goes through:
//
//                        the warpgroup of dV                       the warpgroup of dK
//   there at the start   S^T                                       dP^T
//   wait                 nobody reads the stage of P any more      Q and with it delta, P is there
//                        P^T = e^(S^T - lse), to its stage:        dS^T = P^T o (dP^T - delta)
//                        each warp arrives at its full barrier     each warp arrives at its empty barrier
//   wait, issue          dO: dV += P^T dO                          dK += dS^T Q
//   wait, issue          the next Q: its S^T                       the next dO: its dP^T
//   wait dV or dK        each warp arrives at the empty barriers of Q and dO
//   wait                 the next S^T                              the next dP^T
//
// Shared memory: K, V, Q and dO and P of each stage, lse, renormalised shift and delta with Q, slots of bias and mask
// (keys_smem); dV and dK leave through V and K.
template <class Traits, bool kValues>
__device__ __forceinline__ void consume_one_gradient(const typename Traits::Params& params,
                                                     const typename Traits::Keys& tiles) {
  using T = typename Traits::T;
  using Rows = KeyRows<Traits>;
  constexpr int kBlock = Traits::kBlock, kQueries = Traits::kQueries;
  static_assert(Traits::kKeys == kBlock);
  constexpr int kCols = kValues ? Traits::kValueCols : Traits::kCols;
  const int first_panel = static_cast<int>(blockIdx.x % Traits::kKeysBlocks) * panels(kCols);
  Rows rows(params, tiles, threadIdx.x / 32 % 4);
  const TwoPassWork& work = rows.work;
  const Ring<Traits::kPBytes> p_ring = tiles.p();
  const auto& score_ring = chosen<kValues>(rows.q_ring, rows.d_out_ring);  // B of S^T or dP^T
  const auto& sum_ring = chosen<kValues>(rows.d_out_ring, rows.q_ring);    // B of dV or dK
  const uint64_t a_desc = k_major(kValues ? tiles.k() : tiles.v());
  float sum[kCols / 2] = {};  // dV or dK
  typename Rows::Scores s;    // S^T or dP^T
  constexpr int kSteps = kValues ? Traits::kShape.k_steps : Traits::kShape.v_steps;
  [[maybe_unused]] uint32_t fragments[std::max(4 * kSteps, 1)];  // of K or V
  if (Traits::kScored && kValues && rows.drops) rows.draws.store_keys(tiles.draw_keys(rows.warp));
  const float ds_scale = kValues ? 1.f : rows.ds_scale();
  [[maybe_unused]] bool renorm = false;  // of a tile of queries
  if constexpr (kValues && !Traits::kSoftcap && !Traits::kScored) {
    renorm = any_renorm<kBlock>(
        params.stats + (int64_t{work.b} * params.heads_q + rows.at.head) * params.padded * kQueryStats,
        params.group_size, params.padded / kBlock, work.first * kQueries / kBlock,
        (work.last * kQueries + kBlock - 1) / kBlock);
  }

  const auto issue_s = [&](const typename Traits::Place& at) {
    constexpr int kHeadDim = kValues ? Traits::kHeadDim : Traits::kValueDim;
    issue_next_scores<T, kBlock, kQueries, kHeadDim, kSteps>(s, a_desc, score_ring, at, fragments);
  };
  const auto wait_s = [&] {
    wgmma_wait<0>();
    fence_registers(s);
  };
  // kLast: no tile follows, whose scores would be computed.
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    typename Rows::Packed frag;  // P^T or dS^T
    const auto clear = [&] {
      if (rows.is_boundary(work.first_row)) clear_hidden(frag, rows.kept());
    };
    if constexpr (kValues) {
      typename Rows::Packed for_ds;
      uint32_t dropped = 0;
      rows.make_p(frag, for_ds, dropped, s, sum, renorm);
      pass_on<Traits>(p_ring, rows.place, for_ds, dropped);
      clear();
      barrier_wait(rows.d_out_ring.full(rows.place.stage), rows.place.phase);
    } else {
      barrier_wait(rows.q_ring.full(rows.place.stage), rows.place.phase);  // and with Q its delta
      const uint32_t dropped = receive<Traits>(p_ring, rows.place, frag);
      make_ds<Traits>(frag, s, tiles.delta(rows.place.stage), dropped, ds_scale);
      clear();
      if (Traits::kScored && rows.needs_renorm()) clear_emptied(frag, tiles.lse(rows.place.stage));
      __syncwarp();
      warp_arrive(p_ring.empty(rows.place.stage));
    }
    issue_gradient<T, kQueries, kCols>(sum, frag, sum_ring, rows.place.stage, first_panel);
    typename Traits::Place next = rows.place;
    next.advance();
    if (!kLast) issue_s(next);
    wgmma_wait<!kLast>();
    fence_registers(sum, frag);
    rows.advance(next);
    if (!kLast) wait_s();
  };

  const int total = rows.total();
  barrier_wait(tiles.k_full(), 0);
  if (total > 0) {
    if (!kValues) barrier_wait(tiles.v_full(), 0);
    if constexpr (kSteps > 0) {
      load_fragments<kBlock, kSteps>(fragments, kValues ? tiles.k() : tiles.v(), rows.warp_row);
      fence_registers(fragments);
    }
    issue_s(rows.place);
    wait_s();
    for_tiles(total, step);
  }
  // Both warpgroups have finished with K and V, through which gradients leave.
  // NOTE: one barrier for both would be waited for by two instructions, which synccheck takes for a fault.
  named_barrier_arrive(kOwnBarrier + kValues, 256);
  named_barrier_sync(kOwnBarrier + !kValues, 256);
  const TensorMap& map = kValues ? params.dv : params.dk;
  const float factor = kValues ? value_scale<Traits>(params) : params.scale / ds_scale;
  if (!(kValues ? params.wants_dv : params.wants_dk)) return;
  store_rows<Traits, kBlock>(sum, factor, kValues ? tiles.v() : tiles.k(), rows.warp_row, map,
                             work.box(map.steps, work.head, work.first_row + rows.warp_row), first_panel);
}

}  // namespace flash_ext::sm90
