// What libflash_kernels offers, without torch: its kernels, the devices they plan for, the dropout map, and what its
// CPU code borrows from the program that loads it.
//
// csrc/torch is one such program; examples/cpp_kernels is another, which plans and runs on raw pointers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/decode.h"
#include "core/kernel.h"

namespace flash_ext {

// Those of this build, by backend; select.h says which of them runs a call.
std::span<const Kernel* const> kernels();

// The CUDA devices of this machine, in CUDA's order; empty without a driver and in a build without CUDA. Read once, and
// without making a context.
const std::vector<DeviceInfo>& cuda_devices();

// True where dropout keeps, out [batch_heads, rows, cols] contiguous: (n, i, j) is the map at (n0 + n, q0 + i, k0 + j).
void cpu_dropout_mask(const int64_t* rng_state, double p, int64_t batch_heads, int64_t rows, int64_t cols, int64_t q0,
                      int64_t k0, int64_t n0, bool* out);
// The same on the device and stream of the caller; rng_state lies on the device. Only in a build with CUDA, whose units
// hide what is not told to be seen.
[[gnu::visibility("default")]] void cuda_dropout_mask(const int64_t* rng_state, double p, int64_t batch_heads,
                                                      int64_t rows, int64_t cols, int64_t q0, int64_t k0, int64_t n0,
                                                      bool* out, void* stream);

// The gradient of sinks in parts of so many rows, [b, h_q, count] contiguous: of fwd it reads batch, heads_q, len_q,
// head_dim_v and dtype of the problem, which has one leading dimension, and out, lse, sinks and stream. Only in a build
// with CUDA.
constexpr int64_t kSinkRows = 64;
[[gnu::visibility("default")]] void cuda_sink_gradient(const BackwardArgs& args, double* parts, int64_t count);

// The decode kernel (decode.h). Only in a build with CUDA. batch_invariant: the bits of a sequence depend on no other
// one, nor on the capacity; of the sizes only len_q, heads_q over heads_k and head_dim choose tiles and how keys are
// cut.
[[gnu::visibility("default")]] DecodePlan plan_decode(const DecodeArgs& args, const DeviceInfo& device,
                                                      bool batch_invariant);
// On args.stream and the current device; scratch is of plan.scratch_bytes.
[[gnu::visibility("default")]] void run_decode(const DecodeArgs& args, const DecodePlan& plan, void* scratch);

// What the CPU backend takes from its host. Without one it runs on one thread, by its own products.
struct CpuHost {
  // Calls body(context, worker) for each worker of [0, workers), at a time where it can.
  void (*parallel)(int64_t workers, void (*body)(void* context, int64_t worker), void* context);
  int64_t (*threads)();
  // "AVX512", "AVX2" or anything else: the instruction set that vector code may use.
  const char* (*capability)();
  // Whether the products below may be used now. They may be null, or throw where the machine lacks what they need.
  bool (*has_products)();
  // C[m, n] = A[m, k] B[k, n] (+ C where `add`), row-major, with leading dimensions. Of bf16, B holds pairs of rows.
  void (*product_f32)(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
                      const float* a, const float* b, float* c);
  void (*product_bf16)(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b, int64_t ld_c, bool add,
                       const uint16_t* a, const uint16_t* b, float* c);
  // Ends a thread's products.
  void (*release_products)(bool bf16);
};

const CpuHost& cpu_host();
// Before the first call of a CPU backend.
void set_cpu_host(const CpuHost& host);

}  // namespace flash_ext
