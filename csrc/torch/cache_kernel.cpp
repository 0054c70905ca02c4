// attention_with_cache by the decode kernel (core/decode.h), which reads keys and values where they lie: for calls on a
// GPU for which no backend was asked by name. What it does not take is left to the composite of cache.cpp, its caller,
// which has appended the new rows already.
#include <ATen/ATen.h>

#include <cmath>

#include "core/library.h"
#include "torch/allocation.h"
#include "torch/cache.h"
#include "torch/cache_places.h"
#include "torch/cuda_runtime.h"
#include "torch/dispatch.h"
#include "torch/problem.h"

namespace flash_ext {
namespace {

// The rows of a tensor (slots, rows, heads, cols), if the kernel can read them.
std::optional<CacheView> view_of(const Tensor& tensor, int64_t alignment) {
  const auto size = static_cast<int64_t>(tensor.element_size());
  const auto stride = [&](int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); };
  const CacheView view{tensor.const_data_ptr(), stride(0), stride(1), stride(2)};
  bool fits = stride(3) == 1 && reinterpret_cast<uintptr_t>(view.data) % alignment == 0;
  for (const int64_t step : {view.slot_stride, view.row_stride, view.head_stride}) {
    fits = fits && step * size % alignment == 0;
  }
  return fits ? std::optional(view) : std::nullopt;
}

// (batch or 1, heads), or (heads,).
HeadView per_head(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const bool has_batch = tensor.dim() > 1 && tensor.size(0) > 1;
  return {tensor.const_data_ptr<float>(), has_batch ? tensor.stride(0) : 0, tensor.stride(-1)};
}

int bound_of(const std::optional<int64_t>& given) {
  return static_cast<int>(std::min<int64_t>(given.value_or(DecodeArgs::kMostRows), DecodeArgs::kMostRows));
}

// Whether the sizes and options are those of the kernel; what depends on a head dimension plan_decode says.
bool may_run(const CacheInputs& in, const CacheOptions& options, const CacheShape<int64_t>& shape) {
  const auto dtype = in.query.scalar_type();
  const double cap = options.attention.softcap, scale = scale_of(options.attention, shape.head_dim);
  const bool has_range = (cap == 0.0 || (cap >= 1e-6 && cap <= 4096.0)) && std::abs(scale) <= 1e6;
  const bool fits = shape.capacity <= DecodeArgs::kMostRows - shape.len_q && shape.slots <= DecodeArgs::kMostRows &&
                    shape.len_q <= DecodeArgs::kMostRows / 2 && shape.batch <= DecodeArgs::kMostRows &&
                    shape.added <= DecodeArgs::kMostRows;
  return in.query.is_cuda() && (dtype == at::kHalf || dtype == at::kBFloat16) && shape.head_dim == shape.head_dim_v &&
         shape.heads_k == shape.heads_v && has_range && fits && !options.attention.backend.has_value() &&
         !requested_backend().has_value();
}

}  // namespace

std::optional<std::tuple<Tensor, Tensor>> attend_by_kernel(const CacheInputs& in, const CacheOptions& options,
                                                           const CacheShape<int64_t>& shape, const Tensor& query,
                                                           bool return_lse) {
  if constexpr (!kWithCuda) {
    return std::nullopt;
  } else {
    if (!may_run(in, options, shape)) return std::nullopt;
    constexpr int64_t kRowAlignment = 16, kQueryAlignment = 4;
    const bool invariant = options.attention.batch_invariant;
    DecodeArgs args;
    args.dtype = dtype_of(query.scalar_type());
    const CachePlaces places = fill_places(args, in, shape);
    args.len_q = static_cast<int>(shape.len_q);
    args.heads_q = static_cast<int>(shape.heads_q);
    args.heads_k = static_cast<int>(shape.heads_k);
    args.head_dim = static_cast<int>(shape.head_dim);
    args.added = static_cast<int>(shape.added);
    args.scale = static_cast<float>(scale_of(options.attention, shape.head_dim));
    args.softcap = static_cast<float>(options.attention.softcap);
    args.left = bound_of(options.attention.window_left);
    args.right = bound_of(options.attention.window_right);
    if (options.attention.causal) args.right = std::min(args.right, 0);
    args.k_descale = per_head(in.k_descale);
    args.v_descale = per_head(in.v_descale);
    args.alibi = per_head(in.alibi_slopes);
    args.sinks = per_head(in.sinks);
    const DecodePlan plan = plan_decode(args, cuda_device_info(query.device()), invariant);
    if (plan.too_large && invariant) {
      throw AttentionError("key_cache", concat("holds ", shape.batch, " sequences of ", shape.capacity, " rows and ",
                                               shape.heads_k, " heads; with batch_invariant fewer are accepted"));
    }
    if (!plan.runs) return std::nullopt;
    Tensor q = query, key_cache = in.key_cache, value_cache = in.value_cache;
    const auto readable = [](Tensor& tensor, int64_t alignment, bool may_copy) {
      auto view = view_of(tensor, alignment);
      if (view.has_value() || !may_copy) return view;
      tensor = tensor.clone(at::MemoryFormat::Contiguous);
      return view_of(tensor, alignment);
    };
    // NOTE: batch-invariant bits do not follow from a layout.
    const auto k = readable(key_cache, kRowAlignment, invariant), v = readable(value_cache, kRowAlignment, invariant);
    if (!k.has_value() || !v.has_value()) return std::nullopt;
    args.q = *readable(q, kQueryAlignment, true);
    args.k = *k;
    args.v = *v;
    const Tensor out =
        allocate({shape.batch, shape.len_q, shape.heads_q, shape.head_dim_v}, query, query.scalar_type());
    const Tensor lse = return_lse ? allocate({shape.batch, shape.heads_q, shape.len_q}, query, at::kFloat)
                                  : allocate_absent(query, at::kFloat);
    args.out = out.mutable_data_ptr();
    if (return_lse) args.lse = lse.mutable_data_ptr<float>();
    args.stream = current_cuda_stream(query.device());
    const c10::DataPtr scratch = cuda_allocator()->allocate(plan.scratch_bytes);
    run_decode(args, plan, scratch.get());
    return std::tuple{out, lse};
  }
}

}  // namespace flash_ext
