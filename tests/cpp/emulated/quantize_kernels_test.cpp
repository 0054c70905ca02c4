// Descales and numbers in e4m3 by the kernels of csrc/kernels/stages/quantize.cu.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "emulator.h"
// Behind the emulator, whose shared memory and intrinsics it takes.
#include "kernels/stages/quantize.cu"

namespace flash_ext {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// (outer, rows, heads, cols) in memory, with rows and heads changed places for the kernels.
template <class T>
struct Numbers {
  int64_t outer, heads, rows, cols;
  std::vector<T> x;
  std::vector<uint8_t> x8;
  std::vector<float> descale;

  Numbers(int64_t outer_, int64_t heads_, int64_t rows_, int64_t cols_)
      : outer(outer_), heads(heads_), rows(rows_), cols(cols_), x(outer * heads * rows * cols), x8(x.size(), 0xAA) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.f, 3.f);
    for (auto& number : x) number = static_cast<T>(normal(random));
  }
  int64_t at(int64_t b, int64_t h, int64_t i, int64_t col) const { return ((b * rows + i) * heads + h) * cols + col; }
  QuantizeArgs args(bool per_row) {
    QuantizeArgs args;
    args.dtype = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    descale.assign(outer * heads * (per_row ? rows : 1), 0.f);
    args.x = x.data();
    args.x8 = x8.data();
    args.descale = descale.data();
    const int64_t size[4] = {outer, heads, rows, cols}, stride[3] = {rows * heads * cols, cols, heads * cols};
    const int64_t of_rows[3] = {heads * rows, rows, 1}, of_heads[3] = {heads, 1, 0};
    std::copy_n(size, 4, args.size);
    std::copy_n(stride, 3, args.x_stride);
    std::copy_n(stride, 3, args.x8_stride);
    std::copy_n(per_row ? of_rows : of_heads, 3, args.descale_stride);
    return args;
  }
  float largest(int64_t b, int64_t h, int64_t first, int64_t count) const {
    float most = 0.f;
    for (int64_t i = first; i < first + count; ++i) {
      for (int64_t col = 0; col < cols; ++col) {
        const float number = std::abs(static_cast<float>(x[at(b, h, i, col)]));
        if (std::isfinite(number)) most = std::max(most, number);
      }
    }
    return most == 0.f ? 1.f : most * (1.f / 448.f);
  }
};

// Of numbers and a factor of each.
template <class T, class Factor>
void check_numbers(const Numbers<T>& numbers, const Factor& factor) {
  for (int64_t b = 0; b < numbers.outer; ++b) {
    for (int64_t h = 0; h < numbers.heads; ++h) {
      for (int64_t i = 0; i < numbers.rows; ++i) {
        for (int64_t col = 0; col < numbers.cols; ++col) {
          const float scaled = static_cast<float>(numbers.x[numbers.at(b, h, i, col)]) / factor(b, h, i);
          const uint8_t wanted = __nv_cvt_float_to_fp8(std::isnan(scaled) ? scaled : std::clamp(scaled, -448.f, 448.f),
                                                       __NV_SATFINITE, __NV_E4M3);
          const uint8_t sign_of_nan = std::isnan(scaled) ? 0x80 : 0;
          ASSERT_EQ(numbers.x8[numbers.at(b, h, i, col)] | sign_of_nan, wanted | sign_of_nan) << i << " " << col;
        }
      }
    }
  }
}

template <class T>
void check(Numbers<T>& numbers, bool per_row) {
  const QuantizeArgs args = numbers.args(per_row);
  run_descale(args, per_row);
  run_quantize(args);
  const auto descale = [&](int64_t b, int64_t h, int64_t i) {
    const int64_t head = b * numbers.heads + h;
    return numbers.descale[per_row ? head * numbers.rows + i : head];
  };
  for (int64_t b = 0; b < numbers.outer; ++b) {
    for (int64_t h = 0; h < numbers.heads; ++h) {
      for (int64_t i = 0; i < numbers.rows; ++i) {
        ASSERT_EQ(descale(b, h, i), numbers.largest(b, h, per_row ? i : 0, per_row ? 1 : numbers.rows))
            << b << " " << h;
      }
    }
  }
  check_numbers(numbers, descale);
}

TEST(Quantize, NumbersForEachHeadAndRow) {
  for (const int64_t cols : {8, 24, 64, 128, 264}) {
    for (const int64_t rows : {1, 37, 300}) {
      Numbers<__nv_bfloat16> numbers(2, 3, rows, cols);
      check(numbers, false);
      check(numbers, true);
    }
  }
  Numbers<__half> half(2, 3, 37, 64);
  check(half, false);
  check(half, true);
}

TEST(Quantize, WhatIsNotFiniteCountsForNoDescale) {
  Numbers<__nv_bfloat16> numbers(1, 2, 40, 64);
  const float special[] = {kInfinity, -kInfinity, std::nanf(""), 1e-40f, -0.f, 1e38f};
  for (int64_t i = 0; i < 6; ++i) numbers.x[numbers.at(0, 0, 5 * i, 7 * i)] = static_cast<__nv_bfloat16>(special[i]);
  for (int64_t i = 0; i < 40; ++i) {
    for (int64_t col = 0; col < 64; ++col) numbers.x[numbers.at(0, 1, i, col)] = static_cast<__nv_bfloat16>(0.f);
  }
  check(numbers, false);
  check(numbers, true);
}

TEST(Quantize, ADescaleOfTheCallers) {
  for (const float factor : {0.f, kInfinity, 1e-3f, -2.f}) {
    Numbers<__half> numbers(2, 2, 9, 16);
    numbers.x[0] = static_cast<__half>(0.f);  // over 0: NaN
    QuantizeArgs args = numbers.args(false);
    numbers.descale[0] = factor;
    std::fill_n(args.descale_stride, 3, 0);  // one for all rows
    run_quantize(args);
    check_numbers(numbers, [&](int64_t, int64_t, int64_t) { return factor; });
  }
}

}  // namespace
}  // namespace flash_ext
