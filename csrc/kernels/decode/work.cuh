// Who computes what, decided on the device from the lengths. All tiles of keys of the call are dealt to the blocks in
// runs of equal size:
//
//   sequence 0, head 0      head 1                  sequence 1, head 0     head 1
//   |---------------------|---------------------|-------|-------|
//   | block 0   | block 1   | block 2   | block 3   | block 4   |
//
// A work is (sequence, key head, tile of rows); each has at least one tile, so that its rows are written. What a block
// has of a work is a segment: all of it is written to out, a part of it to scratch, where the merge finds it. A block
// has at most two parts: of the work that its run begins in, and of the one that it ends in.
//
// With plan.piece_tiles a work is cut in pieces that follow from its own keys. A block has those that begin in its run;
// each is a segment, and a part unless it is the whole work, at a place of its own.
//
// Called by kernel.cuh and merge.cu. Invariant: all lanes of a warp, and all warps, find the same; all tiles of a call,
// and one run more, fit 31 bits (merge.cu).
#pragma once

#include "core/decode.h"

namespace flash_ext::decode {

// Keys of one sequence that any of its queries sees, [first, last), and its rows, with new ones.
struct SequenceKeys {
  int rows = 0, first = 0, last = 0;
  int offset = 0;  // query i has position i + offset
};

__device__ __forceinline__ int slot_of(const DecodeArgs& args, int b) {
  return args.slot_of == nullptr ? b : args.slot_of[b];
}

// Keys [first, last) that a query at a position sees.
__device__ __forceinline__ int first_key_at(const DecodeArgs& args, int position) {
  return max(position - args.left, 0);
}
__device__ __forceinline__ int last_key_at(const DecodeArgs& args, int position, int rows) {
  return min(position + args.right + 1, rows);
}

__device__ __forceinline__ SequenceKeys keys_of_sequence(const DecodeArgs& args, int b) {
  SequenceKeys keys;
  const int64_t length = args.lengths[b];
  const bool has_slot = args.slot_of == nullptr || (args.slot_of[b] >= 0 && args.slot_of[b] < args.slots);
  if (length < 0 || !has_slot) return keys;
  const int64_t rows = length + args.added;
  keys.rows = static_cast<int>(rows < args.capacity ? rows : args.capacity);
  keys.offset = args.bottom_right ? keys.rows - args.len_q : 0;
  keys.first = min(first_key_at(args, keys.offset), keys.rows);
  keys.last = max(last_key_at(args, keys.offset + args.len_q - 1, keys.rows), keys.first);
  return keys;
}

__device__ __forceinline__ int tiles_of(const SequenceKeys& keys, int tile_keys) {
  const int tiles = (keys.last - keys.first + tile_keys - 1) / tile_keys;
  return tiles > 0 ? tiles : 1;
}

// Tiles of each piece, but the last, of a work of so many: sixteen pieces, of piece_tiles to four times that many tiles
// each; where these are more than plan.most_pieces, that many.
__device__ __forceinline__ int piece_of(const DecodePlan& plan, int tiles) {
  const int piece = min(max((tiles + 15) / 16, plan.piece_tiles), 4 * plan.piece_tiles);
  return max(piece, (tiles + plan.most_pieces - 1) / plan.most_pieces);
}

__device__ __forceinline__ int works_of(const DecodeArgs& args, const DecodePlan& plan) {
  return args.heads_k * plan.row_tiles;
}

__device__ __forceinline__ int tiles_of_works(const DecodeArgs& args, const DecodePlan& plan, int b, int tile_keys) {
  return tiles_of(keys_of_sequence(args, b), tile_keys) * works_of(args, plan);
}

// How tiles are dealt, and the tiles before some sequences; of a warp, each lane of which adds up the sequences
// [lane * count, lane * count + count).
struct Deal {
  int before = 0, own = 0;  // tiles of the lanes before, and of this one
  int total = 0, run = 0;   // of all, and of a block
  int count = 0;

