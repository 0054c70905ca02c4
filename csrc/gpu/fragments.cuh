// Fragments of mma.sync (PTX ISA, "Matrix fragments for mma.m16n8k16"): how operands come from swizzled shared memory
// or an accumulator into a lane's registers. With g = lane / 4, t = lane % 4 an accumulator c[4] holds rows {g, g + 8}
// x columns {2t, 2t + 1}. Names say how an operand lies in shared memory:
//   a  [m][k]      a_trans  [k][m]      b_nt  [n][k] (k contiguous)      b_nn  [k][n] (n contiguous)
// Two families: 16-bit types with k = 16 a step, float with k = 8 TF32 numbers a step, where a float is either rounded
// (Tf32) or split as hi + lo, and three products give float accuracy (Fp32). Used by mma.cuh. Invariant: operands
// loaded by a_trans, b_nn and from an accumulator agree on the order of k within a step; for TF32 that is {0, 2, 4, 6,
// 1, 3, 5, 7}, which makes an accumulator an A operand as it is.
#pragma once

#include <type_traits>

#include "core/elements.h"
#include "core/smem.h"
#include "gpu/arch.h"
#include "gpu/ptx.cuh"

namespace flash_ext {

// g and t of this lane, hidden as no_hoist() says.
__device__ __forceinline__ int lane_row() { return static_cast<int>(no_hoist(threadIdx.x) % 32 / 4); }
__device__ __forceinline__ int lane_column() { return static_cast<int>(no_hoist(threadIdx.x) % 4); }

// fn(value, query, key) for every element of a warp's fragment that starts at (row0, col0) of the tile.
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void for_each_score(float (&c)[kM][kN][4], int row0, int col0, const Fn& fn) {
  const int g = lane_row(), t = lane_column();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + m * 16 + g + i / 2 * 8;
        const int col = col0 + n * 8 + 2 * t + i % 2;
        if constexpr (kTransposed) {
          fn(c[m][n][i], col, row);
        } else {
          fn(c[m][n][i], row, col);
        }
      }
    }
  }
}

// fn(x, y) over two fragments
template <int kM, int kN, class Fn>
__device__ __forceinline__ void for_each_pair(float (&x)[kM][kN][4], const float (&y)[kM][kN][4], const Fn& fn) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fn(x[m][n][i], y[m][n][i]);
    }
  }
}

// A tile in shared memory, rows of kCols elements of T, swizzled. kPanelRows: 0 where a row is kPitch bytes in a row;
// else how many rows the tile has, and it lies in panels of 128 bytes of each, as TMA writes them.
template <class T, int kCols, int kPanelRows = 0>
struct SmemTile {
  static constexpr int kColumns = kCols, kPitch = kCols * static_cast<int>(sizeof(T));
  static constexpr int kRowBytes = kPanelRows > 0 ? kLineBytes : kPitch;
  static constexpr int kNextLine = kPanelRows > 0 ? kPanelRows* kLineBytes : kLineBytes;
  static_assert(kPanelRows == 0 || kPitch % kLineBytes == 0);
  uint32_t base;  // shared_address, a multiple of 128; of panels, of 1024

  // Address of byte `byte + lane_byte` of row `row8 + row`. What differs between the lanes is `row` and `lane_byte`;
  // row8 is a multiple of 8, so that it has no part in the swizzle, and `byte` is what a loop counts and knows at
  // compile time: the XOR is taken on its part below 128 alone. A product then needs a few addresses, and offsets of
  // its load instructions for the rest.
  __device__ __forceinline__ uint32_t at(int row8, unsigned row, int byte, unsigned lane_byte) const {
    const int in_line = (byte & (kLineBytes - 1)) + static_cast<int>(lane_byte);
    const int line = static_cast<int>(static_cast<unsigned>(byte) / kLineBytes);
    return swizzled<kRowBytes>(static_cast<int>(row), in_line) + (base + row8 * kRowBytes + line * kNextLine);
  }
  // Offset of a byte of a row.
  static __device__ __forceinline__ int offset(int row, int byte) {
    if constexpr (kPanelRows == 0) return swizzled<kPitch>(row, byte);
    const int line = static_cast<int>(static_cast<unsigned>(byte) / kLineBytes);
    return swizzled<kLineBytes>(row, byte & (kLineBytes - 1)) + line * kNextLine;
  }
  static constexpr int bytes(int rows) { return rows * kPitch; }
};

template <class T>
struct Fragments16 {
  static constexpr bool kSplit = false;
  using Storage = T;
  static constexpr int kK = 16;  // numbers of k a step
  template <int kHeadDim>
  static constexpr int kSteps = 1;    // of k that are added up together, see multiply_add
  static constexpr int kUnroll = 64;  // all steps of a product
  static constexpr bool kAhead = true;
  static constexpr int kBlocksPerChunk = 2;  // of an operand's blocks of 8 columns in 16 bytes a lane
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

