// dQ in one order: what backward has in deterministic mode, and where it is faster, beside its consumers. Threads of
// warps of their own:
//
//   load_queries_in_order  takes the next tile of keys from a counter and publishes it; loads Q and dO
//   load_keys_in_order     loads K and V
//   add_in_order           adds dQ to global memory for all consumers when it is this tile's turn; two, who take turns
//
// A tile of queries gets its dQ from the tiles of keys that it meets one after the other. The first stores it, so that
// it need not be zero before; a counter says how many have. Tiles of keys come with the fewest queries first, and each
// begins at the queries that the one before it does not see or has begun with: under a causal band the last keys first,
// and queries from the diagonal on. So whoever must be waited for is ahead, and there is little to wait for.
//
// Called by kernel.cuh with Persistence::kOrdered. Invariant: nobody waits for ever. A tile of keys waits only for
// those of its head that come before it in TileSchedule. Numbers are handed out in that order, to blocks that run, and
// a block works on its own in order; so of all that are not finished the first is being worked on, and what it waits
// for is finished. This holds whichever blocks run at a time and in whatever order they start.
//
// Packed sequences: turns belong to a tile of queries of one sequence, whose tiles of keys stand in the list one behind
// the other, each of them once; of a head, numbers ascend with the list. PackedKeyWork::at may take those of a sequence
// from the last to the first; then it is the last that all wait for, and it has the first place. No number is handed
// out for an entry behind the last tile (tile_count), and no tile of queries counts a tile of keys that nobody sees. So
// a sequence waits for itself alone, and its order of sums is a function of its own lengths and of the band.
#pragma once

#include <cstddef>

#include "kernels/sm90/backward/parts.cuh"

