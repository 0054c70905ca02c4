// Picks the vector code of the best instruction set, once.
//
//   variant       flags beside -O3
//   baseline      none: SSE2 on x86-64, NEON on aarch64
//   avx2          -mavx2 -mfma -mf16c
//   avx512        -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512
//   avx512_bf16   the same and -mavx512bf16
// Called by the backend and by dropout_mask. Follows torch's own choice, so ATEN_CPU_CAPABILITY works here too.
#include <ATen/Version.h>

#include <string>

#include "cpu/vector_kernels.h"

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

static const VectorTable* choose() {
#if defined(__x86_64__)
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return __builtin_cpu_supports("avx512bf16") ? &avx512_bf16::table() : &avx512::table();
  if (capability == "AVX2" && __builtin_cpu_supports("f16c")) return &avx2::table();
#endif
  return &baseline::table();
}

const VectorTable& vector_table() {
  static const VectorTable* const chosen = choose();
  return *chosen;
}

}  // namespace flash_ext::cpu
