// The smallest kernel: forward on the CPU in float32, a query at a time. docs/contribute/add-a-kernel.md explains it,
// tests/cpp/new_kernel_test.cpp builds and runs it.
#pragma once

#include <cmath>

#include "core/kernel.h"
#include "core/online_softmax.h"

namespace flash_ext::naive {

inline Plan plan(const Problem& problem, const DeviceInfo&) {
  Plan plan;
  plan.kernel = "naive.forward";
  plan.block_m = 1;
  plan.block_n = problem.len_k;
  plan.grid = problem.batch * problem.heads_q * problem.len_q;
  plan.scratch_bytes = problem.len_k * 4;  // the scores of one query
  return plan;
}

inline void forward(const ForwardArgs& args, const Plan&, void* workspace) {
  const Problem& problem = args.problem;
  const Band band = make_band(problem);  // causal, windows and alignment are all in it
  auto* const s = static_cast<float*>(workspace);
  auto* lse = static_cast<float*>(args.lse);
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t head = 0; head < problem.heads_q; ++head) {
      const auto row = [&](const TensorView& view, int64_t of_heads, int64_t i) {
        const int64_t of_head = head / (problem.heads_q / of_heads);  // a group of query heads shares one
        return static_cast<float*>(view.data) + batch_offset(problem, view, b) + of_head * view.head_stride +
               i * view.row_stride;
      };
      for (int64_t i = 0; i < problem.len_q; ++i) {
        const Range keys = band.keys({i, i + 1}, problem.len_k);
        const float* const q = row(args.q, problem.heads_q, i);
        float largest = OnlineSoftmax<float>::kEmpty;
        for (int64_t j = keys.first; j < keys.last; ++j) {
          const float* const k = row(args.k, problem.heads_k, j);
          s[j] = 0.f;
          for (int64_t c = 0; c < problem.head_dim; ++c) s[j] += q[c * args.q.col_stride] * k[c * args.k.col_stride];
          s[j] *= static_cast<float>(problem.scale);
          largest = std::fmax(largest, s[j]);
        }
        OnlineSoftmax<float> softmax;
        softmax.step(largest);
        float* const out = row(args.out, problem.heads_q, i);
        for (int64_t c = 0; c < problem.head_dim_v; ++c) out[c * args.out.col_stride] = 0.f;
        for (int64_t j = keys.first; j < keys.last; ++j) {
          const float p = std::exp(s[j] - softmax.shift());
          const float* const v = row(args.v, problem.heads_v, j);
          softmax.add(p);
          for (int64_t c = 0; c < problem.head_dim_v; ++c) out[c * args.out.col_stride] += p * v[c * args.v.col_stride];
        }
        const auto result = softmax.finish();  // a row without keys: out 0, lse -inf
        for (int64_t c = 0; c < problem.head_dim_v; ++c) out[c * args.out.col_stride] *= result.inverse_sum;
        if (lse != nullptr) *lse++ = result.lse;
      }
    }
  }
}

inline constexpr Kernel kForward = {
    .name = "naive.forward",
    .backend = "naive",
    .device = DeviceType::kCpu,
    .pass = Pass::kForward,
    .supports = {Feature::kFloat32, Feature::kGroupedHeads, Feature::kValueHeads},
    .plan = plan,
    .forward = forward,
};

}  // namespace flash_ext::naive
