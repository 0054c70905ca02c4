// The rows of sm90, host code only: what each serves, what it takes, and which instance it picks.
//
//   fp16 and bf16 by TMA and wgmma (forward/kernel.cuh, backward/kernel.cuh, backward_two_pass,
//   bias_gradient/kernel.cuh): bands, grouped heads, lse, softcap, bias, ALiBi, mask and dropout
//
// Serves compute capability 9.0 exactly, because wgmma is of that one architecture; backward serves less than forward.
// Called through kernels/table.cpp. Invariant: what a row accepts has an instance, and its tensor maps encode; the list
// of instances comes from cmake/cuda_units.cmake.
#include <algorithm>
#include <span>
#include <tuple>
#include <utility>

#include "core/kernel.h"
#include "gpu/host/tensor_map.h"
#include "kernels/sm90/backward_two_pass/config.h"
#include "kernels/sm90/config.h"
#include "kernels/sm90/cost.h"
#include "kernels/sm90/forward/choose_tiles.h"
#include "kernels/stages/mask_ranges.h"
#include "kernels/stages/sequences.h"
#include "kernels/stages/transpose_values.h"
#include "sm90_instances.h"

namespace flash_ext::sm90 {
namespace {

constexpr int64_t kMaxLength = (int64_t{1} << 29) - 1;  // sums of a position, a band's edge and a tile fit 32 bits
constexpr double kMaxDropout = 0.99999;  // from 1 - 2^-17 on the threshold takes 17 bits (core/dropout.h)
constexpr double kMaxSoftcap = 4096;     // fp16's tanh has an error of 2e-7
constexpr double kMaxScale = 1e30;       // and its inverse: far from the ends of float
// Rows with fewer, and those of a band of one, have a dS that is nearly or exactly 0 in eager attention, and the
// rounding of P and out is all that is left of it: kernels/sm80/choose_tiles.h, may_be_inexact.
constexpr int64_t kFewKeys = 16;
// A tile with a mask or bias takes 4 us in forward however little of it there is; in shorter calls sm80 took a third to
// two thirds of the time (windows of 49 tokens, 64 by 64). With dropout the same is taken, not measured.
constexpr int64_t kLeastScores = 65;

using Instances = std::span<const Instance>;

constexpr bool serves(const Instance& instance, DType dtype, Pass pass) {
  return instance.dtype == dtype && (pass == Pass::kForward || instance.run_backward != nullptr);
}

// The first that is wide enough; there is one, because a row has accepted.
const Instance& instance_of(const Problem& problem, Pass pass) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const Instances instances = problem.fp8 ? Instances(kFp8Instances) : Instances(kInstances);
  return *std::find_if(instances.begin(), instances.end(), [&](const Instance& instance) {
    return serves(instance, problem.dtype, pass) && instance.head_dim >= head_dim;
  });
}

// NOTE: up to head dim 128 the warps that load a bias of other rows are slower than all the rest: 4.6 ms at 4x16x4095
// where sm80 takes 4.0 (a mask: 2.6 and 3.4).
std::string refuses_bias(const ForwardArgs& args) {
  const Problem& problem = args.problem;
  if (!problem.has_bias || std::max(problem.head_dim, problem.head_dim_v) > 128) return "";
  const bool is_one_row = problem.len_q == 1 || args.bias.row_stride == 0;
  const int element = problem.bias_dtype == DType::kFloat32 ? 4 : 2;
  if (is_one_row || reads_chunks(problem, args.bias, element)) return "";
  return "bias has rows that do not start at multiples of 16 bytes or are not contiguous";
}

// NOTE: what a pass writes needs no question: torch/ makes it dense, last dimension innermost, at an address of the
// allocator. Backward's out, which a caller of the operator may have made, does.
std::string refuses_views(const ForwardArgs& args, const BackwardArgs* backward) {
  const Problem& problem = args.problem;
  std::string reason;
  const auto ask = [&](const char* name, const TensorView& view, int64_t heads, int64_t rows) {
    const char* const refused = reason.empty() ? cuda::tma_refuses(problem, view, heads, rows) : nullptr;
    if (refused != nullptr) reason = std::string(name) + " " + refused;
  };
  const int64_t rows_q = problem.packed ? problem.rows_q : problem.len_q;
  const int64_t rows_k = problem.packed ? problem.rows_k : problem.len_k;
  ask("query", args.q, problem.heads_q, rows_q);
  ask("key", args.k, problem.heads_k, rows_k);
  ask("value", args.v, problem.heads_v, rows_k);
  // How long a bias's rows are is the longest sequence's; a batch-invariant forward reads them however they lie.
  const bool reads_any_bias = problem.batch_invariant && backward == nullptr;
  if (reason.empty() && !reads_any_bias) reason = refuses_bias(args);
  if (backward == nullptr || !reason.empty()) return reason;
  // As limits() says of the longest sequence, which may be one of many. Whether a sequence has others beside it must
  // not choose a kernel where results are batch-invariant.
  if (problem.packed && !problem.batch_invariant && problem.rows_k < kFewKeys * problem.batch)
    return "sequences have fewer than 16 keys in the mean";
  for (const auto& [name, in_accum] :
       {std::pair{"query", backward->dq_in_accum}, std::pair{"key", backward->dk_in_accum},
        std::pair{"value", backward->dv_in_accum}}) {
    if (in_accum) return std::string("the gradient of a broadcast ") + name + " is not supported";
  }
  if (!backward->d_out) return "a backward without grad_out is not supported";
  ask("grad_out", backward->d_out, problem.heads_q, rows_q);
  ask("out", args.out, problem.heads_q, rows_q);
  return reason;
}

// TMA sees two numbers as one of 16 bits.
std::string refuses_fp8_views(const ForwardArgs& args, const BackwardArgs*) {
  const Problem& problem = args.problem;
  const auto is_odd = [&](const TensorView& view, int64_t heads, int64_t rows) {
    int64_t all = (heads > 1 ? view.head_stride : 0) | (rows > 1 ? view.row_stride : 0);
    for (int i = 0; i < problem.batch_rank; ++i) all |= view.batch_stride[i];
    return all % 2 != 0;
  };
  ForwardArgs pairs = args;
  using Part = std::tuple<const char*, TensorView*, int64_t, int64_t>;
  for (const auto& [name, view, heads, rows] :
       {Part{"query", &pairs.q, problem.heads_q, problem.len_q}, Part{"key", &pairs.k, problem.heads_k, problem.len_k},
        Part{"value", &pairs.v, problem.heads_v, problem.len_k}}) {
    if (is_odd(*view, heads, rows)) return std::string(name) + " has a stride that is not a multiple of 16 bytes";
    *view = cuda::pairs_of(*view);
  }
  return refuses_views(pairs, nullptr);
}

const char* schedule_name(Schedule schedule, bool counted, bool shares_tiles) {
  if (shares_tiles) {
    return schedule == Schedule::kOverlap ? "overlap, heads of a group share tiles"
                                          : "ping-pong, heads of a group share tiles";
  }
  if (schedule == Schedule::kOverlap) return counted ? "overlap, tiles by a counter" : "overlap, tiles in turn";
  return counted ? "ping-pong, tiles by a counter" : "ping-pong, tiles in turn";
}

// What all kernels here have in common: a block has a multiprocessor for itself.
Plan plan_of(const char* kernel, int threads, int registers, int producer_registers, const DeviceInfo& device) {
  Plan plan;
  plan.kernel = kernel;
  plan.on_chip_limit = device.shared_memory_per_block;
  plan.registers = registers;
  plan.producer_registers = producer_registers;
  plan.occupancy = threads / 2048.0;
  return plan;
}

// items: of work, each of which a block does alone; persistent: a block for each multiprocessor walks them.
void set_grid(Plan& plan, const TileSchedule& schedule, int64_t items, bool persistent, const DeviceInfo& device) {
  plan.grid = items;
  plan.l2_section = std::min(schedule.section, schedule.kv_heads);
  if (device.multiprocessors == 0) return;
  plan.waves = static_cast<double>(items) / device.multiprocessors;
  if (persistent) plan.grid = std::min<int64_t>(items, device.multiprocessors);
}

void choose_backward(Plan& plan, const Problem& problem, const DeviceInfo& device, bool two_pass) {
  const bool finds_ranges = finds_mask_ranges(problem, device.multiprocessors);
  plan.choose(BackwardLaunch{plan.grid, device.multiprocessors, two_pass, finds_ranges});
}

constexpr const char* kForwardFp8 = "sm90.forward.fp8";

Plan plan_forward(const Problem& problem, const DeviceInfo& device) {
  const int head_dim = instance_of(problem, Pass::kForward).head_dim;
  const auto [tiles, splits] = choose_tiles(problem, head_dim, device.multiprocessors);
  const bool scored = tiles == Tiles::kScored;
  const ForwardShape shape = forward_shape(head_dim, tiles);
  const int work_bytes = problem.packed ? kPackedWorkBytes : problem.fp8 ? kFp8WorkBytes : kWorkBytes;
  const ForwardSmem smem = forward_smem(shape, head_dim, work_bytes);
  const ForwardOrder order = tiles == Tiles::kSplit
                                 ? split_order(problem, shape.block_m(), splits, device.multiprocessors)
                                 : forward_order(problem, shape.block_m(), device.multiprocessors);
  const char* const kernel = scored             ? "sm90.forward.scored"
                             : splits.count > 1 ? "sm90.forward.split"
                             : problem.fp8      ? kForwardFp8
                                                : "sm90.forward";
  Plan plan = plan_of(kernel, shape.threads(), shape.consumer_registers(problem.packed),
                      shape.producer_registers(problem.packed), device);
  plan.schedule = schedule_name(shape.schedule, order.counted, splits.head_rows > 0);
  if (splits.count > 1) {
    plan.splits = splits.count;
    plan.split_keys = int64_t{splits.tiles} * shape.block_n;
  }
  plan.block_m = shape.block_m();
  plan.block_n = shape.block_n;
  plan.stages = shape.stages;
  plan.use("q", smem.k);
  plan.use("k", smem.v - smem.k);
  plan.use("v", smem.scores - smem.v);
  plan.use("bias and mask", smem.sums - smem.scores);
  plan.use("out of all tiles", smem.rows - smem.sums);
  plan.use("sums of rows", smem.works - smem.rows);
  plan.use("barriers and alignment", smem.total - smem.works);
  plan.scratch_bytes = order.counted ? kCounterBytes : split_scratch_bytes(problem, splits);
  if (const int64_t bytes = cuda::mask_ranges_bytes(problem, cuda::RangesOf::kQueries, shape.block_m()); bytes > 0) {
    plan.scratch_bytes = kCounterBytes + bytes;
  }
  if (problem.fp8) {
    plan.scratch_bytes =
        kCounterBytes + cuda::transposed_bytes(problem) + sum_scratch_bytes(problem, shape, head_dim, order.grid);
  }
  if (problem.packed) {
    plan.scratch_bytes = kCounterBytes + cuda::packed_tiles_bytes(problem, cuda::TilesOf::kQueries, shape.block_m());
  }
  set_grid(plan, order.schedule, order.schedule.size() * std::max(splits.count, 1), false, device);
  plan.grid = order.grid;
  const bool finds_ranges = finds_mask_ranges(problem, device.multiprocessors);
  plan.choose(ForwardLaunch{tiles, splits, static_cast<int>(std::min<int64_t>(order.grid, INT32_MAX)), finds_ranges});
  return plan;
}

Plan plan_two_pass(const Problem& problem, const DeviceInfo& device) {
  const Instance& instance = instance_of(problem, Pass::kBackward);
  const ScoreKind kind = two_pass_score_kind(problem, instance.head_dim);
  const bool narrow = is_two_pass_narrow(problem, instance.head_dim);
  const TwoPassShape shape = two_pass_shape(instance.head_dim, kind, narrow);
  const char* const kernel = instance.head_dim <= kSmallHeadDim ? "sm90.backward.two_pass.small_head_dim"
                             : kind == ScoreKind::kScores && shape.halves
                                 ? "sm90.backward.two_pass.scored.large_head_dim"
                             : kind == ScoreKind::kScores  ? "sm90.backward.two_pass.scored"
                             : kind == ScoreKind::kSoftcap ? "sm90.backward.two_pass.softcap"
                                                           : "sm90.backward.two_pass";
  Plan plan = plan_of(kernel, TwoPassShape::threads, shape.consumer_registers(), shape.producer_registers(), device);
  plan.stages = shape.stages;
  plan.scratch_bytes = instance.backward_scratch_bytes(problem, true);
  if (!problem.wants_dk && !problem.wants_dv) {
    const QueriesSmem smem = queries_smem(shape, instance.head_dim);
    const TileSchedule schedule = two_pass_queries(problem, shape, device.multiprocessors);
    plan.schedule = "a tile of queries a block";
    plan.block_m = shape.query_rows();
    plan.block_n = shape.walked_keys;
    plan.use("q", smem.d_out - smem.q);
    plan.use("d_out", smem.k - smem.d_out);
    plan.use("k", smem.v - smem.k);
    plan.use("v", smem.scores - smem.v);
    plan.use("bias and mask", smem.barriers - smem.scores);
    plan.use("barriers and alignment", smem.total - smem.barriers);
    set_grid(plan, schedule, schedule.size(), false, device);
  } else {
    const KeysSmem smem = keys_smem(shape, instance.head_dim);
    const TileSchedule schedule = backward_schedule(problem, shape.keys, device.multiprocessors);
    plan.schedule = problem.wants_dq ? "a tile of keys a block, then a tile of queries" : "a tile of keys a block";
    plan.block_m = shape.queries;
    plan.block_n = shape.keys;
    plan.use("k", smem.v - smem.k);
    plan.use("v", smem.q - smem.v);
    plan.use("q", smem.d_out - smem.q);
    plan.use("d_out", smem.p - smem.d_out);
    plan.use("p", smem.stats - smem.p);
    plan.use("lse and delta", smem.draw_keys - smem.stats);
    plan.use("bias, mask and dropout", smem.barriers - smem.draw_keys);
    plan.use("barriers and alignment", smem.total - smem.barriers);
    set_grid(plan, schedule, schedule.size() * (shape.halves ? 2 : 1), false, device);
  }
  choose_backward(plan, problem, device, true);
  return plan;
}

constexpr const char* kPackedInOrder = "sm90.backward.packed.in_order";

Plan plan_backward(const Problem& problem, const DeviceInfo& device) {
  const Instance& instance = instance_of(problem, Pass::kBackward);
  const ScoreKind kind = score_kind_of(problem);
  const bool scored = is_scored(kind);
  const BackwardShape shape = backward_shape(instance.head_dim, kind);
  const bool ordered = is_ordered(problem);
  const BackwardSmem smem =
      backward_smem(shape, instance.head_dim, problem.packed && ordered ? kPackedKeyWorkBytes : kKeyWorkBytes);
  const TileSchedule schedule = key_schedule(problem, shape.block_n, device.multiprocessors);
  const char* const kernel = has_bias_gradient(problem)    ? "sm90.backward.scored, sm90.bias_gradient"
                             : problem.packed              ? ordered ? kPackedInOrder : "sm90.backward.packed"
                             : scored                      ? "sm90.backward.scored"
                             : kind == ScoreKind::kSoftcap ? "sm90.backward.softcap"
                                                           : "sm90.backward";
  Plan plan = plan_of(kernel, shape.threads, shape.consumer_registers(), shape.producer_registers(), device);
  const bool persistent = ordered || is_backward_persistent(problem, device.multiprocessors);
  if (is_dq_stored(problem)) {
    plan.schedule = persistent ? "dq stored at once, persistent" : "dq stored at once, a tile of keys a block";
  } else {
    plan.schedule = ordered ? "dq in order, persistent" : persistent ? "persistent" : "a tile of keys a block";
  }
  plan.block_m = shape.block_m;
  plan.block_n = shape.block_n;
  plan.stages = shape.stages;
  plan.use("k", smem.v - smem.k);
  plan.use("v", smem.q - smem.v);
  plan.use("q", smem.d_out - smem.q);
  plan.use("d_out", smem.ds - smem.d_out);
  plan.use("ds", smem.dq - smem.ds);
  plan.use("dq staging", smem.scores - smem.dq);
  plan.use("bias, mask and dropout", smem.stats - smem.scores);
  plan.use("lse and delta", smem.barriers - smem.stats);
  plan.use("barriers and alignment", smem.total - smem.barriers);
  plan.scratch_bytes = instance.backward_scratch_bytes(problem, false);
  plan.dbias_in_bias_dtype = has_bias_gradient(problem);
  set_grid(plan, schedule, schedule.size(), persistent, device);
  choose_backward(plan, problem, device, false);
  return plan;
}

// dQ of packed sequences in one order, in deterministic mode and without: who decides is the row (is_ordered).
Plan plan_in_order(const Problem& problem, const DeviceInfo& device) {
  Problem in_order = problem;
  in_order.deterministic = true;
  return plan_backward(in_order, device);
}

void forward(const ForwardArgs& args, const Plan& plan, void* workspace) {
  instance_of(args.problem, Pass::kForward).run_forward(args, plan.chosen<ForwardLaunch>(), workspace);
}

void backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  instance_of(args.fwd.problem, Pass::kBackward).run_backward(args, plan.chosen<BackwardLaunch>(), workspace);
}

