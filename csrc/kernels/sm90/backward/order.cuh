// dQ in one order: what backward has in deterministic mode beside its consumers. Threads of warps of their own:
//
//   load_queries_in_order  takes the next tile of keys from a counter and tells all others; loads Q and dO
//   load_keys_in_order     loads K and V
//   add_in_order           adds dQ to global memory for all consumers when it is this tile's turn; two, who take turns
//
// A tile of queries gets its dQ from the tiles of keys that it meets one after the other. The first stores it, so that
// it need not be zero before; a counter says how many have. Tiles of keys come with the fewest queries first, and each
// begins at the queries that the one before it does not see or has begun with: under a causal band the last keys first,
// and queries from the diagonal on. So whoever must be waited for is ahead, and there is little to wait for.
//
// Called by kernel.cuh with Walk::kOrdered. Invariant: nobody waits for ever. A tile of keys waits only for those of
// its head that come before it in TileSchedule. Numbers are handed out in that order, to blocks that run, and a block
// works on its own in order; so of all that are not finished the first is being worked on, and what it waits for is
// finished. This holds whichever blocks run at a time and in whatever order they start.
#pragma once

#include <cstddef>

#include "kernels/sm90/backward/parts.cuh"

namespace flash_ext::sm90 {

// As RingPlace<2>, but one register: the threads of a producer warpgroup have few.
struct Place2 {
  uint32_t count = 0;
  __device__ __forceinline__ int stage() const { return count & 1; }
  __device__ __forceinline__ uint32_t phase() const { return count >> 1 & 1; }
};

// What load_queries_in_order told. The stage stays as it is until the reader has arrived at its empty barrier.
template <class Traits>
__device__ __forceinline__ KeyWork read_work(const typename Traits::Tiles& tiles, Place2 place) {
  KeyWork work;
  barrier_wait(tiles.works().full(place.stage()), place.phase());
  load_shared(work, tiles.works().tile(place.stage()));
  return work;
}

using flash_ext::uniform;
__device__ __forceinline__ KeyWork uniform(KeyWork work) {
  for (int* field :
       {&work.head_k, &work.b0, &work.b1, &work.first_key, &work.first_m, &work.last_m, &work.row, &work.step}) {
    *field = uniform(*field);
  }
  return work;
}

// fn(work) for all that is told, in one thread.
template <class Traits, class Fn>
__device__ __forceinline__ void for_works(const typename Traits::Tiles& tiles, const Fn& fn) {
  for (Place2 place;; ++place.count) {
    const KeyWork work = read_work<Traits>(tiles, place);
    if (work.step == 0) return;
    fn(work);
    barrier_arrive(tiles.works().empty(place.stage()));
  }
}

// fn(member, m_block) for the tiles of queries of a tile of keys, and of each for all query heads of the key head.
template <class Fn>
__device__ __forceinline__ void in_order(const BackwardParams& params, const KeyWork& work, const Fn& fn) {
#pragma unroll 1
  for (int m = work.begin_m(), i = work.last_m - work.first_m; i > 0; --i, m += work.step) {
#pragma unroll 1
    for (int member = 0; member < params.group_size; ++member) fn(member, m);
  }
}

// NOTE: it takes a number when it has loaded all for the one before. A number that was taken a whole tile earlier kept
// all waiting who depend on it until its block came to it; so, and with the most queries first, causal calls of 2k and
// more took 1.6 to 3 times as long as those in any order.
template <class Traits>
__device__ __forceinline__ void load_queries_in_order(const BackwardParams& params,
                                                      const typename Traits::Tiles& tiles) {
  constexpr int kBlockM = Traits::kBlockM;
  static_assert(Traits::kShape.stages == 2);
  const auto works = tiles.works();
  Place2 place;  // of Q and dO
  for (Place2 work_place;; ++work_place.count) {
    const uint32_t stage = works.tile(work_place.stage());
    const bool takes = params.walks || work_place.count == 0;
    const uint32_t number = takes ? atomicAdd(params.turns + params.turn_count, 1) : params.tiles;
    KeyWork told = {};
    if (number < params.tiles) told = KeyWork::at<kBlockM, Traits::kBlockN>(params, number);
    barrier_wait(works.empty(work_place.stage()), work_place.phase() ^ 1);
    store_shared(stage, told);
    barrier_arrive(works.full(work_place.stage()));
    if (told.step == 0) return;
    for (int m = told.begin_m(), member = 0;;) {
      KeyWork work;
      load_shared(work, stage);  // NOTE: again, because keeping it costs registers that this thread does not have.
      if (m < work.first_m || m >= work.last_m) break;
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {  // Q and stats, dO
        const Ring<Traits::kQBytes> ring = part == 0 ? tiles.q() : tiles.d_out();
        const TensorMap& map = part == 0 ? params.q : params.d_out;
        const uint32_t full = ring.full(place.stage());
        barrier_wait(ring.empty(place.stage()), place.phase() ^ 1);
        if (part == 1) store_shared1(tiles.m_block(place.stage()), __int_as_float(m));
        barrier_expect(full, Traits::kQBytes + (part == 0 ? Traits::kStatsBytes : 0));
        load_panels<kBlockM, Traits::kPanels>(
            ring.tile(place.stage()), full, map,
            work.query_box(map.steps, work.head_k * params.group_size + member, m * kBlockM));
        if (part == 1) continue;
        const int tile = (work.row + member) * params.m_blocks + m;
        bulk_load(tiles.stats(place.stage()), params.stats + int64_t{tile} * (kQueryStats * kBlockM), full,
                  Traits::kStatsBytes);
      }
      ++place.count;
      if (++member == params.group_size) {
        member = 0;
        m += load_shared_int(stage + offsetof(KeyWork, step));
      }
    }
  }
}

// A warp, whose first lane loads. It also tells with K whether the tile of keys meets a far row (far.cuh): asked by
// the consumers it kept them waiting between two tiles of keys.
// NOTE: what is told is read again, and far rows one by one: there are 24 registers.
template <class Traits>
__device__ __forceinline__ void load_keys_in_order(const BackwardParams& params, const typename Traits::Tiles& tiles) {
  uint32_t phase = 0;
  for (Place2 place;; ++place.count) {
    const uint32_t told = tiles.works().tile(place.stage());
    const auto number = [&](size_t offset) { return load_shared_int(told + static_cast<uint32_t>(offset)); };
    barrier_wait(tiles.works().full(place.stage()), place.phase());
    if (number(offsetof(KeyWork, step)) == 0) return;
    if (number(offsetof(KeyWork, first_m)) < number(offsetof(KeyWork, last_m))) {
      bool far = false;
      if constexpr (Traits::kMayBeFar) {
        far = any_far<Traits::kBlockM, 1>(
            params.stats + int64_t{number(offsetof(KeyWork, row))} * params.m_blocks * (kQueryStats * Traits::kBlockM),
            params.group_size, params.m_blocks, number(offsetof(KeyWork, first_m)), number(offsetof(KeyWork, last_m)));
      }
      const auto load = [&](const Ring<Traits::kKvBytes>& ring, const TensorMap& map) {
        KeyWork work;
        load_shared(work, told);
        barrier_expect(ring.full(0), Traits::kKvBytes);
        load_panels<Traits::kBlockN, Traits::kPanels>(ring.tile(0), ring.full(0), map,
                                                      work.key_box(map.steps, work.head_k, work.first_key));
      };
      const auto load_k = [&] {
        barrier_wait(tiles.k().empty(0), phase ^ 1);
        if constexpr (Traits::kMayBeFar) store_shared1(tiles.meets_far(), far ? 1.f : 0.f);
        load(tiles.k(), params.k);
      };
      if (threadIdx.x % 32 == 0) {
        // Behind another tile V is free before K.
        if (place.count == 0) load_k();
        barrier_wait(tiles.v().empty(0), phase ^ 1);
        load(tiles.v(), params.v);
        if (place.count > 0) load_k();
      }
      phase ^= 1;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(tiles.works().empty(place.stage()));
  }
}

// Two, of which one waits for its turn while the other waits until its additions are done: of tiles of queries, in the
// block's order, those of this parity.
template <class Traits, uint32_t kParity>
__device__ __forceinline__ void add_in_order(const BackwardParams& params, const typename Traits::Tiles& tiles) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kTile = kBlockM * Traits::kHeadDim;
  uint32_t count = 0;
  for_works<Traits>(tiles, [&](const KeyWork& work) {
    const auto tile_ranges = params.template tile_ranges<kBlockM, kBlockN>();
    in_order(params, work, [&](int member, int m) {
      const uint32_t index = count++;
      if (index % 2 != kParity) return;
      const int64_t tile = int64_t{work.row + member} * params.m_blocks + m;
      const int n = work.first_key / kBlockN;
      const int before = work.step > 0 ? tile_ranges.last_keys_of(m) - n : n - tile_ranges.first_keys_of(m);
      float* const dq = params.dq + tile * kTile;
      wait_count(params.turns + tile, before);
      barrier_wait(tiles.dq_full(index % 2), index / 2 % 2);
      if (before == 0) {
        bulk_store(dq, tiles.staging(0), kTile * 4);
      } else {
        bulk_add(dq, tiles.staging(0), kTile * 4);
      }
      bulk_commit();
      bulk_wait_read();
      barrier_arrive(tiles.dq_empty());
      bulk_wait();
      add_count(params.turns + tile);
    });
  });
}

}  // namespace flash_ext::sm90
