// What kernel.cuh is made of: its traits, how a block of threads finds the items of its units (what
// core/bias_gradient_plan.h says, with the places of their tensors), and how a unit's sums leave the registers.
//
// Called by kernel.cuh only. Invariant: every sum is taken in an order that depends on nothing but the shapes
// and the number of multiprocessors.
#pragma once

#include "core/bias_gradient_plan.h"
#include "kernels/sm80/backward/parts.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_, bool kSmall_>
struct BiasGradientTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr BiasGradientShape kShape = bias_gradient_shape(sizeof(T), kHeadDim, kSmall_);
  static constexpr TileShape kTile = kShape.tile;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.warps * 32;
  static constexpr int kBlocksPerSm = kSmall_ ? 3 : 1;
  static constexpr int kWarpKeys = kShape.warp_keys;
  static constexpr int kWarpsN = kBlockN / kWarpKeys, kWarpsM = kTile.warps / kWarpsN;
  static constexpr int kQueries = kBlockM / kWarpsM;  // of a warp
  static constexpr int kM = kWarpKeys / 16, kN = kQueries / 8;
  using Scores = float[kM][kN][4];                        // S^T, dP^T or the sum of a warp
  static constexpr int kStageBytes = 16 * kWarpKeys * 4;  // of a warp, for the sums
  using Tile = SmemTile<T, kHeadDim>;
  using Mods = ScoreMods<Element, kBlockM, kBlockN, kThreads>;
  static_assert(kBlockN % kWarpKeys == 0 && kTile.warps % kWarpsN == 0 && kQueries % 16 == 0);
  static_assert(kThreads >= kBlockM, "a thread takes lse and delta of one query");
  static constexpr int kStage = kTile.warps * kStageBytes;  // the end of V and dO, where nobody reads them any more
  static constexpr bool kStageTakesV = kStage > Tile::bytes(kBlockM);
  static_assert(kStage <= Tile::bytes(kBlockM) + Tile::bytes(kBlockN));
  static_assert(!kSmall_ || bias_gradient_smem(kTile, kHeadDim, sizeof(T), 4, true).total + 1024 <= 99 << 10);
};

// An item as the kernel sees it. Offsets are of elements.
struct BiasGradientEntry {
  int64_t q, k, v, d_out, mask, bias;  // of the (batch, head); -1: nothing of it is loaded
  int64_t to;                          // of the tile's corner in the gradient
  float slope;
  uint32_t bh, bh_of_dropout;
  int first_query, first_key;
  bool visible, last;  // what is not visible is only there because its unit ends with it
};
static_assert(sizeof(BiasGradientEntry) == kBiasItemBytes);

// False when neither a pair of the item is visible nor its unit ends there.
template <class Traits>
__device__ __forceinline__ bool describe(const BackwardArgs& args, const BiasGradientPlan& plan, uint32_t unit,
                                         uint32_t index, BiasGradientEntry& entry) {
  const Problem& problem = args.fwd.problem;
  const uint32_t heads = static_cast<uint32_t>(problem.heads_q);
  const BiasGradientItem item = plan.at(problem, unit, index);
  entry.first_query = static_cast<int>(item.m_block) * Traits::kBlockM;
  entry.first_key = static_cast<int>(item.n_block) * Traits::kBlockN;
  const Range queries{entry.first_query, min(int64_t{entry.first_query} + Traits::kBlockM, problem.len_q)};
  const Range seen = make_band(problem).keys(queries, problem.len_k);
  entry.visible =
      max(seen.first, int64_t{entry.first_key}) < min(seen.last, int64_t{entry.first_key} + Traits::kBlockN);
  entry.last = item.last;
  const auto offset = [&](const TensorView& view, uint32_t head) {
    int64_t at = head * view.head_stride;
#pragma unroll
    for (int i = 0; i < kMaxBatchDims; ++i) at += item.batch[i] * view.batch_stride[i];
    return at;
  };
  entry.to = offset(args.dbias, item.head) + entry.first_query * args.dbias.row_stride +
             entry.first_key * args.dbias.col_stride + item.part * plan.part_elements;
  entry.q = entry.k = entry.v = entry.d_out = -1;
  if (entry.visible) {
    entry.q = offset(args.fwd.q, item.head);
    entry.d_out = offset(args.d_out, item.head);
    entry.k = offset(args.fwd.k, item.head / (heads / static_cast<uint32_t>(problem.heads_k)));
    entry.v = offset(args.fwd.v, item.head / (heads / static_cast<uint32_t>(problem.heads_v)));
    entry.bias = offset(args.fwd.bias, item.head);
    entry.mask = offset(args.fwd.mask, item.head);
    entry.bh = item.b * heads + item.head;
    entry.bh_of_dropout = entry.bh + item.b * args.fwd.dropout_place.other_heads;
    entry.slope =
        problem.has_alibi ? static_cast<const float*>(args.fwd.alibi.data)[offset(args.fwd.alibi, item.head)] : 0.f;
  }
  return entry.visible || entry.last;
}

