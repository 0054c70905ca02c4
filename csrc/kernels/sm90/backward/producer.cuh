// What loads K, V, Q and dO of backward, where dQ is added up in whatever order blocks come: one thread.
//
// Called by kernel.cuh. Invariant: as the consumers take them, a tile of keys and then its tiles of queries, head by
// head.
#pragma once

#include "kernels/sm90/backward/parts.cuh"

namespace flash_ext::sm90 {

// Order: K, Q, V, dO; but behind another tile K comes last, because the others have room sooner.
// NOTE: K first was worth 1 to 3 % at head dim 128, also where a block runs hundreds of tiles of queries; perhaps how
// the warpgroups start against each other stays.
template <class Traits>
__device__ __forceinline__ void produce_backward(const typename Traits::Params& params,
                                                 const typename Traits::Tiles& tiles) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  typename Traits::Place place;
  uint32_t phase = 0;
  for (uint32_t linear = blockIdx.x; linear < params.tiles; linear += gridDim.x) {
    const typename Traits::Work work = [&] {
      if constexpr (Traits::kPacked) {
        return packed_work<Traits>(tiles);
      } else {
        return key_work<Traits>(params, linear);
      }
    }();
    if constexpr (Traits::kHasRanges) {  // so that all roles find the range of the next one in L1
      const uint32_t next = linear + gridDim.x;
      if (next < params.tiles) prefetch_l1(range_of<Traits>(params, KeyWork::at<kBlockM, kBlockN>(params, next)));
    }
    const auto now = [&] {  // where it is read for a box
      if constexpr (Traits::kPacked) {
        return packed_work<Traits>(tiles);
      } else {
        return work;
      }
    };
    const auto load_keys = [&](const Ring<Traits::kKvBytes>& ring, const TensorMap& map) {
      barrier_wait(ring.empty(0), phase ^ 1);
      barrier_expect(ring.full(0), Traits::kKvBytes);
      load_panels<kBlockN, Traits::kPanels>(ring.tile(0), ring.full(0), map,
                                            now().key_box(map.steps, work.head_k, work.first_key));
    };
    bool first = true, has_k = false;
    if (linear == blockIdx.x && work.last_m > work.first_m) {
      load_keys(tiles.k(), params.k);
      has_k = true;
    }
    for (int member = 0; member < params.group_size; ++member) {
      const int head = work.head_k * params.group_size + member;
      const float* stats = params.stats + work.first_tile(params, member) * (kQueryStats * kBlockM);
      for (int m = work.first_m; m < work.last_m; ++m) {
        const auto load = [&](const Ring<Traits::kQBytes>& ring, const TensorMap& map, int more) {
          const uint32_t full = ring.full(place.stage);
          barrier_wait(ring.empty(place.stage), place.phase ^ 1);
          barrier_expect(full, Traits::kQBytes + more);
          load_panels<kBlockM, Traits::kPanels>(ring.tile(place.stage), full, map,
                                                now().query_box(map.steps, head, m * kBlockM));
        };
        load(tiles.q(), params.q, Traits::kStatsBytes);
        bulk_load(tiles.stats(place.stage), stats + m * (kQueryStats * kBlockM), tiles.q().full(place.stage),
                  Traits::kStatsBytes);
        if (first) load_keys(tiles.v(), params.v);
        load(tiles.d_out(), params.d_out, 0);
        place.advance();
        if (first) {
          if (!has_k) load_keys(tiles.k(), params.k);
          first = false;
          phase ^= 1;
        }
      }
    }
    if constexpr (Traits::kPersistence == Persistence::kOne) break;
  }
}

}  // namespace flash_ext::sm90
