// The composite of a batch-invariant call: one batch element after the other, each copied to memory of its own, so that
// every product has the sizes and the layout that it has where the element is alone; see chunked.h.
#include <ATen/ATen.h>

#include "torch/chunked.h"
#include "torch/problem.h"

namespace flash_ext::chunked {
namespace {

using Index = Sizes<int64_t>;

// What element `index` of the leading dimensions has of a tensor of (leading..., trailing...), as a view.
Tensor part_of(const Tensor& tensor, int64_t trailing, const Index& index) {
  Tensor part = tensor;
  const int64_t leading = tensor.defined() ? tensor.dim() - trailing : 0;
  const auto skipped = static_cast<int64_t>(index.size()) - leading;
  for (int64_t i = 0; i < leading; ++i) {
    if (part.size(i) > 1) part = part.narrow(i, index[skipped + i], 1);
  }
  return part;
}

Tensor copy_of(const Tensor& tensor, int64_t trailing, const Index& index) {
  return tensor.defined() ? part_of(tensor, trailing, index).clone(at::MemoryFormat::Contiguous) : Tensor();
}

int64_t trailing_of(const Input& input) {
  return input.tensor == &Inputs::alibi_slopes || input.tensor == &Inputs::sinks ? 1 : 3;
}

// body(index, number, inputs) of every batch element.
template <class Body>
void for_each_element(const Inputs& in, const Shape<int64_t>& shape, const Body& body) {
  int64_t count = 1;
  for (const int64_t size : shape.batch) count *= size;
  for (int64_t number = 0; number < count; ++number) {
    Index index(shape.batch);
    int64_t rest = number;
    for (size_t i = index.size(); i-- > 0; rest /= shape.batch[i]) index[i] = rest % shape.batch[i];
    Inputs alone;
    for (const Input& input : kInputs) alone.*input.tensor = copy_of(in.*input.tensor, trailing_of(input), index);
    body(index, number, alone);
  }
}

}  // namespace

Forward forward_alone(const Inputs& in, const Tensor& rng_state, const Options& options, const Shape<int64_t>& shape,
                      int64_t first_batch) {
  const auto wide = in.query.options().dtype(accumulate_type(in.query.scalar_type()));
  const Forward whole{at::empty(shape.out_sizes(), wide), at::empty(shape.lse_sizes(), wide)};
  for_each_element(in, shape, [&](const Index& index, int64_t number, const Inputs& alone) {
    const Forward one = forward(alone, rng_state, options, first_batch + number);
    part_of(whole.out, 3, index).copy_(one.out);
    part_of(whole.lse, 2, index).copy_(one.lse);
  });
  return whole;
}

Gradients backward_alone(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in, const ForwardResult& saved,
                         const Options& options, const GradMask& grad_mask, const Shape<int64_t>& shape,
                         int64_t first_batch) {
  const auto wide = accumulate_type(in.query.scalar_type());
  Gradients sums;
  for_each_element(in, shape, [&](const Index& index, int64_t number, const Inputs& alone) {
    const ForwardResult own{{}, copy_of(saved.lse, 2, index), saved.rng_state};
    const Gradients one = backward(copy_of(grad_out, 3, index), copy_of(grad_lse, 2, index), alone, own, options,
                                   grad_mask, first_batch + number);
    for (size_t i = 0; i < kGradients; ++i) {
      if (!grad_mask[i]) continue;
      const Input& input = kDifferentiable[i];
      // -0, to which nothing is added without a trace: of what no other element shares the bits are these.
      const auto& sizes = (in.*input.tensor).sizes();
      if (!sums[i].defined()) sums[i] = at::full(sizes, -0.0, one[i].options().dtype(wide));
      part_of(sums[i], trailing_of(input), index).add_(one[i]);
    }
  });
  return sums;
}

}  // namespace flash_ext::chunked
