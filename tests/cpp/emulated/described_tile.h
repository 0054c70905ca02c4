// What wgmma reads: tiles of numbers of 16 bits, or of e4m3, in shared memory.
#pragma once

#include <array>
#include <cstdint>

namespace flash_ext::emulated {

using Row = std::array<float, 16>;     // a row of A or a column of B, over the 16 k of one instruction
using Fp8Row = std::array<float, 32>;  // of e4m3

// A tile as a descriptor says (csrc/kernels/sm90/descriptor.h): bf16 or fp16, K-major or MN-major; (mn, k) counts from
// its start.
class DescribedTile {
 public:
  DescribedTile(uint64_t descriptor, bool is_fp16, bool is_mn_major);
  Row row(int mn) const;         // (mn, 0) to (mn, 15)
  Fp8Row fp8_row(int mn) const;  // of e4m3, K-major, (mn, 0) to (mn, 31)

  // This tile is B. a: rows g and g + 8 of the warp's 16; c: this lane's part of 16 x n, as the PTX ISA lays it.
  void multiply(float* c, int n, const std::array<Row, 2>& a, bool accumulate) const;
  void multiply(float* c, int n, const std::array<Fp8Row, 2>& a, bool accumulate) const;

 private:
  uint32_t start_, leading_, stride_;
  bool is_fp16_, is_mn_major_;
};

}  // namespace flash_ext::emulated