// How far a block's list of items has got.
struct BiasGradientProgress {
  int found;  // items in the ring so far, since the beginning
  uint32_t
      candidate;  // the first one not yet looked at: unit * part_items + index, counted from the block's first unit
};

// One warp: looks at the next candidates, 32 at a time, until there is one to be taken, and appends those to the ring.
template <class Traits>
__device__ __forceinline__ void find_items(const BackwardArgs& args, const BiasGradientPlan& plan,
                                           BiasGradientEntry* ring, BiasGradientProgress& progress) {
  const uint32_t lane = threadIdx.x % 32, first_unit = blockIdx.x * plan.run;
  const uint32_t candidates = min(plan.run, plan.units() - first_unit) * plan.part_items;
  const int found = progress.found;
  uint32_t candidate = progress.candidate, taken = 0;
  for (; taken == 0 && candidate < candidates; candidate += 32) {
    const uint32_t unit = first_unit + (candidate + lane) / plan.part_items;
    const uint32_t index = (candidate + lane) % plan.part_items;
    BiasGradientEntry entry;
    const bool takes = candidate + lane < candidates && index < plan.items_of(unit) &&
                       describe<Traits>(args, plan, unit, index, entry);
    taken = __ballot_sync(~0u, takes);
    if (takes) ring[(found + __popc(taken & ((1u << lane) - 1))) % kBiasItems] = entry;
  }
  __syncwarp();
  if (lane == 0) progress = {found + __popc(taken), candidate};
}

// load_tile, also where a row has more chunks than the block has threads.
template <class Traits, int kRows, class T>
__device__ __forceinline__ void load_operand(typename Traits::Tile tile, const GlobalRows<T>& from, int first_row) {
  constexpr int kPitch = Traits::Tile::kPitch, kPieces = kPitch / kChunkBytes > Traits::kThreads ? 2 : 1;
  static_assert(kPitch / kPieces % kLineBytes == 0 || kPieces == 1, "swizzled within lines");
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    load_rows<kRows, kPitch / kPieces / kChunkBytes, kPitch, Traits::kThreads>(
        tile.base + i * (kPitch / kPieces), from, first_row, i * (Traits::kHeadDim / kPieces));
  }
}

// The gradient from some element on, in float or in T.
template <class T>
struct SumsTo {
  char* data;
  bool narrow;

  __device__ __forceinline__ SumsTo operator+(int64_t elements) const {
    return {data + elements * (narrow ? 2 : 4), narrow};
  }
  __device__ __forceinline__ void store(int64_t at, float x) const {
    if (sizeof(T) == 2 && narrow) {
      reinterpret_cast<T*>(data)[at] = T(x);
    } else {
      reinterpret_cast<float*>(data)[at] = x;
    }
  }
  // Four side by side.
  __device__ __forceinline__ void store_four(int64_t at, const uint32_t (&x)[4]) const {
    if (sizeof(T) == 2 && narrow) {
      alignas(8) const T numbers[4] = {T(__uint_as_float(x[0])), T(__uint_as_float(x[1])), T(__uint_as_float(x[2])),
                                       T(__uint_as_float(x[3]))};
      *reinterpret_cast<uint2*>(data + at * 2) = reinterpret_cast<const uint2&>(numbers);
    } else {
      *reinterpret_cast<uint4*>(data + at * 4) = {x[0], x[1], x[2], x[3]};
    }
  }
};

