// Stands in for csrc/gpu/wgmma.cuh: products are made when the thread waits for their group, from what shared
// memory then holds; A in registers is taken when the product is issued.
#pragma once

#include <array>

#include "described_tile.h"
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

template <class T, int kN>
struct Wgmma {
  using Tile = emulated::DescribedTile;
  static constexpr bool kIsFp16 = std::is_same_v<T, __half>;

  template <int kMnA = 0, int kMnB = 0>
  static void ss(float (&c)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    emulated::later([c = &c[0], a, b, accumulate] {
      const Tile left(a, kIsFp16, kMnA != 0);
      const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + emulated::lane() / 4;
      Tile(b, kIsFp16, kMnB != 0).multiply(c, kN, {left.row(row), left.row(row + 8)}, accumulate != 0);
    });
  }
  template <int kMnB = 1>
  static void rs(float (&c)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    struct Operand {
      T x[8];
    } mine;
    std::memcpy(mine.x, a, sizeof(mine));
    const auto lanes = emulated::exchange("wgmma", mine);
    std::array<emulated::Row, 2> rows;
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < 16; ++k) {
        const Operand from = lanes[emulated::lane() / 4 * 4 + k % 8 / 2];
        rows[half][k] = emulated::to_float(from.x[(k / 8 * 2 + half) * 2 + k % 2]);
      }
    }
    emulated::later(
        [c = &c[0], rows, b, accumulate] { Tile(b, kIsFp16, kMnB != 0).multiply(c, kN, rows, accumulate != 0); });
  }
};

template <int kN>
struct Wgmma<E4m3, kN> {
  using Tile = emulated::DescribedTile;

  static void ss(float (&c)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    emulated::later([c = &c[0], a, b, accumulate] {
      const Tile left(a, false, false);
      const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + emulated::lane() / 4;
      Tile(b, false, false).multiply(c, kN, std::array{left.fp8_row(row), left.fp8_row(row + 8)}, accumulate != 0);
    });
  }
  template <int kMnB = 0>
  static void rs(float (&c)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    static_assert(kMnB == 0);
    struct Operand {
      __nv_fp8_e4m3 x[16];
    } mine;
    std::memcpy(static_cast<void*>(mine.x), a, sizeof(mine));
    const auto lanes = emulated::exchange("wgmma", mine);
    std::array<emulated::Fp8Row, 2> rows;
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < 32; ++k) {
        const Operand from = lanes[emulated::lane() / 4 * 4 + k % 16 / 4];
        rows[half][k] = static_cast<float>(from.x[(k / 16 * 2 + half) * 4 + k % 4]);
      }
    }
    emulated::later([c = &c[0], rows, b, accumulate] { Tile(b, false, false).multiply(c, kN, rows, accumulate != 0); });
  }
};

}  // namespace flash_ext
