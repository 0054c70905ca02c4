// What the accesses of mma.sync kernels to tiles in shared memory cost: a model of its banks, counted on the host.
// bank_conflicts_test.cpp holds it against counts made by hand and makes the tables of docs/learn/5-shared-memory.md.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "core/smem.h"

namespace flash_ext::smem {

constexpr int kLanes = 32;
constexpr int kBanks = 32;
constexpr int kWordBytes = 4;

using TileLayout = int (*)(int row, int byte);  // byte offset in the tile: swizzled<kPitch> and these two
using LaneAddresses = std::array<int, kLanes>;

template <int kPitch>
int naive(int row, int byte) {
  return row * kPitch + byte;
}

template <int kPitch>
int padded(int row, int byte) {
  return row * (kPitch + kChunkBytes) + byte;
}

// swizzled() for tiles of float, whose accesses by word and by pair take two chunks (8 columns) of 4 rows at once:
// these rows must differ in the key's upper two bits. swizzled() gives that to every other row only; here, with row
// bits b2 b1 b0, the upper two are b1 and b0 XOR b2, which differ over {0, 2, 4, 6} and over {0, 1, 2, 3}. NOTE: the
// lowest one is b2, so the 8 keys of 8 rows still differ, and all that swizzled() promises holds.
template <int kPitch>
int swizzled_fp32(int row, int byte) {
  static_assert(kPitch % kLineBytes == 0, "a row is a number of whole lines");
  const int key = (row << 1 & 6) ^ (row >> 2 & 1) * 3;
  return row * kPitch + (byte ^ key * kChunkBytes);
}

// Passes over the banks that one instruction of a warp needs beyond those that its bytes fill.
// The model is that of the CUDA programming guide ("Shared Memory", compute capability 5.x and later): successive words
// of 4 bytes belong to successive ones of 32 banks; a bank serves one word a pass, to every lane that wants it. A pass
// moves 128 bytes. NOTE: the guide says no more for wider accesses on these cards; that lanes of 8 bytes go by halves
// of the warp and lanes of 16 bytes by quarters, in lane order, is this model's assumption.
// ldmatrix .x4 is four such quarters, one for each matrix of 8 rows of 16 bytes; .x2 is two: give 16 addresses.
inline int conflicts(std::span<const int> addresses, int bytes_per_lane) {
  const int lanes = kLineBytes / bytes_per_lane, words_per_lane = bytes_per_lane / kWordBytes;
  int extra = 0;
  for (size_t first = 0; first < addresses.size(); first += lanes) {
    std::array<int, kBanks> words{};  // of this pass; a lane of more than 4 bytes has several
    int* end = words.begin();
    for (const int address : addresses.subspan(first, lanes)) {
      for (int word = 0; word < words_per_lane; ++word) *end++ = address / kWordBytes + word;
    }
    std::sort(words.begin(), end);
    end = std::unique(words.begin(), end);
    std::array<int, kBanks> wanted{};
    for (const int* word = words.begin(); word != end; ++word) ++wanted[*word % kBanks];
    extra += *std::max_element(wanted.begin(), wanted.end()) - 1;
  }
  return extra;
}

// The accesses of mma.sync kernels. g = lane / 4 and t = lane mod 4, as in the PTX manual's fragments.
template <class Address>
LaneAddresses each_lane(Address address) {
  LaneAddresses addresses;
  for (int lane = 0; lane < kLanes; ++lane) addresses[lane] = address(lane);
  return addresses;
}

// cp.async, and vector loads and stores of whole rows: successive lanes take successive pieces of `bytes` (16; 4 where
// pointers or strides allow no more), row after row.
inline LaneAddresses tile_copy(TileLayout at, int pitch, int first_piece, int bytes) {
  const int pieces = pitch / bytes;  // of a row
  return each_lane([=](int lane) {
    const int piece = first_piece + lane;
    return at(piece / pieces, piece % pieces * bytes);
  });
}

// ldmatrix.x4 of the A operand of m16n8k16, 16 rows by two chunks; with .trans, of V as two B operands (rows are keys).
// Of floats it is the A operand of m16n8k8: the instruction moves words and does not care what they hold.
inline LaneAddresses ldmatrix_a(TileLayout at, int row, int chunk) {
  return each_lane([=](int lane) { return at(row + lane % 16, (chunk + lane / 16) * kChunkBytes); });
}

// ldmatrix.x4 of the B operands of two m16n8k16 beside each other, 16 rows (n) by two chunks (k); with .trans, of an A
// operand that lies transposed.
inline LaneAddresses ldmatrix_b(TileLayout at, int row, int chunk) {
  return each_lane([=](int lane) { return at(row + lane % 8 + lane / 16 * 8, (chunk + lane / 8 % 2) * kChunkBytes); });
}

// An accumulator's columns 2t and 2t + 1 of row g, stored as a pair of `element_bytes` each: 4 or 8 bytes a lane.
inline LaneAddresses accumulator_pairs(TileLayout at, int row, int n_tile, int element_bytes) {
  return each_lane([=](int lane) { return at(row + lane / 4, (n_tile * 8 + lane % 4 * 2) * element_bytes); });
}

// Floats of an operand of m16n8k8 whose rows are k, one by one, because .trans would tear them apart: lane (g, t) takes
// column g of the 8 from row t * row_step. A step of 2 reads the keys in the order of an accumulator's columns, 2t
// (and, from the next row on, 2t + 1), so that P needs no exchange between lanes; a step of 1 is the operand's own
// order.
inline LaneAddresses float_columns(TileLayout at, int row, int n_tile, int row_step) {
  return each_lane([=](int lane) { return at(row + lane % 4 * row_step, (n_tile * 8 + lane / 4) * kWordBytes); });
}

}  // namespace flash_ext::smem
