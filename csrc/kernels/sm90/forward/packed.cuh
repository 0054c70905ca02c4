// Packed sequences (core/sequences.h) in the forward kernel: the same kernel with a Work that has the lengths and the
// place of its sequence, which for dense calls are parameters.
//
// Boxes of TMA end where a sequence ends: see make_packed_map (gpu/host/tensor_map.h) for how, and what their
// coordinates are. Called by kernel.cuh (device) and run.cuh (host).
// Invariant: of the list a block walks only the tiles that there are.
#pragma once

#include "core/sequences.h"
#include "kernels/sm90/forward/parts.cuh"

namespace flash_ext::sm90 {

struct PackedList {
  const PackedTile* tiles;  // of kBlockM queries
  int rows_q;               // of the tensor
  int diagonal_mask;        // -1: a sequence's diagonal ends at its last key; 0: it begins at the first
};

// band: with a diagonal that begins at the first key.
template <class Base>
struct PackedParams : Base {
  PackedList packed;
  struct {
    TensorMap q, k, v, out;
  } inner;  // of boxes that lie in a sequence as a whole
};

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
  using Box = Work::Box;

  __device__ __forceinline__ bool any() const { return first_n != last_n; }

  // listed: the tiles of a head, of which there was room for more in the schedule.
  static __device__ __forceinline__ uint32_t tiles_of(const ForwardParams& params, int listed) {
    return static_cast<uint32_t>(listed) * params.heads_q;
  }
  // Of the list, what a block begins with unless the list is very short. NOTE: how long it is every entry says, so that
  // a block waits for one answer of memory before its first tile and not for two.
  static __device__ __forceinline__ const PackedTile& likely_first(const ForwardParams& params,
                                                                   const PackedTile* tiles) {
    return tiles[static_cast<uint32_t>(params.schedule.at<uint32_t>(blockIdx.x).block)];
  }
  struct Found {
    PackedTile tile;  // b of -1: none
    int head;
  };
  template <class Traits>
  static __device__ __forceinline__ Found find(const typename Traits::Params& params, uint32_t linear, int listed) {
    if (linear >= tiles_of(params, listed)) return {{-1, 0, {}, 0}, 0};
    TileSchedule schedule = params.schedule;
    schedule.blocks = listed;
    const Tile tile = schedule.at<uint32_t>(linear);
    return {params.packed.tiles[static_cast<uint32_t>(tile.block)], static_cast<int>(tile.head)};
  }
  template <class Traits>
  static __device__ __forceinline__ PackedWork at(const typename Traits::Params& params, const Found& found) {
    if (found.tile.b < 0) return {};
    const Sequence& sequence = found.tile.sequence;
    PackedWork work;
    work.head = found.head;
    work.b0 = found.tile.b;
    work.row_q = sequence.row_q;
    work.row_k = sequence.row_k;
    work.len_q = sequence.len_q;
    work.diagonal = (sequence.len_k - sequence.len_q) & params.packed.diagonal_mask;
    work.band = {params.band.lower + work.diagonal, params.band.upper + work.diagonal, sequence.len_k};
    work.first_query = found.tile.block * Traits::kBlockM;
    find_keys<Traits::kBlockM, Traits::kBlockN>(work.first_n, work.last_n, work.band, work.first_query, work.len_q);
    return work;
  }

  template <class Traits>
  __device__ __forceinline__ int top_of(const typename Traits::Params&, int consumer) const {
    const int row = first_query + consumer * 64, last_query = min(row + 64, len_q) - 1;
    return top_tile<Traits::kBlockN>(band, last_query, row < len_q, first_n, last_n);
  }

  template <class Traits>
  __device__ __forceinline__ int bottom_of(const typename Traits::Params&, int consumer, int top_n) const {
    return bottom_tile<Traits::kBlockN>(band, first_query + consumer * 64, first_n, top_n);
  }

  template <class Traits>
  __device__ __forceinline__ Place place(const ForwardParams&, int row) const {
    return {head, row, row < len_q};
  }

  __device__ __forceinline__ const TileBand& band_of(const ForwardParams&) const { return band; }
  __device__ __forceinline__ int diagonal_of(const ForwardParams&) const { return diagonal; }
  __device__ __forceinline__ float scale_of(const ForwardParams& params) const { return params.scale; }
  __device__ __forceinline__ int batch(const ForwardParams&) const { return b0; }
  __device__ __forceinline__ int flat_head(const ForwardParams& params) const { return b0 * params.heads_q + head; }

  // Of a query in lse.
  template <class Params>
  __device__ __forceinline__ int64_t row(const Params& params, Place at) const {
    return static_cast<int64_t>(at.head) * params.packed.rows_q + row_q + at.query;
  }

  // NOTE: of what lies in a sequence as a whole, by the map of an ordinary tensor, because TMA takes longer for the one
  // that ends with a sequence: at head dim 128 by 3.5 % of a call. Queries behind the last one must be zeros, though
  // nobody writes results of them: whether a warp rescales O is seen in the last bits of all its rows.
  template <class Params>
  __device__ __forceinline__ Box q_box(const Params& params, Place place) const {
    return box<64>(params.inner.q, params.q, place.head, place.query, row_q, len_q);
  }
  template <class Params>
  __device__ __forceinline__ Box out_box(const Params& params, Place place) const {
    return box<16>(params.inner.out, params.out, place.head, place.query, row_q, len_q);
  }
  template <int kBlockN, class Params>
  __device__ __forceinline__ Box k_box(const Params& params, int row) const {
    return box<kBlockN>(params.inner.k, params.k, head / params.group_k, row, row_k, band.len_k);
  }
  template <int kBlockN, class Params>
  __device__ __forceinline__ Box v_box(const Params& params, int row) const {
    return box<kBlockN>(params.inner.v, params.v, head / params.group_v, row, row_k, band.len_k);
  }

  // kRows rows from `row` of a sequence on.
  template <int kRows>
  static __device__ __forceinline__ Box box(const TensorMap& inner, const TensorMap& ending, int box_head, int row,
                                            int first, int len) {
    if (row + kRows <= len) return {inner, {0, first + row, box_head * inner.steps.head, 0, 0}};
    return {ending, {0, cuda::kPackedEnd - len + row, box_head * ending.steps.head, first + len, cuda::kPackedEnd}};
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
