// Attention on raw pointers, forward and backward, without torch: libflash_kernels.so is all it takes.
//   ./attention          float32 on the CPU
//   ./attention cuda     bfloat16 on the first GPU
// A caller says what is to be computed (Problem) and where it lies (ForwardArgs, BackwardArgs), takes the
// cheapest kernel that accepts, asks it for a plan, gives it the scratch memory that the plan wants, and runs it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#ifdef WITH_CUDA
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#endif

#include "core/library.h"
#include "core/select.h"

using namespace flash_ext;

namespace {

constexpr int64_t kHeads = 4, kKeyHeads = 2, kTokens = 200, kDim = 64;
constexpr int64_t kQuery = kHeads * kTokens * kDim, kKey = kKeyHeads * kTokens * kDim;

bool on_gpu = false;

// Memory that both sides can read, so that the example can look at results; never given back.
void* allocate(int64_t bytes) {
#ifdef WITH_CUDA
  void* pointer = nullptr;
  if (on_gpu) return cudaMallocManaged(&pointer, bytes) == cudaSuccess ? pointer : nullptr;
#endif
  return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
}

// [heads, tokens, dim] of the call's dtype.
struct Tensor {
  explicit Tensor(
      int64_t heads, const std::function<float(int64_t)>& value = [](int64_t) { return 0.f; }) {
    const int64_t count = heads * kTokens * kDim;
    view.data = allocate(count * 4);
    view.head_stride = kTokens * kDim;
    view.row_stride = kDim;
    view.col_stride = 1;
    for (int64_t i = 0; i < count; ++i) set(i, value(i));
  }
  void set(int64_t i, float x) {
#ifdef WITH_CUDA
    if (on_gpu) {
      static_cast<__nv_bfloat16*>(view.data)[i] = __float2bfloat16(x);
      return;
    }
#endif
    static_cast<float*>(view.data)[i] = x;
  }
  float at(int64_t i) const {
#ifdef WITH_CUDA
    if (on_gpu) return __bfloat162float(static_cast<const __nv_bfloat16*>(view.data)[i]);
#endif
    return static_cast<const float*>(view.data)[i];
  }
  TensorView view;
};

// Why nothing runs.
void give_up(Pass pass, const Asked& asked, const DeviceInfo& device) {
  for (const Considered& row : consider(kernels(), pass, asked, device)) {
    std::printf("%s refuses: %s\n", row.kernel->name, row.reason.c_str());
  }
  std::exit(2);
}

// sum over heads, tokens and columns of out * weight, by the formula, in double.
double loss(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& weight) {
  double total = 0;
  std::vector<double> p(kTokens);
  for (int64_t h = 0; h < kHeads; ++h) {
    const int64_t kv = h / (kHeads / kKeyHeads) * kTokens * kDim;
    for (int64_t i = 0; i < kTokens; ++i) {
      const int64_t row = (h * kTokens + i) * kDim;
      double sum = 0, weighted = 0;
      for (int64_t j = 0; j <= i; ++j) {
        double dot = 0, term = 0;
        for (int64_t c = 0; c < kDim; ++c) {
          dot += double{q.at(row + c)} * k.at(kv + j * kDim + c);
          term += double{v.at(kv + j * kDim + c)} * weight.at(row + c);
        }
        p[j] = std::exp(dot / std::sqrt(double{kDim}));
        sum += p[j];
        weighted += p[j] * term;
      }
      total += weighted / sum;
    }
  }
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  on_gpu = argc > 1 && std::strcmp(argv[1], "cuda") == 0;
  DeviceInfo device;
  device.multiprocessors = 1;  // threads, on the CPU
  if (on_gpu) {
#ifdef WITH_CUDA
    if (cuda_devices().empty()) return std::puts("no GPU"), 2;
    device = cuda_devices()[0];
#else
    return std::puts("compiled without a CUDA toolkit"), 2;
#endif
  }

  Problem problem;
  problem.dtype = on_gpu ? DType::kBFloat16 : DType::kFloat32;
  problem.heads_q = kHeads;
  problem.heads_k = problem.heads_v = kKeyHeads;
  problem.len_q = problem.len_k = kTokens;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.scale = 1 / std::sqrt(double{kDim});
  problem.causal = true;

  const auto noise = [](int64_t i) { return static_cast<float>(std::sin(0.7 * static_cast<double>(i * i % 1009))); };
  Tensor q(kHeads, noise), k(kKeyHeads, noise), v(kKeyHeads, noise), out(kHeads), weight(kHeads, noise);
  ForwardArgs args;
  args.problem = problem;
  args.q = q.view;
  args.k = k.view;
  args.v = v.view;
  args.out = out.view;
  args.lse = allocate(kHeads * kTokens * 4);
  const Kernel* const forward = select_forward(kernels(), args, device, "");
  if (forward == nullptr) give_up(Pass::kForward, {args}, device);
  const Plan plan = forward->plan(args.problem, device);
  std::printf("forward   %s, tiles of %lld x %lld\n", plan.kernel, static_cast<long long>(plan.block_m),
              static_cast<long long>(plan.block_n));
  forward->forward(args, plan, allocate(plan.scratch_bytes));

  Tensor dq(kHeads), dk(kKeyHeads), dv(kKeyHeads);
  BackwardArgs back;
  back.fwd = args;
  back.fwd.problem.wants_dq = back.fwd.problem.wants_dk = back.fwd.problem.wants_dv = true;
  back.d_out = weight.view;
  back.dq = dq.view;
  back.dk = dk.view;
  back.dv = dv.view;
  const Kernel* const backward = select_backward(kernels(), back, device, "").main();  // no bias, no kernel for it
  if (backward == nullptr) give_up(Pass::kBackward, {back.fwd, &back}, device);
  const Plan backward_plan = backward->plan(back.fwd.problem, device);
  std::printf("backward  %s, tiles of %lld x %lld\n", backward_plan.kernel,
              static_cast<long long>(backward_plan.block_m), static_cast<long long>(backward_plan.block_n));
  backward->backward(back, backward_plan, allocate(backward_plan.scratch_bytes));
#ifdef WITH_CUDA
  if (on_gpu && cudaDeviceSynchronize() != cudaSuccess) return std::puts("the GPU failed"), 2;
#endif

  double by_kernel = 0;
  for (int64_t i = 0; i < kQuery; ++i) by_kernel += double{out.at(i)} * weight.at(i);
  const double expected = loss(q, k, v, weight);
  // Scaling all of value by 1 + e scales the loss so: <value, dv> is the loss.
  double by_gradient = 0;
  for (int64_t i = 0; i < kKey; ++i) by_gradient += double{v.at(i)} * dv.at(i);
  // Scaling all of query by 1 + e is scaling all of key by it.
  double of_query = 0, of_key = 0;
  for (int64_t i = 0; i < kQuery; ++i) of_query += double{q.at(i)} * dq.at(i);
  for (int64_t i = 0; i < kKey; ++i) of_key += double{k.at(i)} * dk.at(i);
  std::printf("loss %.5f, by the formula %.5f, from dv %.5f; from dq %.5f, from dk %.5f\n", by_kernel, expected,
              by_gradient, of_query, of_key);
  const double allowed = on_gpu ? 2e-2 : 1e-5;
  const auto near = [&](double a, double b) { return std::abs(a - b) <= allowed * (1 + std::abs(b)); };
  return near(by_kernel, expected) && near(by_gradient, expected) && near(of_query, of_key) ? 0 : 1;
}