void backward_in_order(const BackwardArgs& args, const Plan& plan, void* workspace) {
  BackwardArgs in_order = args;
  in_order.fwd.problem.deterministic = true;
  backward(in_order, plan, workspace);
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// Of the instances of this build.
constexpr Features dtypes(Pass pass) {
  Features features;
  for (const Instance& instance : kInstances) {
    features.add(feature_of(instance.dtype), serves(instance, instance.dtype, pass));
  }
  return features;
}

// The largest head dimension, at most `limit`, that every dtype has; 0: none.
constexpr int largest(Pass pass, int limit = INT_MAX) {
  int result = INT_MAX;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    if (!dtypes(pass).has(feature_of(dtype))) continue;
    int of_dtype = 0;
    for (const Instance& instance : kInstances) {
      if (serves(instance, dtype, pass) && instance.head_dim <= limit) of_dtype = std::max(of_dtype, instance.head_dim);
    }
    result = std::min(result, of_dtype);
  }
  return result == INT_MAX ? 0 : result;
}

constexpr Limits limits(Pass pass, int64_t least_length, int64_t least_head_dim, int64_t head_dim) {
  return {.least_compute_capability = 90,
          .compute_capability = 90,
          .least_head_dim = least_head_dim,
          .head_dim = head_dim,
          .head_dim_multiple = 8,
          .least_length = least_length,
          .length = kMaxLength,
          .least_keys = pass == Pass::kForward ? 1 : kFewKeys,
          .softcap = kMaxSoftcap,
          .dropout_p = kMaxDropout,
          .least_scale = 1 / kMaxScale,  // the maximum is taken before scaling
          .scale = kMaxScale};
}

