// C[m, n] = A[m, k] B[k, n] (+ C): the one place where matrices are multiplied.
//
// kBrgemm is the host's kernel, with torch oneDNN's (fp32 from AVX2 on; bf16 by vdpbf16ps or AMX); kLoops is
// VectorKernels::product, for fp64, for machines without the former and for torch.backends.mkldnn.enabled = False.
// Called by every tile step. Invariant: a thread that called a Products object calls release() before it ends its work
// (AMX state).
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/library.h"
#include "kernels/cpu/config.h"

namespace flash_ext::cpu {

enum class Engine : uint8_t { kBrgemm, kLoops };

// Whether the kernel works here and gives the right numbers: tried once, on a small product.
bool brgemm_works_f32();
bool brgemm_works_bf16();

// Whether those of bf16 are the faster ones for bf16 inputs on this machine, or what FLASH_EXT_CPU_BF16 says, 1 or 0.
bool prefers_bf16();

template <class Compute>
class Products {
 public:
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;

  Products(Engine engine, const VectorKernels<Compute>& kernels) : engine_(engine), kernels_(kernels) {}

  // ld_a is int64: A may lie in the caller's tensor.
  void operator()(int m, int n, int k, const Operand* a, int64_t ld_a, const Operand* b, int64_t ld_b, Acc* c,
                  int64_t ld_c, bool add) const {
    if constexpr (std::is_same_v<Compute, ComputeBf16>) {
      host_.product_bf16(m, n, k, ld_a, ld_b, ld_c, add, a, b, c);
    } else {
      if constexpr (std::is_same_v<Compute, ComputeF32>) {
        if (engine_ == Engine::kBrgemm) {
          host_.product_f32(m, n, k, ld_a, ld_b, ld_c, add, a, b, c);
          return;
        }
      }
      kernels_.product(m, n, k, a, static_cast<int>(ld_a), b, static_cast<int>(ld_b), c, static_cast<int>(ld_c), add);
    }
  }

  // C = A B by equal parts of the inner dimension, at most kLongestSum, whose sums are added up. For scores and dP: k
  // is d or d_v. NOTE: of 300 columns parts of 256 and 44 had up to 2.8 times eager's error with AVX-512.
  void by_parts(int m, int n, int k, const Operand* a, int64_t ld_a, const Operand* b, int64_t ld_b, Acc* c,
                int64_t ld_c) const {
    const int parts = (k + kLongestSum - 1) / kLongestSum;
    const int step = parts > 1 ? static_cast<int>(round_up((k + parts - 1) / parts, kPad)) : k;
    for (int first = 0; first < k; first += step) {
      (*this)(m, n, std::min(step, k - first), a + first, ld_a, b + first * ld_b, ld_b, c, ld_c,
              /*add=*/first > 0);
    }
  }

  // C = A B, small (kTreeTile) and in fp32: halves of the inner dimension are multiplied apart and then added, which
  // loses less of sums whose terms have one sign.
  void by_tree(int m, int n, int k, const Operand* a, int64_t ld_a, const Operand* b, int64_t ld_b, Acc* c,
               int64_t ld_c) const {
    if (Compute::kPairs || k <= kTreeLeaf) return (*this)(m, n, k, a, ld_a, b, ld_b, c, ld_c, /*add=*/false);
    const int half = static_cast<int>(round_up(k / 2, kTreeLeaf));
    Acc other[kTreeTile];
    by_tree(m, n, half, a, ld_a, b, ld_b, c, ld_c);
    by_tree(m, n, k - half, a + half, ld_a, b + half * ld_b, ld_b, other, n);
    if (ld_c == n) return kernels_.add(c, other, int64_t{m} * n);
    for (int row = 0; row < m; ++row) kernels_.add(c + row * ld_c, other + int64_t{row} * n, n);
  }

  void release() const {
    if (engine_ == Engine::kBrgemm) host_.release_products(Compute::kPairs);
  }

 private:
  Engine engine_;
  const CpuHost& host_ = cpu_host();
  const VectorKernels<Compute>& kernels_;
};

}  // namespace flash_ext::cpu
