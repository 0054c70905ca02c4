// Tensors in the stride order of another one, and where a backend writes a gradient that becomes one.
//
// Called by the kernels of ops.cpp. Invariant: a result has the dtype and the stride order of its input.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>

#include "torch/allocation.h"
#include "torch/problem.h"

namespace flash_ext {

inline Tensor empty_in_order_of(const Sizes<int64_t>& sizes, const Tensor& like, at::ScalarType dtype) {
  return allocate_strided(sizes, strides_in_order_of<int64_t>(sizes, like), like, dtype);
}

inline Tensor empty_in_order_of(const Sizes<c10::SymInt>& sizes, const Tensor& like, at::ScalarType dtype) {
  return at::empty_strided_symint(sizes, strides_in_order_of<c10::SymInt>(sizes, like), like.options().dtype(dtype));
}

// A gradient's buffer: the tensor itself, or where its input was broadcast, a whole one in the accumulate dtype.
struct GradBuffer {
  Tensor buffer;
  bool reduced = false;

  static GradBuffer make(const Tensor& input, const Sizes<int64_t>& whole) {
    if (input.sizes() == c10::IntArrayRef(whole)) {
      return {empty_in_order_of(whole, input, input.scalar_type()), false};
    }
    return {allocate(whole, input, accumulate_type(input.scalar_type())), true};
  }

  Tensor finish(const Tensor& input) const {
    return reduced ? cast_like(at::sum_to(buffer, input.sizes()), input) : buffer;
  }

  // A buffer of ours that has the dtype and stride order of the input already is the result.
  static Tensor as_result(const Tensor& grad, const Tensor& input) {
    const Sizes<int64_t> sizes(input.sizes());
    const auto strides = strides_in_order_of<int64_t>(sizes, input);
    if (grad.scalar_type() == input.scalar_type() && grad.strides() == c10::IntArrayRef(strides)) return grad;
    return cast_like(grad, input);
  }

  // In the dtype and stride order of the input.
  static Tensor cast_like(const Tensor& grad, const Tensor& input) {
    Tensor result = empty_in_order_of(Sizes<int64_t>(input.sizes()), input, input.scalar_type());
    return result.copy_(grad);
  }
};

}  // namespace flash_ext
