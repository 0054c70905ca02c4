// What a call needs of a kernel, and what a kernel offers, in the same words: what is missing is the reason to refuse.
//
// Called by core/select.h and by the rows of every backend. Invariant: required() is a function of Problem alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/band.h"

namespace flash_ext {

enum class Feature : uint8_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kGroupedHeads,
  kValueHeads,
  kMask,
  kBias,
  kAlibi,
  kSinks,
  kSoftcap,
  kDropout,
  kPacked,
  kBatchInvariant,
  kFp8,
  kRowDescales,
  // Of backward.
  kDeterministic,
  kOneKeyBand,
  kConstantLse,
  kBiasGradient,
  kMixedBiasGradient,
  kWholeBiasGradient,
  kAlibiGradient,
  kNoQueryGradient,
  kNoKeyGradient,
  kNoValueGradient,
  kCount
};

// As they stand behind "has no support for".
constexpr const char* kFeatureNames[] = {
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "grouped heads",
    "other heads of value than of key",
    "a mask",
    "a bias",
    "alibi_slopes",
    "sinks",
    "a softcap",
    "dropout",
    "packed sequences",
    "batch-invariant results",
    "inputs of float8_e4m3fn",
    "a descale for each row",
    "deterministic results",
    "a band of one key",
    "a constant lse",
    "the gradient of a bias",
    "the gradient of a bias beside a mask, alibi_slopes or dropout or in another dtype than query",
    "the gradient of a bias that is not broadcast",
    "the gradient of alibi_slopes",
    "a backward without the gradient of query",
    "a backward without the gradient of key",
    "a backward without the gradient of value",
};
static_assert(sizeof(kFeatureNames) / sizeof(*kFeatureNames) == static_cast<std::size_t>(Feature::kCount));

struct Features {
  uint32_t bits = 0;

  constexpr Features() = default;
  constexpr Features(std::initializer_list<Feature> features) {
    for (const Feature feature : features) add(feature);
  }
  constexpr void add(Feature feature, bool present = true) {
    bits |= uint32_t{present} << static_cast<unsigned>(feature);
  }
  constexpr bool has(Feature feature) const { return bits >> static_cast<unsigned>(feature) & 1; }
  constexpr bool empty() const { return bits == 0; }
  constexpr Features with(Features other) const { return from(bits | other.bits); }
  constexpr Features without(Features other) const { return from(bits & ~other.bits); }

  static constexpr Features from(uint32_t bits) {
    Features result;
    result.bits = bits;
    return result;
  }
};

constexpr Features kAllFeatures = Features::from((1u << static_cast<unsigned>(Feature::kCount)) - 1);
// Of inputs that are dequantised before, where a kernel does not read them.
constexpr Features kQuantized = {Feature::kFp8, Feature::kRowDescales};

constexpr Feature feature_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Feature::kFloat16;
    case DType::kBFloat16:
      return Feature::kBFloat16;
    case DType::kFloat32:
      return Feature::kFloat32;
    case DType::kFloat64:
      return Feature::kFloat64;
  }
  return Feature::kCount;
}

inline Features required(const Problem& problem, Pass pass) {
  Features features = {feature_of(problem.dtype)};
  features.add(Feature::kGroupedHeads, problem.heads_q != problem.heads_k || problem.heads_q != problem.heads_v);
  features.add(Feature::kValueHeads, problem.heads_k != problem.heads_v);
  features.add(Feature::kMask, problem.has_mask);
  features.add(Feature::kBias, problem.has_bias);
  features.add(Feature::kAlibi, problem.has_alibi);
  features.add(Feature::kSinks, problem.has_sinks);
  features.add(Feature::kSoftcap, problem.softcap != 0.0);
  features.add(Feature::kDropout, problem.dropout_p > 0.0);
  features.add(Feature::kPacked, problem.packed);
  features.add(Feature::kBatchInvariant, problem.batch_invariant);
  features.add(Feature::kFp8, problem.fp8);
  features.add(Feature::kRowDescales, problem.row_descales);
  if (pass == Pass::kForward) return features;
  const Band band = make_band(problem);
  features.add(Feature::kDeterministic, problem.deterministic);
  features.add(Feature::kOneKeyBand, band.upper <= band.lower);
  features.add(Feature::kConstantLse, problem.constant_lse);
  features.add(Feature::kBiasGradient, problem.wants_dbias);
  features.add(Feature::kMixedBiasGradient,
               problem.wants_dbias && (problem.has_mask || problem.has_alibi || problem.dropout_p > 0.0 ||
                                       problem.bias_dtype != problem.dtype));
  features.add(Feature::kWholeBiasGradient, problem.wants_dbias && problem.whole_dbias);
  features.add(Feature::kAlibiGradient, problem.wants_dalibi);
  if (pass == Pass::kBiasGradient) return features;
  features.add(Feature::kNoQueryGradient, !problem.wants_dq);
  features.add(Feature::kNoKeyGradient, !problem.wants_dk);
  features.add(Feature::kNoValueGradient, !problem.wants_dv);
  return features;
}

}  // namespace flash_ext
