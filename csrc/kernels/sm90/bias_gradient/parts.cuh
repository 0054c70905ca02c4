// What kernel.cuh is made of beside its two roles: parameters, shared memory, how a thread reads the bias of its
// scores, and how the sums of a unit leave the registers.
//
// Called by kernel.cuh only. Invariant: every sum is taken in an order that depends on nothing but the shapes
// and the number of multiprocessors.
#pragma once

#include "core/bias_gradient_plan.h"
#include "kernels/sm90/backward/parts.cuh"
#include "kernels/sm90/out.cuh"

namespace flash_ext::sm90 {

constexpr int kItemStages = 2;

// What the producer publishes of an item. Offsets are of elements.
struct alignas(16) BiasGradientEntry {
  int64_t bias;   // of the tile's corner in the bias
  int64_t to;     // of the tile's corner in the gradient or a part of it
  int64_t stats;  // of its first query
  int first_query, first_key;
  int visible;  // else it is only there because its unit ends with it
  int last;     // of its unit; with kEnd there is none any more
};
constexpr int kEnd = 2;

struct BiasGradientSmem {
  int bias = 0, entries = 0, barriers = 0, total = 0;  // operands begin at 0
};

template <class T_, int kHeadDim_>
struct BiasGradientTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = 128, kThreads = 384, kWarps = 8;
  static constexpr int kPanels = panels(kHeadDim), kTile = tile_bytes(kBlock, kHeadDim), kPair = 2 * kTile;
  static constexpr int kStages = kHeadDim <= 64 ? 6 : 3;
  static constexpr int kWarpBias = 16 * kBlock * 2;  // of a warp's scores
  static constexpr int kStatsBlock = backward_shape(kHeadDim, ScoreKind::kScores).block_m;
  static_assert(kBlock % kStatsBlock == 0);
  // Where that number of the item's query `row` lies.
  static __device__ __forceinline__ int stat(int which, int row) {
    return (row / kStatsBlock * kQueryStats + which) * kStatsBlock + row % kStatsBlock;
  }
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // P is kept as 2^10 P, as in backward/kernel.cuh.
  static constexpr float kFactor = std::is_same_v<T, __half> ? 1.f / 1024.f : 1.f;

  static constexpr BiasGradientSmem smem() {
    BiasGradientSmem smem;
    smem.bias = kStages * kPair;
    smem.entries = smem.bias + kWarps * kWarpBias;
    smem.barriers = smem.entries + kItemStages * static_cast<int>(sizeof(BiasGradientEntry));
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
    __device__ __forceinline__ uint32_t bias(int warp) const { return base + kSmem.bias + warp * kWarpBias; }
  };
};

struct BiasGradientParams {
  TensorMap q, k, v, d_out;
  BackwardArgs args;
  BiasGradientPlan plan;
  const float* stats;  // of BackwardParams, see backward/rows.cuh
  int padded;          // queries
  TileBand band;
  int group;  // query heads of a key head
  int inner_batch;
  bool reads_chunks;  // 16 bytes of a row of the bias at once
  bool stores_wide;   // 16 bytes of a row of the gradient at once, or two numbers of a part, which are aligned
  float scale, to_log2, inverse_scale;
};

// Keeps the bias of this thread's scores, two rows of 128 keys, at `kept`: eight chunks of 16 bytes, kChunkStep apart,
// in the order of the fragment. row: the first of them in the bias's tile `from`; 8 rows further the second. rows,
// cols: how many the tile has. All lanes of the warp call. NOTE: a row or column that all share is there in every item
// of the unit, whatever the first one has of them.
constexpr int kChunkStep = 32 * 16;
template <class T>
__device__ __forceinline__ void keep_bias(uint32_t kept, const T* from, const TensorView& bias, bool in_chunks, int row,
                                          int rows, int cols) {
  const int first_col = threadIdx.x % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool exists = row + 8 * half < rows || bias.row_stride == 0;
    const T* const of_row = from + (row + 8 * half) * bias.row_stride;
    uint32_t words[16];
    if (in_chunks && cols >= 128) {
#pragma unroll
      for (int n = 0; n < 16; n += 4) {
        const uint4 chunk = exists ? *reinterpret_cast<const uint4*>(of_row + 8 * n + first_col) : uint4{};
        words[n] = chunk.x, words[n + 1] = chunk.y, words[n + 2] = chunk.z, words[n + 3] = chunk.w;
      }
    } else {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int col = n / 4 * 32 + first_col + n % 4 * 2;
        const auto read = [&](int at) -> uint32_t {
          const bool there = exists && (at < cols || bias.col_stride == 0);
          return there ? reinterpret_cast<const uint16_t*>(of_row)[at * bias.col_stride] : 0;
        };
        words[n] = read(col) | read(col + 1) << 16;
      }
    }
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
      uint32_t x[4] = {words[n], words[n + 1], words[n + 2], words[n + 3]};
      transpose_quad(x);
      store_shared(kept + (half * 4 + n / 4) * kChunkStep, make_uint4(x[0], x[1], x[2], x[3]));
    }
  }
}

