// Matrix products of one warp on tensor cores, for operands in swizzled shared memory or in registers:
//
//   C[16 * kM, 8 * kN] += A B
//
// in terms of fragments of mma.sync (PTX ISA, "Matrix fragments for mma.m16n8k16"): with g = lane / 4, t = lane % 4 an
// accumulator c[4] holds rows {g, g + 8} x columns {2t, 2t + 1}. Names say how an operand lies in shared memory:
//   a  [m][k]      a_trans  [k][m]      b_nt  [n][k] (k contiguous)      b_nn  [k][n] (n contiguous)
// Called by fwd.cuh, bwd.cuh and bias_gradient.cuh. Two families: 16-bit types with k = 16 a step, float with k = 8
// TF32 numbers a step, where a float is split as hi + lo and three products give float accuracy.
// Invariant: operands loaded by a_for_nn, a_trans, b_nn and from an accumulator agree on the order of k within a step;
// for TF32 that is {0, 2, 4, 6, 1, 3, 5, 7}, which makes an accumulator an A operand as it is.
#pragma once

#include "attention/smem_plan.h"
#include "sm80/kernels.h"
#include "sm80/ptx.cuh"

namespace flash_ext::sm80 {

// A tile in shared memory, rows of kCols elements of T, swizzled.
template <class T, int kCols>
struct SmemTile {
  static constexpr int kPitch = kCols * static_cast<int>(sizeof(T));
  uint32_t base;  // shared_address, a multiple of 128

  // Address of byte `byte + lane_byte` of a row. `byte` is what a loop counts and knows at compile time: the XOR is
  // taken on its part below 128 alone, so that the rest becomes the offset of the load instruction.
  __device__ __forceinline__ uint32_t at(int row, int byte, int lane_byte) const {
    return base + (byte & ~(kLineBytes - 1)) + swizzled<kPitch>(row, (byte & (kLineBytes - 1)) + lane_byte);
  }
  static constexpr int bytes(int rows) { return rows * kPitch; }
};

// ---- fragments ------------------------------------------------------------------------------------------------------

template <class T>
struct Fragments16 {
  using Storage = T;
  static constexpr int kK = 16;       // numbers of k a step
  static constexpr int kUnroll = 64;  // all steps of a product
  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[2];
  };

  static __device__ __forceinline__ uint32_t pack(float x, float y) {
    if constexpr (sizeof(T) == 2 && std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(x, y);
      return reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
      return reinterpret_cast<const uint32_t&>(pair);
    }
  }

  template <int kCols>
  static __device__ __forceinline__ void load_a(A& a, SmemTile<T, kCols> tile, int row, int k, int lane) {
    ldmatrix_x4(a.r, tile.at(row + lane % 16, k * 2, lane / 16 * 16));
  }
  template <int kCols>
  static __device__ __forceinline__ void load_a_for_nn(A& a, SmemTile<T, kCols> tile, int row, int k, int lane) {
    load_a(a, tile, row, k, lane);
  }
  template <int kCols>
  static __device__ __forceinline__ void load_a_trans(A& a, SmemTile<T, kCols> tile, int k, int row, int lane) {
    ldmatrix_x4_trans(a.r, tile.at(k + lane % 8 + lane / 16 * 8, row * 2, lane / 8 % 2 * 16));
  }
  // Two column blocks of 8 at once.
  template <int kCols>
  static __device__ __forceinline__ void load_b_nt(B (&b)[2], SmemTile<T, kCols> tile, int col, int k, int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.at(col + lane % 8 + lane / 16 * 8, k * 2, lane / 8 % 2 * 16));
    b[0] = {r[0], r[1]};
    b[1] = {r[2], r[3]};
  }
  template <int kCols>
  static __device__ __forceinline__ void load_b_nn(B (&b)[2], SmemTile<T, kCols> tile, int k, int col, int lane) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile.at(k + lane % 16, col * 2, lane / 16 * 16));
    b[0] = {r[0], r[1]};
    b[1] = {r[2], r[3]};
  }
  // An accumulator of 8 * kN columns as an A operand, in half the registers.
  template <int kN>
  struct Operand {
    static constexpr int kBlocks = kN;
    uint32_t r[kN][2];
    __device__ __forceinline__ explicit Operand(const float (&c)[kN][4]) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        r[n][0] = pack(c[n][0], c[n][1]);
        r[n][1] = pack(c[n][2], c[n][3]);
      }
    }
    __device__ __forceinline__ A step(int k) const {
      const int n = k / 8;
      return {{r[n][0], r[n][1], r[n + 1][0], r[n + 1][1]}};
    }
    __device__ __forceinline__ float value(int n, int i) const {
      const uint16_t bits = static_cast<uint16_t>(r[n][i / 2] >> i % 2 * 16);
      return static_cast<float>(reinterpret_cast<const T&>(bits));
    }
    // Rows g (half 0) or g + 8 of block n, to the 8 columns from `col`.
    template <int kCols>
    __device__ __forceinline__ void store(SmemTile<T, kCols> tile, int row, int col, int n, int half) const {
      store_shared(tile.at(row, col * 2, 0) + threadIdx.x % 4 * 4, r[n][half]);
    }
    // What this lane stored there.
    template <int kCols>
    static __device__ __forceinline__ float2 load(SmemTile<T, kCols> tile, int row, int col) {
      const uint32_t bits = load_shared(tile.at(row, col * 2, 0) + threadIdx.x % 4 * 4);
      const uint16_t low = bits & 0xFFFFu, high = bits >> 16;
      return {static_cast<float>(reinterpret_cast<const T&>(low)),
              static_cast<float>(reinterpret_cast<const T&>(high))};
    }
    // max(x, 0)
    __device__ __forceinline__ void drop_negative() {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) r[n][i] &= ~((r[n][i] >> 15 & 0x10001u) * 0xFFFFu);
      }
    }
  };
  // Columns 2t, 2t + 1 of the 8 from `col` of one row, to shared memory.
  template <int kCols>
  static __device__ __forceinline__ void store_pair(SmemTile<T, kCols> tile, int row, int col, float x, float y) {
    store_shared(tile.at(row, col * 2, 0) + threadIdx.x % 4 * 4, pack(x, y));
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) { mma_m16n8k16(c, a.r, b.r, T()); }
};

