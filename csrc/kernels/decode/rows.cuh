// Keys and values of one (sequence, key head) on their way from where they lie to the ring of a group of warps.
//
//   ring   stage 0: group 0 [K | V], group 1 [K | V], ...   stage 1: ...
//
// A thread copies the same chunk of 16 bytes of every so many rows. In a pool each lane looks up the page of one row of
// a tile, a tile before it is copied. Called by kernel.cuh. Invariant: rows outside [first, last) become zeros and are
// not read, so that what lies there never meets a product; an index of a page is bounded before it is followed.
#pragma once

#include "gpu/fragments.cuh"
#include "kernels/decode/config.h"
#include "kernels/decode/work.cuh"

namespace flash_ext::decode {

template <class Traits>
class KeyRows {
 public:
  static constexpr int kRowStep = Traits::kGroupThreads / Traits::kRowChunks;  // between two rows of a thread
  static_assert(kRowStep > 0 && Traits::kKeys % kRowStep == 0);
  using Tile = SmemTile<uint8_t, Traits::kRowBytes>;

  explicit __device__ __forceinline__ KeyRows(const DecodeArgs& args) : args_(args) {}

  // Begins with sequence b, of which [first, last) are read.
  __device__ __forceinline__ void begin(int b, int head, int first, int last) {
    table_ = args_.table == nullptr ? nullptr : args_.table + b * args_.table_stride;
    first_ = first;
    last_ = last;
    const int slot = table_ != nullptr || last <= first ? 0 : slot_of(args_, b);
    const auto start = [&](const CacheView& view) {
      return static_cast<const char*>(view.data) + (slot * view.slot_stride + head * view.head_stride) * kBytes;
    };
    k_ = start(args_.k);
    v_ = start(args_.v);
  }

  // Finds the pages of the tile that begins at `key`, for the next copy().
  __device__ __forceinline__ void look_up(int key) {
    if (table_ == nullptr) return;
    int row = key + static_cast<int>(threadIdx.x % Traits::kKeys);
    row = last_ > first_ ? max(first_, min(row, last_ - 1)) : 0;
    const int index = row / args_.page_rows, page = table_[index];
    in_page_ = row - index * args_.page_rows;
    page_ = page < 0 ? 0 : (page < args_.slots ? page : args_.slots - 1);
  }

  // Starts the copies of the tile that begins at `key`.
  __device__ __forceinline__ void copy(uint32_t keys, uint32_t values, int key) const {
    const int thread = static_cast<int>(no_hoist(threadIdx.x)) % Traits::kGroupThreads;
    const int own = thread / Traits::kRowChunks, chunk = thread % Traits::kRowChunks * kChunkBytes;
    if (table_ == nullptr && key >= first_ && key + Traits::kKeys <= last_) {
      copy_whole(keys, k_ + (key + own) * (args_.k.row_stride * kBytes) + chunk, args_.k, own, chunk);
      copy_whole(values, v_ + (key + own) * (args_.v.row_stride * kBytes) + chunk, args_.v, own, chunk);
      return;
    }
#pragma unroll 4
    for (int i = 0; i < Traits::kKeys / kRowStep; ++i) {
      const int row = own + i * kRowStep, at = key + row;
      const bool inside = at >= first_ && at < last_;
      int64_t page = 0, in_page = inside ? at : 0;
      if (table_ != nullptr) {
        page = __shfl_sync(~0u, page_, row);
        in_page = __shfl_sync(~0u, in_page_, row);
      }
      const auto from = [&](const char* start, const CacheView& view) {
        return start + (page * view.slot_stride + in_page * view.row_stride) * kBytes + chunk;
      };
      cp_async_16(keys + Tile::offset(row, chunk), from(k_, args_.k), inside ? 16 : 0);
      cp_async_16(values + Tile::offset(row, chunk), from(v_, args_.v), inside ? 16 : 0);
    }
  }

 private:
  static constexpr int kBytes = Traits::kFp8 ? 1 : 2;

  static __device__ __forceinline__ void copy_whole(uint32_t to, const char* from, const CacheView& view, int own,
                                                    int chunk) {
#pragma unroll
    for (int i = 0; i < Traits::kKeys / kRowStep; ++i) {
      cp_async_16(to + Tile::offset(own + i * kRowStep, chunk), from);
      from += kRowStep * kBytes * view.row_stride;
    }
  }

  const DecodeArgs& args_;
  const char *k_, *v_;  // row 0 of the slot, or of page 0
  const int32_t* table_;
  int first_, last_;
  int page_ = 0, in_page_ = 0;  // of this lane's row
};

}  // namespace flash_ext::decode
