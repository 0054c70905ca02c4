// The gradient of sinks on a GPU, in parts: of kSinkRows rows each
//
//   part = -sum over rows of e^(sink - lse) (rowsum(d_out o out) - d_lse)
//
// A warp a row, eight rows at a time, summed in double and in an order of its own: terms of both signs cancel. Called
// by torch/sinks.cpp. Invariant: a row of lse -inf, which belongs to no sequence or sees nothing, adds nothing.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/library.h"
#include "gpu/host/launch.h"
#include "gpu/warp.cuh"

namespace flash_ext {
namespace {

constexpr int kWarps = 8;

template <class T, class Real>
__global__ void __launch_bounds__(32 * kWarps)
    sink_gradient_kernel(const __grid_constant__ BackwardArgs args, double* parts, int64_t count) {
  const Problem& problem = args.fwd.problem;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t bh = blockIdx.x / count, first = blockIdx.x % count * kSinkRows;
  const int64_t b = bh / problem.heads_q, head = bh % problem.heads_q;
  const double sink = static_cast<double>(sink_of<Real>(args.fwd, b, head, 0));
  const auto head_of = [&](const TensorView& view) {
    return static_cast<const T*>(view.data) + b * view.batch_stride[0] + head * view.head_stride;
  };
  const T* const out = head_of(args.fwd.out);
  const T* const d_out = head_of(args.d_out);
  double sum = 0.0;  // the same in all lanes
  for (int64_t row = first + warp; row < first + kSinkRows && row < problem.len_q; row += kWarps) {
    const Real lse = static_cast<const Real*>(args.fwd.lse)[bh * problem.len_q + row];
    if (lse == -std::numeric_limits<Real>::infinity()) continue;
    Real delta = 0;
    if (args.d_out) {
      for (int64_t col = lane; col < problem.head_dim_v; col += 32) {
        delta += static_cast<Real>(out[row * args.fwd.out.row_stride + col * args.fwd.out.col_stride]) *
                 static_cast<Real>(d_out[row * args.d_out.row_stride + col * args.d_out.col_stride]);
      }
    }
    delta = warp_sum(delta);
    if (args.d_lse != nullptr) delta -= static_cast<const Real*>(args.d_lse)[bh * problem.len_q + row];
    sum -= exp(sink - static_cast<double>(lse)) * static_cast<double>(delta);
  }
  __shared__ double sums[kWarps];
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; ++i) sum += sums[i];
  parts[blockIdx.x] = sum;
}

template <class T, class Real>
void launch(const BackwardArgs& args, double* parts, int64_t count) {
  const int64_t blocks = args.fwd.problem.batch * args.fwd.problem.heads_q * count;
  cuda::launch(sink_gradient_kernel<T, Real>, cuda::grid_of(blocks), 32 * kWarps, 0, args.fwd.stream, args, parts,
               count);
}

}  // namespace

void cuda_sink_gradient(const BackwardArgs& args, double* parts, int64_t count) {
  switch (args.fwd.problem.dtype) {
    case DType::kFloat16:
      return launch<__half, float>(args, parts, count);
    case DType::kBFloat16:
      return launch<__nv_bfloat16, float>(args, parts, count);
    case DType::kFloat32:
      return launch<float, float>(args, parts, count);
    case DType::kFloat64:
      return launch<double, double>(args, parts, count);
  }
}

}  // namespace flash_ext
