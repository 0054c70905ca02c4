// The query rows of a block, and what it knows of each: rows (query i, head h of the group of a key head), i * group +
// h, of tile row_tile.
//
// In shared memory Q lies as a tile of T. For a cache of e4m3, whose products are of fp16, a row is divided by the
// power of two of its largest number first, which its scores are multiplied by again: bf16 has more powers than fp16.
// What bf16 has below 2^-14 of the row's largest number loses digits then, by 2^-25 of that number at most. The words
// of each 16 columns lie in the order 0, 2, 4, 6, 1, 3, 5, 7 (products.cuh). Called by kernel.cuh and merge.cuh.
// Invariant: rows that the tile has too many are zeros, and are not written.
#pragma once

#include "core/online_softmax.h"
#include "gpu/fragments.cuh"
#include "kernels/decode/config.h"
#include "kernels/decode/work.cuh"

namespace flash_ext::decode {

// Of each row of the tile.
template <class Traits>
struct RowTable {
  int position[Traits::kRows];
  float slope[Traits::kRows];                      // times log2(e)
  float factor[Traits::kFp8 ? Traits::kRows : 1];  // of q k^T, beside that of all rows
};

// Of the tile: which keys some row sees, and which all rows do.
struct TileKeys {
  int first, last, all_first, all_last, rows;
};

// at / group. NOTE: an integer division is some 25 instructions, and short calls wait for each.
__device__ __forceinline__ int query_of_row(const DecodePlan& plan, int at) {
  return plan.of_group == 0 ? at : static_cast<int>(__umulhi(static_cast<unsigned>(at), plan.of_group));
}

// Where row `row` of a tile comes from.
struct QueryRow {
  int i, head;
  bool exists;

  __device__ __forceinline__ QueryRow(const DecodeArgs& args, const DecodePlan& plan, const Segment& segment, int row) {
    const int at = segment.row_tile * plan.tile_rows + row;
    i = query_of_row(plan, at);
    head = segment.head * plan.group + at - i * plan.group;
    exists = i < args.len_q;
  }
};

template <class Traits>
__device__ __forceinline__ TileKeys keys_of_tile(const DecodeArgs& args, const DecodePlan& plan,
                                                 const SequenceKeys& keys, const Segment& segment) {
  const int first_row = segment.row_tile * Traits::kRows;
  const int first_query = query_of_row(plan, first_row);
  const int last_query = min(query_of_row(plan, first_row + Traits::kRows - 1), args.len_q - 1);
  TileKeys tile;
  tile.rows = keys.rows;
  tile.first = min(first_key_at(args, keys.offset + first_query), keys.rows);
  tile.last = max(last_key_at(args, keys.offset + last_query, keys.rows), tile.first);
  tile.all_first = first_key_at(args, keys.offset + last_query);
  tile.all_last = last_key_at(args, keys.offset + first_query, keys.rows);
  return tile;
}

// What all scores are multiplied by: log2(e) is in it unless a softcap follows.
__device__ __forceinline__ float score_factor(const DecodeArgs& args) {
  return args.scale * (args.softcap == 0.f ? kLog2eFloat : 1.f);
}

// A row of the warp, divided by the power of two of its largest number, as fp16. Returns that power.
template <int kWords>
__device__ __forceinline__ float scale_to_half(uint32_t (&words)[kWords], bool is_half) {
  float x[2 * kWords], largest = 0.f;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (is_half) {
      unpack(words[i], x[2 * i], x[2 * i + 1], __half());
    } else {
      unpack(words[i], x[2 * i], x[2 * i + 1], __nv_bfloat16());
    }
    largest = fmaxf(largest, fmaxf(fabsf(x[2 * i]), fabsf(x[2 * i + 1])));
  }
  largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  const int power = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  const int used = largest == 0.f || power == 128 ? 0 : min(max(power, -126), 126);
  const float down = __uint_as_float(static_cast<unsigned>(127 - used) << 23);
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = pack(x[2 * i] * down, x[2 * i + 1] * down, __half());
  return __uint_as_float(static_cast<unsigned>(127 + used) << 23);
}

// The rows of Q, by whole warps, of which each takes kBatch at a time, whose loads are in flight together. begin() asks
// for the first of them and finish() puts all in shared memory, so that copies of keys can be started in between.
template <class Traits>
class QueryLoad {
 public:
  using Tile = SmemTile<typename Traits::T, Traits::kHeadDim>;

  __device__ __forceinline__ void begin(const DecodeArgs& args, const DecodePlan& plan, const Segment& segment) {
    ask(args, plan, segment, static_cast<int>(threadIdx.x) / 32);
  }

  __device__ __forceinline__ void finish(const DecodeArgs& args, const DecodePlan& plan, const SequenceKeys& keys,
                                         const Segment& segment, Tile tile, RowTable<Traits>& table) {
    const float descale = Traits::kFp8 ? args.k_descale.at(segment.b, segment.head, 1.f) : 1.f;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    put(args, plan, keys, segment, tile, table, warp, descale);
#pragma unroll 1
    for (int first = warp + kWarps * kBatch; first < Traits::kRows; first += kWarps * kBatch) {
      ask(args, plan, segment, first);
      put(args, plan, keys, segment, tile, table, first, descale);
    }
  }

 private:
  static constexpr int kWarps = Traits::kThreads / 32, kBatch = 4;
  static constexpr int kWords = Traits::kHeadDim / 2 / 32;  // of two numbers, of a lane
  static_assert(Traits::kRows % (kWarps * kBatch) == 0);

  // Rows first, first + kWarps, ...
  __device__ __forceinline__ void ask(const DecodeArgs& args, const DecodePlan& plan, const Segment& segment,
                                      int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const QueryRow from(args, plan, segment, first + k * kWarps);
      const uint32_t* const source =
          static_cast<const uint32_t*>(args.q.data) +
          (segment.b * args.q.slot_stride + from.i * args.q.row_stride + from.head * args.q.head_stride) / 2;
#pragma unroll
      for (int i = 0; i < kWords; ++i) words_[k][i] = from.exists ? source[lane + 32 * i] : 0;
      slopes_[k] = from.exists ? args.alibi.at(segment.b, from.head, 0.f) * kLog2eFloat : 0.f;
    }
  }

  __device__ __forceinline__ void put(const DecodeArgs& args, const DecodePlan& plan, const SequenceKeys& keys,
                                      const Segment& segment, Tile tile, RowTable<Traits>& table, int first,
                                      float descale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int row = first + k * kWarps;
      float factor = descale;
      if constexpr (Traits::kFp8) factor *= scale_to_half(words_[k], args.dtype == DType::kFloat16);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int word = lane + 32 * i, in_16 = word % 8;
        const int to = Traits::kFp8 ? word - in_16 + in_16 % 2 * 4 + in_16 / 2 : word;
        store_shared(tile.base + tile.offset(row, 4 * to), words_[k][i]);
      }
      if (lane == 0) {
        table.position[row] = keys.offset + QueryRow(args, plan, segment, row).i;
        table.slope[row] = slopes_[k];
        if (Traits::kFp8) table.factor[row] = factor;
      }
    }
  }

  uint32_t words_[kBatch][kWords];
  float slopes_[kBatch];
};

}  // namespace flash_ext::decode