constexpr Kernel forward_row(const char* name, Features features, int64_t least_length) {
  const Features always = dtypes(Pass::kForward)
                              .with({Feature::kGroupedHeads, Feature::kValueHeads, Feature::kSinks, Feature::kPacked,
                                     Feature::kBatchInvariant});
  return {.name = name,
          .backend = "sm90",
          .device = DeviceType::kCuda,
          .pass = Pass::kForward,
          .supports = always.with(features),
          .limits = limits(Pass::kForward, least_length, 1, largest(Pass::kForward)),
          .serves_only = features,
          .plan = plan_forward,
          .forward = forward,
          .cost = forward_cost,
          .refuses_views = refuses_views};
}

constexpr Kernel fp8_row() {
  Kernel row = forward_row(kForwardFp8, {Feature::kFp8}, 1);
  row.supports = {Feature::kFp8, Feature::kGroupedHeads, Feature::kValueHeads, Feature::kSinks,
                  Feature::kBatchInvariant};
  row.limits.head_dim = 0;
  for (const Instance& instance : kFp8Instances) {
    row.supports.add(feature_of(instance.dtype));
    row.limits.head_dim = std::max<int64_t>(row.limits.head_dim, instance.head_dim);
  }
  row.limits.head_dim_multiple = 16;
  row.refuses_views = refuses_fp8_views;
  return row;
}

