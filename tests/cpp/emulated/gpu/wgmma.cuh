// Stands in for csrc/gpu/wgmma.cuh: products are made when the thread waits for their group, from what shared
// memory then holds; A in registers is taken when the product is issued.
#pragma once

#include <array>

#include "gpu/ptx.cuh"

namespace flash_ext {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulated::commit_work(); }
template <int kPending>
void wgmma_wait() {
  emulated::wait_work(kPending);
  __syncwarp();  // .sync.aligned: it is the warp that has waited
}

template <int kCount>
void fence_registers(float (&)[kCount]) {}
template <int kCount>
void fence_registers(uint32_t (&)[kCount]) {}
template <class First, class Second, class... Others>
void fence_registers(First&, Second&, Others&...) {}

// A tile of 16-bit numbers in shared memory as a descriptor says (descriptor.h); (mn, k) counts from where it starts.
template <class T, bool kMnMajor>
struct DescribedTile {
  uint32_t start, leading, stride;

  explicit DescribedTile(uint64_t descriptor)
      : start(static_cast<uint32_t>(descriptor & 0x3FFF) << 4),
        leading(static_cast<uint32_t>(descriptor >> 16 & 0x3FFF) << 4),
        stride(static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4) {
    if (descriptor >> 62 != 1) emulated::give_up("a descriptor without the 128-byte swizzle");
  }
  float at(int mn, int k) const {
    const uint32_t linear = kMnMajor ? start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                                     : start + mn / 8 * stride + mn % 8 * 128 + k * 2;
    return static_cast<float>(at_shared<T>(linear ^ (linear >> 7 & 7) << 4));
  }
};

template <class T, int kN>
struct Wgmma {
  // Row 16 w + g + 8 h of A, column of B.
  template <class GetA, class GetB>
  static void multiply(float* c, const GetA& a, const GetB& b, bool accumulate) {
    const int lane = emulated::lane(), g = lane / 4, t = lane % 4;
    for (int i = 0; i < kN / 2; ++i) {
      const int row = g + i % 4 / 2 * 8, col = i / 4 * 8 + 2 * t + i % 2;
      float sum = 0.f;
      for (int k = 0; k < 16; ++k) sum += a(row, k) * b(col, k);
      c[i] = accumulate ? c[i] + sum : sum;
    }
  }
  template <int kMnA = 0, int kMnB = 0>
  static void ss(float (&c)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    emulated::later([c = &c[0], a, b, accumulate] {
      const DescribedTile<T, kMnA != 0> left(a);
      const DescribedTile<T, kMnB != 0> right(b);
      const int first = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
      multiply(
          c, [&](int row, int k) { return left.at(first + row, k); }, [&](int col, int k) { return right.at(col, k); },
          accumulate != 0);
    });
  }
  template <int kMnB = 1>
  static void rs(float (&c)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    struct Operand {
      T x[8];
    } mine;
    std::memcpy(mine.x, a, sizeof(mine));
    const auto lanes = emulated::exchange("wgmma", mine);
    std::array<std::array<float, 16>, 2> rows;  // of this lane: g and g + 8
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < 16; ++k) {
        const Operand from = lanes[emulated::lane() / 4 * 4 + k % 8 / 2];
        rows[half][k] = static_cast<float>(from.x[(k / 8 * 2 + half) * 2 + k % 2]);
      }
    }
    emulated::later([c = &c[0], rows, b, accumulate] {
      const DescribedTile<T, kMnB != 0> right(b);
      multiply(
          c, [&](int row, int k) { return rows[row / 8][k]; }, [&](int col, int k) { return right.at(col, k); },
          accumulate != 0);
    });
  }
};

}  // namespace flash_ext
