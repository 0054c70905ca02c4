#include "described_tile.h"

#include "warp.h"

namespace flash_ext::emulated {
namespace {

// (mn, 0) to (mn, 7) of half a tile's row, from where they would lie without the swizzle.
template <class T>
void read(float* row, uint32_t address, bool is_mn_major) {
  const auto swizzled = [](uint32_t linear) { return shared_memory() + (linear ^ (linear >> 7 & 7) << 4); };
  T numbers[8];
  if (is_mn_major) {
    for (uint32_t k = 0; k < 8; ++k) std::memcpy(&numbers[k], swizzled(address + k * 128), sizeof(T));
  } else {
    std::memcpy(numbers, swizzled(address), sizeof(numbers));
  }
  for (int k = 0; k < 8; ++k) row[k] = to_float(numbers[k]);
}

// rows(i): column i of B.
template <class OneRow, class Rows>
void multiply_rows(float* c, int n, const std::array<OneRow, 2>& a, bool accumulate, const Rows& rows) {
  for (int i = 0; i < n / 8; ++i) {
    const OneRow columns[2] = {rows(i * 8 + 2 * (lane() % 4)), rows(i * 8 + 2 * (lane() % 4) + 1)};
    float sums[4] = {};
    for (size_t k = 0; k < columns[0].size(); ++k) {
      for (int j = 0; j < 4; ++j) sums[j] += a[j / 2][k] * columns[j % 2][k];
    }
    for (int j = 0; j < 4; ++j) c[i * 4 + j] = accumulate ? c[i * 4 + j] + sums[j] : sums[j];
  }
}

}  // namespace

DescribedTile::DescribedTile(uint64_t descriptor, bool is_fp16, bool is_mn_major)
    : start_(static_cast<uint32_t>(descriptor & 0x3FFF) << 4),
      leading_(static_cast<uint32_t>(descriptor >> 16 & 0x3FFF) << 4),
      stride_(static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4),
      is_fp16_(is_fp16),
      is_mn_major_(is_mn_major) {
  if (descriptor >> 62 != 1) give_up("a descriptor without the 128-byte swizzle");
}

Row DescribedTile::row(int mn) const {
  Row result;
  const auto position = static_cast<uint32_t>(mn);
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t address = is_mn_major_ ? start_ + position / 64 * leading_ + half * stride_ + position % 64 * 2
                                          : start_ + position / 8 * stride_ + position % 8 * 128 + half * 16;
    float* part = &result[half * 8];
    is_fp16_ ? read<__half>(part, address, is_mn_major_) : read<__nv_bfloat16>(part, address, is_mn_major_);
  }
  return result;
}

Fp8Row DescribedTile::fp8_row(int mn) const {
  const auto position = static_cast<uint32_t>(mn);
  Fp8Row result;
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t linear = start_ + position / 8 * stride_ + position % 8 * 128 + half * 16;
    __nv_fp8_e4m3 numbers[16];
    std::memcpy(numbers, shared_memory() + (linear ^ (linear >> 7 & 7) << 4), sizeof(numbers));
    for (int k = 0; k < 16; ++k) result[half * 16 + k] = static_cast<float>(numbers[k]);
  }
  return result;
}

void DescribedTile::multiply(float* c, int n, const std::array<Row, 2>& a, bool accumulate) const {
  multiply_rows(c, n, a, accumulate, [this](int mn) { return row(mn); });
}

void DescribedTile::multiply(float* c, int n, const std::array<Fp8Row, 2>& a, bool accumulate) const {
  multiply_rows(c, n, a, accumulate, [this](int mn) { return fp8_row(mn); });
}

}  // namespace flash_ext::emulated
