// The host side of backward: which instance, how much scratch, which launches in which order.
//
//   memset -> delta -> (sums of rows with a large lse) -> (gradient of a broadcast bias) -> main kernel, or one for
//   each batch element -> dQ to its own dtype, sums of slopes
//
// Called by rows.cpp through kernels.h. Invariant: plan_backward and run_backward read the same functions, so
// scratch and shared memory are what explain prints.
#pragma once

#include "gpu/host/inspect.h"
#include "gpu/host/launch.h"
#include "gpu/host/tensor_map.h"
#include "kernels/sm80/backward/kernel.cuh"
#include "kernels/sm80/backward/renormalise.cuh"
#include "kernels/sm80/backward_single_tile/run.cuh"
#include "kernels/sm80/bias_gradient/run.cuh"
#include "kernels/sm80/choose_tiles.h"
#include "kernels/stages/mask_ranges.h"
#include "kernels/stages/rows.h"
#include "kernels/stages/sequences.h"

namespace flash_ext::sm80 {

// fn(Traits) of the instance that serves the problem.
template <class Element, int kHeadDim, class Fn>
auto with_backward_traits(const Problem& problem, bool small, const Fn& fn) {
  const bool plain = is_plain_backward(problem);
  if (small) {
    return plain ? fn(BackwardTraits<Element, kHeadDim, true, ScoreKind::kNone>())
                 : fn(BackwardTraits<Element, kHeadDim, true, ScoreKind::kAny>());
  }
  if (plain) return fn(BackwardTraits<Element, kHeadDim, false, ScoreKind::kNone>());
  if constexpr (sizeof(StorageOf<Element>) == 2) {
    if (has_dropout_alone(problem)) return fn(BackwardTraits<Element, kHeadDim, false, ScoreKind::kDropout>());
  }
  return fn(BackwardTraits<Element, kHeadDim, false, ScoreKind::kAny>());
}

template <class Traits>
BackwardSmem backward_smem_of(const Problem& problem, const DeviceInfo& device) {
  constexpr BackwardShape kShape = Traits::kShape;
  return backward_smem(kShape, Traits::kHeadDim, sizeof(typename Traits::T),
                       backward_needs(problem, Traits::kHeadDim, has_bulk_additions(device)));
}

// batch: of how many elements.
template <class Traits>
TileSchedule backward_schedule(const Problem& problem, int64_t batch, int64_t groups, int64_t resident) {
  const int64_t bytes = rows_of_head(problem) * (problem.head_dim * (sizeof(typename Traits::T) + 4) +
                                                 problem.head_dim_v * sizeof(typename Traits::T));
  const int64_t l2_heads = heads_per_section(bytes * problem.heads_q / groups, kL2Budget);
  if (problem.packed) return packed_schedule(problem, problem.rows_k, Traits::kBlockN, groups, l2_heads);
  TileSchedule schedule;
  schedule.blocks = block_count(problem.len_k, Traits::kBlockN);
  schedule.heads_k = groups;
  schedule.kv_heads = batch * schedule.heads_k;
  schedule.batch = batch;
  const Band band = make_band(problem);
  set_sections(schedule, l2_heads, resident, [&](int64_t block) {
    const int64_t first = block * Traits::kBlockN;
    return band.queries({first, std::min(first + Traits::kBlockN, problem.len_k)}, problem.len_q).size();
  });
  return schedule;
}

// The same call with a V that is 0 in every row, which dV does not need.
inline BackwardArgs without_values(BackwardArgs args, float* zeros) {
  TensorView row;
  row.data = zeros;
  row.col_stride = 1;
  args.fwd.v = row;
  return args;
}

// Whether the gradient is wanted in bf16: where this may serve, and if it does not, bias_gradient/kernel.cuh writes it
// so.
template <class Traits>
bool has_dbias_in_bias_dtype(const Problem& problem, const DeviceInfo& device) {
  return !problem.packed && Traits::kSendsDbias &&
         has_tensor_maps(device, sizeof(typename Traits::T), Traits::kHeadDim) && problem.wants_dbias &&
         problem.bias_dtype == DType::kBFloat16 && !problem.wants_dalibi && problem.dropout_p == 0.0 &&
         problem.len_k % 8 == 0;
}

template <class Element, int kHeadDim>
void run_renormalise(const BackwardArgs& args, const BackwardScratch& scratch) {
  using Traits = RenormaliseTraits<Element, kHeadDim>;
  const Problem& problem = args.fwd.problem;
  const int64_t m_blocks = query_tiles(problem, Traits::kBlockM), heads = elements_of(problem) * problem.heads_q;
  constexpr int64_t kShared = renormalise_shared_bytes(kHeadDim, sizeof(typename Traits::T));
  cuda::launch(renormalise_kernel<Traits>, cuda::grid_of(heads * m_blocks), Traits::kThreads, kShared, args.fwd.stream,
               args, scratch, m_blocks, features_of(args.fwd));
}

// How many launches the main kernel takes for the gradient of the bias, or 0 where it does not make it.
template <class Traits>
int dbias_launches(const BackwardArgs& args, const BackwardChoice& choice) {
  const Problem& problem = args.fwd.problem;
  const TensorView& view = args.dbias;
  if (!choice.dbias_in_bias_dtype || args.d_lse != nullptr) return 0;
  if (!cuda::is_made_for(backward_kernel<Traits>, 90)) return 0;  // a later card's, made of PTX of 8.0, has no boxes
  if (!problem.wants_dq && !problem.wants_dk && !problem.wants_dv) return 0;  // then that pass is less work
  if (problem.heads_k != problem.heads_v && problem.wants_dv) return 0;       // which is two launches as it is
  if (cuda::tma_refuses(problem, view, problem.heads_q, problem.len_q) != nullptr) return 0;
  if (is_whole(problem, view)) return 1;
  Problem one = problem;
  one.batch_rank = 0;
  if (!is_whole(one, view) || problem.batch > kMostSums) return 0;
  for (int i = 0; i < problem.batch_rank; ++i) {
    if (view.batch_stride[i] != 0 && problem.batch_size[i] > 1) return 0;
  }
  // Launches that do not fill the card are what it must not cost.
  const int64_t blocks = block_count(problem.len_k, Traits::kBlockN) * problem.heads_k;
  const int64_t apart = problem.batch * block_count(blocks, choice.resident);
  return 10 * apart <= 12 * block_count(blocks * problem.batch, choice.resident) ? static_cast<int>(problem.batch) : 0;
}

// Not where tiles must come in one order or all of them write something.
template <class Traits>
bool finds_ranges(const Problem& problem, const DeviceInfo& device) {
  return Traits::kGeneral && finds_mask_ranges(problem, device.multiprocessors) && !problem.deterministic &&
         !problem.wants_dbias && problem.heads_k == problem.heads_v && problem.len_k > Traits::kBlockN;
}

template <class Traits>
BackwardScratch backward_scratch(const Problem& problem, void* workspace) {
  BackwardScratch scratch;
  const bool packed = problem.packed;
  const int64_t heads = elements_of(problem) * problem.heads_q, n_blocks = key_tiles(problem, Traits::kBlockN);
  const auto take = [&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(static_cast<char*>(workspace) + scratch.bytes);
    scratch.bytes += (count * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128;
  };
  scratch.rows = rows_of_head(problem);
  scratch.m_blocks = query_tiles(problem, Traits::kBlockM);
  // The longest sequence's length: a batch-invariant call does not ask for it.
  const bool one_tile = problem.len_k <= Traits::kBlockN && !problem.batch_invariant;
  scratch.direct_dq = Traits::kDirectDq && problem.wants_dq && one_tile;
  const bool sums_dq = problem.wants_dq && !scratch.direct_dq;
  take(scratch.delta, heads * scratch.rows);
  if (may_be_inexact(problem)) {
    take(scratch.inverse, heads * scratch.rows);
    take(scratch.shift, heads * scratch.rows);
  }
  if (finds_renorm_rows(problem)) take(scratch.renorm, heads * scratch.rows);
  scratch.beside_lse = scratch.renorm != nullptr ? reinterpret_cast<const float*>(scratch.renorm) : scratch.inverse;
  scratch.beside_lse_size = scratch.renorm != nullptr ? 2 : 1;
  if (problem.wants_dalibi) take(scratch.slopes, heads * n_blocks);
  take(scratch.ranges_data, cuda::mask_ranges_bytes(problem, cuda::RangesOf::kKeys, Traits::kBlockN) / 8);
  if (packed) {
    const auto take_list = [&](PackedTile*& list, cuda::TilesOf of, int64_t block) {
      take(list, cuda::packed_tiles_bytes(problem, of, block) / static_cast<int64_t>(sizeof(PackedTile)));
    };
    take_list(scratch.tiles, cuda::TilesOf::kKeys, Traits::kBlockN);
    take_list(scratch.renorm_tiles, cuda::TilesOf::kQueries,
              renormalise_tile(sizeof(typename Traits::T), Traits::kHeadDim).block_m);
  }
  if (problem.wants_dbias) take(scratch.bias_partial, bias_partial_elements(problem));
  const int64_t before = scratch.bytes;
  if (problem.deterministic && sums_dq) take(scratch.dq_semaphore, heads * scratch.m_blocks * Traits::kWarps + 1);
  if (problem.dtype == DType::kFloat16) take(scratch.bounds, problem.batch * problem.heads_q * 2);
  if (sums_dq) take(scratch.dq_accum, heads * scratch.rows * problem.head_dim);
  if (has_one_float_key(problem)) take(scratch.zeros, problem.head_dim_v);
  const int64_t least_keys = packed ? 0 : problem.len_k;  // of a sequence
  if (problem.dtype == DType::kFloat16 && has_sums(problem.len_q, least_keys, Traits::kBlockM)) {
    const int64_t tiles =
        packed ? first_sum(problem.rows_q, Traits::kBlockM, Traits::kBlockN) + 1 : problem.batch * n_blocks;
    take(scratch.sums, tiles * std::max(problem.heads_k, problem.heads_v) * Traits::kThreads * Traits::kAccumulators);
  }
  scratch.zeroed_bytes = scratch.bytes - before;
  return scratch;
}

template <class Element, int kHeadDim>
Plan plan_backward(const Problem& problem, const DeviceInfo& device) {
  const bool small = takes_small_tiles(problem, Pass::kBackward, kHeadDim, device);
  const auto make = [&]<class Traits>(Traits) {
    const BackwardSmem smem = backward_smem_of<Traits>(problem, device);
    Plan plan;
    if constexpr (sizeof(typename Traits::T) == 2) {
      plan.kernel = Traits::kPlain     ? "sm80.backward.plain"
                    : Traits::kGeneral ? "sm80.backward.general"
                                       : "sm80.backward.dropout";
    } else if constexpr (std::is_same_v<Element, Tf32>) {
      plan.kernel = Traits::kPlain ? "sm80.backward.fp32.plain.tf32" : "sm80.backward.fp32.general.tf32";
    } else {
      plan.kernel = Traits::kPlain ? "sm80.backward.fp32.plain" : "sm80.backward.fp32.general";
    }
    plan.block_m = Traits::kBlockM;
    plan.block_n = Traits::kBlockN;
    plan.stages = Traits::kStages;
    plan.use("k", smem.v);
    plan.use("v", smem.q - smem.v);
    plan.use("q", smem.d_out - smem.q);
    plan.use("d_out", smem.p - smem.d_out);
    plan.use("p and ds", smem.rows - smem.p);
    plan.use("lse and delta", smem.bias - smem.rows);
    plan.use("bias", smem.mask - smem.bias);
    plan.use("mask", smem.dq - smem.mask);
    plan.use("dq", smem.total - smem.dq);
    plan.on_chip_limit = device.shared_memory_per_block;
    plan.scratch_bytes = backward_scratch<Traits>(problem, nullptr).bytes;
    plan.dbias_in_bias_dtype = has_dbias_in_bias_dtype<Traits>(problem, device);
    plan.grid = key_tiles(problem, Traits::kBlockN) * elements_of(problem) * problem.heads_k;
    if (device.multiprocessors > 0) plan.waves = static_cast<double>(plan.grid) / device.multiprocessors;
    plan.choose(BackwardChoice{.small_tiles = small,
                               .dbias_in_bias_dtype = plan.dbias_in_bias_dtype,
                               .shared_limit = plan.on_chip_limit,
                               .shared_bytes = plan.on_chip_bytes(),
                               .resident = device.multiprocessors,  // mostly one block each
                               .finds_ranges = finds_ranges<Traits>(problem, device)});
    return plan;
  };
  return with_backward_traits<Element, kHeadDim>(problem, small, make);
}

// The lists of tiles, and zeros in the rows of dK and dV that no tile has.
template <class Traits>
void prepare_packed(const BackwardArgs& args, const BackwardScratch& scratch) {
  using cuda::TilesOf;
  const Problem& problem = args.fwd.problem;
  constexpr int kRenormalised = renormalise_tile(sizeof(typename Traits::T), Traits::kHeadDim).block_m;
  const auto bytes = [](bool in_accum) { return in_accum ? 4 : static_cast<int>(sizeof(typename Traits::T)); };
  const cuda::PackedResults results = {
      .rows = {{args.dk, TilesOf::kKeys, problem.heads_k, problem.head_dim, bytes(args.dk_in_accum)},
               {args.dv, TilesOf::kKeys, problem.heads_v, problem.head_dim_v, bytes(args.dv_in_accum)}}};
  const auto list = [&](TilesOf of, int64_t block, PackedTile* tiles, const cuda::PackedResults& ready) {
    cuda::prepare_packed(problem, args.fwd.sequences, of, block, tiles, ready, args.fwd.stream);
  };
  list(TilesOf::kKeys, Traits::kBlockN, scratch.tiles, results);
  list(TilesOf::kQueries, kRenormalised, scratch.renorm_tiles, {});
}

template <class Traits>
void launch_backward(const BackwardArgs& given, const BackwardChoice& choice, void* workspace) {
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim;
  const Problem& problem = given.fwd.problem;
  BackwardScratch scratch = backward_scratch<Traits>(problem, workspace);
  BackwardArgs args = has_one_float_key(problem) ? without_values(given, scratch.zeros) : given;
  if (scratch.zeroed_bytes > 0) {
    void* const first = static_cast<char*>(workspace) + scratch.bytes - scratch.zeroed_bytes;
    cuda::check(cudaMemsetAsync(first, 0, scratch.zeroed_bytes, static_cast<cudaStream_t>(args.fwd.stream)), "memset");
  }
  if (problem.packed) prepare_packed<Traits>(args, scratch);
  if (choice.finds_ranges) {
    scratch.ranges = cuda::find_mask_ranges(args.fwd, cuda::RangesOf::kKeys, Traits::kBlockN, scratch.ranges_data);
  }
  if (is_dlse_apart(problem)) scratch.d_lse = static_cast<const float*>(args.d_lse);
  cuda::delta(args, scratch.delta, scratch.bounds, scratch.d_lse != nullptr,
              finds_renorm_rows(problem) ? scratch.renorm : nullptr);
  if (may_be_inexact(problem)) {
    run_renormalise<Element, kHeadDim>(args, scratch);
    if (!finds_renorm_rows(problem)) args.fwd.lse = scratch.shift;
  }
  const int by_boxes = problem.wants_dbias ? dbias_launches<Traits>(args, choice) : 0;
  scratch.direct_dbias = problem.wants_dbias && !choice.dbias_in_bias_dtype && is_whole(problem, args.dbias);
  if (by_boxes > 0) {
    scratch.dbias_map = cuda::make_tensor_map(problem, args.dbias, problem.heads_q, problem.len_q, problem.len_k,
                                              Traits::kBlockM, cuda::Promotion::k128, 1, kDbiasCols);
  } else if (problem.wants_dbias && !scratch.direct_dbias) {
    run_bias_gradient<Element, kHeadDim>(args, scratch, choice.shared_limit, choice.dbias_in_bias_dtype);
  }
  if (scratch.direct_dbias ||
      (by_boxes > 0 && (problem.packed || !make_band(problem).unbounded()))) {  // some tiles are not visited
    const int64_t bytes = bias_elements(problem, args.dbias) * (choice.dbias_in_bias_dtype ? 2 : 4);
    cuda::check(cudaMemsetAsync(args.dbias.data, 0, bytes, static_cast<cudaStream_t>(args.fwd.stream)), "memset");
  }
  const bool skips = problem.packed || !make_band(problem).unbounded();  // some tiles of queries see no key
  if (scratch.direct_dq && skips) {
    const int64_t element = args.dq_in_accum || problem.dtype == DType::kFloat32 ? 4 : 2;
    const int64_t bytes = elements_of(problem) * problem.heads_q * scratch.rows * problem.head_dim * element;
    cuda::check(cudaMemsetAsync(args.dq.data, 0, bytes, static_cast<cudaStream_t>(args.fwd.stream)), "memset");
  }
  const bool has_tiles = problem.wants_dq || problem.wants_dk || problem.wants_dv || problem.wants_dalibi;
  if (!has_tiles && !scratch.direct_dbias) return;
  const auto launch = [&](const BackwardArgs& part, const BackwardScratch& part_scratch, int64_t groups) {
    const Problem& p = part.fwd.problem;
    constexpr bool kMayBeRaw = sizeof(typename Traits::T) == 2;
    ScoreOptions options = ScoreOptions::of(part.fwd, kMayBeRaw && (!Traits::kGeneral || !may_be_inexact(problem)));
    options.features |= (may_be_inexact(problem) ? kRenormalised : 0u) |
                        (part_scratch.d_lse != nullptr ? kDlseApart : 0u) | (p.wants_dalibi ? kSlopeGradient : 0u) |
                        (part_scratch.direct_dbias ? kBiasGradient : 0u) | (by_boxes > 0 ? kBiasBoxes : 0u) |
                        (backward_needs(problem, kHeadDim, false).p_apart ? kPApart : 0u);
    const int64_t elements = elements_of(problem), batch = by_boxes > 1 ? 1 : elements;
    TileSchedule schedule = backward_schedule<Traits>(problem, batch, groups, choice.resident);
    schedule.batch_inner = batch > 1 && batch_shares_scores(problem, part.fwd);
    BackwardScratch now = part_scratch;
    for (; now.first_batch < elements; now.first_batch += static_cast<int>(batch)) {
      now.adds_dbias = now.first_batch > 0;
      cuda::launch(backward_kernel<Traits>, cuda::grid_of(schedule.size()), Traits::kThreads, choice.shared_bytes,
                   args.fwd.stream, part, now, schedule, options);
    }
  };
  if (problem.heads_k == problem.heads_v || !args.dv) {
    launch(args, scratch, problem.heads_k);
  } else {
    BackwardArgs keys = args, values = args;
    keys.dv = TensorView();
    values.dk = TensorView();
    Problem& of_values = values.fwd.problem;
    of_values.wants_dq = of_values.wants_dk = of_values.wants_dbias = of_values.wants_dalibi = false;
    BackwardScratch values_scratch = scratch;
    values_scratch.dq_semaphore = nullptr;
    values_scratch.direct_dbias = values_scratch.direct_dq = false;
    launch(keys, scratch, problem.heads_k);
    launch(values, values_scratch, problem.heads_v);
  }
  if (problem.wants_dq && !scratch.direct_dq) cuda::convert_dq(args, scratch.dq_accum, problem.head_dim == kHeadDim);
  if (problem.wants_dalibi) {
    cuda::sum_slopes(args, scratch.slopes, key_tiles(problem, Traits::kBlockN), Traits::kBlockN, scratch.delta,
                     scratch.inverse, scratch.d_lse != nullptr);
  }
}

template <class Element, int kHeadDim>
void run_backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  const auto choice = plan.chosen<BackwardChoice>();
  with_backward_traits<Element, kHeadDim>(args.fwd.problem, choice.small_tiles, [&]<class Traits>(Traits) {
    launch_backward<Traits>(args, choice, workspace);
  });
}

template <class Element, int kHeadDim>
void inspect_backward(const Problem& problem, Plan& plan) {
  const auto choice = plan.chosen<BackwardChoice>();
  with_backward_traits<Element, kHeadDim>(problem, choice.small_tiles, [&]<class Traits>(Traits) {
    cuda::inspect(backward_kernel<Traits>, Traits::kThreads, choice.shared_bytes, plan);
    if (may_be_inexact(problem)) cuda::inspect_beside(renormalise_kernel<RenormaliseTraits<Element, kHeadDim>>, plan);
    if (problem.wants_dbias) {
      cuda::inspect_beside(bias_gradient_kernel<BiasGradientTraits<Element, kHeadDim, false>>, plan);
      cuda::inspect_beside(bias_gradient_kernel<BiasGradientTraits<Element, kHeadDim, true>>, plan);
    }
  });
}

}  // namespace flash_ext::sm80
