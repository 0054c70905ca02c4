// The descales of 16-bit numbers, and the numbers in e4m3; see core/quantize.h. Each reads x once, 16 bytes a thread at
// a time: 5 bytes a number for both. Called by torch/quantize.cpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>

#include "core/quantize.h"
#include "core/tile_schedule.h"
#include "gpu/host/launch.h"

namespace flash_ext {
namespace {

constexpr int kThreads = 256, kWidth = 8;
constexpr int kRounds = 8;  // of rows, in a block that looks for the largest

struct alignas(16) Chunk {
  uint32_t words[4];
};

__device__ __forceinline__ float2 numbers_of(uint32_t word, __nv_bfloat16) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}
__device__ __forceinline__ float2 numbers_of(uint32_t word, __half) {
  const __half2 pair = reinterpret_cast<const __half2&>(word);
  return {__low2float(pair), __high2float(pair)};
}

// NOTE: a product, because compilers make one of a division by a constant; a bit apart, numbers between two of e4m3 go
// the other way.
__device__ __forceinline__ float descale_of(float largest) {
  return largest == 0.f ? 1.f : fminf(fmaxf(__fmul_rn(largest, 1.f / 448.f), FLT_MIN), FLT_MAX);
}

// `lanes` threads a row, a power of 2; a block is (outer, head) and some rows of it.
template <class T>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const __grid_constant__ QuantizeArgs args, int lanes, int row_blocks, bool per_row) {
  const int64_t flat = blockIdx.x / row_blocks, head = flat % args.size[1], outer = flat / args.size[1];
  const int thread = static_cast<int>(threadIdx.x), rows = kThreads / lanes;
  const int64_t first = int64_t{blockIdx.x % row_blocks} * (rows * kRounds) + thread / lanes;
  const T* const x = static_cast<const T*>(args.x) + outer * args.x_stride[0] + head * args.x_stride[1];
  float* const descale = args.descale + outer * args.descale_stride[0] + head * args.descale_stride[1];
  float most = 0.f;
  const auto reduce = [&](int width) {
    for (int step = width / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  };
  for (int round = 0; round < kRounds; ++round) {
    const int64_t row = first + round * rows;
    if (row < args.size[2]) {
      for (int64_t col = thread % lanes * kWidth; col < args.size[3]; col += lanes * kWidth) {
        const Chunk chunk = *reinterpret_cast<const Chunk*>(x + row * args.x_stride[2] + col);
        for (const uint32_t word : chunk.words) {
          const float2 pair = numbers_of(word, T());
          for (const float number : {fabsf(pair.x), fabsf(pair.y)}) {
            if (number <= FLT_MAX) most = fmaxf(most, number);  // neither NaN nor an infinity
          }
        }
      }
    }
    if (per_row) {
      reduce(lanes);
      if (row < args.size[2] && thread % lanes == 0) descale[row * args.descale_stride[2]] = descale_of(most);
      most = 0.f;
    }
  }
  if (per_row) return;
  reduce(32);
  if (thread % 32 == 0) atomicMax(reinterpret_cast<int*>(descale), __float_as_int(most));
}

__global__ void __launch_bounds__(kThreads) descale_kernel(float* numbers, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) numbers[i] = descale_of(numbers[i]);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ QuantizeArgs args, uint32_t chunks, uint32_t count) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const uint32_t size1 = static_cast<uint32_t>(args.size[1]), size2 = static_cast<uint32_t>(args.size[2]);
  const int64_t col = int64_t{i % chunks} * kWidth;
  const uint32_t row = i / chunks, flat = row / size2;
  const int64_t at[3] = {flat / size1, flat % size1, row % size2};
  const auto place = [&](const int64_t(&stride)[3]) {
    return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2];
  };
  const float descale = args.descale[place(args.descale_stride)];
  const Chunk from = *reinterpret_cast<const Chunk*>(static_cast<const T*>(args.x) + place(args.x_stride) + col);
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 pair = numbers_of(from.words[j], T());
    const float2 scaled = {__fdiv_rn(pair.x, descale), __fdiv_rn(pair.y, descale)};
    words[j / 2] |= uint32_t{__nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3)} << (j % 2 * 16);
  }
  *reinterpret_cast<uint2*>(args.x8 + place(args.x8_stride) + col) = {words[0], words[1]};
}

}  // namespace

void run_descale(const QuantizeArgs& args, bool per_row) {
  int lanes = 1;
  while (lanes < 32 && lanes * kWidth < args.size[3]) lanes *= 2;
  const int64_t heads = args.size[0] * args.size[1], row_blocks = block_count(args.size[2], kThreads / lanes * kRounds);
  const auto kernel = args.dtype == DType::kFloat16 ? largest_kernel<__half> : largest_kernel<__nv_bfloat16>;
  cuda::launch(kernel, cuda::grid_of(heads * row_blocks), kThreads, 0, args.stream, args, lanes,
               static_cast<int>(row_blocks), per_row);
  if (!per_row) {
    cuda::launch(descale_kernel, cuda::grid_of(block_count(heads, kThreads)), kThreads, 0, args.stream, args.descale,
                 heads);
  }
}

void run_quantize(const QuantizeArgs& args) {
  const int64_t chunks = args.size[3] / kWidth, count = args.size[0] * args.size[1] * args.size[2] * chunks;
  const auto kernel = args.dtype == DType::kFloat16 ? quantize_kernel<__half> : quantize_kernel<__nv_bfloat16>;
  cuda::launch(kernel, cuda::grid_of(block_count(count, kThreads)), kThreads, 0, args.stream, args,
               static_cast<uint32_t>(chunks), static_cast<uint32_t>(count));
}

}  // namespace flash_ext
