// The probe of the host's products: they may be missing (of torch's, no AVX2), refuse a type (no AVX-512) or, on a
// machine nobody has tried, be wrong. So it is asked for a small product whose numbers are known.
//
// And what of it is fast, which is asked of the processor and not of a clock, so that the same machine always gives the
// same bits. Called by choose_flavour in rows.cpp. Invariant: one answer for the life of the process.
#include "kernels/cpu/product.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

// NOTE: by vdpbf16ps alone calls took 1.5 to 3.3 times as long as by fp32 on Emerald Rapids without AMX, which a
// hypervisor may hide; 0.6 on an AMD EPYC with AVX-512, 0.35 by AMX (docs/lab/2026-12-01-windows-on-a-cpu.md).
bool is_intel_without_amx() {
#if defined(__x86_64__)
  constexpr unsigned kAmxBf16 = 1u << 22;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxBf16) != 0;
  return __builtin_cpu_is("intel") && !has_amx;
#else
  return false;
#endif
}

}  // namespace

bool prefers_bf16() {
  static const bool prefers = [] {
    const char* const asked = std::getenv("FLASH_EXT_CPU_BF16");
    if (asked == nullptr || *asked == '\0') return !is_intel_without_amx();
    if (std::strcmp(asked, "0") != 0 && std::strcmp(asked, "1") != 0) {
      throw std::runtime_error(std::string("flash_ext: FLASH_EXT_CPU_BF16 is '") + asked + "', not 0 or 1");
    }
    return *asked == '1';
  }();
  return prefers;
}

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