  template <class Tile>
  static __device__ __forceinline__ void load_a(A& a, Tile tile, int row, int k, unsigned lane) {
    ldmatrix_x4(a.r, tile.at(row, lane % 16, k * 2, lane / 16 * 16));
  }
  template <class Tile>
  static __device__ __forceinline__ void load_a_trans(A& a, Tile tile, int k, int row, unsigned lane) {
    ldmatrix_x4_trans(a.r, tile.at(k, lane % 8 + lane / 16 * 8, row * 2, lane / 8 % 2 * 16));
  }
  // Two column blocks of 8 at once.
  template <class Tile>
  static __device__ __forceinline__ void load_b_nt(B (&b)[2], Tile tile, int col, int k, unsigned lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.at(col, lane % 8 + lane / 16 * 8, k * 2, lane / 8 % 2 * 16));
    b[0] = {r[0], r[1]};
    b[1] = {r[2], r[3]};
  }
  template <class Tile>
  static __device__ __forceinline__ void load_b_nn(B (&b)[2], Tile tile, int k, int col, unsigned lane) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, tile.at(k, lane % 16, col * 2, lane / 16 * 16));
    b[0] = {r[0], r[1]};
    b[1] = {r[2], r[3]};
  }
  // An accumulator of 8 * kN columns as an A operand, in half the registers.
  template <int kN>
  struct Operand {
    static constexpr int kWords = 2 * kN;
    uint32_t r[kN][2];
    Operand() = default;
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
    // Its registers, to be moved between warps.
    __device__ __forceinline__ uint32_t word(int i) const { return r[i / 2][i % 2]; }
    __device__ __forceinline__ void set_word(int i, uint32_t word) { r[i / 2][i % 2] = word; }
    __device__ __forceinline__ float value(int n, int i) const {
      const uint16_t bits = static_cast<uint16_t>(r[n][i / 2] >> i % 2 * 16);
      return static_cast<float>(reinterpret_cast<const T&>(bits));
    }
    // Rows g (half 0) or g + 8 of block n, to the 8 columns from `col` of rows row8 + g.
    template <int kCols>
    __device__ __forceinline__ void store(SmemTile<T, kCols> tile, int row8, int col, unsigned lane, int n,
                                          int half) const {
      store_shared(tile.at(row8, lane / 4, col * 2, 0) + lane % 4 * 4, r[n][half]);
    }
    // What this lane stored there.
    template <int kCols>
    static __device__ __forceinline__ uint32_t load_word(SmemTile<T, kCols> tile, int row8, int col, unsigned lane) {
      return load_shared(tile.at(row8, lane / 4, col * 2, 0) + lane % 4 * 4);
    }
    template <int kCols>
    static __device__ __forceinline__ float2 load(SmemTile<T, kCols> tile, int row8, int col, unsigned lane) {
      const uint32_t bits = load_word(tile, row8, col, lane);
      const uint16_t low = bits & 0xFFFFu, high = bits >> 16;
      return {static_cast<float>(reinterpret_cast<const T&>(low)),
              static_cast<float>(reinterpret_cast<const T&>(high))};
    }
    // -x where a flag is 0, two flags a word, as DropoutFlags has them.
    __device__ __forceinline__ void negate(uint32_t flags) {
      static_assert(2 * kN <= 16);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) r[n][i] ^= ~(flags << (16 - 2 * kN + 2 * n + i)) & 0x80008000u;
      }
    }
    // max(x, 0), NaN stays NaN.
    __device__ __forceinline__ void drop_negative() {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) r[n][i] = at_least_zero(r[n][i], T());
      }
    }
  };
  // Columns 2t, 2t + 1 of the 8 from `col` of row row8 + g, to shared memory.
  template <int kCols>
  static __device__ __forceinline__ void store_pair(SmemTile<T, kCols> tile, int row8, int col, unsigned lane, float x,
                                                    float y) {
    store_shared(tile.at(row8, lane / 4, col * 2, 0) + lane % 4 * 4, pack(x, y));
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) {
    mma_m16n8k16(c, a.r, b.r[0], b.r[1], T());
  }
};

