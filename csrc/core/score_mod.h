// What happens to a scaled score before the band mask and the softmax, and its gradients. The order is the contract's:
//
//   s = scale * q k^T     score = c * t + bias - slope * |i + offset - j|,  t = tanh(s / c)
//
//   then masks, softmax, dropout; and back
//
//   d_bias = d_score      d_slope = sum -d_score * |i + offset - j|      d_s = d_score * (1 - t^2)
//
// Every modification brings forward and backward in one structure: ScoreChain takes nothing that lacks one of them.
// Called by the CPU backend and sm80/fp64, forward to make scores and backward to recompute them; V is float, double or
// a class holding several of them (a CPU vector), with +, -, *, and tanh and abs found by ADL. sm80/score.cuh and
// sm90/scores.cuh have the same on fragments, and take ScoreFunction from here.
// Invariant: backward uses what the same forward saved; nothing here looks at a mask, so masked elements must arrive
// in backward with d_score = 0.
#pragma once

#include <cmath>
#include <concepts>

#include "core/portable.h"

namespace flash_ext {

// What a tile knows of one element.
template <class V>
struct ScoreAt {
  V distance{};  // i + offset - j, exact up to 2^24 in float; only read when alibi is on
  V bias{};      // only read when a bias is on
};

// Gradients beside that of the score itself, to be summed by the caller over the elements that share an input.
template <class V>
struct ScoreGrads {
  V bias{};
  V slope{};
};

// forward(score, at, saved) -> score;  backward(d_score, at, saved, grads) -> d_score of the incoming score.
template <class Mod, class V>
concept ScoreModFor = requires(const Mod& mod, V value, const ScoreAt<V>& at, V& saved, ScoreGrads<V>& grads) {
  { mod.forward(value, at, saved) } -> std::same_as<V>;
  { mod.backward(value, at, value, grads) } -> std::same_as<V>;
};

template <class Mod>
concept ScoreMod = ScoreModFor<Mod, float> && ScoreModFor<Mod, double>;

// What the kernels of sm80 and sm90 can be compiled with in the place of a softcap: value(score, distance) of a scaled
// q k^T, and its derivative by the score, slope(score, distance), which must not be negative: its sign is where sm90
// keeps what is hidden. distance: i + offset - j.
template <class F>
concept ScoreFunction = requires(float x) {
  { F::value(x, x) } -> std::same_as<float>;
  { F::slope(x, x) } -> std::same_as<float>;
};

template <class Real>
struct Softcap {
  Real cap = 0;  // 0: off
  Real inverse = 0;

  template <class V>
  FLASH_DEVICE V forward(V score, const ScoreAt<V>&, V& saved) const {
    using std::tanh;
    if (cap == Real(0)) return score;
    saved = tanh(score * V(inverse));
    return saved * V(cap);
  }

  template <class V>
  FLASH_DEVICE V backward(V d_score, const ScoreAt<V>&, V saved, ScoreGrads<V>&) const {
    if (cap == Real(0)) return d_score;
    return d_score * (V(Real(1)) - saved * saved);
  }
};

// cap as the caller gave it: 0 or positive and finite. Beyond 2^+-100 c * tanh(s / c) no longer differs from s, or
// from 0, in any softmax, but c or 1 / c would leave float's range.
template <class Real>
FLASH_DEVICE Softcap<Real> make_softcap(double cap) {
  if (cap == 0.0) return {};
  const double limit = 0x1p100;
  cap = cap > limit ? limit : (cap < 1.0 / limit ? 1.0 / limit : cap);
  return {static_cast<Real>(cap), static_cast<Real>(1.0 / cap)};
}

struct Bias {
  bool on = false;

  template <class V>
  FLASH_DEVICE V forward(V score, const ScoreAt<V>& at, V&) const {
    return on ? score + at.bias : score;
  }

  template <class V>
  FLASH_DEVICE V backward(V d_score, const ScoreAt<V>&, V, ScoreGrads<V>& grads) const {
    if (on) grads.bias = d_score;
    return d_score;
  }
};

// How far a position is from the nearest of the keys 0 to len_k - 1: what the distances of a row have in common.
FLASH_DEVICE constexpr int distance_to_keys(int position, int len_k) {
  const int behind = position - (len_k - 1), before = -position;
  return behind > 0 ? behind : (before > 0 ? before : 0);
}

template <class Real>
struct Alibi {
  bool on = false;
  Real slope = 0;  // of this (batch, head); a slope of 0 still has a gradient

  template <class V>
  FLASH_DEVICE V forward(V score, const ScoreAt<V>& at, V&) const {
    using std::abs;
    return on ? score - V(slope) * abs(at.distance) : score;
  }

  template <class V>
  FLASH_DEVICE V backward(V d_score, const ScoreAt<V>& at, V, ScoreGrads<V>& grads) const {
    using std::abs;
    if (on) grads.slope = V(Real(0)) - d_score * abs(at.distance);
    return d_score;
  }
};

// The modifications one after the other; backward runs them from last to first.
template <ScoreMod... Mods>
struct ScoreChain : Mods... {
  template <class V>
  struct Saved {
    V value[sizeof...(Mods)]{};
  };

  template <class V>
  FLASH_DEVICE V forward(V score, const ScoreAt<V>& at, Saved<V>& saved) const {
    V* slot = saved.value;
    ((score = Mods::forward(score, at, *slot++)), ...);
    return score;
  }

  template <class V>
  FLASH_DEVICE V backward(V d_score, const ScoreAt<V>& at, const Saved<V>& saved, ScoreGrads<V>& grads) const {
    return backward_of<V, Mods...>(d_score, at, saved.value, grads);
  }

 private:
  template <class V, class First, class... Rest>
  FLASH_DEVICE V backward_of(V d_score, const ScoreAt<V>& at, const V* saved, ScoreGrads<V>& grads) const {
    if constexpr (sizeof...(Rest) > 0) d_score = backward_of<V, Rest...>(d_score, at, saved + 1, grads);
    return First::backward(d_score, at, *saved, grads);
  }
};

// The contract's order.
template <class Real>
using StandardScoreMods = ScoreChain<Softcap<Real>, Bias, Alibi<Real>>;

}  // namespace flash_ext
