// Encoding of tensor maps. The driver's function is found through the runtime, so that the library does not link with
// libcuda, which a machine without a GPU lacks.
#include "gpu/host/tensor_map.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace flash_ext::cuda {
namespace {

constexpr int kElementBytes = 2;
constexpr int64_t kStrideUnit = 16;                 // bytes
constexpr int64_t kStrideLimit = int64_t{1} << 40;  // bytes
constexpr int64_t kSizeLimit = int64_t{1} << 31;    // coordinates are signed 32-bit numbers

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encode_function() {
  static const Encode function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found);
    if (status != cudaSuccess) {
      throw std::runtime_error(std::string("flash_ext: tensor map: ") + cudaGetErrorString(status));
    }
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("flash_ext: tensor map: the driver has no cuTensorMapEncodeTiled of CUDA 12.0");
    }
    return reinterpret_cast<Encode>(pointer);
  }();
  return function;
}

// The runtime does this by itself in a thread's first call; the driver's function does not.
void bind_context() {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("flash_ext: tensor map: ") + cudaGetErrorString(status));
  }
}

int64_t batch_stride(const Problem& problem, const TensorView& view, int from_last) {
  const int dim = problem.batch_rank - 1 - from_last;
  return dim >= 0 ? view.batch_stride[dim] : 0;
}

int64_t batch_size(const Problem& problem, int from_last) {
  const int dim = problem.batch_rank - 1 - from_last;
  return dim >= 0 ? problem.batch_size[dim] : 1;
}

// What maps of both kinds are made of.
struct MapSizes {
  const char* data;
  cuuint64_t size[5];
  cuuint64_t stride[4];  // bytes, of all dimensions but the first
  cuuint32_t box[5];

  // Whether the dimension is one: else it keeps one index.
  int add(int dim, int64_t count, int64_t elements) {
    if (count <= 1 || elements == 0) return 0;
    size[dim] = static_cast<cuuint64_t>(count);
    stride[dim - 1] = static_cast<cuuint64_t>(elements * kElementBytes);
    return 1;
  }
};

MapSizes sizes_of(const TensorView& view, int64_t rows, int64_t cols, int box_rows, int box_heads, int box_cols) {
  const cuuint64_t row_stride = rows == 1 ? kStrideUnit : static_cast<cuuint64_t>(view.row_stride * kElementBytes);
  return {
      static_cast<const char*>(view.data),
      {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows), 1, 1, 1},
      {row_stride, kStrideUnit, kStrideUnit, kStrideUnit},
      {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_heads), 1, 1}};
}

CUtensorMap encode_map(const MapSizes& sizes, DType dtype, Promotion promotion) {
  CUtensorMap map;
  const cuuint32_t element_stride[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMapL2promotion promoted =
      promotion == Promotion::k256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const auto encode = [&] {
    return encode_function()(&map, type, 5, const_cast<char*>(sizes.data), sizes.size, sizes.stride, sizes.box,
                             element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             sizes.box[0] == kBoxCols ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                             promoted, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // the thread's first use of the device, as may be in autograd's
    bind_context();
    status = encode();
  }
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("flash_ext: tensor map: cuTensorMapEncodeTiled returned " + std::to_string(status));
  }
  return map;
}

}  // namespace

const char* tma_refuses(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows) {
  if (problem.batch_rank > 2) return "has more than 2 batch dimensions that do not merge";
  if (view.col_stride != 1) return "has a last dimension that is not contiguous";
  if (reinterpret_cast<uint64_t>(view.data) % kStrideUnit != 0) return "does not start at a multiple of 16 bytes";
  if (view.row_stride == 0 && rows > 1) return "repeats one row";
  for (const int64_t stride : {rows > 1 ? view.row_stride : 0, heads > 1 ? view.head_stride : 0,
                               batch_stride(problem, view, 0), batch_stride(problem, view, 1)}) {
    if (stride * kElementBytes % kStrideUnit != 0) return "has a stride that is not a multiple of 16 bytes";
    if (stride < 0 || stride >= kStrideLimit / kElementBytes) return "has a stride of 2^40 bytes or more";
  }
  if (problem.packed) {  // see make_packed_map
    if (rows >= kPackedEnd) return "has 2^30 rows or more";
    if (view.row_stride * kElementBytes >= int64_t{1} << 34) return "has rows of 2^34 bytes or more";
  }
  if (rows >= kSizeLimit) return "has 2^31 rows or more";
  return nullptr;
}

TensorMap make_tensor_map(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                          int box_rows, Promotion promotion, int box_heads, int box_cols) {
  TensorMap result;
  MapSizes sizes = sizes_of(view, rows, cols, box_rows, box_heads, box_cols);
  result.steps.head = sizes.add(2, heads, view.head_stride);
  result.steps.b0 = sizes.add(3, batch_size(problem, 0), batch_stride(problem, view, 0));
  result.steps.b1 = sizes.add(4, batch_size(problem, 1), batch_stride(problem, view, 1));
  result.map = encode_map(sizes, problem.dtype, promotion);
  return result;
}

TensorMap make_packed_map(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                          int box_rows, Promotion promotion) {
  TensorMap result;
  MapSizes sizes = sizes_of(view, rows, cols, box_rows, 1, kBoxCols);
  result.steps.head = sizes.add(2, heads, view.head_stride);
  sizes.size[1] = kPackedEnd;
  sizes.size[3] = static_cast<cuuint64_t>(rows + 1);
  sizes.stride[2] = sizes.stride[0];
  sizes.size[4] = kPackedEnd + 1;
  sizes.stride[3] = (cuuint64_t{1} << 34) - sizes.stride[0];
  result.map = encode_map(sizes, problem.dtype, promotion);
  return result;
}

}  // namespace flash_ext::cuda