// A warp's sums to the gradient, whose corner for this warp is `to`; `stage` is the warp's own shared memory. Sixteen
// queries at a time become rows of keys, so that the stores are whole sectors.
template <class Traits>
__device__ __forceinline__ void store_sums(const typename Traits::Scores& sum, uint32_t stage,
                                           const SumsTo<typename Traits::T>& to, const TensorView& dbias, int rows,
                                           int cols) {
  constexpr int kWarpKeys = Traits::kWarpKeys;
  constexpr int kLanes = kWarpKeys / 4, kRows = 32 / kLanes;  // of a row, and rows at once, where stores take 16 bytes
  const int lane = no_hoist(threadIdx.x % 32);
  const auto address = [&](int query, int key) {
    return stage + (query * kWarpKeys + (key ^ query / 2 % (kWarpKeys / 8) * 8)) * 4;
  };
  const bool vectors = dbias.col_stride == 1 && dbias.row_stride % 4 == 0 &&
                       reinterpret_cast<uint64_t>(to.data) % (to.narrow ? 8 : 16) == 0 && cols >= kWarpKeys;
#pragma unroll
  for (int n = 0; n < Traits::kN; n += 2) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < Traits::kM; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        store_shared(address(i / 4 * 8 + lane % 4 * 2 + i % 2, m * 16 + lane / 4 + i / 2 % 2 * 8),
                     __float_as_uint(sum[m][n + i / 4][i % 4]));
      }
    }
    __syncwarp();
    if (vectors && rows >= n * 8 + 16) {
      const int key = lane % kLanes * 4;
#pragma unroll
      for (int row = lane / kLanes; row < 16; row += kRows) {
        uint32_t words[4];
        load_shared(words, address(row, key));
        to.store_four((n * 8 + row) * dbias.row_stride + key, words);
      }
    } else {
      const int key = lane % kWarpKeys;
#pragma unroll 1
      for (int row = lane / kWarpKeys; row < 16 && n * 8 + row < rows; row += 32 / kWarpKeys) {
        if (key < cols) {
          to.store((n * 8 + row) * dbias.row_stride + key * dbias.col_stride,
                   __uint_as_float(load_shared(address(row, key))));
        }
      }
    }
  }
}

// The same where queries, keys or both are summed over the tile too: in the thread, over the lanes, then over the warps
// through `partial`, always in the same order.
template <class Traits>
__device__ __forceinline__ void store_reduced(const typename Traits::Scores& sum, float* partial,
                                              const SumsTo<typename Traits::T>& to, const TensorView& dbias,
                                              const BiasGradientPlan& plan, int rows, int cols) {
  constexpr int kWarpsM = Traits::kWarpsM, kWarpsN = Traits::kWarpsN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = static_cast<int>(threadIdx.x);
  const auto over_lanes = [](float x, int first, int last) {
    for (int step = first; step <= last; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  };
  if (plan.own_rows) {
#pragma unroll
    for (int n = 0; n < Traits::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = 0.f;
#pragma unroll
        for (int m = 0; m < Traits::kM; ++m) x += sum[m][n][i] + sum[m][n][i + 2];
        x = over_lanes(x, 4, 16);
        if (lane < 4) {
          partial[warp % kWarpsN * Traits::kBlockM + warp / kWarpsN * Traits::kQueries + n * 8 + lane * 2 + i] = x;
        }
      }
    }
    __syncthreads();
    if (thread < Traits::kBlockM && thread < rows) {
      float x = 0.f;
#pragma unroll
      for (int i = 0; i < kWarpsN; ++i) x += partial[i * Traits::kBlockM + thread];
      to.store(thread * dbias.row_stride, x);
    }
    return;
  }
  float all = 0.f;
#pragma unroll
  for (int m = 0; m < Traits::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = 0.f;
#pragma unroll
      for (int n = 0; n < Traits::kN; ++n) x += sum[m][n][half * 2] + sum[m][n][half * 2 + 1];
      x = over_lanes(x, 1, 2);
      all += x;
      if (plan.own_cols && lane % 4 == 0) {
        partial[warp / kWarpsN * Traits::kBlockN + warp % kWarpsN * Traits::kWarpKeys + m * 16 + half * 8 + lane / 4] =
            x;
      }
    }
  }
  if (!plan.own_cols) {
    all = over_lanes(all, 4, 16);
    if (lane == 0) partial[warp] = all;
  }
  __syncthreads();
  const int numbers = plan.own_cols ? Traits::kBlockN : 1, terms = plan.own_cols ? kWarpsM : Traits::kTile.warps;
  for (int i = thread; i < numbers && i < cols; i += Traits::kThreads) {
    float x = 0.f;
    for (int term = 0; term < terms; ++term) x += partial[term * numbers + i];
    to.store(i * dbias.col_stride, x);
  }
}

}  // namespace flash_ext::sm80
