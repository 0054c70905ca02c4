// The probe of the host's products: they may be missing (of torch's, no AVX2), refuse a type (no AVX-512) or, on a
// machine nobody has tried, be wrong. So it is asked for a small product whose numbers are known.
//
// Called by choose_flavour in rows.cpp. Invariant: one answer for the life of the process.
#include "kernels/cpu/product.h"

#include <bit>
#include <exception>
#include <vector>

namespace flash_ext::cpu {
namespace {

// Small whole numbers: every product and sum is exact in bf16 and fp32, so the answer is right or it is not.
constexpr int kRows = 3, kCols = 16, kDepth = 6;
int left_at(int r, int i) { return (r * 5 + i * 3) % 7 - 3; }
int right_at(int i, int c) { return (i * 2 + c) % 5 - 2; }

template <class Compute, class ToOperand>
bool gives_right_numbers(ToOperand to_operand) {
  std::vector<typename Compute::Operand> left(kRows * kDepth), right(kDepth * kCols);
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kDepth; ++i) left[r * kDepth + i] = to_operand(left_at(r, i));
  }
  for (int i = 0; i < kDepth; ++i) {
    for (int c = 0; c < kCols; ++c) {
      const int index = Compute::kPairs ? (i / 2 * kCols + c) * 2 + i % 2 : i * kCols + c;
      right[index] = to_operand(right_at(i, c));
    }
  }
  std::vector<float> result(kRows * kCols, 1.0f);
  const Products<Compute> product(Engine::kBrgemm, vector_table().get<Compute>());
  try {
    product(kRows, kCols, kDepth, left.data(), kDepth, right.data(), kCols, result.data(), kCols, /*add=*/true);
    product.release();
  } catch (const std::exception&) {
    return false;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      int expected = 1;
      for (int i = 0; i < kDepth; ++i) expected += left_at(r, i) * right_at(i, c);
      if (result[r * kCols + c] != static_cast<float>(expected)) return false;
    }
  }
  return true;
}

}  // namespace

bool brgemm_works_f32() {
  static const bool works = gives_right_numbers<ComputeF32>([](int x) { return static_cast<float>(x); });
  return works;
}

bool brgemm_works_bf16() {
  static const bool works = gives_right_numbers<ComputeBf16>(
      [](int x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16); });
  return works;
}

}  // namespace flash_ext::cpu
