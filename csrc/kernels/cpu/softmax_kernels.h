// The vector code between the two products of forward, and between the five of backward.
//
//   forward   x = scale * s   m' = max(m, max x)   p = e^(x - m')   l' = l e^(m - m') + sum p   O *= e^(m - m')
//   backward  p = e^(x - lse)   ds = p (dp - delta)                on S^T: lse and delta lie along the lanes
//
// Included by vector_kernels.cpp alone, once per instruction set; called a tile at a time through VectorKernels.
// Invariant: a removed element leaves as exactly 0, whatever its score was.
#pragma once

#include <limits>

#include "core/online_softmax.h"
#include "kernels/cpu/pack_kernels.h"

namespace flash_ext::cpu::FLASH_CPU_VARIANT {
namespace {

template <class Compute>
constexpr Precision kExpPrecision = Compute::kPairs ? Precision::kRounded : Precision::kFull;

[[gnu::always_inline]] inline int clamp(int x, int low, int high) { return x < low ? low : (x > high ? high : x); }

// The kept columns of row r.
struct Columns {
  int first;
  int last;
};
[[gnu::always_inline]] inline Columns kept_columns(const TileDiagonals& band, int r) {
  if (r >= band.rows) return {0, 0};
  const int first = clamp(band.low + r, 0, band.cols);
  return {first, clamp(band.high + r, first, band.cols)};
}

template <class V>
[[gnu::always_inline]] inline void store_operand(V value, typename V::Scalar* to) {
  value.store(to);
}
[[gnu::always_inline]] inline void store_operand(F32 value, uint16_t* to) { store_half(to_bf16(value), to); }

template <class V>
[[gnu::always_inline]] inline void accumulate(V value, typename V::Scalar* sum) {
  (V::load(sum) + value).store(sum);
}

// A sum with what rounding lost, for sums that nearly cancel (Knuth's two-sum).
template <class V>
struct Exact {
  V sum, lost;

