// The operators attention_with_cache and gather_pages: their signatures, autograd, autocast and kernels (cache.cpp).
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "torch/cache.h"
#include "torch/check_parts.h"

namespace flash_ext {
namespace {

using cache::Pages;
using cache::Result;
using OptionalInt = std::optional<int64_t>;
using CacheFunction = Result(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                             const OptionalTensor&, bool, bool, OptionalInt, OptionalInt, double, std::optional<double>,
                             std::optional<std::string_view>, bool, bool);
using PagesFunction = Pages(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);

template <Result (*kernel)(const CacheInputs&, const CacheOptions&, bool)>
Result run(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& cache_seqlens,
           const OptionalTensor& key, const OptionalTensor& value, const OptionalTensor& block_table,
           const OptionalTensor& cache_batch_index, const OptionalTensor& rotary_cos, const OptionalTensor& rotary_sin,
           const OptionalTensor& k_descale, const OptionalTensor& v_descale, const OptionalTensor& alibi_slopes,
           const OptionalTensor& sinks, bool rotary_interleaved, bool causal, OptionalInt window_left,
           OptionalInt window_right, double softcap, std::optional<double> scale,
           std::optional<std::string_view> backend, bool return_lse, bool batch_invariant) {
  const auto tensor = [](const OptionalTensor& given) { return given.value_or(Tensor()); };
  const CacheInputs in{query,
                       key_cache,
                       value_cache,
                       cache_seqlens,
                       tensor(key),
                       tensor(value),
                       tensor(block_table),
                       tensor(cache_batch_index),
                       tensor(rotary_cos),
                       tensor(rotary_sin),
                       tensor(k_descale),
                       tensor(v_descale),
                       tensor(alibi_slopes),
                       tensor(sinks)};
  CacheOptions options;
  options.rotary_interleaved = rotary_interleaved;
  options.attention.causal = causal;
  options.attention.window_left = window_left;
  options.attention.window_right = window_right;
  options.attention.softcap = softcap;
  options.attention.scale = scale;
  options.attention.backend = backend;
  options.attention.batch_invariant = batch_invariant;
  return kernel(in, options, return_lse);
}

template <class Call>
Result flat(const Call& call, const CacheInputs& in, const CacheOptions& options, bool return_lse) {
  const Options& o = options.attention;
  return call(in.query, in.key_cache, in.value_cache, in.cache_seqlens, optional(in.key), optional(in.value),
              optional(in.block_table), optional(in.cache_batch_index), optional(in.rotary_cos),
              optional(in.rotary_sin), optional(in.k_descale), optional(in.v_descale), optional(in.alibi_slopes),
              optional(in.sinks), options.rotary_interleaved, o.causal, o.window_left, o.window_right, o.softcap,
              o.scale, o.backend, return_lse, o.batch_invariant);
}

const auto& cache_handle() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_ext::attention_with_cache", "").typed<CacheFunction>();
  return handle;
}

const auto& pages_handle() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_ext::gather_pages", "").typed<PagesFunction>();
  return handle;
}

void refuse_gradient(const char* name, const Tensor& tensor, const char* who) {
  using namespace torch::autograd;
  if (!tensor.defined() || !(compute_requires_grad(tensor) || isFwGradDefined(tensor))) return;
  throw AttentionError(name, concat("wants a gradient, which ", who,
                                    " does not have; call it under torch.no_grad() or ", "pass ", name, ".detach()"));
}

const Tensor& given(const Tensor& tensor) { return tensor; }
const Tensor& given(const OptionalTensor& tensor) {
  static const Tensor absent;
  return tensor.has_value() ? *tensor : absent;
}

// What only looks at a call hands on the arguments as they are.
template <class Function>
struct HandedOn;
template <class... Args>
struct HandedOn<Result(Args...)> {
  // Is in_place, too.
  static Result autograd(c10::DispatchKeySet keys, Args... args) {
    const auto all = std::tie(args...);
    [&]<size_t... i>(std::index_sequence<i...>) {
      (refuse_gradient(kCacheInputs[i].name, given(std::get<i>(all)), "attention_with_cache"), ...);
    }
    (std::make_index_sequence<std::size(kCacheInputs)>());
    return in_place(keys, args...);
  }

