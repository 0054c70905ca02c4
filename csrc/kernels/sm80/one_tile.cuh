// What the kernels of one tile share: how a block of threads finds heads that are one tile each and loads them, and a
// warp's rows, with all of their keys in its block's shared memory.
//
//   item = one (batch, head)      unit = items that share a tile of a bias or of its gradient
//   (core/bias_gradient_plan.h)
//
// An item is so short that what surrounds its products counts: where it lies is found 32 items at a time, a lane each,
// and what a call has between Q K^T and the softmax is made once, after which only its pointers move.
// Called by forward_single_tile/kernel.cuh and backward_single_tile/kernel.cuh. Invariant: over the grid every item is
// walked once, those of a unit by one block of threads.
#pragma once

#include "core/bias_gradient_plan.h"
#include "kernels/sm80/score.cuh"

namespace flash_ext::sm80 {

// What the host knows of a call's heads.
struct OneTileForm {
  bool is_regular;  // has_regular_rows
  bool has_band;    // it hides pairs of a tile
};

// Where an item lies, in elements from the first of each tensor.
template <int kViews>
struct OneTileItem {
  int64_t at[kViews];
  int64_t bias, mask, bias_sum;  // bias_sum: of the bias's gradient
  float slope;
  int b, head;
  bool exists;      // a part may have fewer items than the others
  bool new_scores;  // its bias or mask is not the one of the item before, or it is the first of those found at once
  bool last;        // of its unit
};

// A tensor of an item, and how many heads it has.
struct OneTileView {
  const TensorView& view;
  int64_t heads;
};

// The items of a block of threads, in a ring in shared memory, and what is done to the scores of two of them.
// view_of(i) is an OneTileView.
template <class Mods_, int kViews, class ViewOf>
struct OneTileItems {
  using Mods = Mods_;
  using Item = OneTileItem<kViews>;
  static constexpr int kRing = 64;
  static_assert(sizeof(Item) <= one_tile_item_bytes(kViews) && sizeof(Mods) <= kOneTileModsBytes);

  const ForwardArgs& args;
  const BiasGradientPlan& plan;
  const TensorView& bias_sum;
  const unsigned features;
  char* const ring;
  char* const mods;
  const ViewOf view_of;

  __device__ __forceinline__ const Problem& problem() const { return args.problem; }
  __device__ __forceinline__ Item& item(uint32_t n) const {
    return *reinterpret_cast<Item*>(ring + n % kRing * one_tile_item_bytes(kViews));
  }
  __device__ __forceinline__ Mods& mods_of(uint32_t n) const {
    return *reinterpret_cast<Mods*>(mods + n % 2 * kOneTileModsBytes);
  }
  // How many there are, with those that do not exist.
  __device__ __forceinline__ uint32_t count() const {
    return blockIdx.x < plan.units() ? block_count(plan.units() - blockIdx.x, gridDim.x) * plan.part_items : 0;
  }

  // Those that the first steps read. All threads come here, and a __syncthreads follows.
  __device__ __forceinline__ void find_first(uint32_t bias_smem, uint32_t mask_smem) const {
    if (threadIdx.x < kRing) find(threadIdx.x / 32 * 32);
    if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < 3) {
      *reinterpret_cast<Mods*>(mods + threadIdx.x / 32 * kOneTileModsBytes) =
          Mods::make(args, 0, 0, whole_sequence(problem()), bias_smem, mask_smem);
    }
    __syncthreads();
    if (threadIdx.x == 0) turn_mods(0);
  }
  // The same for later ones, when the items before n are done with.
  __device__ __forceinline__ void find_next(uint32_t n) const {
    if (n % 32 == 0 && n > 0 && threadIdx.x / 32 == 1) find(n + 32);
    if (threadIdx.x == 0) turn_mods(n + 1);
  }

 private:
  // 32 of them from `first` on, by a warp, one a lane.
  __device__ __forceinline__ void find(uint32_t first) const {
    const uint32_t n = first + threadIdx.x % 32, unit = blockIdx.x + n / plan.part_items * gridDim.x;
    const uint32_t index = n % plan.part_items;
    Item found = {};
    found.exists = unit < plan.units() && index < plan.items_of(unit);
    if (found.exists) {
      const BiasGradientItem at = plan.at(problem(), unit, index);
      const auto offset = [&](const TensorView& view, uint32_t head) {
        int64_t result = int64_t{head} * view.head_stride;
#pragma unroll
        for (int i = 0; i < kMaxBatchDims; ++i) result += int64_t{at.batch[i]} * view.batch_stride[i];
        return result;
      };
#pragma unroll
      for (int i = 0; i < kViews; ++i) {
        const OneTileView of = view_of(i);
        const uint32_t group = static_cast<uint32_t>(problem().heads_q) / static_cast<uint32_t>(of.heads);
        found.at[i] = offset(of.view, at.head / group);
      }
      found.bias = offset(args.bias, at.head);
      found.mask = offset(args.mask, at.head);
      found.slope = problem().has_alibi ? static_cast<const float*>(args.alibi.data)[offset(args.alibi, at.head)] : 0.f;
      found.b = static_cast<int>(at.b);
      found.head = static_cast<int>(at.head);
      found.last = at.last;
      found.bias_sum = at.part * plan.part_elements + (plan.own_head ? at.head * bias_sum.head_stride : 0);
#pragma unroll
      for (int i = 0; i < kMaxBatchDims; ++i) {
        if (plan.own_batch[i]) found.bias_sum += at.batch[i] * bias_sum.batch_stride[i];
      }
    }
    const auto differs = [&](int64_t x) { return __shfl_up_sync(~0u, x, 1) != x; };
    const bool other_bias = differs(found.bias), other_mask = differs(found.mask);
    const bool after_none = !__shfl_up_sync(~0u, found.exists, 1), is_first = threadIdx.x % 32 == 0;
    found.new_scores =
        (problem().has_bias || problem().has_mask) && (is_first || after_none || other_bias || other_mask);
    item(n) = found;
  }