  [[gnu::always_inline]] inline void add(V value) {
    const V before = sum;
    sum = before + value;
    const V added = sum - before;
    lost = lost + ((before - (sum - added)) + (value - added));
  }
};

// The same in memory, the lost part `lost` elements behind the sum.
template <class V>
[[gnu::always_inline]] inline void accumulate_exactly(V value, typename V::Scalar* sum, int lost) {
  Exact<V> exact{V::load(sum), V::load(sum + lost)};
  exact.add(value);
  exact.sum.store(sum);
  exact.lost.store(sum + lost);
}

// keep ? scale : 0, from bytes of 0 and 1.
template <class V>
[[gnu::always_inline]] inline V keep_factor(const uint8_t* keep, V scale) {
  return from_bytes<V>(keep) * scale;
}

template <class Acc>
void modify_scores(Acc* scores, int ld, int rows, int cols, Acc scale, const ScoreInputs<Acc>& inputs) {
  using V = Vec<Acc>;
  const V removed(-std::numeric_limits<Acc>::infinity());
  for (int r = 0; r < rows; ++r) {
    Acc* row = scores + int64_t{r} * ld;
    for (int c = 0; c < cols; c += V::kLanes) {
      ScoreAt<V> at;
      at.distance = V(inputs.distance + r) - V::iota(static_cast<Acc>(c));
      if (inputs.bias != nullptr) at.bias = V::load(inputs.bias + int64_t{r} * inputs.ld_bias + c);
      typename StandardScoreMods<Acc>::template Saved<V> saved;
      V score = inputs.mods.forward(V::load(row + c) * V(scale), at, saved);
      if (inputs.mask != nullptr) {
        score = keep_nonzero(score, V::load(inputs.mask + int64_t{r} * inputs.ld_mask + c), removed);
      }
      score.store(row + c);
    }
  }
}

template <class Compute, bool kDropout>
void softmax_rows(const SoftmaxTile<Compute>& tile) {
  using Acc = typename Compute::Acc;
  using V = Vec<Acc>;
  constexpr int kLanes = V::kLanes;
  const V removed(-std::numeric_limits<Acc>::infinity());
  const V scale(tile.scale);
  for (int r = 0; r < tile.rows; ++r) {
    Acc* scores = tile.scores + int64_t{r} * tile.ld_scores;
    typename Compute::Operand* probs = tile.probs + int64_t{r} * tile.ld_probs;
    Columns kept{0, tile.cols};
    if (tile.band != nullptr) {
      kept = kept_columns(*tile.band, r);
      if (kept.first % kLanes != 0) {
        const int c = kept.first / kLanes * kLanes;
        keep_range(V::load(scores + c), c, kept.first, kept.last, removed).store(scores + c);
      }
      if (kept.last % kLanes != 0) {
        const int c = kept.last / kLanes * kLanes;
        keep_range(V::load(scores + c), c, kept.first, kept.last, removed).store(scores + c);
      }
    }
    const int first = kept.first / kLanes * kLanes;
    const int last = (kept.last + kLanes - 1) / kLanes * kLanes;

    V high[4] = {removed, removed, removed, removed};
    int c = first;
    for (; c + 4 * kLanes <= last; c += 4 * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) high[i] = max(high[i], V::load(scores + c + i * kLanes) * scale);
    }
    for (; c < last; c += kLanes) high[0] = max(high[0], V::load(scores + c) * scale);

    OnlineSoftmax<Acc> row{tile.row_max[r], tile.row_sum[r]};
    const Acc before = row.row_max, tile_max = max_lanes(max(max(high[0], high[1]), max(high[2], high[3])));
    // As row.step(tile_max) has it, but its exponential is a call, and only a maximum that moves needs it.
    Acc factor = 0;
    if (before == OnlineSoftmax<Acc>::kEmpty) {
      row.row_max = tile_max > before ? tile_max : before;
    } else if (tile_max > before) {
      factor = row.step(tile_max);
    }
    const V shift(-row.shift());
    // The multiply-add below does not round x * scale, and the maximum is rounded: that alone may be more than exp
    // takes.
    constexpr Acc kFar = 0x1p24;
    V factor_of_x = scale;
    if (row.shift() > kFar || row.shift() < -kFar) {
      for (c = first; c < last; c += kLanes) (V::load(scores + c) * scale).store(scores + c);
      factor_of_x = V(Acc(1));
    }
    V sum[2] = {V(Acc(0)), V(Acc(0))};
    for (c = 0; c < first; c += kLanes) store_operand(V(Acc(0)), probs + c);
    for (c = first; c < last; c += kLanes) {
      const V p = exp<kExpPrecision<Compute>>(fma(V::load(scores + c), factor_of_x, shift));
      const V part = sum[1] + p;  // the two take turns; an index would put them into memory
      sum[1] = sum[0];
      sum[0] = part;
      if constexpr (kDropout) {
        store_operand(p * keep_factor(tile.keep + int64_t{r} * tile.ld_keep + c, V(tile.keep_scale)), probs + c);
      } else {
        store_operand(p, probs + c);
      }
    }
    for (c = last; c < tile.cols; c += kLanes) store_operand(V(Acc(0)), probs + c);
    row.add(sum_lanes(sum[0] + sum[1]));
    tile.row_max[r] = row.row_max;
    tile.row_sum[r] = row.row_sum;
    if (tile.out != nullptr && !(row.row_max == before)) {
      Acc* out = tile.out + int64_t{r} * tile.ld_out;
      for (c = 0; c < tile.out_cols; c += kLanes) (V::load(out + c) * V(factor)).store(out + c);
    }
  }
}

template <class Compute>
void softmax(const SoftmaxTile<Compute>& tile) {
  if (tile.keep != nullptr) {
    softmax_rows<Compute, true>(tile);
  } else {
    softmax_rows<Compute, false>(tile);
  }
}

// 0 where a query does not see a key, and not NaN, whatever was computed there.
template <class Compute, bool kGeneral, class V>
[[gnu::always_inline]] inline V only_visible(const GradientTile<Compute>& tile, int r, int c, Columns kept, V x) {
  using Acc = typename Compute::Acc;
  const V zero(Acc(0));
  if constexpr (kGeneral) {
    const ScoreInputs<Acc>* inputs = tile.inputs;
    if (inputs != nullptr && inputs->mask != nullptr) {
      x = keep_nonzero(x, V::load(inputs->mask + int64_t{r} * inputs->ld_mask + c), zero);
    }
  }
  if (tile.band != nullptr) x = keep_range(x, c, kept.first, kept.last, zero);
  if (tile.has_empty) x = keep_below(x, V::load(tile.lse + c), V(std::numeric_limits<Acc>::infinity()), zero);
  return x;
}

// Probabilities of one vector of S^T, and what backward of the score needs of it.
template <class Compute, bool kGeneral, class V>
[[gnu::always_inline]] inline V probability_at(
    const GradientTile<Compute>& tile, int r, int c, Columns kept, ScoreAt<V>& at,
    typename StandardScoreMods<typename Compute::Acc>::template Saved<V>& saved) {
  using Acc = typename Compute::Acc;
  V score = V::load(tile.scores + int64_t{r} * tile.ld + c);
  const V lse = V::load(tile.lse + c);
  V p;
  if constexpr (kGeneral) {
    score = score * V(tile.scale);
    const ScoreInputs<Acc>* inputs = tile.inputs;
    if (inputs != nullptr) {
      at.distance = V(inputs->distance - r) + V::iota(static_cast<Acc>(c));
      if (inputs->bias != nullptr) at.bias = V::load(inputs->bias + int64_t{r} * inputs->ld_bias + c);
      score = inputs->mods.forward(score, at, saved);
    }
    p = exp<Precision::kFull>(score - lse);
    if (tile.renorm != nullptr) p = p * V::load(tile.renorm + c);
  } else {
    p = exp<kExpPrecision<Compute>>(fma(score, V(tile.scale), V(Acc(0)) - lse));
  }
  return only_visible<Compute, kGeneral>(tile, r, c, kept, p);
}

// What a tile may ask for beyond plain scores: nothing, dropout alone, anything, or, where raw_probs are there,
// anything but a softcap and the slope's gradient, which need the scores.
enum class Extras { kNone, kDropout, kAny, kKnown };

template <class Compute, Extras kExtras>
void gradient_rows(const GradientTile<Compute>& tile) {
  constexpr bool kKnown = kExtras == Extras::kKnown, kGeneral = kExtras == Extras::kAny || kKnown;
  using Acc = typename Compute::Acc;
  using V = Vec<Acc>;
  constexpr int kLanes = V::kLanes;
  constexpr int kRows = Compute::kPairs ? 2 : 1;
  for (int r0 = 0; r0 < tile.rows; r0 += kRows) {
    Columns kept[kRows];
    for (int i = 0; i < kRows; ++i) kept[i] = tile.band ? kept_columns(*tile.band, r0 + i) : Columns{0, tile.cols};
    for (int c = 0; c < tile.cols; c += kLanes) {
      V d_score[kRows];
#pragma GCC unroll 2
      for (int i = 0; i < kRows; ++i) {
        const int r = r0 + i;
        const int64_t index = int64_t{r} * tile.ld + c;
        ScoreAt<V> at;
        typename StandardScoreMods<Acc>::template Saved<V> saved;
        V p;
        if constexpr (kKnown) {
          p = V::load(tile.raw_probs + index) * V::load(tile.renorm + c);
          p = only_visible<Compute, kGeneral>(tile, r, c, kept[i], p);
        } else {
          p = probability_at<Compute, kGeneral>(tile, r, c, kept[i], at, saved);
        }
        V keep(Acc(1));
        if constexpr (kExtras != Extras::kNone) {
          if (!kGeneral || tile.keep != nullptr) keep = keep_factor(tile.keep + index, V(tile.keep_scale));
        }
        if (tile.probs != nullptr) store_operand(kExtras != Extras::kNone ? p * keep : p, tile.probs + index);
        d_score[i] = V(Acc(0));
        if (tile.d_probs == nullptr) continue;
        V d_prob = V::load(tile.d_probs + index);
        if constexpr (kExtras != Extras::kNone) d_prob = rounded(d_prob * keep);  // of one key it is delta, bit for bit
        V difference = d_prob - V::load(tile.delta + c);
        if (tile.d_lse != nullptr) difference = difference + V::load(tile.d_lse + c);
        d_score[i] = only_visible<Compute, kGeneral>(tile, r, c, kept[i], p * difference);
        if constexpr (kGeneral) {
          if (tile.d_bias != nullptr) {
            Acc* const to = tile.d_bias + int64_t{r} * tile.ld_d_bias + c;
            (tile.adds_d_bias ? V::load(to) + d_score[i] : d_score[i]).store(to);
          }
          if (!kKnown && tile.inputs != nullptr) {
            ScoreGrads<V> grads;
            const V modified = d_score[i];
            // Again, because what a softcap saved of a pair that is hidden, or of the padding, may be NaN.
            d_score[i] = only_visible<Compute, kGeneral>(tile, r, c, kept[i],
                                                         tile.inputs->mods.backward(modified, at, saved, grads));
            if (tile.slope != nullptr) {
              accumulate_exactly(grads.slope, tile.slope->gradient + c, tile.slope->lost);
              accumulate_exactly(modified, tile.slope->d_score + c, tile.slope->lost);
              accumulate(p * abs(at.distance), tile.slope->distance + c);
              accumulate(p, tile.slope->prob + c);
            }
          }
        }
        if (tile.d_scores != nullptr) store_operand(d_score[i], tile.d_scores + index);
      }
      if constexpr (Compute::kPairs) {
        if (tile.d_scores_right != nullptr) {
          uint32_t* pairs = reinterpret_cast<uint32_t*>(tile.d_scores_right);
          pairs_of(to_bf16(d_score[0]), to_bf16(d_score[1])).store(pairs + int64_t{r0 / 2} * tile.ld + c);
        }
      }
    }
  }
}

// A bias alone, read and its gradient written where they lie, a square of them at a time. load(i): a
// vector of elements of so many bytes from the i-th on.
template <class Compute, class Load>
void gradient_blocks(const GradientTile<Compute>& tile, int bytes, const Load& load) {
  using Acc = typename Compute::Acc;
  using V = Vec<Acc>;
  constexpr int kLanes = V::kLanes, kRows = Compute::kPairs ? 2 : 1;
  for (int r0 = 0; r0 < tile.rows; r0 += kLanes) {
    for (int c = 0; c < tile.cols; c += kLanes) {
      Acc numbers[kLanes][kLanes];  // [row][column]: bias, then dS
      V block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const int64_t at = (c + i) * tile.bias.row_stride + r0;
        block[i] = load(at);
        __builtin_prefetch(static_cast<const char*>(tile.bias.data) + (at + kLanes) * bytes);  // the rows lie apart
      }
      transpose_steps<1>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i].store(numbers[i]);
      const V lse = V::load(tile.lse + c), scale(tile.scale);
      for (int i0 = 0; i0 < kLanes; i0 += kRows) {
        V d_score[kRows];
#pragma GCC unroll 2
        for (int i = 0; i < kRows; ++i) {
          const int r = r0 + i0 + i;
          const int64_t index = int64_t{r} * tile.ld + c;
          V p = exp<Precision::kFull>(V::load(tile.scores + index) * scale + V::load(numbers[i0 + i]) - lse);
          const Columns kept = tile.band ? kept_columns(*tile.band, r) : Columns{0, tile.cols};
          p = only_visible<Compute, false>(tile, r, c, kept, p);
          if (tile.probs != nullptr) store_operand(p, tile.probs + index);
          d_score[i] = V(Acc(0));
          if (tile.d_probs == nullptr) continue;
          V difference = V::load(tile.d_probs + index) - V::load(tile.delta + c);
          if (tile.d_lse != nullptr) difference = difference + V::load(tile.d_lse + c);
          d_score[i] = only_visible<Compute, false>(tile, r, c, kept, p * difference);
          d_score[i].store(numbers[i0 + i]);
          if (tile.d_scores != nullptr) store_operand(d_score[i], tile.d_scores + index);
        }
        if constexpr (Compute::kPairs) {
          if (tile.d_scores_right != nullptr) {
            uint32_t* pairs = reinterpret_cast<uint32_t*>(tile.d_scores_right);
            pairs_of(to_bf16(d_score[0]), to_bf16(d_score[1])).store(pairs + int64_t{(r0 + i0) / 2} * tile.ld + c);
          }
        }
      }
      if (tile.bias_sink.data == nullptr) continue;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = V::load(numbers[i]);
      transpose_steps<1>(block);
      Acc* const to = static_cast<Acc*>(tile.bias_sink.data) + c * tile.bias_sink.row_stride + r0;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        Acc* const row = to + i * tile.bias_sink.row_stride;
        (tile.adds_d_bias ? V::load(row) + block[i] : block[i]).store(row);
        __builtin_prefetch(row + kLanes, 1);
      }
    }
  }
}

