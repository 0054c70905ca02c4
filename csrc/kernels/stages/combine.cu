// One warp a row or, where rows are few, four; see combine.h. The order of the sum is fixed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/online_softmax.h"
#include "gpu/host/launch.h"
#include "gpu/ptx/grid.cuh"
#include "gpu/warp.cuh"
#include "kernels/stages/combine.h"

namespace flash_ext::cuda {
namespace {

constexpr int kWarps = 4, kMaxParts = 128, kPartsALane = kMaxParts / 32, kMaxCols = 256;
constexpr int64_t kFewRows = 2048;

// kWarpsARow: 1 or kWarps, which then take every fourth part each.
template <class T, int kWarpsARow>
__global__ void __launch_bounds__(32 * kWarps)
    combine_kernel(const __grid_constant__ ForwardArgs args, const float* parts_out, const float2* parts_sums,
                   int count) {
#if __CUDA_ARCH__ >= 900
  grid_dependency_wait();
#endif
  const Problem& problem = args.problem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t rows = problem.batch * problem.heads_q * problem.len_q, cols = problem.head_dim_v;
  const int64_t row = kWarpsARow == 1 ? int64_t{blockIdx.x} * kWarps + warp : blockIdx.x;
  if (row >= rows) return;
  // Loads of this warp's parts, eight at a time and the first eight before the weights are known. What a part without
  // keys reads is not used.
  constexpr int kBatch = 8;
  const int first = kWarpsARow == 1 ? 0 : warp;
  float4 x[kBatch];
  const auto load = [&](int col, int part) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i, part += kWarpsARow) {
      x[i] = col < cols && part < count ? *reinterpret_cast<const float4*>(parts_out + (part * rows + row) * cols + col)
                                        : float4{};
    }
  };
  load(4 * lane, first);

  float weight[kPartsALane], sums[kPartsALane];
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPartsALane; ++i) {
    const int part = lane + 32 * i;
    const float2 of_part = part < count ? parts_sums[part * rows + row] : float2{-INFINITY, 0.f};
    weight[i] = of_part.x;
    sums[i] = of_part.y;
    max = fmaxf(max, of_part.x);
  }
  max = warp_max(max);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kPartsALane; ++i) {
    weight[i] = sums[i] * (max == -INFINITY ? 1.f : expf(weight[i] - max));  // NaN stays
    sum += weight[i];
  }
  sum = warp_sum(sum);
  const int64_t bh = row / problem.len_q, of_head = row % problem.len_q;
  float keys = 1.f;
  if (problem.has_sinks) {
    const auto joined = with_sink(max, sum, sink_of<float>(args, bh / problem.heads_q, bh % problem.heads_q, of_head));
    max = joined.max;
    sum = joined.sum;
    keys = joined.factor;
  }
  const float inverse = sum == 0.f ? 0.f : keys / sum;
  if (args.lse != nullptr && threadIdx.x % (32 * kWarpsARow) == 0) {
    static_cast<float*>(args.lse)[row] = max + logf(sum);
  }
  const auto weight_of = [&](int part) {
    float w = 0.f;
#pragma unroll
    for (int i = 0; i < kPartsALane; ++i) {
      const float other = __shfl_sync(~0u, weight[i], part % 32);
      if (part / 32 == i) w = other;
    }
    return w;
  };

  T* const out = static_cast<T*>(args.out.data) + batch_offset(problem, args.out, bh / problem.heads_q) +
                 bh % problem.heads_q * args.out.head_stride + of_head * args.out.row_stride;
  __shared__ float4 others[kWarpsARow][kWarpsARow == 1 ? 1 : kMaxCols / 4];
#pragma unroll
  for (int chunk = 0; chunk < kMaxCols; chunk += 128) {
    const int col = chunk + 4 * lane;
    if (chunk >= cols) break;
    if (chunk > 0) load(col, first);
    float4 total = {};
    for (int part = first; part < count; part += kBatch * kWarpsARow) {
      if (part > first) load(col, part);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float w = weight_of(part + i * kWarpsARow);  // 0 beyond the last
        const bool used = w != 0.f;
        total.x = used ? fmaf(w, x[i].x, total.x) : total.x;
        total.y = used ? fmaf(w, x[i].y, total.y) : total.y;
        total.z = used ? fmaf(w, x[i].z, total.z) : total.z;
        total.w = used ? fmaf(w, x[i].w, total.w) : total.w;
      }
    }
    if constexpr (kWarpsARow > 1) {
      others[warp][col / 4] = total;
      __syncthreads();
      if (warp > 0) continue;
#pragma unroll
      for (int i = 1; i < kWarpsARow; ++i) {
        const float4 x = others[i][col / 4];
        total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w);
      }
    }
    if (col >= cols) continue;
    alignas(8) const T values[4] = {static_cast<T>(total.x * inverse), static_cast<T>(total.y * inverse),
                                    static_cast<T>(total.z * inverse), static_cast<T>(total.w * inverse)};
    *reinterpret_cast<uint2*>(out + col) = *reinterpret_cast<const uint2*>(values);
  }
}

template <class T>
void launch_combine(const ForwardArgs& args, const float* out, const float2* sums, int count) {
  const int64_t rows = args.problem.batch * args.problem.heads_q * args.problem.len_q;
  const bool few = rows <= kFewRows;
  launch_dependent(few ? combine_kernel<T, kWarps> : combine_kernel<T, 1>,
                   grid_of(few ? rows : (rows + kWarps - 1) / kWarps), 32 * kWarps, 0, args.stream, args, out, sums,
                   count);
}

}  // namespace

void combine(const ForwardArgs& args, const float* out, const float2* sums, int count) {
  if (args.problem.dtype == DType::kFloat16) return launch_combine<__half>(args, out, sums, count);
  launch_combine<__nv_bfloat16>(args, out, sums, count);
}

}  // namespace flash_ext::cuda