namespace flash_ext::sm90 {

// As RingState<2>, but one register: the threads of a producer warpgroup have few.
struct Place2 {
  uint32_t count = 0;
  __device__ __forceinline__ int stage() const { return count & 1; }
  __device__ __forceinline__ uint32_t phase() const { return count >> 1 & 1; }
};

// What load_queries_in_order published. The stage stays as it is until the reader has arrived at its empty barrier.
template <class Traits>
__device__ __forceinline__ typename Traits::Work read_work(const typename Traits::Tiles& tiles, Place2 place) {
  typename Traits::Work work;
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
__device__ __forceinline__ PackedKeyWork uniform(PackedKeyWork work) {
  for (int* field : {&work.head_k, &work.first_key, &work.first_m, &work.last_m, &work.row, &work.first, &work.row_k,
                     &work.edges.len_q, &work.edges.band.lower, &work.edges.band.upper, &work.edges.band.len_k}) {
    *field = uniform(*field);
  }
  return work;
}

// Of a PackedKeyWork in shared memory the number at this offset.
__device__ __forceinline__ int packed_number(uint32_t published, size_t offset) {
  return load_shared_int(published + static_cast<uint32_t>(offset));
}

// Where the packed tile of keys that a block works on lies in shared memory.
template <class Traits>
__device__ __forceinline__ uint32_t packed_work_at(const typename Traits::Tiles& tiles, Place2 place) {
  if constexpr (Traits::kOrdered) return tiles.works().tile(place.stage());
  return tiles.packed_work();
}

// fn(work) for all that is published, in one thread.
template <class Traits, class Fn>
__device__ __forceinline__ void for_works(const typename Traits::Tiles& tiles, const Fn& fn) {
  for (Place2 place;; ++place.count) {
    const KeyWork work = read_work<Traits>(tiles, place);
    if (work.step == 0) return;
    fn(work);
    barrier_arrive(tiles.works().empty(place.stage()));
  }
}

// The same of packed sequences; fn(where the work lies).
template <class Traits, class Fn>
__device__ __forceinline__ void for_published(const typename Traits::Tiles& tiles, const Fn& fn) {
  for (Place2 place;; ++place.count) {
    const uint32_t published = tiles.works().tile(place.stage());
    barrier_wait(tiles.works().full(place.stage()), place.phase());
    if (packed_number(published, offsetof(PackedKeyWork, step)) == 0) return;
    fn(published);
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

// Of PackedKeyWork in shared memory what a box needs. NOTE: no more, because these threads have 24 registers.
__device__ __forceinline__ PackedKeyWork read_query_part(uint32_t published) {
  PackedKeyWork work;
  work.head_k = packed_number(published, offsetof(PackedKeyWork, head_k));
  work.row_q = packed_number(published, offsetof(PackedKeyWork, row_q));
  work.edges.len_q = packed_number(published, offsetof(PackedKeyWork, edges.len_q));
  return work;
}
__device__ __forceinline__ PackedKeyWork read_key_part(uint32_t published) {
  PackedKeyWork work;
  work.head_k = packed_number(published, offsetof(PackedKeyWork, head_k));
  work.first_key = packed_number(published, offsetof(PackedKeyWork, first_key));
  work.row_k = packed_number(published, offsetof(PackedKeyWork, row_k));
  work.edges.band.len_k = packed_number(published, offsetof(PackedKeyWork, edges.band.len_k));
  return work;
}

// Tells all others of the tile of keys of this number; begin_m: its first tile of queries. False: there is none.
template <class Traits>
__device__ __forceinline__ bool tell_packed(const typename Traits::Params& params, const typename Traits::Tiles& tiles,
                                            Place2 place, uint32_t number, int& begin_m) {
  const auto works = tiles.works();
  const uint32_t stage = works.tile(place.stage());
  const bool exists = number < tile_count(params);
  barrier_wait(works.empty(place.stage()), place.phase() ^ 1);
  if (exists) {
    const auto work = PackedKeyWork::at<Traits::kBlockM, Traits::kBlockN, true>(params, number);
    store_shared(stage, work);
    begin_m = work.begin_m();
  } else {
    store_shared(stage + static_cast<uint32_t>(offsetof(PackedKeyWork, step)), 0u);
  }
  barrier_arrive(works.full(place.stage()));
  return exists;
}

// NOTE: it takes a number when it has loaded all for the one before. A number that was taken a whole tile earlier kept
// all waiting who depend on it until its block came to it; so, and with the most queries first, causal calls of 2k and
// more took 1.6 to 3 times as long as those in any order.
template <class Traits>
__device__ __forceinline__ void load_queries_in_order(const typename Traits::Params& params,
                                                      const typename Traits::Tiles& tiles) {
  using Work = typename Traits::Work;
  constexpr int kBlockM = Traits::kBlockM;
  static_assert(Traits::kShape.stages == 2);
  const auto works = tiles.works();
  Place2 place;  // of Q and dO
  for (Place2 work_place;; ++work_place.count) {
    const uint32_t stage = works.tile(work_place.stage());
    const bool takes = params.walks || work_place.count == 0;
    const uint32_t number = takes ? atomicAdd(params.dq_semaphore + params.dq_semaphore_count, 1) : params.tiles;
    int m;
    if constexpr (Traits::kPacked) {
      if (!tell_packed<Traits>(params, tiles, work_place, number, m)) return;
    } else {
      Work published = {};
      if (number < params.tiles) published = Work::template at<kBlockM, Traits::kBlockN>(params, number);
      barrier_wait(works.empty(work_place.stage()), work_place.phase() ^ 1);
      store_shared(stage, published);
      barrier_arrive(works.full(work_place.stage()));
      if (published.step == 0) return;
      m = published.begin_m();
    }
    for (int member = 0;;) {
      Work work;  // NOTE: again, because keeping it costs registers that this thread does not have.
      if constexpr (Traits::kPacked) {
        work.first_m = packed_number(stage, offsetof(Work, first_m));
        work.last_m = packed_number(stage, offsetof(Work, last_m));
      } else {
        load_shared(work, stage);
      }
      if (m < work.first_m || m >= work.last_m) break;
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {  // Q and stats, dO
        const Ring<Traits::kQBytes> ring = part == 0 ? tiles.q() : tiles.d_out();
        const TensorMap& map = part == 0 ? params.q : params.d_out;
        const uint32_t full = ring.full(place.stage());
        barrier_wait(ring.empty(place.stage()), place.phase() ^ 1);
        if (part == 1) store_shared1(tiles.m_block(place.stage()), __int_as_float(m));
        barrier_expect(full, Traits::kQBytes + (part == 0 ? Traits::kStatsBytes : 0));
        if constexpr (Traits::kPacked) work = read_query_part(stage);
        load_panels<kBlockM, Traits::kPanels>(
            ring.tile(place.stage()), full, map,
            work.query_box(map.steps, work.head_k * params.group_size + member, m * kBlockM));
        if (part == 1) continue;
        if constexpr (Traits::kPacked) work.first = packed_number(stage, offsetof(Work, first));
        const int tile = work.first_tile_number(params, member) + m;
        bulk_load(tiles.stats(place.stage()), params.stats + int64_t{tile} * (kQueryStats * kBlockM), full,
                  Traits::kStatsBytes);
      }
      ++place.count;
      if (++member == params.group_size) {
        member = 0;
        m += load_shared_int(stage + offsetof(Work, step));
      }
    }
  }
}

// A warp, whose first lane loads. It also tells with K whether the tile of keys meets a renormalised row
// (renormalise.cuh): asked by the consumers it kept them waiting between two tiles of keys. NOTE: what is published is
// read again, and renormalised rows one by one: there are 24 registers.
template <class Traits>
__device__ __forceinline__ void load_keys_in_order(const typename Traits::Params& params,
                                                   const typename Traits::Tiles& tiles) {
  using Work = typename Traits::Work;
  uint32_t phase = 0;
  for (Place2 place;; ++place.count) {
    const uint32_t published = tiles.works().tile(place.stage());
    const auto number = [&](size_t offset) { return load_shared_int(published + static_cast<uint32_t>(offset)); };
    barrier_wait(tiles.works().full(place.stage()), place.phase());
    if (number(offsetof(Work, step)) == 0) return;
    if (number(offsetof(Work, first_m)) < number(offsetof(Work, last_m))) {
      bool renorm = false;
      if constexpr (Traits::kMayRenorm) {
        const int64_t first = [&] {  // of the first head's tiles
          if constexpr (Traits::kPacked) {
            return int64_t{number(offsetof(Work, first))};
          } else {
            return int64_t{number(offsetof(Work, row))} * params.m_blocks;
          }
        }();
        renorm = any_renorm<Traits::kBlockM, 1>(params.stats + first * (kQueryStats * Traits::kBlockM),
                                                params.group_size, params.m_blocks, number(offsetof(Work, first_m)),
                                                number(offsetof(Work, last_m)));
      }
      const auto load = [&](const Ring<Traits::kKvBytes>& ring, const TensorMap& map) {
        Work work;
        if constexpr (Traits::kPacked) {
          work = read_key_part(published);
        } else {
          load_shared(work, published);
        }
        barrier_expect(ring.full(0), Traits::kKvBytes);
        load_panels<Traits::kBlockN, Traits::kPanels>(ring.tile(0), ring.full(0), map,
                                                      work.key_box(map.steps, work.head_k, work.first_key));
      };
      const auto load_k = [&] {
        barrier_wait(tiles.k().empty(0), phase ^ 1);
        if constexpr (Traits::kMayRenorm) store_shared1(tiles.meets_renorm(), renorm ? 1.f : 0.f);
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
__device__ __forceinline__ void add_in_order(const typename Traits::Params& params,
                                             const typename Traits::Tiles& tiles) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kTile = kBlockM * Traits::kHeadDim;
  uint32_t count = 0;
  struct Turn {
    int64_t tile;  // of queries
    int before;    // how many tiles of keys come before this one
  };
  const auto add = [&](const auto& turn_of) {
    const uint32_t index = count++;
    if (index % 2 != kParity) return;
    const auto [tile, before] = turn_of();
    float* const dq = params.dq + tile * kTile;
    wait_count(params.dq_semaphore + tile, before);
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
    add_count(params.dq_semaphore + tile);
  };
  const auto tiles_before = [](const TileRanges<kBlockM, kBlockN>& ranges, int step, int m, int n) {
    return step > 0 ? ranges.last_keys_of(m) - n : n - ranges.first_keys_of(m);
  };
  if constexpr (Traits::kPacked) {
    for_published<Traits>(tiles, [&](uint32_t published) {
      const auto number = [&](size_t offset) { return packed_number(published, offset); };
      int m = number(offsetof(PackedKeyWork, first_m)), left = number(offsetof(PackedKeyWork, last_m)) - m;
      if (number(offsetof(PackedKeyWork, step)) < 0) m += left - 1;
#pragma unroll 1
      for (; left > 0; --left, m += number(offsetof(PackedKeyWork, step))) {
        int tile = number(offsetof(PackedKeyWork, first)) + m;
#pragma unroll 1
        for (int member = 0; member < params.group_size; ++member, tile += params.m_blocks) {
          add([&] {
            const SequenceEdges edges = packed_edges(published);
            return Turn{tile, tiles_before({edges.band.lower, edges.band.upper, edges.len_q, edges.band.len_k},
                                           number(offsetof(PackedKeyWork, step)), m,
                                           number(offsetof(PackedKeyWork, first_key)) / kBlockN)};
          });
        }
      }
    });
  } else {
    for_works<Traits>(tiles, [&](const KeyWork& work) {
      const auto tile_ranges = params.template tile_ranges<kBlockM, kBlockN>();
      in_order(params, work, [&](int member, int m) {
        add([&] {
          return Turn{work.first_tile(params, member) + m,
                      tiles_before(tile_ranges, work.step, m, work.first_key / kBlockN)};
        });
      });
    });
  }
}

}  // namespace flash_ext::sm90
