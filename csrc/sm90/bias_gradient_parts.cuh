// What bias_gradient.cuh is made of beside its two roles: parameters, shared memory, how a thread reads the bias of its
// scores, and how the sums of a unit leave the registers.
//
// Called by bias_gradient.cuh only. Invariant: every sum is taken in an order that depends on nothing but the shapes
// and the number of multiprocessors.
#pragma once

#include "attention/bias_gradient_plan.h"
#include "sm90/bwd_parts.cuh"
#include "sm90/out.cuh"

namespace flash_ext::sm90 {

constexpr int kItemStages = 2;

// What the producer tells the consumers of an item. Offsets are of elements.
struct alignas(16) BiasGradientEntry {
  int64_t bias;  // of the tile's corner in the bias
  int64_t to;    // of the tile's corner in the gradient or a part of it
  int first_query, first_key;
  int visible;  // else it is only there because its unit ends with it
  int last;     // of its unit; with kEnd there is none any more
};
constexpr int kEnd = 2;

struct BiasGradientSmem {
  int numbers = 0, entries = 0, partial = 0, barriers = 0, total = 0;  // operands begin at 0
};

template <class T_, int kHeadDim_>
struct BiasGradientTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = 128, kThreads = 384, kWarps = 8;
  static constexpr int kPanels = panels(kHeadDim), kTile = tile_bytes(kBlock, kHeadDim), kPair = 2 * kTile;
  static constexpr int kStages = kHeadDim <= 64 ? 4 : 3;
  static constexpr int kNumbers = 3 * kBlock * 4;  // of an item: lse, delta, what is far (bwd_rows.cuh)
  static constexpr int kStatsBlock = backward_shape(kHeadDim, true).block_m;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // P is kept as 2^10 P, as in bwd.cuh.
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1.f / 1024.f : 1.f;

  static constexpr BiasGradientSmem smem() {
    BiasGradientSmem smem;
    smem.numbers = kStages * kPair;
    smem.entries = smem.numbers + kItemStages * kNumbers;
    smem.partial = smem.entries + kItemStages * static_cast<int>(sizeof(BiasGradientEntry));
    smem.barriers = smem.partial + kWarps * kBlock * 4;
    smem.total = smem.barriers + 16 * (kStages + kItemStages) + kTileAlign;
    return smem;
  }
  static constexpr BiasGradientSmem kSmem = smem();
  static_assert(kSmem.total <= kSharedMemoryLimit);

  struct Tiles {
    uint32_t base;
    __device__ __forceinline__ Ring<kPair> operands() const { return {base, base + kSmem.barriers}; }
    __device__ __forceinline__ Ring<sizeof(BiasGradientEntry)> entries() const {
      return {base + kSmem.entries, base + kSmem.barriers + 16 * kStages};
    }
    __device__ __forceinline__ uint32_t numbers(int stage) const { return base + kSmem.numbers + stage * kNumbers; }
    __device__ __forceinline__ uint32_t partial() const { return base + kSmem.partial; }
  };
};

struct BiasGradientParams {
  TensorMap q, k, v, d_out;
  BackwardArgs args;
  BiasGradientPlan plan;
  const float* stats;  // [b, h_q, 3, padded]
  int padded;          // queries
  TileBand band;
  int group;  // query heads of a key head
  int inner_batch;
  bool reads_chunks;  // 16 bytes of a row of the bias at once
  bool stores_pairs;  // two numbers of a row of the gradient at once
  float scale, to_log2, inverse_scale;
};

// Two rows of 128 keys, as words of two of the fragment.
using BiasWords = uint32_t[2][16];

