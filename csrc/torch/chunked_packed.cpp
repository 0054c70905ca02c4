// The composite of any call: packed sequences are padded on the device, computed and cut out again; see chunked.h.
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <limits>

#include "torch/chunked.h"
#include "torch/packed.h"
#include "torch/problem.h"

namespace flash_ext::chunked {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The composite computes in the dtype it chose, whatever autocast says around it.
const c10::impl::ExcludeDispatchKeyGuard without_autocast() {
  return c10::impl::ExcludeDispatchKeyGuard(c10::autocast_dispatch_keyset);
}

// No sequence at all: there is nothing to pad.
bool has_no_sequence(const Inputs& in) { return in.cu_seqlens_q.sym_size(0) == 1; }

Tensor zeros_of(const Tensor& like, at::ScalarType dtype) {
  return at::zeros_symint(like.sym_sizes(), like.options().dtype(dtype).requires_grad(false));
}

Gradients zeros_of(const Inputs& in, const GradMask& wanted) {
  Gradients zeros;
  for (size_t i = 0; i < kGradients; ++i) {
    const Tensor& input = in.*kDifferentiable[i].tensor;
    if (wanted[i] && input.defined()) zeros[i] = zeros_of(input, accumulate_type(in.query.scalar_type()));
  }
  return zeros;
}

void unpad(Gradients& grads, const packed::Padding& padding) {
  grads[kDq] = padding.unpad_queries(grads[kDq]);
  grads[kDk] = padding.unpad_keys(grads[kDk]);
  grads[kDv] = padding.unpad_keys(grads[kDv]);
}

}  // namespace

Forward forward(const Inputs& in, const Tensor& rng_state, const Options& options, int64_t first_batch) {
  const auto guard = without_autocast();
  if (!in.packed()) return forward_of(in, rng_state, options, nullptr, first_batch);
  const auto shape = check_call<c10::SymInt>(in, options);
  if (has_no_sequence(in)) {
    const auto zeros = [&](const Sizes<c10::SymInt>& sizes) {
      return at::zeros_symint(sizes, in.query.options().dtype(accumulate_type(in.query.scalar_type())));
    };
    return {zeros(shape.out_sizes()), zeros(shape.lse_sizes()) - kInfinity};
  }
  const packed::Padding padding(in, options);
  const Forward padded = forward_of(padding.inputs(in), rng_state, packed::dense_options(options), &padding);
  return {padding.unpad_queries(padded.out), padding.unpad_lse(padded.lse, -kInfinity)};
}

Gradients backward(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in, const ForwardResult& saved,
                   const Options& options, const GradMask& grad_mask, int64_t first_batch) {
  const auto guard = without_autocast();
  if (!in.packed()) return backward_of(grad_out, grad_lse, in, saved, options, grad_mask, nullptr, first_batch);
  if (has_no_sequence(in)) return zeros_of(in, grad_mask);
  const packed::Padding padding(in, options);
  Gradients grads = backward_of(padding.pad_queries(grad_out), padding.pad_lse(grad_lse), padding.inputs(in),
                                {{}, padding.pad_lse(saved.lse), saved.rng_state}, packed::dense_options(options),
                                grad_mask, &padding);
  unpad(grads, padding);
  return grads;
}

DoubleBackward double_backward(const Gradients& cotangents, const Tensor& grad_out, const Tensor& grad_lse,
                               const Inputs& in, const Tensor& rng_state, const Options& options) {
  const auto guard = without_autocast();
  if (!in.packed()) return double_backward_of(cotangents, grad_out, grad_lse, in, rng_state, options, nullptr);
  if (has_no_sequence(in)) {
    const auto zeros = [&](const Tensor& like) {
      return like.defined() ? zeros_of(like, accumulate_type(in.query.scalar_type())) : Tensor();
    };
    GradMask every;
    every.fill(true);
    return {zeros(grad_out), zeros(grad_lse), zeros_of(in, every), zeros(in.sinks)};
  }
  const packed::Padding padding(in, options);
  Gradients padded = cotangents;
  padded[kDq] = padding.pad_queries(padded[kDq]);
  padded[kDk] = padding.pad_keys(padded[kDk]);
  padded[kDv] = padding.pad_keys(padded[kDv]);
  DoubleBackward grads = double_backward_of(padded, padding.pad_queries(grad_out), padding.pad_lse(grad_lse),
                                            padding.inputs(in), rng_state, packed::dense_options(options), &padding);
  grads.grad_out = padding.unpad_queries(grads.grad_out);
  grads.grad_lse = padding.unpad_lse(grads.grad_lse, 0.0);
  unpad(grads.inputs, padding);
  return grads;
}

}  // namespace flash_ext::chunked