// kSplit: float accuracy in three products, else one product of rounded numbers. kFinite: of what is infinite or NaN
// +-2^100 or 0, see score_product (score.cuh).
template <bool kSplitFloat, bool kFinite = false>
struct FragmentsTf32 {
  static constexpr bool kSplit = kSplitFloat;
  using Storage = float;
  static constexpr int kK = 8;
  static constexpr int kBlocksPerChunk = 1;
  // NOTE: with more ptxas spills.
  template <int kHeadDim>
  static constexpr int kSteps = kSplit ? (kHeadDim == 96 || kHeadDim > 128 ? 2 : 4) : 1;
  static constexpr int kUnroll = kSplit ? 1 : 4;
  static constexpr bool kAhead = false;
  // x = hi + lo to 2^-23 of x. Without kSplit hi alone, to 2^-11.
  // NOTE: the tensor core does not read the last 13 bits. lo has a bit more than TF32, so cutting it there is off by no
  // more than rounding it, and its sign is random. hi is rounded half up, in its bits: cvt.rna.tf32 is four
  // instructions, and with it forward took 1.3 times as long. A NaN may lose itself in hi, but not in lo.
  template <int kCount>
  struct Words {
    uint32_t hi[kCount], lo[kSplit ? kCount : 1];
    __device__ __forceinline__ void set(int i, uint32_t bits) {
      if constexpr (kSplit) {
        if constexpr (kFinite) {
          const float x = __uint_as_float(bits);
          bits = __float_as_uint(x == x ? fminf(fmaxf(x, -0x1p100f), 0x1p100f) : 0.f);
        }
        hi[i] = (bits + 0x1000U) & ~0x1FFFU;
        lo[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(hi[i]));
      } else {
        hi[i] = to_tf32(__uint_as_float(bits));
      }
    }
  };
  using A = Words<4>;
  using B = Words<2>;

  template <class Tile>
  static __device__ __forceinline__ void load_a(A& a, Tile tile, int row, int k, unsigned lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.at(row, lane % 16, k * 4, lane / 16 * 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) a.set(i, r[i]);
  }
  template <class Tile>
  static __device__ __forceinline__ void load_a_trans(A& a, Tile tile, int k, int row, unsigned lane) {
    const unsigned g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.set(i, load_shared(tile.at(k, 2 * t + i / 2, (row + i % 2 * 8) * 4, g / 4 * 16) + g % 4 * 4));
    }
  }
  template <class Tile>
  static __device__ __forceinline__ void load_b_nt(B (&b)[2], Tile tile, int col, int k, unsigned lane) {
    uint32_t r[4];
    ldmatrix_x4(r, tile.at(col, lane % 8 + lane / 16 * 8, k * 4, lane / 8 % 2 * 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, r[i]);
  }
  template <class Tile>
  static __device__ __forceinline__ void load_b_nn(B (&b)[2], Tile tile, int k, int col, unsigned lane) {
    const unsigned g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b[i / 2].set(i % 2, load_shared(tile.at(k, 2 * t + i % 2, (col + i / 2 * 8) * 4, g / 4 * 16) + g % 4 * 4));
    }
  }
  template <int kN>
  struct Operand {
    static constexpr int kWords = 4 * kN;
    float r[kN][4];
    Operand() = default;
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
    __device__ __forceinline__ uint32_t word(int i) const { return __float_as_uint(r[i / 4][i % 4]); }
    __device__ __forceinline__ void set_word(int i, uint32_t word) { r[i / 4][i % 4] = __uint_as_float(word); }
    __device__ __forceinline__ float value(int n, int i) const { return r[n][i]; }
    template <int kCols>
    __device__ __forceinline__ void store(SmemTile<float, kCols> tile, int row8, int col, unsigned lane, int n,
                                          int half) const {
      store_pair(tile, row8, col, lane, r[n][2 * half], r[n][2 * half + 1]);
    }
    template <int kCols>
    static __device__ __forceinline__ float2 load(SmemTile<float, kCols> tile, int row8, int col, unsigned lane) {
      const uint32_t address = tile.at(row8, lane / 4, col * 4, lane % 4 / 2 * 16) + lane % 2 * 8;
      return {__uint_as_float(load_shared(address)), __uint_as_float(load_shared(address + 4))};
    }
    __device__ __forceinline__ void drop_negative() {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) r[n][i] = maximum(r[n][i], 0.f);
      }
    }
  };
  template <int kCols>
  static __device__ __forceinline__ void store_pair(SmemTile<float, kCols> tile, int row8, int col, unsigned lane,
                                                    float x, float y) {
    store_shared(tile.at(row8, lane / 4, col * 4, lane % 4 / 2 * 16) + lane % 2 * 8, x, y);
  }
  static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) { mma_m16n8k8(c, a.hi, b.hi); }
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
  using Type = FragmentsTf32<true>;
};
template <>
struct FragmentsOf<Tf32> {
  using Type = FragmentsTf32<false>;
};
template <class Element>
using Fragments = typename FragmentsOf<Element>::Type;
template <class Element>
using StorageOf = typename Fragments<Element>::Storage;

}  // namespace flash_ext