// row: this thread's first in the bias's tile `from`; 8 rows further the second. rows, cols: how many the tile has.
template <class T>
__device__ __forceinline__ void read_bias(BiasWords& words, const T* from, const TensorView& bias, bool in_chunks,
                                          int row, int rows, int cols) {
  const int first_col = threadIdx.x % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = row + 8 * half < rows;
    const T* const of_row = from + (row + 8 * half) * bias.row_stride;
    if (in_chunks && cols >= 128) {
#pragma unroll
      for (int n = 0; n < 16; n += 4) {
        const uint4 chunk = exists ? *reinterpret_cast<const uint4*>(of_row + 8 * n + first_col) : uint4{};
        words[half][n] = chunk.x, words[half][n + 1] = chunk.y;
        words[half][n + 2] = chunk.z, words[half][n + 3] = chunk.w;
      }
    } else {
#pragma unroll
      for (int n = 0; n < 16; n += 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int col = 8 * n + first_col + 2 * i;
          const auto read = [&](int at) -> uint32_t {
            return exists && at < cols ? reinterpret_cast<const uint16_t*>(of_row)[at * bias.col_stride] : 0;
          };
          words[half][n + i] = read(col) | read(col + 1) << 16;
        }
      }
    }
  }
}

// fn(score, bias) of all 128 columns of both rows. All lanes of the warp call.
template <class T, class Fn>
__device__ __forceinline__ void with_bias(float (&s)[64], BiasWords& words, const Fn& fn) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
      uint32_t x[4] = {words[half][n], words[half][n + 1], words[half][n + 2], words[half][n + 3]};
      transpose_quad(x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float bias[2];
        unpack(x[i], bias[0], bias[1], T());
        fn(s[4 * (n + i) + 2 * half], bias[0], half);
        fn(s[4 * (n + i) + 2 * half + 1], bias[1], half);
      }
    }
  }
}

// The sums of a unit to the gradient, whose corner is `to`; queries, keys or both are summed over the tile where the
// gradient has none of its own: in the thread, over lanes, over warps, always in the same order.
template <class Traits>
__device__ __forceinline__ void store_sums(const float (&sum)[64], const BiasGradientParams& params, float* to,
                                           uint32_t partial, int warp_row, int rows, int cols) {
  const TensorView& dbias = params.args.dbias;
  const int lane = threadIdx.x % 32, warp = warp_row / 16, row = warp_row + lane / 4, column = lane % 4 * 2;
  const auto over_lanes = [](float x, int first, int last) {
    for (int step = first; step <= last; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  };
  if (params.plan.own_rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = row + 8 * half < rows;
      float* const of_row = to + (row + 8 * half) * dbias.row_stride;
      float all = 0.f;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const float x = sum[4 * n + 2 * half] * Traits::kFactor, y = sum[4 * n + 2 * half + 1] * Traits::kFactor;
        all += x + y;
        if (!params.plan.own_cols || !exists) continue;
        const int col = 8 * n + column;
        if (params.stores_pairs && col + 2 <= cols) {
          *reinterpret_cast<float2*>(of_row + col) = make_float2(x, y);
        } else {
          if (col < cols) of_row[col * dbias.col_stride] = x;
          if (col + 1 < cols) of_row[(col + 1) * dbias.col_stride] = y;
        }
      }
      if (params.plan.own_cols) continue;
      all = over_lanes(all, 1, 2);
      if (exists && lane % 4 == 0) *of_row = all;
    }
    return;
  }
  float all = 0.f;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = (sum[4 * n + i] + sum[4 * n + 2 + i]) * Traits::kFactor;
      if (params.plan.own_cols) {
        x = over_lanes(x, 4, 16);
        if (lane < 4) store_shared1(partial + (warp * Traits::kBlock + 8 * n + column + i) * 4, x);
      } else {
        all += x;
      }
    }
  }
  if (!params.plan.own_cols) {
    all = over_lanes(all, 1, 16);
    if (lane == 0) store_shared1(partial + warp * 4, all);
  }
  named_barrier_sync(kConsumersBarrier, Traits::kWarps * 32);
  const int numbers = params.plan.own_cols ? Traits::kBlock : 1, thread = static_cast<int>(threadIdx.x) - 128;
  if (thread < numbers && thread < cols) {
    float x = 0.f;
#pragma unroll
    for (int i = 0; i < Traits::kWarps; ++i) x += load_shared_float(partial + (i * numbers + thread) * 4);
    to[thread * dbias.col_stride] = x;
  }
  named_barrier_sync(kConsumersBarrier, Traits::kWarps * 32);  // partial may be written again
}

}  // namespace flash_ext::sm90
