// Picks the vector code of the best instruction set, once.
//
//   variant       flags beside -O3
//   baseline      none: SSE2 on x86-64, NEON on aarch64
//   avx2          -mavx2 -mfma -mf16c
//   avx512        -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512
//   avx512_bf16   the same and -mavx512bf16
// Called by the backend and by dropout_mask. Follows its host's choice, so torch's ATEN_CPU_CAPABILITY works here too.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <string>

#include "core/library.h"
#include "kernels/cpu/vector_kernels.h"

namespace flash_ext::cpu {

namespace baseline {
const VectorTable& table();
}
#if defined(__x86_64__)
namespace avx2 {
const VectorTable& table();
}
namespace avx512 {
const VectorTable& table();
}
namespace avx512_bf16 {
const VectorTable& table();
}
#endif

#if defined(__x86_64__)
namespace {

// Leaf 7.1, EAX bit 5; older compilers' __builtin_cpu_supports does not know the name.
bool has_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 5 & 1) != 0;
}

}  // namespace
#endif

static const VectorTable* choose() {
#if defined(__x86_64__)
  const std::string capability = cpu_host().capability();
  if (capability == "AVX512") return has_avx512_bf16() ? &avx512_bf16::table() : &avx512::table();
  if (capability == "AVX2") return &avx2::table();
#endif
  return &baseline::table();
}

const VectorTable& vector_table() {
  static const VectorTable* const chosen = choose();
  return *chosen;
}

}  // namespace flash_ext::cpu
