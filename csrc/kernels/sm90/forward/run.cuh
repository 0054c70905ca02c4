// From the types of kernels.h to those of the kernels: parameters, tensor maps, which of the shapes of a head
// dimension is launched, and combine behind it.
// Called by rows.cpp through kernels.h; instantiated by generated units (unit.cu.in).
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "core/args.h"
#include "gpu/host/launch.h"
#include "kernels/sm90/forward/fp8.cuh"
#include "kernels/sm90/forward/kernel.cuh"
#include "kernels/sm90/kernels.h"
#include "kernels/sm90/run_scores.cuh"
#include "kernels/stages/combine.h"
#include "kernels/stages/mask_ranges.h"
#include "kernels/stages/sequences.h"
#include "kernels/stages/transpose_values.h"

namespace flash_ext::sm90 {

// NOTE: a memset is a kernel of its own, whose end the next one waits for; behind this one it begins at once.
static __global__ void clear_kernel(uint32_t* counter) {
  grid_dependency_launch();
  *counter = 0;
}

// What packed sequences need before the kernel: the list of their tiles in scratch, and zeros where they have no row.
inline PackedList prepare_packed(const ForwardArgs& args, int block_m, void* list, uint32_t* counter) {
  using cuda::TilesOf;
  const Problem& problem = args.problem;
  const cuda::PackedResults results = {.rows = {{args.out, TilesOf::kQueries, problem.heads_q, problem.head_dim_v, 2}},
                                       .lse = static_cast<float*>(args.lse),
                                       .counter = counter};
  const PackedTile* const tiles = cuda::prepare_packed(problem, args.sequences, TilesOf::kQueries, block_m, list,
                                                       results, args.stream, packed_rows_together(problem));
  return {tiles, static_cast<int>(problem.rows_q), problem.bottom_right ? -1 : 0};
}

inline TensorView from_column(TensorView view, int64_t first) {
  view.data = static_cast<uint16_t*>(view.data) + first;
  return view;
}

// Values as transpose_values() leaves them, in numbers of 16 bits.
inline TensorView transposed_view(const Problem& problem, void* data) {
  TensorView view;
  view.data = data;
  view.col_stride = 1;
  view.row_stride = cuda::transposed_keys(problem) / 2;
  view.head_stride = problem.head_dim_v * view.row_stride;
  int64_t stride = problem.heads_v * view.head_stride;
  for (int i = problem.batch_rank - 1; i >= 0; --i) {
    view.batch_stride[i] = stride;
    stride *= problem.batch_size[i];
  }
  return view;
}

// workspace: the counter where the order is counted, the parts where keys are split; behind a counter's place the list
// of packed sequences, the ranges of a mask, or the values of e4m3, transposed, and SumOfO's numbers.
template <class Traits>
void launch_forward(const ForwardArgs& args, const ForwardLaunch& how, void* workspace) {
  const Problem& problem = args.problem;
  const Band band = Traits::kPacked ? make_band(problem, 0, 0) : make_band(problem);
  Splits splits = how.splits;
  // A query that all heads repeat has no rows to share tiles with.
  if (args.q.head_stride == 0) splits.head_rows = 0;
  const ForwardOrder order = how.tiles == Tiles::kSplit ? split_order(problem, Traits::kBlockM, splits, how.grid)
                                                        : forward_order(problem, Traits::kBlockM, how.grid);
  typename Traits::Params params;
  const int head_rows = splits.head_rows, box_heads = head_rows > 0 ? 64 / head_rows : 1;
  const auto map = [&](const TensorView& view, int64_t heads, int64_t rows, int64_t cols, int box_rows, int of_heads) {
    if constexpr (Traits::kPacked) {
      return make_packed_map(problem, view, heads, rows, cols, box_rows, Promotion::k128);
    } else {
      return make_tensor_map(problem, view, heads, rows, cols, box_rows, Promotion::k128, of_heads);
    }
  };
  const int64_t rows_q = Traits::kPacked ? problem.rows_q : problem.len_q;
  const int64_t rows_k = Traits::kPacked ? problem.rows_k : problem.len_k;
  const auto in_map = [&](const TensorView& view, int64_t heads, int64_t rows, int box_rows, int heads_of_box) {
    return map(Traits::kFp8 ? cuda::pairs_of(view) : view, heads, rows, Traits::kShape.columns(problem.head_dim),
               box_rows, heads_of_box);
  };
  params.q = in_map(args.q, problem.heads_q, rows_q, 64 / box_heads, box_heads);
  params.k = in_map(args.k, problem.heads_k, rows_k, Traits::kBlockN, 1);
  params.schedule = order.schedule;
  params.band = TileBand::make(band, static_cast<int>(problem.len_k));
  params.tiles = cuda::grid_of(order.schedule.size() * std::max(splits.count, 1)).x;
  params.len_q = static_cast<int>(problem.len_q);
  const int group_size = head_rows > 0 ? static_cast<int>(problem.heads_q / problem.heads_k) : 1;
  params.group_k = static_cast<int>(problem.heads_q / problem.heads_k) / group_size;
  params.group_v = static_cast<int>(problem.heads_q / problem.heads_v) / group_size;
  params.shared = {-1, 31, 1, params.len_q, 64};
  if (head_rows > 0) {
    params.shared = {head_rows - 1, std::countr_zero(static_cast<unsigned>(head_rows)), group_size,
                     group_size * head_rows, head_rows};
  }
  params.heads_q = static_cast<int>(problem.heads_q);
  params.inner_batch = inner_batch_of(problem);
  params.scale = static_cast<float>(problem.scale);
  params.to_log2 = static_cast<float>(problem.scale * kLog2e);
  params.lse = static_cast<float*>(args.lse);
  const auto of_heads = [&](const TensorView& view) -> HeadNumbers {
    const auto stride = [&](int from_last) {
      const int dim = problem.batch_rank - 1 - from_last;
      return dim >= 0 ? view.batch_stride[dim] : 0;
    };
    return {static_cast<const float*>(view.data), stride(0), stride(1), view.head_stride, view.row_stride};
  };
  params.sinks = of_heads(args.sinks);
  void* const values = static_cast<char*>(workspace) + kCounterBytes;
  if constexpr (Traits::kFp8) {
    params.q_descale = of_heads(args.q_descale);
    params.k_descale = of_heads(args.k_descale);
    params.v_descale = of_heads(args.v_descale);
    params.sums = reinterpret_cast<float*>(static_cast<char*>(values) + cuda::transposed_bytes(problem));
    cuda::transpose_values(args, values);
  }
  if constexpr (Traits::kScored) {
    params.schedule.batch_inner = !Traits::kPacked && batch_shares_scores(problem, args);
    constexpr ForwardSmem kSmem = Traits::kSmem;
    params.scores = make_scores(args, Traits::kBlockM, Traits::kBlockN, 0, kSmem.works - kSmem.scores);
    if (problem.has_bias || problem.has_alibi || problem.softcap != 0.0) {  // scores are in natural units then
      params.scale = 1.f;
      params.to_log2 = kLog2eFloat;
    }
  }
  params.counter = order.counted ? static_cast<uint32_t*>(workspace) : nullptr;
  bool is_prepared = Traits::kPacked;  // the kernel before leaves a counter of 0, and dependents wait for it
  if constexpr (Traits::kScored && !Traits::kPacked) {
    if (how.finds_ranges) {
      params.scores.ranges = cuda::find_mask_ranges(args, cuda::RangesOf::kQueries, Traits::kBlockM,
                                                    static_cast<char*>(workspace) + kCounterBytes, params.counter);
      is_prepared = true;
    }
  }
  params.parts = {};
  params.parts.splits = splits;
  if (splits.count > 1) {
    params.parts.rows = problem.batch * problem.heads_q * problem.len_q;
    params.parts.cols = static_cast<int>(problem.head_dim_v);
    params.parts.out = static_cast<float*>(workspace);
    params.parts.sums = reinterpret_cast<float2*>(params.parts.out + splits.count * part_elements(problem));
  }
  Problem one = problem;  // of packed sequences, all rows as one batch element
  one.batch_rank = 0;
  const auto inner_map = [&](const TensorView& view, int64_t heads, int64_t rows, int64_t cols, int box_rows) {
    return make_tensor_map(one, view, heads, std::max<int64_t>(rows, 1), cols, box_rows, Promotion::k128);
  };
  if constexpr (Traits::kPacked) {
    params.inner.q = inner_map(args.q, problem.heads_q, rows_q, problem.head_dim, 64);
    params.inner.k = inner_map(args.k, problem.heads_k, rows_k, problem.head_dim, Traits::kBlockN);
    params.packed =
        prepare_packed(args, Traits::kBlockM, static_cast<char*>(workspace) + kCounterBytes, params.counter);
  }
  const auto launch = [&](const auto& how_to) {
    how_to(forward_kernel<Traits>, cuda::grid_of(order.grid), Traits::kShape.threads(), Traits::kSmem.total,
           args.stream, params);
  };
  for (int64_t first = 0; first < problem.head_dim_v; first += Traits::kValueDim) {
    [[maybe_unused]] const TensorView v = from_column(args.v, first);
    const TensorView out = from_column(args.out, first);
    const int64_t cols = problem.head_dim_v - first;
    if constexpr (Traits::kFp8) {
      params.v = map(transposed_view(problem, values), problem.heads_v, cols, cuda::transposed_keys(problem) / 2,
                     Traits::kValueBoxRows, 1);
    } else {
      params.v = map(v, problem.heads_v, rows_k, cols, Traits::kBlockN, 1);
    }
    params.out = map(out, problem.heads_q, rows_q, cols, 16, 1);
    params.out_view = make_out_view(problem, out, cols);
    if constexpr (Traits::kPacked) {
      params.inner.v = inner_map(v, problem.heads_v, rows_k, cols, Traits::kBlockN);
      params.inner.out = inner_map(out, problem.heads_q, rows_q, cols, 16);
    }
    if (order.counted && !is_prepared) cuda::launch(clear_kernel, dim3(1), 1, 0, args.stream, params.counter);
    if (order.counted || is_prepared) {
      launch([](const auto&... x) { cuda::launch_dependent(x...); });
    } else {
      launch([](const auto&... x) { cuda::launch(x...); });
    }
    params.lse = nullptr;  // it is there
    is_prepared = false;
  }
}

// Of inputs of e4m3, kDType is out's.
template <DType kDType, int kHeadDim>
void run_forward_fp8(const ForwardArgs& args, const ForwardLaunch& how, void* workspace) {
  using T = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  launch_forward<Fp8Traits<T, kHeadDim, forward_shape(kHeadDim, Tiles::kFp8)>>(args, how, workspace);
}

// A kernel for each value_dim() columns of V.
template <DType kDType, int kHeadDim>
void run_forward(const ForwardArgs& args, const ForwardLaunch& how, void* workspace) {
  using T = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  if constexpr (kHeadDim == 192) {
    if (how.tiles == Tiles::kNarrow) {
      constexpr ForwardShape kNarrow = forward_shape(kHeadDim, Tiles::kNarrow);
      if (args.problem.packed) return launch_forward<PackedTraits<T, kHeadDim, kNarrow>>(args, how, workspace);
      return launch_forward<ForwardTraits<T, kHeadDim, kNarrow>>(args, how, workspace);
    }
  }
  constexpr ForwardShape kSmall = forward_shape(kHeadDim, Tiles::kSmall),
                         kLarge = forward_shape(kHeadDim, Tiles::kLarge),
                         kSplit = forward_shape(kHeadDim, Tiles::kSplit);
  if (args.problem.packed) {
    if (how.tiles == Tiles::kScored) {
      return launch_forward<PackedTraits<T, kHeadDim, forward_shape(kHeadDim, Tiles::kScored)>>(args, how, workspace);
    }
    if constexpr (kSmall != kLarge) {
      if (how.tiles == Tiles::kSmall) return launch_forward<PackedTraits<T, kHeadDim, kSmall>>(args, how, workspace);
    }
    return launch_forward<PackedTraits<T, kHeadDim, kLarge>>(args, how, workspace);
  }
  if (how.tiles == Tiles::kScored) {
    return launch_forward<ForwardTraits<T, kHeadDim, forward_shape(kHeadDim, Tiles::kScored)>>(args, how, workspace);
  }
  if constexpr (kSplit.shares_keys) {
    if (how.tiles == Tiles::kSplit) {
      launch_forward<ForwardTraits<T, kHeadDim, kSplit>>(args, how, workspace);
      if (how.splits.count > 1) {
        const auto* const out = static_cast<const float*>(workspace);
        const float* const sums = out + how.splits.count * part_elements(args.problem);
        cuda::combine(args, out, reinterpret_cast<const float2*>(sums), how.splits.count);
      }
      return;
    }
  }
  if constexpr (kSmall != kLarge) {
    if (how.tiles == Tiles::kSmall) return launch_forward<ForwardTraits<T, kHeadDim, kSmall>>(args, how, workspace);
  }
  launch_forward<ForwardTraits<T, kHeadDim, kLarge>>(args, how, workspace);
}

}  // namespace flash_ext::sm90
