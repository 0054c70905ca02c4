// Packed sequences (core/sequences.h) in the forward kernel: the same kernel with a Work that has the lengths and the
// place of its sequence, which for dense calls are parameters.
//
// Boxes of TMA end where a sequence ends: see make_packed_map (gpu/host/tensor_map.h) for how, and what their
// coordinates are. Called by kernel.cuh (device) and run.cuh (host).
// Invariant: of the list a block walks only what stands before the first entry without a tile.
#pragma once

#include "core/sequences.h"
#include "kernels/sm90/forward/parts.cuh"

namespace flash_ext::sm90 {

struct PackedList {
  const PackedTile* tiles;  // of kBlockM queries
  int room;                 // entries; those behind the last tile have a b of -1
  int rows_q;               // of the tensor
  int diagonal_mask;        // -1: a sequence's diagonal ends at its last key; 0: it begins at the first
};

// band: with a diagonal that begins at the first key.
template <class Base>
struct PackedParams : Base {
  PackedList packed;
};

// The tiles of a list, by all threads of a block.
template <int kThreads>
__device__ __forceinline__ int count_tiles(const PackedList& list) {
  int first = 0, left = list.room;  // entries before `first` are tiles, `left` are not known
  while (left > 0) {
    const int step = (left - 1) / kThreads + 1;  // each thread looks at the last of so many
    const int i = first + (static_cast<int>(threadIdx.x) + 1) * step - 1;
    const int found = __syncthreads_count(i < first + left && list.tiles[i].b >= 0);
    first += found * step;
    left = min(left - found * step, step - 1);
  }
  return first;
}

// As Work.
struct alignas(16) PackedWork {
  int first_query;
  int first_n, last_n;
  int head, b0;  // b0: the sequence
  int row_q, row_k, len_q;
  TileBand band;
  int diagonal;

  static constexpr int b1 = 0, part = 0;
  using Place = Work::Place;

  __device__ __forceinline__ bool any() const { return first_n != last_n; }

  // listed: the tiles of a head, of which there was room for more in the schedule.
  static __device__ __forceinline__ uint32_t tiles_of(const ForwardParams& params, int listed) {
    return static_cast<uint32_t>(listed) * params.heads_q;
  }
  template <class Traits>
  static __device__ __forceinline__ PackedWork at(const typename Traits::Params& params, uint32_t linear, int listed) {
    TileSchedule schedule = params.schedule;
    schedule.blocks = listed;
    const Tile tile = schedule.at<uint32_t>(linear);
    const PackedTile entry = params.packed.tiles[static_cast<uint32_t>(tile.block)];
    const Sequence& sequence = entry.sequence;
    PackedWork work;
    work.head = static_cast<int>(tile.head);
    work.b0 = entry.b;
    work.row_q = sequence.row_q;
    work.row_k = sequence.row_k;
    work.len_q = sequence.len_q;
    work.diagonal = (sequence.len_k - sequence.len_q) & params.packed.diagonal_mask;
    work.band = {params.band.lower + work.diagonal, params.band.upper + work.diagonal, sequence.len_k};
    work.first_query = entry.block * Traits::kBlockM;
    find_keys<Traits::kBlockM, Traits::kBlockN>(work.first_n, work.last_n, work.band, work.first_query, work.len_q);
    return work;
  }

  template <class Traits>
  __device__ __forceinline__ int top_of(const typename Traits::Params&, int consumer) const {
    const int row = first_query + consumer * 64, last_query = min(row + 64, len_q) - 1;
    return top_tile<Traits::kBlockN>(band, last_query, row < len_q, first_n, last_n);
  }

  template <class Traits>
  __device__ __forceinline__ Place place(const ForwardParams&, int row) const {
    return {head, row, row < len_q};
  }

  __device__ __forceinline__ const TileBand& band_of(const ForwardParams&) const { return band; }
  __device__ __forceinline__ int diagonal_of(const ForwardParams&) const { return diagonal; }
  __device__ __forceinline__ int flat_head(const ForwardParams& params) const { return b0 * params.heads_q + head; }

  // Of a query in lse.
  template <class Params>
  __device__ __forceinline__ int64_t row(const Params& params, Place at) const {
    return static_cast<int64_t>(at.head) * params.packed.rows_q + row_q + at.query;
  }

  template <class Params>
  __device__ __forceinline__ BoxStart query_box(const Params&, const BoxSteps& steps, int box_head, int row) const {
    return {0, cuda::kPackedEnd - len_q + row, box_head * steps.head, row_q + len_q, cuda::kPackedEnd};
  }
  template <class Params>
  __device__ __forceinline__ BoxStart key_box(const Params&, const BoxSteps& steps, int box_head, int row) const {
    return {0, cuda::kPackedEnd - band.len_k + row, box_head * steps.head, row_k + band.len_k, cuda::kPackedEnd};
  }
};

static_assert(sizeof(PackedWork) == kPackedWorkBytes);

template <class T, int kHeadDim, ForwardShape kShape>
struct PackedTraits : TraitsOfWork<T, kHeadDim, kShape, PackedWork,
                                   PackedParams<std::conditional_t<kShape.scored, ScoredParams, ForwardParams>>> {
  static constexpr bool kPacked = true;
  static_assert(!kShape.shares_keys);
};

}  // namespace flash_ext::sm90
