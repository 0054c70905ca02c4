// The sm90 backend's entry, host code only: refuses, plans, and picks the kernel's instance.
//
//   fp16 and bf16 forward by TMA and wgmma (fwd.cuh): bands, grouped heads, lse; no score modification, no dropout
//
// Serves compute capability 9.0 exactly, because wgmma is of that one architecture, and hands backward to the others.
// Called by api/dispatch.cpp. Invariant: what refuses() and refuses_views() let pass has an instance, and its tensor
// maps encode; the list of instances comes from cmake/cuda_units.cmake.
#include "api/backend.h"

#include <algorithm>

#include "sm90/config.h"
#include "sm90/tensor_map.h"
#include "sm90_instances.h"

namespace flash_ext::sm90 {
namespace {

constexpr int64_t kMaxLength = int64_t{1} << 29;  // sums of a position, a band's edge and a tile fit 32 bits
constexpr double kMaxScale = 1e30;                // and its inverse: far from the ends of float

// The first that is wide enough, or null.
const Instance* find_instance(const Problem& problem) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const Instance* const found = std::find_if(std::begin(kInstances), std::end(kInstances), [&](const Instance& i) {
    return i.dtype == problem.dtype && i.head_dim >= head_dim;
  });
  return found == std::end(kInstances) ? nullptr : found;
}

const Instance& instance_of(const Problem& problem) { return *find_instance(problem); }

std::string refuses_head_dim(const Problem& problem, const char* name, int64_t size) {
  const auto clause = [&](const std::string& rest) {
    return std::string(name) + " " + std::to_string(size) + " is " + rest;
  };
  int largest = 0;
  for (const Instance& instance : kInstances) {
    if (instance.dtype == problem.dtype) largest = std::max(largest, instance.head_dim);
  }
  if (size > largest) return clause("more than " + std::to_string(largest));
  return size % 8 == 0 ? "" : clause("not a multiple of 8");
}

std::string refuses(const Problem& problem, Pass, const DeviceInfo& device) {
  if (device.compute_capability != 90) {
    return "compute capability " + std::to_string(device.compute_capability / 10) + "." +
           std::to_string(device.compute_capability % 10) + " is not 9.0";
  }
  const auto is_wanted = [&](const Instance& instance) { return instance.dtype == problem.dtype; };
  if (std::none_of(std::begin(kInstances), std::end(kInstances), is_wanted)) {
    switch (problem.dtype) {
      case DType::kFloat16:
        return "this build has no kernels for fp16";
      case DType::kBFloat16:
        return "this build has no kernels for bf16";
      default:
        return "only fp16 and bf16 are supported";
    }
  }
  std::string reason = refuses_head_dim(problem, "head_dim", problem.head_dim);
  if (reason.empty()) reason = refuses_head_dim(problem, "head_dim_v", problem.head_dim_v);
  if (!reason.empty()) return reason;
  if (problem.has_mask) return "a mask is not supported";
  if (problem.has_bias) return "a bias is not supported";
  if (problem.has_alibi) return "alibi_slopes are not supported";
  if (problem.softcap != 0.0) return "a softcap is not supported";
  if (problem.dropout_p != 0.0) return "dropout is not supported";
  // The maximum is taken before scaling.
  if (!(problem.scale >= 1 / kMaxScale && problem.scale <= kMaxScale)) return "scale is not between 1e-30 and 1e30";
  if (std::max(problem.len_q, problem.len_k) >= kMaxLength) return "a sequence has 2^29 tokens or more";
  if (problem.has_cu_seqlens) return "cu_seqlens are not supported";
  if (problem.has_page_table) return "page_table is not supported";
  if (problem.has_sinks) return "sinks are not supported";
  if (problem.has_descale) return "k_descale and v_descale are not supported";
  return "";
}

// NOTE: out needs no question: api/ makes it dense, last dimension innermost, at an address of the allocator.
std::string refuses_views(const ForwardArgs& args) {
  const Problem& problem = args.problem;
  const auto clause = [&](const char* name, const TensorView& view, int64_t rows) {
    const char* reason = tma_refuses(problem, view, rows);
    return reason == nullptr ? std::string() : std::string(name) + " " + reason;
  };
  std::string reason = clause("query", args.q, problem.len_q);
  if (reason.empty()) reason = clause("key", args.k, problem.len_k);
  if (reason.empty()) reason = clause("value", args.v, problem.len_k);
  return reason;
}

const char* schedule_name(Schedule schedule, bool persistent) {
  switch (schedule) {
    case Schedule::kSerial:
      return persistent ? "serial, persistent" : "serial, a tile a block";
    case Schedule::kOverlap:
      return persistent ? "overlap, persistent" : "overlap, a tile a block";
    case Schedule::kPingPong:
      return persistent ? "ping-pong, persistent" : "ping-pong, a tile a block";
    default:
      return persistent ? "exp mutex, persistent" : "exp mutex, a tile a block";
  }
}

Plan plan(const Problem& problem, Pass, const DeviceInfo& device) {
  const int head_dim = instance_of(problem).head_dim;
  const bool persistent = is_persistent(problem, head_dim);
  const ForwardShape shape = forward_shape(head_dim, persistent);
  const ForwardSmem smem = forward_smem(shape, head_dim);
  const TileSchedule schedule = forward_schedule(problem, shape.block_m());
  Plan plan;
  plan.kernel = "sm90.forward";
  plan.schedule = schedule_name(shape.schedule, persistent);
  plan.block_m = shape.block_m();
  plan.block_n = shape.block_n;
  plan.stages = shape.stages;
  plan.on_chip[0] = {"q", smem.k};
  plan.on_chip[1] = {"k", smem.v - smem.k};
  plan.on_chip[2] = {"v", smem.barriers - smem.v};
  plan.on_chip[3] = {"barriers", smem.total - kTileAlign - smem.barriers};
  plan.on_chip[4] = {"alignment", kTileAlign};
  plan.on_chip_limit = device.shared_memory_per_block;
  plan.registers = shape.consumer_registers();
  plan.producer_registers = shape.producer_registers();
  plan.occupancy = shape.threads() / 2048.0;  // one block a multiprocessor
  plan.grid = schedule.size();
  if (device.multiprocessors > 0) {
    plan.waves = static_cast<double>(plan.grid) / device.multiprocessors;
    if (persistent) plan.grid = std::min<int64_t>(plan.grid, device.multiprocessors);
  }
  plan.l2_section = std::min(schedule.section, schedule.kv_heads);
  return plan;
}

void forward(const ForwardArgs& args, const Plan& plan, void*) {
  const Instance& instance = instance_of(args.problem);
  const int grid = static_cast<int>(std::min<int64_t>(plan.grid, INT32_MAX));
  instance.run_forward(args, is_persistent(args.problem, instance.head_dim), grid);
}

}  // namespace
}  // namespace flash_ext::sm90

namespace flash_ext {

extern const Backend sm90_backend = {.name = "sm90",
                                     .device = DeviceType::kCuda,
                                     .refuses = sm90::refuses,
                                     .plan = sm90::plan,
                                     .forward = sm90::forward,
                                     .backward = nullptr,
                                     .refuses_views = sm90::refuses_views};

}  // namespace flash_ext