template <class Compute>
void gradient_blocks(const GradientTile<Compute>& tile) {
  using V = Vec<typename Compute::Acc>;
  if constexpr (sizeof(typename Compute::Acc) == 4) {
    const auto* const halves = static_cast<const uint16_t*>(tile.bias.data);
    if (tile.bias.type == Element::kBFloat16) {
      return gradient_blocks<Compute>(tile, 2, [=](int64_t at) { return from_bf16(load_half(halves + at)); });
    }
    if (tile.bias.type == Element::kFloat16) {
      return gradient_blocks<Compute>(tile, 2, [=](int64_t at) { return from_fp16(load_half(halves + at)); });
    }
  }
  const auto* const data = static_cast<const typename Compute::Acc*>(tile.bias.data);
  gradient_blocks<Compute>(tile, sizeof(*data), [=](int64_t at) { return V::load(data + at); });
}

template <class Compute>
void gradient(const GradientTile<Compute>& tile) {
  if (tile.bias.data != nullptr) return gradient_blocks<Compute>(tile);
  if (tile.raw_probs != nullptr) return gradient_rows<Compute, Extras::kKnown>(tile);
  if (tile.inputs != nullptr || tile.renorm != nullptr || tile.d_bias != nullptr) {
    gradient_rows<Compute, Extras::kAny>(tile);
  } else if (tile.keep != nullptr) {
    gradient_rows<Compute, Extras::kDropout>(tile);
  } else {
    gradient_rows<Compute, Extras::kNone>(tile);
  }
}

