// Matrix products of one warp on tensor cores, for operands in swizzled shared memory or in registers:
//
//   C[16 * kM, 8 * kN] += A B
//
// in terms of the fragments of fragments.cuh. Called by the kernels of sm80 and of decode.
#pragma once

#include "gpu/fragments.cuh"

namespace flash_ext {

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[m][n][i] = 0.f;
    }
  }
}

// One fragment C += a(0) b(0) + ... of kSteps steps of k.
// NOTE: the tensor core cuts off what its accumulator has no place for (relative error 1e-5 over 1,000 keys, measured).
// With kSplit the products of these steps alone are added there, small and large ones apart, the large ones in kChains
// sums, and C gets their sum by rounding additions. Mean error of sums of positive products in 2^-24 of them: -0.7 by
// single steps, -1.9 by four, -0.9 by four in two chains; four take 0.92 of the time of one. kChains = 0: in one sum,
// the small ones first, for where no registers are left for two.
template <class Frag, int kSteps, int kChains, class GetA, class GetB>
__device__ __forceinline__ void multiply_add(float (&c)[4], const GetA& a, const GetB& b) {
  if constexpr (!Frag::kSplit) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) Frag::mma(c, a(s), b(s));
  } else if constexpr (kChains == 0) {
    float sum[4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      mma_m16n8k8(sum, a(s).hi, b(s).lo);
      mma_m16n8k8(sum, a(s).lo, b(s).hi);
      mma_m16n8k8(sum, a(s).hi, b(s).hi);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += sum[i];
  } else {
    float small[4] = {}, large[kChains][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      mma_m16n8k8(small, a(s).lo, b(s).hi);
      mma_m16n8k8(large[s % kChains], a(s).hi, b(s).hi);
      mma_m16n8k8(small, a(s).hi, b(s).lo);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kChains == 2) large[0][i] += large[kChains - 1][i];
      c[i] += large[0][i] + small[i];
    }
  }
}

// C += A B, kSteps steps of k at once. load_a(fragment, m, k) and load_b(two fragments, n, k) read what they are named
// for. kAhead: the next fragments are asked for before the present ones are multiplied. NOTE: 2 to 3 %
// more speed where registers are left for it (forward, head dimension 64), 2 % less where they are not (128).
template <class Frag, int kDepth, int kSteps, int kChains, bool kAhead, int kM, int kN, class LoadA, class LoadB>
__device__ __forceinline__ void multiply(float (&c)[kM][kN][4], const LoadA& load_a, const LoadB& load_b) {
  if constexpr (kAhead) {
    constexpr int kDepthSteps = kDepth / Frag::kK;
    typename Frag::A a[2][kM];
    typename Frag::B b[2][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_a(a[0][m], m, 0);
    load_b(b[0], 0, 0);
#pragma unroll
    for (int k = 0; k < kDepthSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        const int step = k * (kN / 2) + n / 2;
        if (n + 2 < kN) {
          load_b(b[(step + 1) % 2], n + 2, k * Frag::kK);
        } else if (k + 1 < kDepthSteps) {
          load_b(b[(step + 1) % 2], 0, (k + 1) * Frag::kK);
        }
        if (n == 0 && k + 1 < kDepthSteps) {
#pragma unroll
          for (int m = 0; m < kM; ++m) load_a(a[(k + 1) % 2][m], m, (k + 1) * Frag::kK);
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          Frag::mma(c[m][n], a[k % 2][m], b[step % 2][0]);
          Frag::mma(c[m][n + 1], a[k % 2][m], b[step % 2][1]);
        }
      }
    }
  } else {
#pragma unroll Frag::kUnroll
    for (int k = 0; k < kDepth; k += kSteps * Frag::kK) {
      typename Frag::A a[kSteps][kM];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int m = 0; m < kM; ++m) load_a(a[s][m], m, k + s * Frag::kK);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        typename Frag::B b[kSteps][2];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) load_b(b[s], n, k + s * Frag::kK);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply_add<Frag, kSteps, kChains>(
                c[m][n + i], [&](int s) -> const auto& { return a[s][m]; },
                [&](int s) -> const auto& { return b[s][i]; });
          }
        }
      }
    }
  }
}

// C += A B^T: A rows from `row`, B rows from `col`, both with k in [0, kDepth) contiguous.
template <class Frag, int kDepth, bool kAhead = Frag::kAhead, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void gemm_nt(float (&c)[kM][kN][4], TileA a_tile, int row, TileB b_tile, int col) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
  constexpr int kSteps = Frag::template kSteps<kDepth>;
  multiply<Frag, kDepth, kSteps, kSteps == 4 ? 2 : 1, kAhead>(
      c, [&](auto& a, int m, int k) { Frag::load_a(a, a_tile, row + m * 16, k, lane); },
      [&](auto& b, int n, int k) { Frag::load_b_nt(b, b_tile, col + n * 8, k, lane); });
}

// C += A B: A stored [k][m] from column `row`, B stored [k][n] from column `col`, k in [0, kDepth).
template <class Frag, int kDepth, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void gemm_tn(float (&c)[kM][kN][4], TileA a_tile, int row, TileB b_tile, int col) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
  multiply<Frag, kDepth, Frag::template kSteps<TileB::kColumns>, 1, Frag::kAhead>(
      c, [&](auto& a, int m, int k) { Frag::load_a_trans(a, a_tile, k, row + m * 16, lane); },
      [&](auto& b, int n, int k) { Frag::load_b_nn(b, b_tile, k, col + n * 8, lane); });
}

