// S = Q K^T and O += P V of a warp: its rows and one tile of keys of its group. Keys and values of 16 bits by the
// fragments of mma.sync; e4m3 as pairs of bytes, which ldmatrix moves as numbers of 16 bits, made fp16 in registers:
//
//   K   a lane gets 4 numbers in a row of 16: {4t, 4t + 1} are its first word of B, {4t + 2, 4t + 3} its second. So
//       columns of Q lie in the order of query.cuh
//   V   transposed, a lane gets columns 2g and 2g + 1 of keys 2t and 2t + 1. Even columns of 16 make one block of 8
//       columns, odd ones the next: column_of() says which one an accumulator is of
//
// Called by kernel.cuh. Invariant: e4m3 is exact in fp16, NaN stays NaN.
#pragma once

#include <cuda_fp8.h>

#include "gpu/mma.cuh"
#include "kernels/decode/config.h"

namespace flash_ext::decode {

// Two numbers of fp16 of the low two bytes.
__device__ __forceinline__ uint32_t half_of_e4m3(uint32_t bytes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3);
  return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

template <class Traits>
struct Products {
  using Frag = Fragments16<typename Traits::T>;
  using QueryTile = SmemTile<typename Traits::T, Traits::kHeadDim>;
  using KeyTile = SmemTile<typename Traits::T, Traits::kRowBytes / 2>;  // e4m3: of pairs
  static constexpr int kM = Traits::kM, kSteps = Traits::kHeadDim / 16, kBlocks = Traits::kKeys / 8;
  using Scores = float[kM][kBlocks][4];
  using Out = float[kM][Traits::kHeadDim / 8][4];

  QueryTile tile;  // of all rows of the block
  int row;         // of this warp's first
  typename Frag::A query[Traits::kQueryInRegisters ? kSteps : 1];

  // Which column an accumulator of Out is of.
  static __device__ __forceinline__ int column_of(int n, int i) {
    const int t = lane_column();
    return Traits::kFp8 ? n / 2 * 16 + 4 * t + 2 * (i % 2) + n % 2 : n * 8 + 2 * t + i % 2;
  }

  __device__ __forceinline__ void load_query() {
    if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) Frag::load_a(query[k], tile, row, 16 * k, threadIdx.x % 32);
    }
  }
  __device__ __forceinline__ void query_at(typename Frag::A& a, int m, int k) const {
    if constexpr (Traits::kQueryInRegisters) {
      a = query[k / 16];
    } else {
      Frag::load_a(a, tile, row + 16 * m, k, threadIdx.x % 32);
    }
  }

  __device__ __forceinline__ void scores(Scores& s, KeyTile keys) const {
    clear(s);
    const unsigned lane = threadIdx.x % 32;
    if constexpr (!Traits::kFp8) {
      multiply<Frag, Traits::kHeadDim, 1, 1, kM == 1>(
          s, [&](auto& a, int m, int k) { query_at(a, m, k); },
          [&](auto& b, int n, int k) { Frag::load_b_nt(b, keys, n * 8, k, lane); });
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        typename Frag::A a[2][kM];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          query_at(a[0][m], m, 16 * k);
          query_at(a[1][m], m, 16 * k + 16);
        }
#pragma unroll
        for (int n = 0; n < kBlocks; n += 2) {
          typename Frag::B pairs[2];  // of block n + i: steps k and k + 1
          Frag::load_b_nt(pairs, keys, n * 8, 8 * k, lane);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              const uint32_t bytes = pairs[i].r[step];
              const typename Frag::B b{{half_of_e4m3(bytes), half_of_e4m3(bytes >> 16)}};
#pragma unroll
              for (int m = 0; m < kM; ++m) Frag::mma(s[m][n + i], a[step][m], b);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add_values(Out& o, const Scores& s, KeyTile values) const {
    const auto p = operands<Frag>(s);
    if constexpr (!Traits::kFp8) {
      gemm_from_registers<Frag, StepSums<1, 1>, kM == 1>(o, p, values, 0, 0);
    } else {
      const unsigned lane = threadIdx.x % 32;
#pragma unroll
      for (int k = 0; k < Traits::kKeys; k += 16) {
#pragma unroll
        for (int n = 0; n < Traits::kHeadDim / 8; n += 4) {
          typename Frag::B pairs[2];  // of columns 8 n to 8 n + 15, and the 16 behind
          Frag::load_b_nn(pairs, values, k, n * 4, lane);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t low = pairs[i].r[0], high = pairs[i].r[1];  // keys 2t and 2t + 1, the same + 8
            const typename Frag::B even{
                {half_of_e4m3(__byte_perm(low, 0, 0x20)), half_of_e4m3(__byte_perm(high, 0, 0x20))}};
            const typename Frag::B odd{
                {half_of_e4m3(__byte_perm(low, 0, 0x31)), half_of_e4m3(__byte_perm(high, 0, 0x31))}};
#pragma unroll
            for (int m = 0; m < kM; ++m) {
              const typename Frag::A a = p.row[m].step(k);
              Frag::mma(o[m][n + 2 * i], a, even);
              Frag::mma(o[m][n + 2 * i + 1], a, odd);
            }
          }
        }
      }
    }
  }
};

}  // namespace flash_ext::decode
