// The sm90 backend's entry, host code only: refuses, plans, and picks the kernel's instance.
//
//   fp16 and bf16 by TMA and wgmma (fwd.cuh, bwd.cuh, bias_gradient.cuh): bands, grouped heads, lse, softcap, bias,
//   ALiBi, mask and dropout
//
// Serves compute capability 9.0 exactly, because wgmma is of that one architecture; backward serves less than forward.
// Called by torch/dispatch.cpp. Invariant: what refuses() and refuses_views() let pass has an instance, and its tensor
// maps encode; the list of instances comes from cmake/cuda_units.cmake.
#include "core/backend.h"

#include <algorithm>
#include <utility>

#include "gpu/host/tensor_map.h"
#include "kernels/sm90/bwd_config.h"
#include "kernels/sm90/choose_tiles.h"
#include "kernels/sm90/config.h"
#include "sm90_instances.h"

namespace flash_ext::sm90 {
namespace {

constexpr int64_t kMaxLength = int64_t{1} << 29;  // sums of a position, a band's edge and a tile fit 32 bits
constexpr double kMaxDropout = 1 - 0x1p-17;       // from here on the threshold takes 17 bits (core/dropout.h)
constexpr double kMaxSoftcap = 4096;              // fp16's tanh has an error of 2e-7
constexpr double kMaxScale = 1e30;                // and its inverse: far from the ends of float
// Rows with fewer, and those of a band of one, have a dS that is nearly or exactly 0 in eager attention, and the
// rounding of P and out is all that is left of it: kernels/sm80/shared_memory.h, may_be_inexact.
constexpr int64_t kFewKeys = 16;
// A tile with a mask or bias takes 4 us in forward however little of it there is; up to here sm80 took a third to two
// thirds of the time (windows of 49 tokens, 64 by 64). With dropout the same is taken, not measured.
constexpr int64_t kSmallScores = 64;

bool serves(const Instance& instance, DType dtype, Pass pass) {
  return instance.dtype == dtype && (pass == Pass::kForward || instance.run_backward != nullptr);
}

// The first that is wide enough; there is one, because refuses() has accepted.
const Instance& instance_of(const Problem& problem, Pass pass) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  return *std::find_if(std::begin(kInstances), std::end(kInstances), [&](const Instance& instance) {
    return serves(instance, problem.dtype, pass) && instance.head_dim >= head_dim;
  });
}

std::string refuses_head_dim(const Problem& problem, Pass pass, const char* name, int64_t size) {
  const auto clause = [&](const std::string& rest) {
    return std::string(name) + " " + std::to_string(size) + " is " + rest;
  };
  int largest = 0;
  for (const Instance& instance : kInstances) {
    if (serves(instance, problem.dtype, pass)) largest = std::max(largest, instance.head_dim);
  }
  const char* const where = pass == Pass::kForward ? "" : " in backward";
  if (size > largest) return clause("more than " + std::to_string(largest) + where);
  return size % 8 == 0 ? "" : clause("not a multiple of 8");
}

// The gradient of a bias is a pass of its own, bias_gradient.cuh; beside a mask or dropout or in float it is left.
bool leaves_bias_gradient(const Problem& problem) { return problem.wants_dbias && !has_bias_gradient(problem); }

// What forward serves and backward does not.
std::string refuses_backward(const Problem& problem) {
  const Band band = make_band(problem);
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  if (is_scored(added_of(problem))) {
    const std::string scores = problem.has_mask    ? "a mask is"
                               : problem.has_bias  ? "a bias is"
                               : problem.has_alibi ? "alibi_slopes are"
                                                   : "dropout is";
    if (head_dim > kNarrow) return scores + " not supported in backward above head dim " + std::to_string(kNarrow);
    if (problem.deterministic) return scores + " not supported in deterministic backward";
  }
  if (problem.softcap != 0.0) {
    if (problem.has_mask || problem.has_bias || problem.has_alibi || problem.dropout_p > 0.0) {
      return "a softcap is not supported in backward beside a mask, bias, slopes or dropout";
    }
    if (problem.deterministic && head_dim <= kNarrow) {
      return "a softcap is not supported in deterministic backward up to head dim 128";
    }
  }
  if (problem.wants_dalibi) return "the gradient of alibi_slopes is not supported";
  if (problem.wants_dbias && problem.has_alibi) return "the gradient of a bias is not supported beside alibi_slopes";
  if (problem.heads_k != problem.heads_v) return "other heads of value than of key are not supported in backward";
  if (band.upper <= band.lower) return "a band of one key is not supported in backward";
  if (band.keys({0, problem.len_q}, problem.len_k).size() < kFewKeys)
    return "fewer than 16 keys are not supported in backward";
  const char* const unwanted = !problem.wants_dq   ? "query"
                               : !problem.wants_dk ? "key"
                               : !problem.wants_dv ? "value"
                                                   : nullptr;
  if (unwanted != nullptr) return std::string("a backward without the gradient of ") + unwanted + " is not supported";
  return "";
}

std::string refuses(const Problem& problem, Pass pass, const DeviceInfo& device) {
  if (device.compute_capability != 90) {
    return "compute capability " + std::to_string(device.compute_capability / 10) + "." +
           std::to_string(device.compute_capability % 10) + " is not 9.0";
  }
  const bool is_fp16 = problem.dtype == DType::kFloat16;
  if (!is_fp16 && problem.dtype != DType::kBFloat16) return "only fp16 and bf16 are supported";
  const auto is_wanted = [&](const Instance& instance) { return serves(instance, problem.dtype, pass); };
  if (std::none_of(std::begin(kInstances), std::end(kInstances), is_wanted)) {
    return std::string("this build has no ") + (pass == Pass::kForward ? "" : "backward ") + "kernels for " +
           (is_fp16 ? "fp16" : "bf16");
  }
  std::string reason = refuses_head_dim(problem, pass, "head_dim", problem.head_dim);
  if (reason.empty()) reason = refuses_head_dim(problem, pass, "head_dim_v", problem.head_dim_v);
  if (!reason.empty()) return reason;
  if (is_scored(problem) && std::max(problem.len_q, problem.len_k) <= kSmallScores) {
    return "a mask, bias, slopes, softcap or dropout of at most 64 queries by 64 keys are not supported";
  }
  if (problem.softcap > kMaxSoftcap) return "a softcap above 4096 is not supported";
  if (problem.dropout_p >= kMaxDropout) return "a dropout_p that rounds to 1 is not supported";
  // The maximum is taken before scaling.
  if (!(problem.scale >= 1 / kMaxScale && problem.scale <= kMaxScale)) return "scale is not between 1e-30 and 1e30";
  if (std::max(problem.len_q, problem.len_k) >= kMaxLength) return "a sequence has 2^29 tokens or more";
  return pass == Pass::kForward ? "" : refuses_backward(problem);
}

// A tile of 64 queries takes this backend 3 to 4 us however little of it there is. In forward, sm80 is faster up to
// head dim 128 where heads are many, and as fast where they are few; in backward, where it has its kernel of one tile
// (kernels/sm80/shared_memory.h, is_one_tile). docs/lab/2026-11-22-short-calls.md has the measurements.
std::string yields(const Problem& problem, Pass pass) {
  constexpr int64_t kTile = 64;
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  // Only sums of dQ need memory beside it, and sm80 has none where one of its tiles holds all keys.
  constexpr int64_t kMostBytes = 3 << 20;  // what a call may take beside inputs and outputs without a question
  const int64_t sum_bytes = problem.batch * problem.heads_q * problem.len_q * problem.head_dim * 4;
  if (pass == Pass::kBackward && problem.wants_dq && sum_bytes > kMostBytes && head_dim <= kTile &&
      problem.len_k <= 2 * kTile) {
    return "up to 128 keys and 64 columns sm80's dQ needs no memory beside it";
  }
  if (std::max(problem.len_q, problem.len_k) > kTile) return "";
  if (pass == Pass::kForward) {
    return head_dim > 128 ? "" : "up to 64 queries and keys and 128 columns sm80 is faster";
  }
  if (head_dim > kTile || problem.heads_q != problem.heads_k) return "";
  return "up to 64 queries, keys and columns sm80's kernel of one tile is faster";
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
  ask("query", args.q, problem.heads_q, problem.len_q);
  ask("key", args.k, problem.heads_k, problem.len_k);
  ask("value", args.v, problem.heads_v, problem.len_k);
  if (reason.empty()) reason = refuses_bias(args);
  if (backward == nullptr || !reason.empty()) return reason;
  for (const auto& [name, in_accum] :
       {std::pair{"query", backward->dq_in_accum}, std::pair{"key", backward->dk_in_accum},
        std::pair{"value", backward->dv_in_accum}}) {
    if (in_accum) return std::string("the gradient of a broadcast ") + name + " is not supported";
  }
  if (!backward->d_out) return "a backward without grad_out is not supported";
  if (leaves_bias_gradient(problem) && is_whole(problem, backward->dbias)) {
    return "the gradient of a bias that is not broadcast is not supported beside a mask or dropout or in float32";
  }
  ask("grad_out", backward->d_out, problem.heads_q, problem.len_q);
  ask("out", args.out, problem.heads_q, problem.len_q);
  return reason;
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

void choose_backward(Plan& plan, const DeviceInfo& device) {
  plan.choose(BackwardLaunch{plan.grid, device.multiprocessors});
}

Plan plan_forward(const Problem& problem, const DeviceInfo& device) {
  const int head_dim = instance_of(problem, Pass::kForward).head_dim;
  const auto [tiles, splits] = choose_tiles(problem, head_dim, device.multiprocessors);
  const bool scored = tiles == Tiles::kScored;
  const ForwardShape shape = forward_shape(head_dim, tiles);
  const ForwardSmem smem = forward_smem(shape, head_dim);
  const ForwardOrder order = tiles == Tiles::kSplit
                                 ? split_order(problem, shape.block_m(), splits, device.multiprocessors)
                                 : forward_order(problem, shape.block_m(), device.multiprocessors);
  const char* const kernel = scored ? "sm90.forward.scored" : splits.count > 1 ? "sm90.forward.split" : "sm90.forward";
  Plan plan = plan_of(kernel, shape.threads(), shape.consumer_registers(), shape.producer_registers(), device);
  plan.schedule = schedule_name(shape.schedule, order.counted, splits.head_rows > 0);
  if (splits.count > 1) {
    plan.splits = splits.count;
    plan.split_keys = int64_t{splits.tiles} * shape.block_n;
  }
  plan.block_m = shape.block_m();
  plan.block_n = shape.block_n;
  plan.stages = shape.stages;
  plan.on_chip[0] = {"q", smem.k};
  plan.on_chip[1] = {"k", smem.v - smem.k};
  plan.on_chip[2] = {"v", smem.scores - smem.v};
  int next = 3;
  if (scored) plan.on_chip[next++] = {"bias and mask", smem.works - smem.scores};
  plan.on_chip[next] = {"barriers and alignment", smem.total - smem.works};
  plan.scratch_bytes = order.counted ? kCounterBytes : split_scratch_bytes(problem, splits);
  set_grid(plan, order.schedule, order.schedule.size() * std::max(splits.count, 1), false, device);
  plan.grid = order.grid;
  plan.choose(ForwardLaunch{tiles, splits, static_cast<int>(std::min<int64_t>(plan.grid, INT32_MAX))});
  return plan;
}

Plan plan_wide_backward(const Problem& problem, const Instance& instance, const DeviceInfo& device) {
  const WideKeysSmem smem = wide_keys_smem(instance.head_dim);
  const TileSchedule schedule = backward_schedule(problem, WideShape::block, device.multiprocessors);
  using Shape = WideShape;
  Plan plan =
      plan_of("sm90.backward.wide", Shape::threads, Shape::consumer_registers, Shape::producer_registers, device);
  plan.schedule = "a tile of keys a block, then a tile of queries";
  plan.block_m = plan.block_n = Shape::block;
  plan.stages = Shape::stages;
  plan.on_chip[0] = {"k", smem.v - smem.k};
  plan.on_chip[1] = {"v", smem.q - smem.v};
  plan.on_chip[2] = {"q", smem.d_out - smem.q};
  plan.on_chip[3] = {"d_out", smem.p - smem.d_out};
  plan.on_chip[4] = {"p", smem.stats - smem.p};
  plan.on_chip[5] = {"lse and delta", smem.barriers - smem.stats};
  plan.on_chip[6] = {"barriers and alignment", smem.total - smem.barriers};
  plan.scratch_bytes = instance.backward_scratch_bytes(problem);
  set_grid(plan, schedule, schedule.size(), false, device);
  choose_backward(plan, device);
  return plan;
}

Plan plan_backward(const Problem& problem, const DeviceInfo& device) {
  const Instance& instance = instance_of(problem, Pass::kBackward);
  if (instance.head_dim > kNarrow) return plan_wide_backward(problem, instance, device);
  const Added added = added_of(problem);
  const bool scored = is_scored(added);
  const BackwardShape shape = backward_shape(instance.head_dim, added);
  const BackwardSmem smem = backward_smem(shape, instance.head_dim);
  const bool ordered = is_ordered(problem);
  const TileSchedule schedule = narrow_schedule(problem, shape.block_n, device.multiprocessors);
  const char* const kernel = has_bias_gradient(problem) ? "sm90.backward.scored, sm90.bias_gradient"
                             : scored                   ? "sm90.backward.scored"
                             : added == Added::kCap     ? "sm90.backward.softcap"
                                                        : "sm90.backward";
  Plan plan = plan_of(kernel, shape.threads, shape.consumer_registers(), shape.producer_registers(), device);
  const bool persistent = ordered || is_backward_persistent(problem, device.multiprocessors);
  plan.schedule = ordered ? "dq in order, persistent" : persistent ? "persistent" : "a tile of keys a block";
  plan.block_m = shape.block_m;
  plan.block_n = shape.block_n;
  plan.stages = shape.stages;
  plan.on_chip[0] = {"k", smem.v - smem.k};
  plan.on_chip[1] = {"v", smem.q - smem.v};
  plan.on_chip[2] = {"q", smem.d_out - smem.q};
  plan.on_chip[3] = {"d_out", smem.ds - smem.d_out};
  plan.on_chip[4] = {"ds", smem.dq - smem.ds};
  plan.on_chip[5] = {"dq staging", smem.scores - smem.dq};
  int next = 6;
  if (scored) plan.on_chip[next++] = {"bias, mask and dropout", smem.stats - smem.scores};
  plan.on_chip[next++] = {"lse and delta", smem.barriers - smem.stats};
  plan.on_chip[next] = {"barriers and alignment", smem.total - smem.barriers};
  plan.scratch_bytes = instance.backward_scratch_bytes(problem);
  plan.narrow_dbias = has_bias_gradient(problem);
  set_grid(plan, schedule, schedule.size(), persistent, device);
  choose_backward(plan, device);
  return plan;
}

Plan plan(const Problem& problem, Pass pass, const DeviceInfo& device) {
  return pass == Pass::kForward ? plan_forward(problem, device) : plan_backward(problem, device);
}

void forward(const ForwardArgs& args, const Plan& plan, void* workspace) {
  instance_of(args.problem, Pass::kForward).run_forward(args, plan.chosen<ForwardLaunch>(), workspace);
}

void backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  instance_of(args.fwd.problem, Pass::kBackward).run_backward(args, plan.chosen<BackwardLaunch>(), workspace);
}

}  // namespace
}  // namespace flash_ext::sm90

namespace flash_ext {

extern const Backend sm90_backend = {.name = "sm90",
                                     .device = DeviceType::kCuda,
                                     .refuses = sm90::refuses,
                                     .plan = sm90::plan,
                                     .forward = sm90::forward,
                                     .backward = sm90::backward,
                                     .refuses_views = sm90::refuses_views,
                                     .yields = sm90::yields,
                                     .leaves_bias_gradient = sm90::leaves_bias_gradient};

}  // namespace flash_ext