// C += A B: A rows from `row` with k in [0, kDepth) contiguous, B stored [k][n] from column `col`.
template <class Frag, int kDepth, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void gemm_nn(float (&c)[kM][kN][4], TileA a_tile, int row, TileB b_tile, int col) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
  multiply<Frag, kDepth, Frag::template kSteps<TileB::kColumns>, 1, Frag::kAhead>(
      c, [&](auto& a, int m, int k) { Frag::load_a(a, a_tile, row + m * 16, k, lane); },
      [&](auto& b, int n, int k) { Frag::load_b_nn(b, b_tile, k, col + n * 8, lane); });
}

// Accumulators as the A operand of the next product.
template <class Frag, int kM, int kN>
struct Operands {
  typename Frag::template Operand<kN> row[kM];
};

template <class Frag, int kM, int kN>
__device__ __forceinline__ Operands<Frag, kM, kN> operands(const float (&c)[kM][kN][4]) {
  if constexpr (kM == 1) {
    return {{typename Frag::template Operand<kN>(c[0])}};
  } else {
    static_assert(kM == 2);
    return {{typename Frag::template Operand<kN>(c[0]), typename Frag::template Operand<kN>(c[1])}};
  }
}

// What multiply_add is told by gemm_from_registers.
template <int kSteps_, int kChains_>
struct StepSums {
  static constexpr int kSteps = kSteps_, kChains = kChains_;
};

struct Nothing {
  __device__ __forceinline__ void operator()(int, int) const {}
};

// C += P B, P in registers, B rows (k) from `k0`, columns from `col`. between(i, n) is called after part i of n, for
// what shall be done while the tensor core works. Sums: void for those of head dimension TileB::kColumns.
template <class Frag, class Sums = void, bool kAhead = Frag::kAhead, int kM, int kN, int kP, class TileB,
          class Between = Nothing>
__device__ __forceinline__ void gemm_from_registers(float (&c)[kM][kN][4], const Operands<Frag, kM, kP>& p,
                                                    TileB b_tile, int k0, int col, const Between& between = {}) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
  using UsedSums = std::conditional_t<std::is_void_v<Sums>, StepSums<Frag::template kSteps<TileB::kColumns>, 1>, Sums>;
  constexpr int kSteps = UsedSums::kSteps, kRow = kSteps * Frag::kK;
  constexpr int kBuffers = kAhead ? 2 : 1, kDepthRows = kP * 8 / kRow;
  static_assert(kDepthRows * kRow == kP * 8 && (!kAhead || kSteps == 1));
  typename Frag::B b[kBuffers][kSteps][2];
  if (kAhead) Frag::load_b_nn(b[0][0], b_tile, k0, col, lane);
#pragma unroll
  for (int k = 0; k < kDepthRows; ++k) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const int turn = k * (kN / 2) + n / 2;
      if (!kAhead) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          Frag::load_b_nn(b[0][s], b_tile, k0 + k * kRow + s * Frag::kK, col + n * 8, lane);
        }
      }
      if (kAhead && n + 2 < kN) {
        Frag::load_b_nn(b[(turn + 1) % kBuffers][0], b_tile, k0 + k * kRow, col + n * 8 + 16, lane);
      } else if (kAhead && k + 1 < kDepthRows) {
        Frag::load_b_nn(b[(turn + 1) % kBuffers][0], b_tile, k0 + (k + 1) * kRow, col, lane);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        typename Frag::A a[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) a[s] = p.row[m].step(k * kRow + s * Frag::kK);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply_add<Frag, kSteps, UsedSums::kChains>(
              c[m][n + i], [&](int s) -> const auto& { return a[s]; },
              [&](int s) -> const auto& { return b[turn % kBuffers][s][i]; });
        }
      }
    }
    between(k, kDepthRows);
  }
}

// C += A B with A computed on the way, 16-bit types: A is an accumulator of which `make(m, n, half)` finishes rows g
// (half 0) or g + 8 of block n. It is called for a step of k while the products of the step before are issued.
template <class Frag, bool kAhead = Frag::kAhead, int kM, int kN, int kP, class TileB, class Make>
__device__ __forceinline__ void gemm_from_accumulators(float (&c)[kM][kN][4], float (&p)[kM][kP][4], TileB b_tile,
                                                       const Make& make) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
  constexpr int kBuffers = kAhead ? 2 : 1, kPairs = kN / 2, kDepthSteps = kP / 2;
  typename Frag::A a[2][kM];
  // Word i of the fragments of a step.
  const auto make_word = [&](int k, int i) {
    const int m = i / 4, n = 2 * k + i % 4 / 2, half = i % 2;
    make(m, n, half);
    a[k % 2][m].r[i % 4] = Frag::pack(p[m][n][2 * half], p[m][n][2 * half + 1]);
  };
  typename Frag::B b[kBuffers][2];
  if (kAhead) Frag::load_b_nn(b[0], b_tile, 0, 0, lane);
#pragma unroll
  for (int i = 0; i < 4 * kM; ++i) make_word(0, i);
#pragma unroll
  for (int k = 0; k < kDepthSteps; ++k) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int turn = k * kPairs + pair, next = turn + 1;
      if (!kAhead) {
        Frag::load_b_nn(b[0], b_tile, k * 16, pair * 16, lane);
      } else if (next < kDepthSteps * kPairs) {
        Frag::load_b_nn(b[next % kBuffers], b_tile, next / kPairs * 16, next % kPairs * 16, lane);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) Frag::mma(c[m][2 * pair + i], a[k % 2][m], b[turn % kBuffers][i]);
      }
      if (k + 1 < kDepthSteps) {
#pragma unroll
        for (int i = pair * 4 * kM / kPairs; i < (pair + 1) * 4 * kM / kPairs; ++i) make_word(k + 1, i);
      }
    }
  }
}

}  // namespace flash_ext
