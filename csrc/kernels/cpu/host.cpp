// The CPU backend's host where no program has set one: one thread, no products of its own, see core/library.h.
#include "core/library.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flash_ext {
namespace {

#if defined(__x86_64__)
// NOTE: __builtin_cpu_supports("f16c") is an error in clang 14.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

const char* own_capability() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return has_avx512 ? "AVX512" : has_avx2 ? "AVX2" : "";
#else
  return "";
#endif
}

CpuHost& host() {
  static CpuHost host = {
      .parallel =
          [](int64_t workers, void (*body)(void*, int64_t), void* context) {
            for (int64_t worker = 0; worker < workers; ++worker) body(context, worker);
          },
      .threads = [] { return int64_t{1}; },
      .capability = own_capability,
      .has_products = [] { return false; },
      .product_f32 = nullptr,
      .product_bf16 = nullptr,
      .release_products = [](bool) {},
  };
  return host;
}

}  // namespace

const CpuHost& cpu_host() { return host(); }
void set_cpu_host(const CpuHost& given) { host() = given; }

}  // namespace flash_ext
