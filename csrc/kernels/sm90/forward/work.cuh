// What a block of the forward works on: the parameters of the kernel and the tiles of one block, one after the other.
// Called by kernel.cuh (device) and run.cuh (host).
// Invariant: over the grid every tile is walked once, whichever way blocks find their next.
#pragma once

#include "core/mask_ranges.h"
#include "core/tile_schedule.h"
#include "kernels/sm90/config.h"
#include "kernels/sm90/forward/splits.h"
#include "kernels/sm90/out.cuh"
#include "kernels/sm90/pipeline.cuh"
#include "kernels/sm90/softmax.cuh"

namespace flash_ext::sm90 {

// The keys of one tile of queries as the work of several blocks, each of which leaves a result of its own for combine
// (kernels/stages/combine.h).
struct Parts {
  Splits splits;  // a count of 1: the results are the call's
  float* out;     // [count, rows of the call, cols]
  float2* sums;   // [count, rows of the call]: combine's; -inf: no key, and nothing in out
  int64_t rows;
  int cols;
};

// Which query of which head a row of a tile is, where heads of a group share tiles (Splits::head_rows): query
// r & row_mask of member r >> shift. Where they do not, row_mask is -1 and shift 31.
struct SharedTiles {
  int row_mask, shift;
  int group_size;  // heads of a group; 1 where they share no tile
  int rows;        // of a group, len_q where they share no tile
  int queries;     // of a warpgroup
};

// A number of each head, a sink or a descale; without data there are none.
struct HeadNumbers {
  const float* data;
  int64_t b0, b1, head, row;
};

struct ForwardParams {
  TensorMap q, k, v, out;
  OutView out_view;
  TileSchedule schedule;
  TileBand band;
  uint32_t tiles;
  int len_q;
  int group_k, group_v;  // heads that a tile is of, of a key head, of a value head
  int heads_q;
  SharedTiles shared;
  int inner_batch;  // size of the last batch dimension
  float scale, to_log2;
  float* lse;         // null: not wanted
  HeadNumbers sinks;  // not of parts, which combine joins
  uint32_t* counter;  // of the tiles handed out beyond the first of each block; null: every grid-th is a block's
  Parts parts;        // of a shape that shares keys
};

// The tiles of keys [first_n, last_n) that a tile of queries sees; where it sees none, one behind the last key. range:
// those that a mask leaves.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ void find_keys(int& first_n, int& last_n, const TileBand& band, int first_query, int len_q,
                                          MaskRange range = {0, INT32_MAX}) {
  const int last_query = min(first_query + kBlockM, len_q) - 1;
  const int first_key = max(first_query + band.lower, range.first);
  const int last_key = min(min(last_query + band.upper + 1, band.len_k), range.last);
  const bool any = last_key > first_key;
  first_n = (any ? first_key : band.len_k + kBlockN - 1) / kBlockN;
  last_n = any ? (last_key + kBlockN - 1) / kBlockN : first_n + 1;
}

// The last of those tiles of which a consumer's queries see one, and one more: first_n < top <= last_n. any: it has
// some.
template <int kBlockN>
__device__ __forceinline__ int top_tile(const TileBand& band, int last_query, bool any, int first_n, int last_n) {
  const int last_key = any ? min(last_query + band.upper + 1, band.len_k) : 0;
  return min(max((last_key + kBlockN - 1) / kBlockN, first_n + 1), last_n);
}

// The first of those tiles of which a consumer's queries see a key: first_n <= bottom < top.
template <int kBlockN>
__device__ __forceinline__ int bottom_tile(const TileBand& band, int first_query, int first_n, int top_n) {
  return min(max((first_query + band.lower) / kBlockN, first_n), top_n - 1);
}

// One tile of the grid: 64 * consumers queries of one head, or rows of a group that shares tiles, and the tiles of keys
// they see. Where they see none it is one tile behind the last key, which reads as zeros and is masked. The producer
// hands it over in shared memory. What it says of lengths and places is asked of it with the parameters, because those
// of packed sequences (packed.cuh) are its own.
struct alignas(16) Work {
  int first_query;      // or row
  int first_n, last_n;  // of keys; equal in what stands for the end of a block's work, and in a part without keys
  int head, b0, b1;     // head: or group
  int part;
  int unused;

  __device__ __forceinline__ bool any() const { return first_n != last_n; }

  // What is known of a tile once it has been looked up, and what a block works on then, the end of its work behind the
  // last tile.
  using Found = uint32_t;
  template <class Traits>
  static __device__ __forceinline__ Found find(const ForwardParams&, uint32_t linear, int) {
    return linear;
  }
  template <class Traits>
  static __device__ __forceinline__ Work at(const typename Traits::Params& params, Found linear) {
    if (linear >= params.tiles) return {};
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr bool kSharesKeys = Traits::kShape.shares_keys;
    const uint32_t parts = kSharesKeys ? params.parts.splits.count : 1;
    const Tile tile = params.schedule.template at<uint32_t>(linear / parts);
    const int b = static_cast<int>(tile.b);
    Work work;
    work.head = static_cast<int>(tile.head);
    work.b1 = b / params.inner_batch;
    work.b0 = b - work.b1 * params.inner_batch;
    work.first_query = static_cast<int>(tile.block) * kBlockM;
    const int first_query = kSharesKeys ? work.first_query & params.shared.row_mask : work.first_query;
    MaskRange range{0, INT32_MAX};
    if constexpr (Traits::kScored) range = params.scores.ranges.at(b, work.head, tile.block);
    find_keys<kBlockM, kBlockN>(work.first_n, work.last_n, params.band, first_query, params.len_q, range);
    work.part = 0;
    if constexpr (kSharesKeys) {
      work.part = static_cast<int>(linear % parts);
      take_part(work.first_n, work.last_n, work.part, params.parts.splits);
    }
    return work;
  }

