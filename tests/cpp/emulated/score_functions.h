// Functions of a score (core/score_mod.h) in the place of a softcap, for both backends: kernels compiled with one are
// rows of a table of their own.
#pragma once

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "call_case.h"
#include "core/score_mod.h"

namespace flash_ext {

template <class Real>
Real tanh_of(Real x) {
  if constexpr (sizeof(Real) == 4) return tanhf(x);
  return ::tanh(x);
}

// s + tanh(i + offset - j) / 2
struct PlaceScore {
  template <class Real>
  static Real value(Real score, Real distance) {
    return score + tanh_of(distance) / 2;
  }
  template <class Real>
  static Real slope(Real, Real) {
    return 1;
  }
};

// (s + sin(s) / 2) (1 + tanh((i + offset - j) / 8) / 2)
struct BentScore {
  template <class Real>
  static Real value(Real score, Real distance) {
    return (score + std::sin(score) / 2) * (1 + tanh_of(distance / 8) / 2);
  }
  template <class Real>
  static Real slope(Real score, Real distance) {
    return (1 + std::cos(score) / 2) * (1 + tanh_of(distance / 8) / 2);
  }
};

namespace sm80 {
std::span<const Kernel> kernels();
}
namespace sm90 {
std::span<const Kernel> kernels();
}

// The row of that name, with another launch.
template <class Launch>
Kernel row_with(std::span<const Kernel> kernels, std::string_view name, Launch Kernel::*member, Launch launch) {
  const auto row = std::find_if(kernels.begin(), kernels.end(), [&](const Kernel& k) { return k.name == name; });
  Kernel result = row == kernels.end() ? throw std::runtime_error("no such row") : *row;
  result.*member = launch;
  return result;
}

// A call of which scores go through F, beside what else there is.
template <class F>
Case with_function(Case c) {
  c.softcap = 1;
  c.value = F::template value<double>;
  c.slope_of_value = F::template slope<double>;
  return c;
}

inline const Case kFunctionCases[] = {
    {.name = "alone", .len_q = 150, .len_k = 170},
    {.name = "causal_to_the_right", .len_q = 100, .len_k = 150, .heads_q = 2, .causal = true, .bottom_right = true},
    {.name = "mask_bias_slopes_and_dropout",
     .len_q = 140,
     .len_k = 136,
     .batch = 2,
     .bias = true,
     .mask = true,
     .alibi = true,
     .dropout = 0.2,
     .deterministic = true,
     .d_lse = true},
};

}  // namespace flash_ext
