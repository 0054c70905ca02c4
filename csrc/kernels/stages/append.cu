// New rows of keys and values to where a cache has them, and rotary of keys and queries; see core/append.h.
//
// One warp a row of one head, a lane two columns at a time. Products are rounded before they are added, as torch's
// operations round them. Called by torch/cache_append.cpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "core/append.h"
#include "gpu/host/launch.h"

namespace flash_ext {
namespace {

constexpr int kWarps = 4;
constexpr float kLargestE4m3 = 448.f;

__host__ __device__ __forceinline__ int64_t rows_of(const RowCopy& copy, int batch) {
  return int64_t{batch} * copy.rows * copy.heads;
}

// Where a new row lies: its slot or page, and the row of it; false: nowhere.
__device__ __forceinline__ bool find_place(const AppendArgs& args, int b, int64_t position, int64_t& slot,
                                           int64_t& row) {
  if (args.lengths[b] < 0 || position >= args.capacity) return false;
  slot = args.slot_of != nullptr ? args.slot_of[b] : b;
  row = position;
  if (args.table != nullptr) {
    slot = args.table[b * args.table_stride + position / args.page_rows];
    row = position % args.page_rows;
  }
  return slot >= 0 && slot < args.slots;
}

template <class T>
__device__ __forceinline__ float angle(const AppendArgs& args, const void* table, const int64_t (&stride)[2],
                                       int64_t position, int column) {
  const int64_t last = args.positions - 1;
  const int64_t at = (position < 0 ? 0 : position > last ? last : position) * stride[0] + column * stride[1];
  return args.float_angles ? static_cast<const float*>(table)[at]
                           : static_cast<float>(static_cast<const T*>(table)[at]);
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps) append_kernel(const __grid_constant__ AppendArgs args) {
  int64_t line = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t keys = rows_of(args.key, args.batch), values = rows_of(args.value, args.batch);
  const bool is_key = line < keys, is_query = line >= keys + values;
  const RowCopy& copy = is_key ? args.key : is_query ? args.query : args.value;
  line -= is_key ? 0 : is_query ? keys + values : keys;
  if (line >= rows_of(copy, args.batch)) return;
  const int head = static_cast<int>(line % copy.heads), i = static_cast<int>(line / copy.heads % copy.rows);
  const int b = static_cast<int>(line / copy.heads / copy.rows);
  const int64_t position = int64_t{args.lengths[b]} + (is_query && !args.queries_move ? 0 : i);
  int64_t slot = b, row = i;
  if (!is_query && !find_place(args, b, position, slot, row)) return;
  const auto* const from =
      static_cast<const T*>(copy.from) + b * copy.from_stride[0] + i * copy.from_stride[1] + head * copy.from_stride[2];
  const int64_t to = slot * copy.to_stride[0] + row * copy.to_stride[1] + head * copy.to_stride[2];
  const bool turns = args.cos != nullptr && (is_key || is_query), as_fp8 = args.fp8 && !is_query;
  const float descale = copy.descale.at(b, head, 1.f);
  const auto store = [&](int column, float x) {
    const int64_t at = to + column * copy.to_stride[3];
    if (!as_fp8) {
      static_cast<T*>(copy.to)[at] = static_cast<T>(x);
      return;
    }
    x = static_cast<float>(static_cast<T>(x));
    if (copy.descale.data != nullptr) x = __fdiv_rn(x, descale);
    x = x < -kLargestE4m3 ? -kLargestE4m3 : x > kLargestE4m3 ? kLargestE4m3 : x;
    static_cast<uint8_t*>(copy.to)[at] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  };
  for (int pair = static_cast<int>(threadIdx.x) % 32; 2 * pair < copy.cols; pair += 32) {
    const bool turned = turns && pair < args.half;
    const int first = turned && !args.interleaved ? pair : 2 * pair;
    const int second = turned && !args.interleaved ? pair + args.half : 2 * pair + 1;
    float x = static_cast<float>(from[first * copy.from_stride[3]]), y = 0.f;
    if (second < copy.cols) y = static_cast<float>(from[second * copy.from_stride[3]]);
    if (turned) {
      const float c = angle<T>(args, args.cos, args.cos_stride, position, pair);
      const float s = angle<T>(args, args.sin, args.sin_stride, position, pair);
      const float before = x;
      x = __fsub_rn(__fmul_rn(before, c), __fmul_rn(y, s));
      y = __fadd_rn(__fmul_rn(before, s), __fmul_rn(y, c));
    }
    store(first, x);
    if (second < copy.cols) store(second, y);
  }
}

}  // namespace

void run_append(const AppendArgs& args) {
  const int64_t lines =
      rows_of(args.key, args.batch) + rows_of(args.value, args.batch) + rows_of(args.query, args.batch);
  if (lines == 0) return;
  const auto kernel = args.dtype == DType::kFloat16 ? append_kernel<__half> : append_kernel<__nv_bfloat16>;
  cuda::launch(kernel, cuda::grid_of((lines + kWarps - 1) / kWarps), 32 * kWarps, 0, args.stream, args);
}

}  // namespace flash_ext
