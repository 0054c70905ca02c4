// A softcap (Gemma 2, arXiv:2408.00118): cap * tanh(scale * q k^T / cap), and its derivative.
//
// Called by scores.cuh in forward, in natural units, and by both backwards, in units of q k^T. Invariant: what is
// capped is a finite multiple of the cap, so that the derivative of what a band removed, -inf, is 0.
#pragma once

#include "attention/args.h"
#include "sm90/softmax.cuh"

namespace flash_ext::sm90 {

struct SoftcapParams {
  float cap;       // 0: none
  float argument;  // of e^(2 x), in log2, where tanh is taken of x, for 1 of q k^T
  float inverse;   // 1 / cap

  // unit: what 1 of the results is in natural units.
  static SoftcapParams of(const Problem& problem, double unit) {
    if (problem.softcap == 0.0) return {};
    return {static_cast<float>(problem.softcap / unit),
            static_cast<float>(2.0 * kLog2e * problem.scale / problem.softcap),
            static_cast<float>(unit / problem.softcap)};
  }
};

// A fragment of q k^T becomes what it is capped to, within 2e-7 of cap; tanh.approx (5e-4) times a cap of 50 would
// break the error rule.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], const SoftcapParams& softcap) {
  const float cap = softcap.cap, argument = softcap.argument;
#pragma unroll
  for (float& x : s) x = fmaf(-2.f * cap, reciprocal_fast(1.f + exp2_fast(x * argument)), cap);
}

// 1 - tanh^2 of a capped score.
__device__ __forceinline__ float slope_of(float capped, const SoftcapParams& softcap) {
  const float tanh = capped * softcap.inverse;
  return __saturatef(fmaf(-tanh, tanh, 1.f));
}

}  // namespace flash_ext::sm90