  // top_tile of a consumer.
  template <class Traits>
  __device__ __forceinline__ int top_of(const ForwardParams& params, int consumer) const {
    constexpr int kBlockN = Traits::kBlockN;
    constexpr bool kShares = Traits::kShape.shares_keys;
    const int row = first_query + consumer * 64, query = kShares ? row & params.shared.row_mask : row;
    const int last_query = min(query + 64, params.len_q) - 1;
    const bool any = row < (kShares ? params.shared.rows : params.len_q);
    return top_tile<kBlockN>(params.band, last_query, any, first_n, last_n);
  }

  // bottom_tile of a consumer. NOTE: in a group that shares tiles rows are not in the order of queries.
  template <class Traits>
  __device__ __forceinline__ int bottom_of(const ForwardParams& params, int consumer, int top_n) const {
    if constexpr (Traits::kShape.shares_keys) return first_n;
    return bottom_tile<Traits::kBlockN>(params.band, first_query + consumer * 64, first_n, top_n);
  }

  // Of a row of the tile's.
  struct Place {
    int head, query;
    bool exists;
  };
  template <class Traits>
  __device__ __forceinline__ Place place(const ForwardParams& params, int row) const {
    if constexpr (!Traits::kShape.shares_keys) {
      return {head, row, row < params.len_q};
    } else {
      const SharedTiles& shared = params.shared;
      const int query = row & shared.row_mask;
      return {head * shared.group_size + (row >> shared.shift), query, row < shared.rows && query < params.len_q};
    }
  }

  __device__ __forceinline__ const TileBand& band_of(const ForwardParams& params) const { return params.band; }
  // i + this - j is how far a key j is from the diagonal.
  template <class Params>
  __device__ __forceinline__ int diagonal_of(const Params& params) const {
    return params.scores.alibi.offset;
  }
  __device__ __forceinline__ float scale_of(const ForwardParams& params) const { return params.scale; }
  __device__ __forceinline__ int batch(const ForwardParams& params) const { return b1 * params.inner_batch + b0; }
  // Of all batch elements' heads, which the bits of dropout are of.
  __device__ __forceinline__ int flat_head(const ForwardParams& params) const {
    return batch(params) * params.heads_q + head;
  }

  // Of a query in lse and in a part's results.
  __device__ __forceinline__ int64_t row(const ForwardParams& params, Place at) const {
    return (static_cast<int64_t>(b1 * params.inner_batch + b0) * params.heads_q + at.head) * params.len_q + at.query;
  }

  // Where TMA finds 64 queries, or 16 of out, from a row's place on, and kBlockN keys or values.
  struct Box {
    const TensorMap& map;
    BoxStart at;
  };
  __device__ __forceinline__ Box q_box(const ForwardParams& params, Place place) const {
    return box(params.q, place.head, place.query);
  }
  __device__ __forceinline__ Box out_box(const ForwardParams& params, Place place) const {
    return box(params.out, place.head, place.query);
  }
  template <int kBlockN>
  __device__ __forceinline__ Box k_box(const ForwardParams& params, int row) const {
    return box(params.k, head / params.group_k, row);
  }
  template <int kBlockN>
  __device__ __forceinline__ Box v_box(const ForwardParams& params, int row) const {
    return box(params.v, head / params.group_v, row);
  }

  __device__ __forceinline__ Box box(const TensorMap& map, int box_head, int row) const {
    return {map, {0, row, box_head * map.steps.head, b0 * map.steps.b0, b1 * map.steps.b1}};
  }
};

static_assert(sizeof(Work) == kWorkBytes);

// True where this block's part of a tile has no key: says so to combine.
template <class Traits>
__device__ __forceinline__ bool skip_part(const ForwardParams& params) {
  const Work work = Work::at<Traits>(params, blockIdx.x);
  if (work.any()) return false;
  const auto at = work.place<Traits>(params, work.first_query + static_cast<int>(threadIdx.x));
  if (threadIdx.x < Traits::kBlockM && at.exists) {
    params.parts.sums[work.part * params.parts.rows + work.row(params, at)] = {kMinusInf, 0.f};
  }
  return true;
}

// Which tile this block takes after `linear`, counted from the first behind those that blocks begin with; from_here()
// of it is there.
__device__ __forceinline__ uint32_t ask_tile(const ForwardParams& params, uint32_t linear) {
  return params.counter != nullptr ? atomicAdd(params.counter, 1) : linear;
}

}  // namespace flash_ext::sm90
