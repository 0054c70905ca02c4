// The CPU's rows: they plan, and pick compute type and engine.
//
//   dtype        operands          product
//   fp32, fp16   fp32              brgemm, else loops     (fp16 brgemm reaches half of fp32's speed without AMX-FP16)
//   bf16         bf16, else fp32   brgemm, else loops     (fp32 where products of bf16 are slower, prefers_bf16)
//   fp64         fp64              loops
// Called through kernels/table.cpp. Invariant: plan() alone decides; what it chose, a plan's Choice, is what runs.
#include "kernels/cpu/passes.h"
#include "kernels/cpu/work.h"

namespace flash_ext::cpu {
namespace {

struct Flavour {
  const char* forward;
  const char* backward;
  Type type;
  Engine engine;
};

constexpr Flavour kFlavours[] = {
    {"cpu.forward.fp32.brgemm", "cpu.backward.fp32.brgemm", Type::kF32, Engine::kBrgemm},
    {"cpu.forward.fp32.loops", "cpu.backward.fp32.loops", Type::kF32, Engine::kLoops},
    {"cpu.forward.bf16.brgemm", "cpu.backward.bf16.brgemm", Type::kBf16, Engine::kBrgemm},
    {"cpu.forward.fp64.loops", "cpu.backward.fp64.loops", Type::kF64, Engine::kLoops},
};

const Flavour& choose_flavour(DType dtype) {
  if (dtype == DType::kFloat64) return kFlavours[3];
  const bool allowed = cpu_host().has_products();
  if (dtype == DType::kBFloat16 && allowed && prefers_bf16() && brgemm_works_bf16()) return kFlavours[2];
  return kFlavours[allowed && brgemm_works_f32() ? 0 : 1];
}

template <class Function>
void with_compute(Type type, const Function& function) {
  switch (type) {
    case Type::kF32:
      return function(ComputeF32{});
    case Type::kBf16:
      return function(ComputeBf16{});
    case Type::kF64:
      return function(ComputeF64{});
  }
}

Plan plan(const Problem& problem, Pass pass, const DeviceInfo& device) {
  const Flavour& flavour = choose_flavour(problem.dtype);
  const int64_t threads = device.multiprocessors > 0 ? device.multiprocessors : cpu_host().threads();
  Plan plan;
  plan.kernel = pass == Pass::kForward ? flavour.forward : flavour.backward;
  with_compute(flavour.type, [&]<class Compute>(Compute) {
    Choice choice;
    choice.type = flavour.type, choice.engine = flavour.engine;
    if (pass == Pass::kForward) {
      plan_forward<Compute>(problem, threads, choice, plan);
    } else {
      plan_backward<Compute>(problem, threads, choice, plan);
    }
  });
  return plan;
}

void forward(const ForwardArgs& args, const Plan& plan, void* workspace) {
  with_compute(plan.chosen<Choice>().type,
               [&]<class Compute>(Compute) { run_forward<Compute>(args, plan, workspace); });
}

void backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  with_compute(plan.chosen<Choice>().type,
               [&]<class Compute>(Compute) { run_backward<Compute>(args, plan, workspace); });
}

constexpr Kernel kKernels[] = {
    {.name = "cpu.forward",
     .backend = "cpu",
     .device = DeviceType::kCpu,
     .pass = Pass::kForward,
     .supports = kAllFeatures.without(kQuantized),
     .plan = [](const Problem& problem, const DeviceInfo& device) { return plan(problem, Pass::kForward, device); },
     .forward = forward},
    {.name = "cpu.backward",
     .backend = "cpu",
     .device = DeviceType::kCpu,
     .pass = Pass::kBackward,
     .supports = kAllFeatures.without(kQuantized),
     .plan = [](const Problem& problem, const DeviceInfo& device) { return plan(problem, Pass::kBackward, device); },
     .backward = backward},
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

}  // namespace flash_ext::cpu

namespace flash_ext {

// The op dropout_mask: any origin, so whole 16x16 blocks are drawn and cut.
void cpu_dropout_mask(const int64_t* rng_state, double p, int64_t batch_heads, int64_t rows, int64_t cols, int64_t q0,
                      int64_t k0, int64_t n0, bool* out) {
  constexpr int64_t kWidth = 256;
  const Dropout dropout = make_dropout(rng_state[0], rng_state[1], p);
  const auto keep_tile = cpu::vector_table().f32.keep_tile;
  const int64_t first_row = q0 / 16 * 16;
  const int64_t row_tiles = (q0 + rows - first_row + 15) / 16;
  const int64_t items = rows > 0 ? batch_heads * row_tiles : 0;
  const auto draw = [&](int64_t item, int64_t) {
    uint8_t keep[16 * kWidth];
    const int64_t bh = item / row_tiles;
    const int64_t row = first_row + item % row_tiles * 16;
    for (int64_t col = k0 / 16 * 16; col < k0 + cols; col += kWidth) {
      keep_tile(dropout, static_cast<uint32_t>(n0 + bh), row, col, 16, kWidth, /*transposed=*/false, keep, kWidth);
      for (int64_t i = std::max(row, q0); i < std::min(row + 16, q0 + rows); ++i) {
        for (int64_t j = std::max(col, k0); j < std::min(col + kWidth, k0 + cols); ++j) {
          out[(bh * rows + i - q0) * cols + j - k0] = keep[(i - row) * kWidth + j - col] != 0;
        }
      }
    }
  };
  cpu::for_each_item(items, std::min(cpu_host().threads(), (items + 15) / 16), draw, [] {});
}

}  // namespace flash_ext