  // Tells autograd that the caches were written to.
  static Result in_place(c10::DispatchKeySet keys, Args... args) {
    const auto all = std::tie(args...);
    Result result = [&] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return cache_handle().redispatch(keys & c10::after_ADInplaceOrView_keyset, args...);
    }();
    if (given(std::get<kRequiredCacheInputs>(all)).defined()) {  // key
      torch::autograd::impl::bump_version(std::get<1>(all));
      torch::autograd::impl::bump_version(std::get<2>(all));
    }
    return result;
  }
};
using Handed = HandedOn<CacheFunction>;

// A cache stays what it is, and says what query and new rows become; an fp8 one leaves it to autocast. What else is of
// 16 bits becomes float32.
template <c10::DeviceType device>
Result autocast(const CacheInputs& in, const CacheOptions& options, bool return_lse) {
  using at::autocast::cached_cast;
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  CacheInputs cast = in;
  const auto dtype =
      cache::is_fp8(in.key_cache) ? at::autocast::get_autocast_dtype(device) : in.key_cache.scalar_type();
  for (Tensor* tensor : {&cast.query, &cast.key, &cast.value}) {
    if (tensor->defined()) *tensor = cached_cast(dtype, *tensor, device);
  }
  for (Tensor* tensor : {&cast.rotary_cos, &cast.rotary_sin}) {
    if (tensor->defined() && tensor->scalar_type() != dtype) *tensor = cached_cast(at::kFloat, *tensor, device);
  }
  for (Tensor* tensor : {&cast.k_descale, &cast.v_descale, &cast.alibi_slopes, &cast.sinks}) {
    if (tensor->defined() && tensor->scalar_type() != at::kDouble) *tensor = cached_cast(at::kFloat, *tensor, device);
  }
  return call_attention_with_cache(cast, options, return_lse);
}

Pages gather_pages_autograd(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value,
                            const Tensor& block_table, const Tensor& seqused_k) {
  for (const auto& [name, tensor] : {std::pair{"query", &query}, std::pair{"key", &key}, std::pair{"value", &value}}) {
    refuse_gradient(name, *tensor, "attention_varlen with block_table");
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return pages_handle().redispatch(keys & c10::after_autograd_keyset, query, key, value, block_table, seqused_k);
}

}  // namespace

Result call_attention_with_cache(const CacheInputs& in, const CacheOptions& options, bool return_lse) {
  return flat([](const auto&... args) { return cache_handle().call(args...); }, in, options, return_lse);
}

Pages call_gather_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                        const Tensor& seqused_k) {
  return pages_handle().call(query, key, value, block_table, seqused_k);
}

TORCH_LIBRARY_IMPL(flash_ext, CPU, m) {
  m.impl("attention_with_cache", TORCH_FN(run<cache::with_cache>));
  m.impl("gather_pages", TORCH_FN(cache::gather_pages));
}
TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("attention_with_cache", TORCH_FN(run<cache::with_cache>));
  m.impl("gather_pages", TORCH_FN(cache::gather_pages));
}
TORCH_LIBRARY_IMPL(flash_ext, Meta, m) {
  m.impl("attention_with_cache", TORCH_FN(run<cache::with_cache_meta>));
  m.impl("gather_pages", TORCH_FN(cache::gather_pages_meta));
}
TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) {
  m.impl("attention_with_cache", TORCH_FN(Handed::autograd));
  m.impl("gather_pages", TORCH_FN(gather_pages_autograd));
}
TORCH_LIBRARY_IMPL(flash_ext, ADInplaceOrView, m) { m.impl("attention_with_cache", TORCH_FN(Handed::in_place)); }
TORCH_LIBRARY_IMPL(flash_ext, AutocastCPU, m) { m.impl("attention_with_cache", TORCH_FN(run<autocast<c10::kCPU>>)); }
TORCH_LIBRARY_IMPL(flash_ext, AutocastCUDA, m) { m.impl("attention_with_cache", TORCH_FN(run<autocast<c10::kCUDA>>)); }

}  // namespace flash_ext
