// The composite of differentiable torch operations, over blocks of queries: any head dimension, dtype and device,
// O(len_q * block) memory, never len_q x len_k. Three users:
//   the fallback behind the backends (dispatch.h), the derivative of attention_backward, and forward-mode AD.
// Everything it calls is differentiable, so that derivatives of any order and mode come out right.
// Results have the shapes of the inputs and the accumulate dtype (float64 for float64, else float32).
#pragma once

#include "torch/checks.h"

namespace flash_ext::packed {
class Padding;
}

namespace flash_ext::chunked {

struct Forward {
  Tensor out;  // (..., Hq, L, Ev)
  Tensor lse;  // (..., Hq, L)
};

// first_batch: of the batch elements, in the map of dropout.
Forward forward(const Inputs& in, const Tensor& rng_state, const Options& options, int64_t first_batch = 0);

// Gradients of <grad_out, out> + <grad_lse, lse>. Recomputes out and lse: they are functions of the inputs, so that
// the derivative of this function is the total one. saved: what it does not recompute, rng_state and a constant lse.
Gradients backward(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in, const ForwardResult& saved,
                   const Options& options, const GradMask& grad_mask, int64_t first_batch = 0);

// The same of dense calls where the bits of a batch element depend on no other one: each is computed alone.
Forward forward_alone(const Inputs& in, const Tensor& rng_state, const Options& options, const Shape<int64_t>& shape,
                      int64_t first_batch);
Gradients backward_alone(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in, const ForwardResult& saved,
                         const Options& options, const GradMask& grad_mask, const Shape<int64_t>& shape,
                         int64_t first_batch);

struct DoubleBackward {
  Tensor grad_out, grad_lse;
  Gradients inputs;
  Tensor sinks;
};

// Gradients of sum over the gradients that backward gives of <cotangent, gradient>; an undefined cotangent is zero.
DoubleBackward double_backward(const Gradients& cotangents, const Tensor& grad_out, const Tensor& grad_lse,
                               const Inputs& in, const Tensor& rng_state, const Options& options);

// The same of dense calls. padding: what makes `in` of packed sequences, or null.
Forward forward_of(const Inputs& in, const Tensor& rng_state, const Options& options, const packed::Padding* padding,
                   int64_t first_batch = 0);
Gradients backward_of(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in, const ForwardResult& saved,
                      const Options& options, const GradMask& grad_mask, const packed::Padding* padding,
                      int64_t first_batch = 0);
DoubleBackward double_backward_of(const Gradients& cotangents, const Tensor& grad_out, const Tensor& grad_lse,
                                  const Inputs& in, const Tensor& rng_state, const Options& options,
                                  const packed::Padding* padding);

}  // namespace flash_ext::chunked