// NOTE: a vector of queries after the other, whose sums are then registers.
template <class Compute>
void sum_probs(const GradientTile<Compute>& tile, typename Compute::Acc* sums) {
  using Acc = typename Compute::Acc;
  using V = Vec<Acc>;
  const int rows = tile.band ? clamp(tile.rows, 0, tile.band->rows) : tile.rows;
  for (int c = 0; c < tile.cols; c += V::kLanes) {
    Exact<V> of_p{V::load(sums + c), V::load(sums + 2 * kPanel + c)};
    Exact<V> of_product{V::load(sums + kPanel + c), V::load(sums + 3 * kPanel + c)};
    for (int r = 0; r < rows; ++r) {
      const Columns kept = tile.band ? kept_columns(*tile.band, r) : Columns{0, tile.cols};
      const int64_t index = int64_t{r} * tile.ld + c;
      ScoreAt<V> at;
      typename StandardScoreMods<Acc>::template Saved<V> saved;
      const V p = probability_at<Compute, true>(tile, r, c, kept, at, saved);
      if (tile.raw_probs != nullptr) p.store(tile.raw_probs + index);
      of_p.add(p);
      if (tile.d_probs == nullptr) continue;
      V d_prob = V::load(tile.d_probs + index);
      if (tile.keep != nullptr) d_prob = rounded(d_prob * keep_factor(tile.keep + index, V(tile.keep_scale)));
      const V product = rounded(p * d_prob);
      of_product.add(only_visible<Compute, true>(tile, r, c, kept, product));
      const V rest = fma(p, d_prob, V(Acc(0)) - product);
      of_product.lost = of_product.lost + only_visible<Compute, true>(tile, r, c, kept, rest);
    }
    of_p.sum.store(sums + c);
    of_p.lost.store(sums + 2 * kPanel + c);
    of_product.sum.store(sums + kPanel + c);
    of_product.lost.store(sums + 3 * kPanel + c);
  }
}

