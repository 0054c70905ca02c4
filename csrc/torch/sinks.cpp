// See sinks.h; and the operator sinks_gradient:
//
//   d_sink = -sum over rows of p (rowsum(grad_out o out) - grad_lse)      p = e^(sink - lse)
//
// It reads what forward gave, so that one pass over out serves every backend. Summed in double: terms of both signs
// cancel. Where its own derivative is wanted it is computed by torch's operators, through out and lse.
#include "torch/sinks.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <limits>

#include "core/library.h"
#include "torch/check_parts.h"
#include "torch/checks.h"
#include "torch/cuda_runtime.h"
#include "torch/packed.h"
#include "torch/problem.h"

namespace flash_ext {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// out and grad_out as (..., Hq, rows, Ev), the order of lse.
Tensor heads_first(const Tensor& of_rows, bool packed) { return packed ? of_rows.transpose(0, 1) : of_rows; }

void check(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
           const Tensor& sinks, bool packed) {
  const auto fail = [&](const char* name, const Tensor& tensor) {
    throw AttentionError(name,
                         concat("of shape ", shape_text<c10::SymInt>(tensor), " does not fit out of shape ",
                                shape_text<c10::SymInt>(out), " and lse of shape ", shape_text<c10::SymInt>(lse)));
  };
  const bool fits = out.dim() >= 3 && lse.dim() == out.dim() - 1;
  if (!fits || heads_first(out, packed).sym_sizes().slice(0, out.dim() - 1) != lse.sym_sizes()) fail("lse", lse);
  if (grad_out.has_value() && grad_out->sym_sizes() != out.sym_sizes()) fail("grad_out", *grad_out);
  if (grad_lse.has_value() && grad_lse->sym_sizes() != lse.sym_sizes()) fail("grad_lse", *grad_lse);
  if (sinks.dim() < 1 || sinks.dim() >= lse.dim() || sinks.sym_size(-1) != lse.sym_size(-2)) fail("sinks", sinks);
}

// (..., Hq, rows) in double; differentiable in all tensors. One head at a time, for the memory.
Tensor terms_of(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
                const Tensor& sinks, bool packed) {
  const auto wide = [](const Tensor& tensor) { return tensor.to(at::kDouble); };
  // A row without keys and without a sink has no weight, nor a derivative, whatever its grad_lse is.
  const Tensor empty = lse == -kInfinity;
  const Tensor p = (wide(sinks).unsqueeze(-1) - wide(lse).masked_fill(empty, kInfinity)).exp();
  Tensor minus_delta = grad_lse.has_value() ? wide(*grad_lse) : at::zeros_like(p);
  if (grad_out.has_value()) {
    const Tensor rows = heads_first(out, packed), d_rows = heads_first(*grad_out, packed);
    std::vector<Tensor> sums;
    for (int64_t head = 0; head < rows.size(-3); ++head) {
      sums.push_back((wide(rows.select(-3, head)) * wide(d_rows.select(-3, head))).sum(-1));
    }
    minus_delta = minus_delta - at::stack(sums, -2);
  }
  return p * minus_delta.masked_fill(empty, 0.0);
}

Tensor summed(const Tensor& terms, const Tensor& sinks) {
  return at::sum_to(terms.sum(-1), sinks.sym_sizes()).to(sinks.scalar_type());
}

Tensor by_operators(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                    const Tensor& lse, const Tensor& sinks, bool packed) {
  check(grad_out, grad_lse, out, lse, sinks, packed);
  if (lse.sym_numel() == 0) return at::zeros_like(sinks);
  return summed(terms_of(grad_out, grad_lse, out, lse, sinks, packed), sinks);
}

Tensor by_kernel(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
                 const Tensor& sinks, bool packed) {
  if constexpr (!kWithCuda) {
    return by_operators(grad_out, grad_lse, out, lse, sinks, packed);
  } else {
    check(grad_out, grad_lse, out, lse, sinks, packed);
    if (lse.numel() == 0) return at::zeros_like(sinks);
    const c10::DeviceGuard guard(out.device());
    // One leading dimension: a copy where several do not merge.
    const auto flat = [&](const Tensor& tensor) {
      const Tensor rows = heads_first(tensor, packed);
      return rows.dim() == 3 ? rows.unsqueeze(0) : rows.flatten(0, rows.dim() - 4);
    };
    const auto set_view = [](TensorView& view, const Tensor& tensor) {
      view.data = const_cast<void*>(tensor.const_data_ptr());
      view.batch_stride[0] = tensor.stride(0);
      view.head_stride = tensor.stride(1);
      view.row_stride = tensor.stride(2);
      view.col_stride = tensor.stride(3);
    };
    const Tensor rows = flat(out), d_rows = grad_out.has_value() ? flat(*grad_out) : Tensor();
    const Tensor whole_lse = lse.contiguous(), d_lse = grad_lse.has_value() ? grad_lse->contiguous() : Tensor();
    auto sizes = lse.sizes().vec();
    const int64_t len = sizes.back(), parts = (len + kSinkRows - 1) / kSinkRows;
    sizes.pop_back();
    const Tensor of_heads = sinks.expand(sizes).contiguous();
    sizes.push_back(parts);
    const Tensor terms = at::empty(sizes, lse.options().dtype(at::kDouble));

    BackwardArgs args;
    Problem& problem = args.fwd.problem;
    problem.dtype = dtype_of(out.scalar_type());
    problem.batch_rank = 1;
    problem.batch_size[0] = problem.batch = rows.size(0);
    problem.heads_q = rows.size(1);
    problem.len_q = len;
    problem.head_dim_v = rows.size(3);
    set_view(args.fwd.out, rows);
    if (d_rows.defined()) set_view(args.d_out, d_rows);
    args.fwd.lse = const_cast<void*>(whole_lse.const_data_ptr());
    if (d_lse.defined()) args.d_lse = d_lse.const_data_ptr();
    args.fwd.sinks.data = const_cast<void*>(of_heads.const_data_ptr());
    args.fwd.sinks.batch_stride[0] = problem.heads_q;
    args.fwd.sinks.head_stride = 1;
    args.fwd.stream = current_cuda_stream(out.device());
    cuda_sink_gradient(args, terms.mutable_data_ptr<double>(), parts);
    return summed(terms, sinks);
  }
}

Tensor on_meta(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out, const Tensor& lse,
               const Tensor& sinks, bool packed) {
  check(grad_out, grad_lse, out, lse, sinks, packed);
  return at::empty_like(sinks);
}

using Function = Tensor(const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
                        bool);

const auto& handle() {
  static const auto found =
      c10::Dispatcher::singleton().findSchemaOrThrow("flash_ext::sinks_gradient", "").typed<Function>();
  return found;
}

Tensor with_derivatives(c10::DispatchKeySet keys, const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                        const Tensor& out, const Tensor& lse, const Tensor& sinks, bool packed) {
  const Tensor d_out = grad_out.value_or(Tensor()), d_lse = grad_lse.value_or(Tensor());
  const auto has_tangent = [](const auto&... t) { return (torch::autograd::isFwGradDefined(t) || ...); };
  if (torch::autograd::compute_requires_grad(d_out, d_lse, out, lse, sinks) ||
      has_tangent(d_out, d_lse, out, lse, sinks)) {
    return by_operators(grad_out, grad_lse, out, lse, sinks, packed);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return handle().redispatch(keys & c10::after_autograd_keyset, grad_out, grad_lse, out, lse, sinks, packed);
}

}  // namespace

Tensor call_sinks_gradient(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                           const ForwardResult& saved) {
  return handle().call(optional(grad_out), optional(grad_lse), saved.out, saved.lse, in.sinks, in.packed());
}

void sinks::fill_lse(const Tensor& lse, const Inputs& in, const Options& options) {
  if (lse.numel() == 0) return;
  lse.copy_(in.sinks.unsqueeze(-1).expand(lse.sizes()));
  if (!in.packed()) return;
  if (in.cu_seqlens_q.size(0) == 1) {
    lse.fill_(-kInfinity);
  } else {
    lse.masked_fill_(packed::Padding(in, options).nobodys_queries(), -kInfinity);
  }
}

TORCH_LIBRARY_IMPL(flash_ext, CPU, m) { m.impl("sinks_gradient", TORCH_FN(by_operators)); }
TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) { m.impl("sinks_gradient", TORCH_FN(by_kernel)); }
TORCH_LIBRARY_IMPL(flash_ext, Meta, m) { m.impl("sinks_gradient", TORCH_FN(on_meta)); }
TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) { m.impl("sinks_gradient", TORCH_FN(with_derivatives)); }

}  // namespace flash_ext
