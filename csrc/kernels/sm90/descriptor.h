// How a tile of 16-bit numbers lies in shared memory for TMA and wgmma, and the 64-bit descriptors that say so.
//
//   tile = panels of 64 columns; a panel is `rows` rows of 128 bytes, its 16-byte chunks permuted by row (swizzle
//   128B): byte offset = panel * rows * 128 + row * 128 + (chunk XOR row mod 8) * 16
//
// The same tile is read in two ways: K-major, the columns are the k of the product (Q and K of Q K^T), and MN-major,
// the rows are (V of P V). Pure functions, called by the kernels of sm90/ and, on the host, by their tests.
// Invariant: a tile starts at a multiple of 1024 bytes (8 rows of a panel, the swizzle's period), or the hardware's
// permutation, which looks at address bits, is another one.
#pragma once

#include <cstdint>

#include "core/portable.h"

namespace flash_ext::sm90 {

constexpr int kPanelBytes = 128;  // of a row
constexpr int kPanelCols = kPanelBytes / 2;
constexpr int kTileAlign = 1024;

FLASH_DEVICE constexpr int panels(int cols) { return (cols + kPanelCols - 1) / kPanelCols; }
FLASH_DEVICE constexpr int panel_size(int rows) { return rows * kPanelBytes; }
FLASH_DEVICE constexpr int tile_bytes(int rows, int cols) { return panels(cols) * panel_size(rows); }

// Offset of element (row, col) in a tile of `rows` rows.
FLASH_DEVICE constexpr int tile_offset(int rows, int row, int col) {
  const int byte = col % kPanelCols * 2;
  return col / kPanelCols * panel_size(rows) + row * kPanelBytes + (byte ^ (row & 7) << 4);
}

// PTX ISA, "Matrix Descriptor Format": start [0, 14), leading [16, 30) and stride [32, 46) byte offset, all divided by
// 16; layout [62, 64), 1 for the 128-byte swizzle. `address` is a 32-bit address of the shared window.
FLASH_DEVICE constexpr uint64_t make_descriptor(uint32_t address, int leading_bytes, int stride_bytes) {
  return static_cast<uint64_t>(address >> 4 & 0x3FFF) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// K-major: 8 rows further is 1024 bytes; the leading offset has no meaning under a swizzle that spans all of k.
FLASH_DEVICE constexpr uint64_t k_major(uint32_t address) { return make_descriptor(address, 16, kTileAlign); }

// MN-major: 8 rows (of k) further is 1024 bytes, 64 columns further is the next panel.
FLASH_DEVICE constexpr uint64_t mn_major(uint32_t address, int rows) {
  return make_descriptor(address, panel_size(rows), kTileAlign);
}

// What is added to a descriptor for the k-th step of 16: inside a panel the swizzle permits plain addition, because the
// 32 bytes of a step never carry into the row bits.
FLASH_DEVICE constexpr uint64_t k_major_step(int rows, int k) {
  return static_cast<uint64_t>((k * 16 / kPanelCols * panel_size(rows) + k * 16 % kPanelCols * 2) >> 4);
}
// And for rows, a multiple of 8, of a K-major tile of at least as many.
FLASH_DEVICE constexpr uint64_t k_major_rows(int rows) { return static_cast<uint64_t>(rows * kPanelBytes >> 4); }
FLASH_DEVICE constexpr uint64_t mn_major_step(int k) { return static_cast<uint64_t>(k * 16 * kPanelBytes >> 4); }

}  // namespace flash_ext::sm90
