// Where a tile's elements lie in shared memory. A tile is `rows` rows of `pitch` bytes, in chunks of 16 bytes: what one
// cp.async, one ldmatrix row and one vector store move. The 32 banks of 4 bytes are 8 chunks wide.
//
//   physical chunk = chunk XOR f(row)      f(row) = row mod 8 where rows are whole lines of 128 bytes,
//                                                   (row / 2) mod 4 where they are an odd number of half lines
//
// so that the same chunk of 8 successive rows lies in 8 different bank groups, and so do 8 successive chunks of a row.
// Called by the kernels of sm80/ and decode/. tests/cpp/bank_conflicts.h lists their accesses and counts what they cost
// (docs/learn/5-shared-memory.md has the table).
// Invariant: the XOR stays inside a row, for every pitch that is a multiple of 64 bytes.
#pragma once

#include "core/portable.h"

namespace flash_ext {

constexpr int kChunkBytes = 16;
constexpr int kLineBytes = 128;  // one pass over all banks

// Byte offset of `byte` of `row` in a swizzled tile.
template <int kPitch>
FLASH_DEVICE int swizzled(int row, int byte) {
  static_assert(kPitch % 64 == 0, "a row is a multiple of half a line");
  const int key = kPitch % kLineBytes == 0 ? row & 7 : row >> 1 & 3;
  return row * kPitch + (byte ^ key * kChunkBytes);
}

}  // namespace flash_ext
