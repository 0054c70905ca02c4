// torch's threads and matrix kernels for the CPU backend, handed over when the library is loaded; see core/library.h.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/native/CPUBlas.h>

#include "core/library.h"

namespace flash_ext {
namespace {

namespace blas = at::native::cpublas;

const char* capability() {
  static const std::string text = at::get_cpu_capability();
  return text.c_str();
}

const CpuHost torch_host = {
    .parallel =
        [](int64_t workers, void (*body)(void*, int64_t), void* context) {
          at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
            for (int64_t worker = begin; worker < end; ++worker) body(context, worker);
          });
        },
    .threads = [] { return int64_t{at::get_num_threads()}; },
    .capability = capability,
    // brgemm throws while torch.backends.mkldnn is off.
    .has_products = [] { return at::globalContext().userEnabledMkldnn(); },
    .product_f32 = [](int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
                      const float* a, const float* b,
                      float* c) { blas::brgemm(m, n, k, ld_a, ld_b, ld_c, add, a, b, c, /*is_vnni=*/false); },
    .product_bf16 =
        [](int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add, const uint16_t* a,
           const uint16_t* b, float* c) {
          blas::brgemm(m, n, k, ld_a, ld_b, ld_c, add, reinterpret_cast<const at::BFloat16*>(a),
                       reinterpret_cast<const at::BFloat16*>(b), c, /*is_vnni=*/true);
        },
    .release_products = [](bool bf16) { blas::brgemm_release(bf16); },
};

[[maybe_unused]] const bool handed_over = [] {
  set_cpu_host(torch_host);
  return true;
}();

}  // namespace
}  // namespace flash_ext
