// What the decode kernel is handed: queries, a cache of keys and values where it lies, and how many rows of it each
// sequence has, which only the device knows.
//
//   cache (slots, rows, heads, cols)            sequence b has slot b, or slot_of[b]
//   pool  (pages, rows of a page, heads, cols)  sequence b has pages table[b, 0], table[b, 1], ...
//
// A sequence attends to min(lengths[b] + added, capacity) rows, to none where that, or its slot, is not there. Filled
// by torch/cache_kernel.cpp, read by kernels/decode/. Invariant: whatever lengths, slots and pages hold, no access is
// outside the tensors; what no query sees is not read.
#pragma once

#include <cstdint>

#include "core/args.h"

namespace flash_ext {

// Strides in elements; columns are contiguous, and rows begin at multiples of 16 bytes.
struct CacheView {
  const void* data = nullptr;
  int64_t slot_stride = 0, row_stride = 0, head_stride = 0;  // slot: page of a pool
};

// One number a (sequence, head); data == nullptr: absent.
struct HeadView {
  const float* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0;

  FLASH_DEVICE float at(int b, int head, float absent) const {
    return data == nullptr ? absent : data[b * batch_stride + head * head_stride];
  }
};

struct DecodeArgs {
  static constexpr int kMostRows = 1 << 30;  // so that a row, an offset and a bound add up in 32 bits

  DType dtype = DType::kBFloat16;  // of q and out: 16 bits
  bool fp8 = false;                // k and v are of e4m3
  int batch = 0, len_q = 0, heads_q = 0, heads_k = 0, head_dim = 0;
  int capacity = 0;   // rows that a sequence can have, from 1 to kMostRows - len_q
  int added = 0;      // rows behind lengths[b]
  int slots = 0;      // pages of a pool
  int page_rows = 0;  // 0: not paged

  float scale = 1.f, softcap = 0.f;         // softcap 0: off
  bool bottom_right = true;                 // query i has position i + rows - len_q; else i
  int left = kMostRows, right = kMostRows;  // the window; causal: right is at most 0. kMostRows: no bound

  CacheView q;  // slot: sequence
  CacheView k, v;
  const int32_t* lengths = nullptr;  // [batch]
  const int32_t* slot_of = nullptr;  // [batch], or null
  const int32_t* table = nullptr;    // [batch, columns] where paged
  int64_t table_stride = 0;
  HeadView k_descale, v_descale;  // factors of fp8
  HeadView alibi, sinks;          // of query heads; sinks are shared by the batch

  void* out = nullptr;   // [batch, len_q, heads_q, head_dim], contiguous
  float* lse = nullptr;  // [batch, heads_q, len_q], contiguous, natural log; null: not wanted
  void* stream = nullptr;
};

// What the host decides without knowing a length.
struct DecodePlan {
  bool runs = false;       // whether there is a kernel for the call
  bool too_large = false;  // there is not because tiles are too many
  int tile_rows = 0;       // query rows of a block: (query, head of a group of heads)
  int row_tiles = 0;       // of each key head
  int part_rows = 0;       // rows of a part in scratch
  int group = 1;           // query heads of a key head
  unsigned of_group = 0;   // at / group is the high word of at * of_group; 0: group is 1
  int stages = 0;          // of the ring of keys and values
  int grid = 0;
  int least_tiles = 1;        // of keys, in a block's run
  int piece_tiles = 0;        // 0: runs end anywhere; else keys are cut by a sequence's own length, see work.cuh
  int most_pieces = 1;        // of the keys of a sequence
  int pieces = 0;             // the same, of no more keys than the capacity
  bool merges = true;         // whether there may be parts to merge
  bool tells_places = false;  // the kernel writes which parts a work has, else the merge finds them
  bool dependent = false;     // the merge may be launched before the kernel has ended
  int64_t parts = 0;          // that scratch has room for
  int64_t shared_bytes = 0, scratch_bytes = 0;
};

}  // namespace flash_ext