constexpr Kernel backward_row(const char* name, Features features, Features only, int64_t least_length = 1) {
  return {
      .name = name,
      .backend = "sm90",
      .device = DeviceType::kCuda,
      .pass = Pass::kBackward,
      .supports = dtypes(Pass::kBackward)
                      .with({Feature::kGroupedHeads, Feature::kSinks, Feature::kBatchInvariant, Feature::kConstantLse})
                      .with(features),
      .limits = limits(Pass::kBackward, least_length, 1, largest(Pass::kBackward, kSmallHeadDim)),
      .serves_only = only,
      .plan = plan_backward,
      .backward = backward,
      .cost = backward_cost,
      .refuses_views = refuses_views};
}

constexpr Kernel packed_in_order_row() {
  Kernel row = backward_row(kPackedInOrder, {Feature::kPacked, Feature::kDeterministic}, {Feature::kPacked});
  row.plan = plan_in_order;
  row.backward = backward_in_order;
  row.cost = packed_in_order_cost;
  return row;
}

constexpr Features kScores = {Feature::kMask, Feature::kBias, Feature::kAlibi, Feature::kDropout};
constexpr Features kSome = {Feature::kNoQueryGradient, Feature::kNoKeyGradient, Feature::kNoValueGradient};

// Of head dims in (above, head_dim].
constexpr Kernel two_pass_row(const char* name, Features features, Features only, int above, int head_dim,
                              int64_t least_length) {
  Kernel row = backward_row(name, Features{Feature::kDeterministic}.with(kSome).with(features), only);
  row.limits = limits(Pass::kBackward, least_length, above + 1, largest(Pass::kBackward, head_dim));
  row.plan = plan_two_pass;
  row.cost = two_pass_cost;
  return row;
}

