// core/score_mod.h: the order, the derivatives against finite differences, and what must not compile.
#include "core/score_mod.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace flash_ext {
namespace {

template <class V, class Real>
struct Outcome {
  V score;
  V d_score;
  ScoreGrads<V> grads;
};

template <class V, class Real>
Outcome<V, Real> run(const StandardScoreMods<Real>& mods, V score, V distance, V bias, V d_score) {
  typename StandardScoreMods<Real>::template Saved<V> saved;
  const ScoreAt<V> at{distance, bias};
  Outcome<V, Real> outcome;
  outcome.score = mods.forward(score, at, saved);
  outcome.d_score = mods.backward(d_score, at, saved, outcome.grads);
  return outcome;
}

template <class Real>
StandardScoreMods<Real> make_mods(double cap, bool bias, bool alibi, double slope) {
  return {make_softcap<Real>(cap), {bias}, {alibi, static_cast<Real>(slope)}};
}

TEST(ScoreMod, OrderIsSoftcapThenBiasThenAlibi) {
  const auto mods = make_mods<double>(5.0, true, true, 0.5);
  // A score far above the cap, and additions that the cap must not touch.
  EXPECT_NEAR(run(mods, 1e3, -6.0, 70.0, 1.0).score, 5.0 + 70.0 - 0.5 * 6.0, 1e-12);
  EXPECT_NEAR(run(mods, -2.0, 4.0, 0.25, 1.0).score, 5.0 * std::tanh(-0.4) + 0.25 - 2.0, 1e-12);
}

TEST(ScoreMod, DerivativesMatchFiniteDifferences) {
  const double h = 1e-5;
  for (double cap : {0.0, 0.7, 5.0, 50.0})
    for (bool bias : {false, true})
      for (bool alibi : {false, true})
        for (double s : {-30.0, -1.5, 0.0, 0.3, 4.0})
          for (double distance : {-7.0, 0.0, 12.0})
            for (double slope : {0.0, 0.25, -1.0}) {
              const auto score = [&](double s, double b, double slope) {
                return run(make_mods<double>(cap, bias, alibi, slope), s, distance, b, 1.0).score;
              };
              const auto got = run(make_mods<double>(cap, bias, alibi, slope), s, distance, 0.5, 3.0);
              const auto near = [&](double value, double plus, double minus) {
                EXPECT_NEAR(value, 3.0 * (plus - minus) / (2 * h), 2e-7)
                    << "cap " << cap << " s " << s << " distance " << distance << " slope " << slope;
              };
              near(got.d_score, score(s + h, 0.5, slope), score(s - h, 0.5, slope));
              near(got.grads.bias, score(s, 0.5 + h, slope), score(s, 0.5 - h, slope));
              near(got.grads.slope, score(s, 0.5, slope + h), score(s, 0.5, slope - h));
            }
}

TEST(ScoreMod, OffMeansUntouched) {
  const auto off = make_mods<float>(0.0, false, false, 0.0);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (float s : {0.0f, -3.5f, std::numeric_limits<float>::lowest(), -inf, inf}) {
    EXPECT_EQ(run(off, s, nan, nan, s).score, s);  // what is off is not read
    EXPECT_EQ(run(off, s, nan, nan, s).d_score, s);
    EXPECT_EQ(run(off, s, nan, nan, s).grads.bias, 0.0f);
    EXPECT_EQ(run(off, s, nan, nan, s).grads.slope, 0.0f);
  }
}

TEST(ScoreMod, RemovingAndLowestBias) {
  const auto mods = make_mods<float>(0.0, true, false, 0.0);
  const float inf = std::numeric_limits<float>::infinity();
  const float lowest = std::numeric_limits<float>::lowest();
  EXPECT_EQ(run(mods, 3.0f, 0.0f, -inf, 0.0f).score, -inf);
  EXPECT_EQ(run(mods, 3.0f, 0.0f, lowest, 0.0f).score, lowest);
  EXPECT_TRUE(std::isnan(run(mods, 3.0f, 0.0f, std::nanf(""), 0.0f).score));
}

TEST(ScoreMod, SoftcapOfAnyPositiveSize) {
  for (double cap : {1e-320, 1e-60, 1e-38, 1e35, 1e60, 1e300}) {
    const auto mods = make_mods<float>(cap, false, false, 0.0);
    for (float s : {-200.0f, -1e-3f, 0.0f, 0.5f, 1e6f}) {
      const auto got = run(mods, s, 0.0f, 0.0f, 1.0f);
      const double expected = cap < 1 ? 0.0 : s;
      EXPECT_NEAR(got.score, expected, 1e-6 * std::abs(expected) + 1e-29) << cap << " " << s;
      EXPECT_NEAR(got.d_score, cap < 1 && s != 0 ? 0.0 : 1.0, 1e-6) << cap << " " << s;
    }
  }
}

TEST(ScoreMod, FloatFollowsDouble) {
  const auto single = make_mods<float>(30.0, true, true, 0.125);
  const auto exact = make_mods<double>(30.0, true, true, 0.125);
  for (float s = -100.0f; s < 100.0f; s += 0.37f) {
    const auto got = run(single, s, 40.0f, 0.5f, 1.0f);
    const auto expected = run(exact, static_cast<double>(s), 40.0, 0.5, 1.0);
    EXPECT_NEAR(got.score, expected.score, 1e-5);
    EXPECT_NEAR(got.d_score, expected.d_score, 1e-6);
    EXPECT_EQ(got.grads.slope, -40.0f);
  }
}

struct OnlyForward {
  template <class V>
  V forward(V score, const ScoreAt<V>&, V&) const {
    return score + score;
  }
};

template <class... Mods>
concept CanChain = requires {
  typename ScoreChain<Mods...>;
};

static_assert(ScoreMod<Softcap<float>> && ScoreMod<Bias> && ScoreMod<Alibi<double>>);
static_assert(CanChain<Bias>);
static_assert(!ScoreMod<OnlyForward> && !CanChain<Bias, OnlyForward>);

}  // namespace
}  // namespace flash_ext