struct FragmentsTf32 {
  using Storage = float;
  static constexpr int kK = 8;
  static constexpr int kUnroll = 1;  // NOTE: more spills, because ptxas starts the loads of all steps at once
  // x = hi + lo to 2^-22 of x; each half is a TF32 number.
  template <int kCount>
  struct Split {
    uint32_t hi[kCount], lo[kCount];
    __device__ __forceinline__ void set(int i, uint32_t bits) {
      const float x = __uint_as_float(bits);
      hi[i] = to_tf32(x);
      lo[i] = to_tf32(x - __uint_as_float(hi[i]));
    }
  };
  using A = Split<4>;
  using B = Split<2>;

  template <int kCols>
  static __device__ __forceinline__ void load_a(A& a, SmemTile<float, kCols> tile, int row, int k, int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.at(row + lane % 16, k * 4, lane / 16 * 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) a.set(i, r[i]);
  }
  template <int kCols>
  static __device__ __forceinline__ void load_a_for_nn(A& a, SmemTile<float, kCols> tile, int row, int k, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.set(i, load_shared(tile.at(row + g + i % 2 * 8, k * 4, t / 2 * 16) + t % 2 * 8 + i / 2 * 4));
    }
  }
  template <int kCols>
  static __device__ __forceinline__ void load_a_trans(A& a, SmemTile<float, kCols> tile, int k, int row, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.set(i, load_shared(tile.at(k + 2 * t + i / 2, (row + i % 2 * 8) * 4, g / 4 * 16) + g % 4 * 4));
    }
  }
  template <int kCols>
  static __device__ __forceinline__ void load_b_nt(B (&b)[2], SmemTile<float, kCols> tile, int col, int k, int lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.at(col + lane % 8 + lane / 16 * 8, k * 4, lane / 8 % 2 * 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, r[i]);
  }
  template <int kCols>
  static __device__ __forceinline__ void load_b_nn(B (&b)[2], SmemTile<float, kCols> tile, int k, int col, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i / 2].set(i % 2, load_shared(tile.at(k + 2 * t + i % 2, (col + i / 2 * 8) * 4, g / 4 * 16) + g % 4 * 4));
    }
  }
  template <int kN>
  struct Operand {
    static constexpr int kBlocks = kN;
    float r[kN][4];
    __device__ __forceinline__ explicit Operand(const float (&c)[kN][4]) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r[n][i] = c[n][i];
      }
    }
    __device__ __forceinline__ A step(int k) const {
      A a;
#pragma unroll
      for (int i = 0; i < 4; ++i) a.set(i, __float_as_uint(r[k / 8][i / 2 + i % 2 * 2]));
      return a;
    }
    __device__ __forceinline__ float value(int n, int i) const { return r[n][i]; }
    template <int kCols>
    __device__ __forceinline__ void store(SmemTile<float, kCols> tile, int row, int col, int n, int half) const {
      store_pair(tile, row, col, r[n][2 * half], r[n][2 * half + 1]);
    }
    template <int kCols>
    static __device__ __forceinline__ float2 load(SmemTile<float, kCols> tile, int row, int col) {
      const uint32_t address = tile.at(row, col * 4, threadIdx.x % 4 / 2 * 16) + threadIdx.x % 2 * 8;
      return {__uint_as_float(load_shared(address)), __uint_as_float(load_shared(address + 4))};
    }
    __device__ __forceinline__ void drop_negative() {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r[n][i] = fmaxf(r[n][i], 0.f);
      }
    }
  };
  template <int kCols>
  static __device__ __forceinline__ void store_pair(SmemTile<float, kCols> tile, int row, int col, float x, float y) {
    store_shared(tile.at(row, col * 4, threadIdx.x % 4 / 2 * 16) + threadIdx.x % 2 * 8, x, y);
  }
  // NOTE: the tensor core truncates when it adds to its accumulator (relative error 1e-5 over 1,000 keys, measured), so
  // only the products of one step are added there, and the step is added to C by rounding additions.
  static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) {
    float step[4] = {0.f, 0.f, 0.f, 0.f};
    mma_m16n8k8(step, a.lo, b.hi);
    mma_m16n8k8(step, a.hi, b.lo);
    mma_m16n8k8(step, a.hi, b.hi);
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += step[i];
  }
};