// fn(score, bias, half) of all 128 columns of both rows.
template <class T, class Fn>
__device__ __forceinline__ void with_bias(float (&s)[64], uint32_t kept, const Fn& fn) {
#pragma unroll
  for (int chunk = 0; chunk < 8; ++chunk) {
    const int half = chunk / 4, n = chunk % 4 * 4;
    uint4 words;
    load_shared(words, kept + chunk * kChunkStep);
    const uint32_t x[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float bias[2];
      unpack(x[i], bias[0], bias[1], T());
      fn(s[4 * (n + i) + 2 * half], bias[0], half);
      fn(s[4 * (n + i) + 2 * half + 1], bias[1], half);
    }
  }
}

// The sums of a unit to the gradient or, as floats, to a part of it, whose corner is `to`; queries, keys or both are
// summed over the tile where the gradient has none of its own: in the thread, over lanes, over warps (through where
// each keeps its bias, which no item needs any more), always in the same order.
template <class Traits, class Out>
__device__ __forceinline__ void store_sums(float (&sum)[64], const BiasGradientParams& params, Out* to,
                                           const typename Traits::Tiles& tiles, int warp_row, int rows, int cols) {
  const TensorView& dbias = params.args.dbias;
  const int lane = threadIdx.x % 32, warp = warp_row / 16, row = warp_row + lane / 4, column = lane % 4 * 2;
  const auto over_lanes = [](float x, int first, int last) {
    for (int step = first; step <= last; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  };
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] *= Traits::kFactor;
  if (params.plan.own_rows) {
    Out* of_rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_rows[half] = row + 8 * half < rows ? to + (row + 8 * half) * dbias.row_stride : nullptr;
    }
    if (params.plan.own_cols && params.stores_wide && cols >= Traits::kBlock) {
      if constexpr (std::is_same_v<Out, float>) {
        write_part<Traits::kBlock>(sum, of_rows, Traits::kBlock);
      } else {
        write_out<Out, Traits::kBlock>(sum, reinterpret_cast<char* const(&)[2]>(of_rows), Traits::kBlock);
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = 0.f;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = sum[4 * n + 2 * half + i];
          const int col = 8 * n + column + i;
          all += x;
          if (params.plan.own_cols && of_rows[half] != nullptr && col < cols) {
            of_rows[half][col * dbias.col_stride] = Out(x);
          }
        }
      }
      all = over_lanes(all, 1, 2);
      if (!params.plan.own_cols && of_rows[half] != nullptr && lane % 4 == 0) *of_rows[half] = Out(all);
    }
    return;
  }
  float all = 0.f;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x = sum[4 * n + i] + sum[4 * n + 2 + i];
      if (params.plan.own_cols) {
        x = over_lanes(x, 4, 16);
        if (lane < 4) store_shared1(tiles.bias(warp) + (8 * n + column + i) * 4, x);
      } else {
        all += x;
      }
    }
  }
  if (!params.plan.own_cols) {
    all = over_lanes(all, 1, 16);
    if (lane == 0) store_shared1(tiles.bias(warp), all);
  }
  named_barrier_sync(kConsumersBarrier, Traits::kWarps * 32);
  const int numbers = params.plan.own_cols ? Traits::kBlock : 1, thread = static_cast<int>(threadIdx.x) - 128;
  if (thread < numbers && thread < cols) {
    float x = 0.f;
#pragma unroll
    for (int i = 0; i < Traits::kWarps; ++i) x += load_shared_float(tiles.bias(i) + thread * 4);
    to[thread * dbias.col_stride] = Out(x);
  }
  named_barrier_sync(kConsumersBarrier, Traits::kWarps * 32);  // the next unit keeps its bias there
}

}  // namespace flash_ext::sm90
