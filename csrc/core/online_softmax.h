// Softmax of a row that arrives tile by tile, and what backward and split-K make of its log-sum-exp.
//
//   m' = max(m, max_j s_j)   l' = l * e^(m - m') + sum_j e^(s_j - m')   O' = O * e^(m - m') + sum_j e^(s_j - m') v_j
//
//   out = O / l              lse = m + log(l)                           P_j = e^(s_j - lse)
//
// Milakov & Gimelshein 2018 (arXiv:1805.02867); FlashAttention (arXiv:2205.14135), algorithm 1. Everything is in
// natural units of the final score, so that a bias of finfo.min never meets log2(e) before its maximum is subtracted.
// Called by the CPU backend and sm80/fp64 once a row and tile (the exponentials of the elements are theirs), and by
// sm80/forward/restore_rows.cuh; what is not of a class also by other kernels, which keep rows in a form of their own
// (gpu/softmax.cuh, sm90/softmax.cuh).
// Invariant: row_max is -inf exactly while no finite score was seen, and then 0 is subtracted, so a removed score
// gives e^(-inf) = 0 and never NaN; a NaN or +inf score ends as NaN in out and lse, as the formula has it.
#pragma once

#include <cmath>
#include <limits>

#include "core/portable.h"

namespace flash_ext {

// Float in inner loops. NOTE: a double that is multiplied there makes all of the product a double.
constexpr double kLog2e = 1.4426950408889634;
constexpr float kLog2eFloat = 1.4426950408889634f, kLn2Float = 0.6931471805599453f;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

template <class Real>
struct OnlineSoftmax {
  static constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();

  struct Result {
    Real inverse_sum;  // out = O * inverse_sum; 0 for a row without keys
    Real lse;          // -inf for a row without keys and without a sink
  };

  Real row_max = kEmpty;
  Real row_sum = 0;

  // What is subtracted from every score of the current tile.
  FLASH_DEVICE Real shift() const { return row_max == kEmpty ? Real(0) : row_max; }

  // Joins the tile's maximum. Returns the factor by which O must be rescaled; row_sum already is. The factor of the
  // first tile is 0, so O starts as zeros, not as garbage.
  FLASH_DEVICE Real step(Real tile_max) {
    const Real before = row_max;
    row_max = tile_max > before ? tile_max : before;
    const Real factor = std::exp(before - shift());
    row_sum *= factor;
    return factor;
  }

  // Adds the tile's exponentials, sum_j e^(s_j - shift()).
  FLASH_DEVICE void add(Real tile_sum) { row_sum += tile_sum; }

  FLASH_DEVICE Result finish() const {
    if (row_sum == Real(0)) return {Real(0), kEmpty};
    return {Real(1) / row_sum, shift() + std::log(row_sum)};
  }

  // The same with a logit that takes its part of the sum and has no value. It may be above every score, so it joins
  // the maximum as well, and O, which is relative to the old one, is corrected within inverse_sum.
  FLASH_DEVICE Result finish(Real sink) const {
    OnlineSoftmax joined = *this;
    const Real factor = joined.step(sink);
    joined.add(std::exp(sink - joined.shift()));
    const Result result = joined.finish();
    return {result.inverse_sum * factor, result.lse};
  }
};

// scale * max + log(sum), rounded once: half a unit of the last place and 5e-8 at most. All probabilities that backward
// makes of it have its error. max is finite, sum above 0.
FLASH_DEVICE float log_sum_exp(float max, float scale, float sum) {
  int exponent = 0;
  float factor = std::frexp(sum, &exponent);  // [0.5, 1)
  if (factor < 0.70710678f) {
    factor *= 2.f;
    --exponent;
  }
  constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682e-6f;  // 15 bits: products are exact
  const float power = static_cast<float>(exponent) * kLn2High;
  const float product = max * scale, total = product + power, added = total - product;
  const float lost = std::fma(max, scale, -product) + ((product - (total - added)) + (power - added));
  return total + (lost + std::fma(static_cast<float>(exponent), kLn2Low, std::log(factor)));
}

// A row's maximum and sum with a sink; factor: of what was summed relative to the maximum before.
template <class Real>
struct RowWithSink {
  Real max, sum, factor;
};
template <class Real>
FLASH_DEVICE RowWithSink<Real> with_sink(Real max, Real sum, Real sink) {
  if (sink == OnlineSoftmax<Real>::kEmpty) return {max, sum, Real(1)};
  const Real top = max > sink ? max : sink, factor = std::exp(max - top);
  return {top, sum * factor + std::exp(sink - top), factor};
}

// Backward: the probability of a score, from the lse that forward wrote (with a sink, its share is already in lse).
template <class Real>
FLASH_DEVICE Real probability(Real score, Real lse) {
  return lse == OnlineSoftmax<Real>::kEmpty ? Real(0) : std::exp(score - lse);
}

// m + log(l) rounds log(l) away when |m| is large: a whole row of finfo.min has lse = m, and e^(s - lse) is 1 where it
// should be 1 / n. For such a row backward sums e^(s - lse) over all keys (and the sink) and divides by that; the
// exponent stays near or below 0. Below 2^15 the rounding of lse (2^-9) is that of the scores themselves.
template <class Real>
FLASH_DEVICE bool needs_renormalisation(Real lse) {
  constexpr Real kLimit = 32768;
  return lse > kLimit || (lse < -kLimit && lse != OnlineSoftmax<Real>::kEmpty);
}

// Whether backward of a constant lse divides P by its own sum all the same: what rounds in such a score is felt.
template <class Real>
FLASH_DEVICE bool renormalises_constant(Real lse) {
  constexpr Real kLimit = 4096;
  return lse > kLimit || (lse < -kLimit && lse != OnlineSoftmax<Real>::kEmpty);
}

}  // namespace flash_ext