template <class Element>
struct FragmentsOf;
template <>
struct FragmentsOf<Fp16> {
  using Type = Fragments16<__half>;
};
template <>
struct FragmentsOf<Bf16> {
  using Type = Fragments16<__nv_bfloat16>;
};
template <>
struct FragmentsOf<Fp32> {
  using Type = FragmentsTf32;
};
template <class Element>
using Fragments = typename FragmentsOf<Element>::Type;
template <class Element>
using StorageOf = typename Fragments<Element>::Storage;

// ---- products -------------------------------------------------------------------------------------------------------

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

// C += A B^T over k in [0, kDepth): A rows from `row`, B rows from `col`, both with k contiguous.
template <class Frag, int kDepth, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void gemm_nt(float (&c)[kM][kN][4], TileA a_tile, int row, TileB b_tile, int col) {
  const int lane = opaque(threadIdx.x % 32);
#pragma unroll Frag::kUnroll
  for (int k = 0; k < kDepth; k += Frag::kK) {
    typename Frag::A a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) Frag::load_a(a[m], a_tile, row + m * 16, k, lane);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      typename Frag::B b[2];
      Frag::load_b_nt(b, b_tile, col + n * 8, k, lane);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Frag::mma(c[m][n], a[m], b[0]);
        Frag::mma(c[m][n + 1], a[m], b[1]);
      }
    }
  }
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

// C += P B, P in registers, B rows (k) from `k0`, columns from `col`.
template <class Frag, int kM, int kN, int kP, class TileB>
__device__ __forceinline__ void gemm_from_registers(float (&c)[kM][kN][4], const Operands<Frag, kM, kP>& p,
                                                    TileB b_tile, int k0, int col) {
  const int lane = opaque(threadIdx.x % 32);
#pragma unroll
  for (int k = 0; k < kP * 8; k += Frag::kK) {
    typename Frag::A a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) a[m] = p.row[m].step(k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      typename Frag::B b[2];
      Frag::load_b_nn(b, b_tile, k0 + k, col + n * 8, lane);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Frag::mma(c[m][n], a[m], b[0]);
        Frag::mma(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// C += A B, A rows from `row` (k contiguous), B stored [k][n] from column `col`, k in [0, kDepth).
template <class Frag, int kDepth, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void gemm_nn(float (&c)[kM][kN][4], TileA a_tile, int row, TileB b_tile, int col) {
  const int lane = opaque(threadIdx.x % 32);
#pragma unroll Frag::kUnroll
  for (int k = 0; k < kDepth; k += Frag::kK) {
    typename Frag::A a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) Frag::load_a_for_nn(a[m], a_tile, row + m * 16, k, lane);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      typename Frag::B b[2];
      Frag::load_b_nn(b, b_tile, k, col + n * 8, lane);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Frag::mma(c[m][n], a[m], b[0]);
        Frag::mma(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// C += A B, A stored [k][m] from column `row`, B stored [k][n] from column `col`, k in [0, kDepth).
template <class Frag, int kDepth, int kM, int kN, class TileA, class TileB>
__device__ __forceinline__ void gemm_tn(float (&c)[kM][kN][4], TileA a_tile, int row, TileB b_tile, int col) {
  const int lane = opaque(threadIdx.x % 32);
#pragma unroll Frag::kUnroll
  for (int k = 0; k < kDepth; k += Frag::kK) {
    typename Frag::A a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) Frag::load_a_trans(a[m], a_tile, k, row + m * 16, lane);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      typename Frag::B b[2];
      Frag::load_b_nn(b, b_tile, k, col + n * 8, lane);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Frag::mma(c[m][n], a[m], b[0]);
        Frag::mma(c[m][n + 1], a[m], b[1]);
      }
    }
  }
}

}  // namespace flash_ext::sm80