  static __device__ __forceinline__ Deal make(const DecodeArgs& args, const DecodePlan& plan, int tile_keys) {
    const int lane = threadIdx.x % 32;
    Deal deal;
    if (args.batch == 1) {  // NOTE: short calls wait for each instruction, and these are mostly of one sequence
      const int tiles = tiles_of(keys_of_sequence(args, 0), tile_keys);
      deal.count = 1;
      deal.total = tiles * works_of(args, plan);
      (lane == 0 ? deal.own : deal.before) = deal.total;
      deal.run = run_of(plan, deal.total, tiles);
      return deal;
    }
    int longest = 0;  // of a work
    deal.count = (args.batch + 31) / 32;
#pragma unroll 1
    for (int i = 0; i < deal.count; ++i) {
      const int b = lane * deal.count + i;
      if (b >= args.batch) break;
      const int tiles = tiles_of(keys_of_sequence(args, b), tile_keys);
      longest = max(longest, tiles);
      deal.own += tiles * works_of(args, plan);
    }
    longest = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(longest)));
    int sum = deal.own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    deal.before = sum - deal.own;
    deal.total = __shfl_sync(~0u, sum, 31);
    deal.run = run_of(plan, deal.total, longest);
    return deal;
  }

  // longest: tiles of a work.
  static __device__ __forceinline__ int run_of(const DecodePlan& plan, int total, int longest) {
    const int even = (total + plan.grid - 1) / plan.grid;
    return max(even, min(plan.least_tiles, longest));
  }

  // Tiles before sequence b.
  __device__ __forceinline__ int before_sequence(const DecodeArgs& args, const DecodePlan& plan, int b,
                                                 int tile_keys) const {
    int sum = before;
#pragma unroll 1
    for (int other = threadIdx.x % 32 * count; other < b && other < args.batch; ++other) {
      if (other >= (static_cast<int>(threadIdx.x) % 32 + 1) * count) break;
      sum += tiles_of_works(args, plan, other, tile_keys);
    }
    return __shfl_sync(~0u, sum, b / count);
  }
};

// What a block has of a work: tiles [tile, tile + tiles) of its keys.
struct Segment {
  int b = 0, head = 0, row_tile = 0;
  int tile = 0, tiles = 0;
  bool whole = false;
  int part = 0;  // its place in scratch, unless it is whole
};

// The place of a work in scratch, where it is cut in pieces: that of its first part.
__device__ __forceinline__ int first_piece(const DecodeArgs& args, const DecodePlan& plan, int b, int work) {
  return (b * works_of(args, plan) + work) * plan.pieces;
}

// The segments of a block, in order.
class Walk {
 public:
  __device__ __forceinline__ Walk(const DecodeArgs& args, const DecodePlan& plan, int tile_keys) {
    const Deal deal = Deal::make(args, plan, tile_keys);
    run_ = deal.run;
    begin_ = next_ = static_cast<int>(blockIdx.x) * deal.run;
    end_ = min(next_ + deal.run, deal.total);
    if (next_ >= end_) return;
    int before = 0;
    if (args.batch > 1) {
      int b = threadIdx.x % 32 * deal.count;
      before = deal.before;
      const bool is_here = deal.before <= next_ && next_ < deal.before + deal.own;
#pragma unroll 1
      while (is_here) {
        const int tiles = tiles_of_works(args, plan, b, tile_keys);
        if (before + tiles > next_) break;
        before += tiles;
        ++b;
      }
      const int from = __ffs(static_cast<int>(__ballot_sync(~0u, is_here))) - 1;
      b_ = __shfl_sync(~0u, b, from);
      before = __shfl_sync(~0u, before, from);
    }
    const int inside = next_ - before;
    const int tiles = tiles_of(keys_of_sequence(args, b_), tile_keys);
    work_ = inside / tiles;
    at_ = inside % tiles;
    if (plan.piece_tiles > 0) {
      const int piece = piece_of(plan, tiles), behind = at_ % piece;
      if (behind > 0) take(args, plan, tiles, min(piece - behind, tiles - at_));
    }
  }

  __device__ __forceinline__ bool has_more() const { return next_ < end_; }

  // The sequence of the next segment.
  __device__ __forceinline__ int b() const { return b_; }
  // The first tile of the next segment, among all; and the tiles of a run.
  __device__ __forceinline__ int2 place() const { return make_int2(next_, run_); }

  // tiles: of keys of that sequence.
  __device__ __forceinline__ Segment next(const DecodeArgs& args, const DecodePlan& plan, int tiles) {
    Segment segment;
    segment.b = b_;
    segment.head = work_;
    if (plan.row_tiles > 1) {
      segment.head = work_ / plan.row_tiles;
      segment.row_tile = work_ % plan.row_tiles;
    }
    segment.tile = at_;
    if (plan.piece_tiles > 0) {
      const int piece = piece_of(plan, tiles);
      segment.tiles = min(piece, tiles - at_);
      segment.part = first_piece(args, plan, b_, work_) + at_ / piece;
    } else {
      segment.tiles = min(end_ - next_, tiles - at_);
      segment.part = 2 * static_cast<int>(blockIdx.x) + (next_ == begin_ ? 0 : 1);
    }
    segment.whole = segment.tiles == tiles;
    take(args, plan, tiles, segment.tiles);
    return segment;
  }

 private:
  __device__ __forceinline__ void take(const DecodeArgs& args, const DecodePlan& plan, int tiles, int taken) {
    next_ += taken;
    at_ += taken;
    if (at_ < tiles) return;
    at_ = 0;
    if (++work_ == works_of(args, plan)) {
      work_ = 0;
      ++b_;
    }
  }

  int run_ = 0, begin_ = 0, next_ = 0, end_ = 0;  // tiles among all
  int b_ = 0, work_ = 0, at_ = 0;                 // where next_ lies: tile at_ of work work_ of sequence b_
};

}  // namespace flash_ext::decode