// A vector of values lives in a namespace of its own; tanh and abs are found there.
namespace vectors {

struct Float4 {
  float x[4]{};
  Float4() = default;
  explicit Float4(float value) : x{value, value, value, value} {}
  Float4(float a, float b, float c, float d) : x{a, b, c, d} {}
};

template <class Op>
Float4 map(const Float4& a, const Float4& b, Op op) {
  return {op(a.x[0], b.x[0]), op(a.x[1], b.x[1]), op(a.x[2], b.x[2]), op(a.x[3], b.x[3])};
}
Float4 operator+(const Float4& a, const Float4& b) { return map(a, b, std::plus<float>{}); }
Float4 operator-(const Float4& a, const Float4& b) { return map(a, b, std::minus<float>{}); }
Float4 operator*(const Float4& a, const Float4& b) { return map(a, b, std::multiplies<float>{}); }
Float4 tanh(const Float4& a) {
  return map(a, a, [](float x, float) { return std::tanh(x); });
}
Float4 abs(const Float4& a) {
  return map(a, a, [](float x, float) { return std::abs(x); });
}

TEST(ScoreMod, VectorEqualsScalar) {
  const flash_ext::StandardScoreMods<float> mods{flash_ext::make_softcap<float>(3.0), {true}, {true, 0.5f}};
  const Float4 s{-4.0f, 0.0f, 1.0f, 9.0f}, distance{-2.0f, 0.0f, 5.0f, 8.0f}, bias{0.0f, 1.0f, -2.0f, 3.0f};
  const auto vector = flash_ext::run(mods, s, distance, bias, Float4(2.0f));
  for (int i = 0; i < 4; ++i) {
    const auto scalar = flash_ext::run(mods, s.x[i], distance.x[i], bias.x[i], 2.0f);
    EXPECT_EQ(vector.score.x[i], scalar.score);
    EXPECT_EQ(vector.d_score.x[i], scalar.d_score);
    EXPECT_EQ(vector.grads.bias.x[i], scalar.grads.bias);
    EXPECT_EQ(vector.grads.slope.x[i], scalar.grads.slope);
  }
}

}  // namespace vectors
