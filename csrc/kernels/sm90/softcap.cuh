// A softcap (Gemma 2, arXiv:2408.00118): cap * tanh(scale * q k^T / cap), and its derivative.
//
// Called by scores.cuh, in natural units, and by backward where a softcap is alone, in units of q k^T. Invariant: what
// is capped is a finite multiple of the cap, so that the derivative of what a band removed, -inf, is 0.
#pragma once

#include "core/args.h"
#include "kernels/sm90/softmax.cuh"

namespace flash_ext::sm90 {

// tanh(x) = x p(x^2) within 1e-7 up to kNear, minimax.
constexpr double kNear = 0.7;
constexpr int kTanhTerms = 5;
constexpr double kTanh[kTanhTerms] = {0.9999985, -0.33326973, 0.13257456, -0.0501953, 0.01319423};

struct SoftcapParams {
  float cap;               // 0: none
  float argument;          // of e^(2 x), in log2, where tanh is taken of x, for 1 of q k^T
  float inverse;           // 1 / cap
  float to_tanh;           // x for 1 of q k^T
  float near;              // the q k^T at kNear
  float tanh[kTanhTerms];  // times cap

  // unit: what 1 of the results is in natural units.
  static SoftcapParams of(const Problem& problem, double unit) {
    SoftcapParams params = {};
    if (problem.softcap == 0.0) return params;
    const double cap = problem.softcap / unit, to_tanh = problem.scale / problem.softcap;
    params.cap = static_cast<float>(cap);
    params.argument = static_cast<float>(2.0 * kLog2e * to_tanh);
    params.inverse = static_cast<float>(1.0 / cap);
    params.to_tanh = static_cast<float>(to_tanh);
    params.near = static_cast<float>(kNear / to_tanh);
    for (int i = 0; i < kTanhTerms; ++i) params.tanh[i] = static_cast<float>(kTanh[i] * cap);
    return params;
  }
};

// A fragment of q k^T becomes what it is capped to. bf16: by tanh.approx, within 1e-5 of tanh on 9.0 (2^-11 by its
// manual), where each of eager attention's roundings is up to 2^-9. fp16: within 2e-7 of cap. NOTE: a multiprocessor
// makes 16 special functions a clock, and ex2 and a reciprocal for each score are more than the products take; so a
// warp whose scores are all near 0 has multiply-adds instead (kNearToo). Not in forward above head dim 128 and in the
// kernel of dQ, where there are no registers for both.
template <class T, bool kNearToo, int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount], const SoftcapParams& softcap) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (float& x : s) x = softcap.cap * tanh_fast(x * softcap.to_tanh);
    return;
  }
  float most = 0.f;
  if constexpr (kNearToo) {
#pragma unroll
    for (const float x : s) most = fmaxf(most, fabsf(x));
  }
  if (kNearToo && !__any_sync(~0u, most > softcap.near)) {
#pragma unroll
    for (float& x : s) {
      const float tanh_of = x * softcap.to_tanh, square = tanh_of * tanh_of;
      float sum = softcap.tanh[kTanhTerms - 1];
#pragma unroll
      for (int i = kTanhTerms - 2; i >= 0; --i) sum = fmaf(sum, square, softcap.tanh[i]);
      x = tanh_of * sum;
    }
  } else {
    const float cap = softcap.cap, argument = softcap.argument;
#pragma unroll
    for (float& x : s) x = fmaf(-2.f * cap, reciprocal_fast(1.f + exp2_fast(x * argument)), cap);
  }
}

// 1 - tanh^2 of a capped score.
__device__ __forceinline__ float slope_of(float capped, const SoftcapParams& softcap) {
  const float tanh = capped * softcap.inverse;
  return __saturatef(fmaf(-tanh, tanh, 1.f));
}

}  // namespace flash_ext::sm90