  __device__ __forceinline__ void turn_mods(uint32_t n) const {
    const Mods& first = *reinterpret_cast<const Mods*>(mods + 2 * kOneTileModsBytes);
    const Item& to = item(n);
    Mods& turned = mods_of(n);
    turned.slope = to.slope;
    if (problem().has_bias) {
      turned.bias = first.bias;
      turned.bias.advance(to.bias * (features & kFloatBias ? 4 / static_cast<int>(sizeof(typename Mods::T)) : 1));
    }
    if (problem().has_mask) {
      turned.mask = first.mask;
      turned.mask.advance(to.mask);
    }
  }
};

// Starts the copies of a head's rows from element `at` of a view on. is_regular: OneTileForm's.
template <int kBlock, int kThreads, class T, int kCols>
__device__ __forceinline__ void load_one_tile(SmemTile<T, kCols> tile, const TensorView& view, int64_t at, int rows,
                                              int cols, bool is_regular) {
  if (!is_regular) {
    load_tile<kBlock, kThreads, LoadForm::kRare>(tile, rows_of<T>(view, at, rows, cols), 0);
    return;
  }
  constexpr int kChunks = kCols / 8, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0 && kBlock % kStep == 0, "the swizzle repeats after eight rows");
  const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
  const T* const head = static_cast<const T*>(view.data) + at;
  const T* from = head + row * view.row_stride + chunk * 8;
  const uint32_t to = tile.base + SmemTile<T, kCols>::offset(row, chunk * kChunkBytes);
#pragma unroll
  for (int i = 0; i < kBlock; i += kStep) {
    const bool inside = row + i < rows && chunk * 8 < cols;
    cp_async_16(to + i * SmemTile<T, kCols>::kRowBytes, inside ? from : head, inside ? kChunkBytes : 0);
    from += kStep * view.row_stride;
  }
}

// What keys past the last and the band hide, of rows of S from `row` and columns from `col` on.
template <int kN>
__device__ __forceinline__ void hide_outside(const Problem& problem, const OneTileForm& form, float (&s)[1][kN][4],
                                             int row, int col, float hidden) {
  if (form.has_band) {
    mask_band<false>(s, row, col, make_tile_band(problem, whole_sequence(problem)), 0, 0, hidden);
    return;
  }
  const int len_k = static_cast<int>(problem.len_k) - col;
  if (len_k >= 8 * kN) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    if (8 * n + 8 <= len_k) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][n][i] = 8 * n + 2 * lane_column() + i % 2 < len_k ? s[0][n][i] : hidden;
  }
}

// fn(value, number of its row), numbers[i] of rows g + 8 i.
template <int kN, class Fn>
__device__ __forceinline__ void for_each_row(float (&c)[1][kN][4], const Fn& fn) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fn(c[0][n][i], i / 2);
  }
}

// Over the four lanes of a row.
template <class Fn>
__device__ __forceinline__ float row_reduce(float x, const Fn& fn) {
  x = fn(x, __shfl_xor_sync(~0u, x, 1));
  return fn(x, __shfl_xor_sync(~0u, x, 2));
}

// S becomes e^(S - m) of its row, with to_log2 what a unit of S is in log2; m and the sums are of whole rows. A row
// without keys has P = 0 and m = -inf.
template <int kN>
__device__ __forceinline__ void exponentiate_rows(float (&s)[1][kN][4], float to_log2, float (&max)[2],
                                                  float (&sum)[2]) {
  for_each_row(s, [&](float x, int i) { max[i] = fmaxf(max[i], x); });
#pragma unroll
  for (float& x : max) x = row_reduce(x, [](float x, float y) { return fmaxf(x, y); });
  for_each_row(s, [&](float& x, int i) {
    x = exp2_fast((x - (max[i] == kMinusInf ? 0.f : max[i])) * to_log2);
    sum[i] += x;
  });
#pragma unroll
  for (float& x : sum) x = row_reduce(x, [](float x, float y) { return x + y; });
}

}  // namespace flash_ext::sm80
