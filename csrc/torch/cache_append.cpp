// The new rows of attention_with_cache, appended and rotated by one kernel (core/append.h): on a GPU for 16-bit types,
// where no backend was asked for by name. Else cache.cpp, its caller, does it by torch's operations.
#include <ATen/ATen.h>

#include "core/append.h"
#include "torch/allocation.h"
#include "torch/cache.h"
#include "torch/cache_places.h"
#include "torch/cuda_runtime.h"
#include "torch/dispatch.h"
#include "torch/problem.h"

namespace flash_ext {
namespace {

RowCopy copy_of(const Tensor& from, const Tensor& to, const Tensor& descale) {
  RowCopy copy;
  copy.from = from.const_data_ptr();
  copy.to = to.mutable_data_ptr();
  for (int dim = 0; dim < 4; ++dim) {
    copy.from_stride[dim] = from.stride(dim);
    copy.to_stride[dim] = to.stride(dim);
  }
  copy.rows = static_cast<int>(from.size(1));
  copy.heads = static_cast<int>(from.size(2));
  copy.cols = static_cast<int>(from.size(3));
  if (descale.defined()) copy.descale = {descale.const_data_ptr<float>(), descale.stride(0), descale.stride(1)};
  return copy;
}

// Sizes that the kernel counts in 32 bits.
bool fits(const CacheInputs& in, const CacheShape<int64_t>& shape) {
  bool all = true;
  for (const int64_t size : {shape.batch, shape.added, shape.len_q, shape.heads_q, shape.heads_k, shape.heads_v,
                             shape.head_dim, shape.head_dim_v, shape.slots, shape.rows, shape.capacity}) {
    all = all && size > 0 && size <= DecodeArgs::kMostRows;
  }
  return all && (!in.rotary_cos.defined() || in.rotary_cos.size(0) <= DecodeArgs::kMostRows);
}

}  // namespace

std::optional<Tensor> append_by_kernel(const CacheInputs& in, const CacheOptions& options,
                                       const CacheShape<int64_t>& shape) {
  if constexpr (!kWithCuda) {
    return std::nullopt;
  } else {
    const auto dtype = in.query.scalar_type();
    const bool is_named = options.attention.backend.has_value() || requested_backend().has_value();
    if (!in.query.is_cuda() || (dtype != at::kHalf && dtype != at::kBFloat16) || is_named || !fits(in, shape)) {
      return std::nullopt;
    }
    if (cuda_device_info(in.query.device()).compute_capability < 80) return std::nullopt;
    Tensor query = in.query;
    AppendArgs args;
    args.dtype = dtype_of(dtype);
    const CachePlaces places = fill_places(args, in, shape);
    args.key = copy_of(in.key, in.key_cache, in.k_descale);
    args.value = copy_of(in.value, in.value_cache, in.v_descale);
    if (in.rotary_cos.defined()) {
      query = allocate(in.query.sizes(), in.query, dtype);
      args.query = copy_of(in.query, query, Tensor());
      args.cos = in.rotary_cos.const_data_ptr();
      args.sin = in.rotary_sin.const_data_ptr();
      for (const int dim : {0, 1}) {
        args.cos_stride[dim] = in.rotary_cos.stride(dim);
        args.sin_stride[dim] = in.rotary_sin.stride(dim);
      }
      args.float_angles = in.rotary_cos.scalar_type() == at::kFloat;
      args.positions = static_cast<int>(in.rotary_cos.size(0));
      args.half = static_cast<int>(in.rotary_cos.size(1));
      args.interleaved = options.rotary_interleaved;
      args.queries_move = options.queries_have_positions();
    }
    args.stream = current_cuda_stream(in.query.device());
    run_append(args);
    return query;
  }
}

}  // namespace flash_ext
