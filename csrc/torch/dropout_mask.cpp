// The operator dropout_mask on every device: the map of core/dropout.h, by the CPU backend's vector code, by a
// CUDA kernel or, where there are no kernels, by torch's integer operations. `chunked` and the tests draw the same bits
// through it.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "core/library.h"
#include "torch/checks.h"
#include "torch/cuda_runtime.h"
#include "torch/nvtx.h"

namespace flash_ext {
namespace {

void check(const Tensor& rng_state, double dropout_p) {
  if (rng_state.scalar_type() != at::kLong || rng_state.dim() != 1 || rng_state.sym_size(0) != 2) {
    throw AttentionError("rng_state", "must be a torch.int64 tensor of shape (2,): {seed, offset}");
  }
  if (!(dropout_p >= 0.0 && dropout_p <= 1.0)) {
    throw AttentionError("dropout_p", concat("is ", dropout_p, "; it must be a probability from 0 to 1"));
  }
}

Tensor dropout_mask_cpu(const Tensor& rng_state, double dropout_p, int64_t batch_heads, int64_t rows, int64_t cols,
                        int64_t q0, int64_t k0, int64_t n0) {
  const nvtx::Range range(nvtx::Op::kDropoutMask);
  check(rng_state, dropout_p);
  Tensor result = at::empty({batch_heads, rows, cols}, rng_state.options().dtype(at::kBool));
  const Tensor state = rng_state.contiguous();
  cpu_dropout_mask(state.const_data_ptr<int64_t>(), dropout_p, batch_heads, rows, cols, q0, k0, n0,
                   result.mutable_data_ptr<bool>());
  return result;
}

// Philox4x32-7 in int64: products wrap, which leaves their 64 bits right. Reads rng_state on its device, without a
// sync.
Tensor dropout_mask_composite(const Tensor& rng_state, double dropout_p, int64_t batch_heads, int64_t rows,
                              int64_t cols, int64_t q0, int64_t k0, int64_t n0) {
  check(rng_state, dropout_p);
  constexpr int64_t kWord = 0xFFFFFFFF;
  const auto index = rng_state.options();
  const Tensor i = at::arange(q0, q0 + rows, index).unsqueeze(-1);
  const Tensor j = at::arange(k0, k0 + cols, index);
  const auto high = [](const Tensor& x) { return x.__rshift__(32).bitwise_and(kWord); };
  const auto mod = [](const Tensor& x, int64_t n) { return x.bitwise_and(n - 1); };
  const Tensor seed = rng_state[0], offset = rng_state[1];
  Tensor key0 = seed.bitwise_and(kWord), key1 = high(seed).bitwise_xor(high(offset));
  const Tensor lane = mod(i, 8) * 4 + mod(j, 8).__rshift__(1);
  Tensor c0 = j.__rshift__(4) * 32 + lane;
  Tensor c1 = i.__rshift__(4);
  Tensor c2 = at::arange(n0, n0 + batch_heads, index).unsqueeze(-1).unsqueeze(-1);
  Tensor c3 = offset.bitwise_and(kWord);
  for (int round = 0; round < 7; ++round) {
    const Tensor product0 = c0 * int64_t{0xD2511F53}, product1 = c2 * int64_t{0xCD9E8D57};
    c0 = high(product1).bitwise_xor(c1).bitwise_xor(key0);
    c2 = high(product0).bitwise_xor(c3).bitwise_xor(key1);
    c1 = product1.bitwise_and(kWord);
    c3 = product0.bitwise_and(kWord);
    key0 = (key0 + int64_t{0x9E3779B9}).bitwise_and(kWord);
    key1 = (key1 + int64_t{0xBB67AE85}).bitwise_and(kWord);
  }
  const Tensor low_row = i.bitwise_and(8) == 0, low_col = j.bitwise_and(8) == 0;
  const Tensor word = at::where(low_col, at::where(low_row, c0, c1), at::where(low_row, c2, c3));
  const Tensor number = word.__rshift__(mod(j, 2) * 16).bitwise_and(0xFFFF);
  return number >= static_cast<int64_t>(dropout_p * 65536.0 + 0.5);
}

Tensor dropout_mask_cuda(const Tensor& rng_state, double dropout_p, int64_t batch_heads, int64_t rows, int64_t cols,
                         int64_t q0, int64_t k0, int64_t n0) {
  const nvtx::Range range(nvtx::Op::kDropoutMask);
  if constexpr (kWithCuda) {
    const c10::DeviceGuard guard(rng_state.device());
    check(rng_state, dropout_p);
    Tensor result = at::empty({batch_heads, rows, cols}, rng_state.options().dtype(at::kBool));
    const Tensor state = rng_state.contiguous();
    cuda_dropout_mask(state.const_data_ptr<int64_t>(), dropout_p, batch_heads, rows, cols, q0, k0, n0,
                      result.mutable_data_ptr<bool>(), current_cuda_stream(rng_state.device()));
    return result;
  } else {
    return dropout_mask_composite(rng_state, dropout_p, batch_heads, rows, cols, q0, k0, n0);
  }
}

Tensor dropout_mask_meta(const Tensor& rng_state, double dropout_p, c10::SymInt batch_heads, c10::SymInt rows,
                         c10::SymInt cols, c10::SymInt, c10::SymInt, c10::SymInt) {
  check(rng_state, dropout_p);
  return at::empty_symint({std::move(batch_heads), std::move(rows), std::move(cols)},
                          rng_state.options().dtype(at::kBool));
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, CPU, m) { m.impl("dropout_mask", dropout_mask_cpu); }
TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) { m.impl("dropout_mask", dropout_mask_cuda); }
TORCH_LIBRARY_IMPL(flash_ext, Meta, m) { m.impl("dropout_mask", dropout_mask_meta); }

}  // namespace flash_ext