template <class Acc>
void dot_rows(const Acc* a, const Acc* b, int ld, int rows, int cols, Acc* out) {
  using V = Vec<Acc>;
  for (int r = 0; r < rows; ++r) {
    const int64_t row = int64_t{r} * ld;
    V sum[2] = {V(Acc(0)), V(Acc(0))};
    for (int c = 0; c < cols; c += V::kLanes) {
      const V part = fma(V::load(a + row + c), V::load(b + row + c), sum[1]);
      sum[1] = sum[0];
      sum[0] = part;
    }
    out[r] = sum_lanes(sum[0] + sum[1]);
  }
}

template <class Acc>
void add_row_sums(const Acc* src, int ld, int rows, int cols, Acc* out) {
  using V = Vec<Acc>;
  for (int r = 0; r < rows; ++r) {
    V sum = V::load(src + int64_t{r} * ld);
    for (int c = V::kLanes; c < cols; c += V::kLanes) sum = sum + V::load(src + int64_t{r} * ld + c);
    out[r] += sum_lanes(sum);
  }
}

template <class Acc>
void add(Acc* dst, const Acc* src, int64_t count) {
  using V = Vec<Acc>;
  for (int64_t i = 0; i < count; i += V::kLanes) (V::load(dst + i) + V::load(src + i)).store(dst + i);
}

}  // namespace
}  // namespace flash_ext::cpu::FLASH_CPU_VARIANT