// Above them.
constexpr int kWide = largest(Pass::kBackward, kSmallHeadDim), kLarge = largest(Pass::kBackward, kMostSoftcap);
constexpr Kernel kKernels[] = {
    forward_row("sm90.forward.scored", kScores.with({Feature::kSoftcap}), kLeastScores),
    forward_row("sm90.forward", {}, 1),
    fp8_row(),
    two_pass_row("sm90.backward.two_pass.small_head_dim", kScores.with({Feature::kSoftcap}),
                 kSome.with({Feature::kDeterministic, Feature::kSoftcap}), 0, kSmallHeadDim, kLeastScores),
    two_pass_row("sm90.backward.two_pass.scored", kScores.with({Feature::kSoftcap}), kScores, kWide, kMostSoftcap,
                 kLeastScores),
    two_pass_row("sm90.backward.two_pass.scored.large_head_dim", kScores.with({Feature::kSoftcap}),
                 kScores.with({Feature::kSoftcap}), kLarge, INT_MAX, 1),
    two_pass_row("sm90.backward.two_pass.softcap", {Feature::kSoftcap}, {Feature::kSoftcap}, kWide, kMostSoftcap,
                 kLeastScores),
    two_pass_row("sm90.backward.two_pass", {}, {}, kWide, INT_MAX, 1),
    // The gradient of a bias is a pass of its own, bias_gradient/kernel.cuh.
    backward_row("sm90.backward.scored", kScores.with({Feature::kBiasGradient, Feature::kWholeBiasGradient}), kScores,
                 kLeastScores),
    backward_row("sm90.backward.softcap", {Feature::kSoftcap}, {Feature::kSoftcap}, kLeastScores),
    backward_row("sm90.backward.packed", kScores.with({Feature::kPacked}), {Feature::kPacked}),
    packed_in_order_row(),
    backward_row("sm90.backward", {Feature::kDeterministic}, {}),
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

}  // namespace flash_ext::sm90
