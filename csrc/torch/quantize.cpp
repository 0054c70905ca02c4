// See quantize.h. Everything below autograd is made of torch operations, on any device.
#include "torch/quantize.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/check_parts.h"
#include "torch/nodes.h"

namespace flash_ext {
namespace {

constexpr double kLargest = 448.0;  // of e4m3, which has no infinity

Tensor quantized(const Tensor& x, const Tensor& descale) {
  const auto dtype = x.scalar_type();
  if (!is_supported(dtype)) {
    fail("x", "is of ", dtype_text(dtype), "; it must be of torch.float16, torch.bfloat16, torch.float32 or ",
         "torch.float64");
  }
  if (descale.scalar_type() != at::kFloat) {
    fail("descale", "is of ", dtype_text(descale.scalar_type()), "; it must be of torch.float32");
  }
  const Tensor wide = x.to(dtype == at::kDouble ? at::kDouble : at::kFloat);
  return (wide / descale).clamp(-kLargest, kLargest).to(at::kFloat8_e4m3fn);
}

const auto& handle() {
  static const auto found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("flash_ext::quantize_fp8", "")
                                .typed<Tensor(const Tensor&, const Tensor&)>();
  return found;
}

Tensor recorded(c10::DispatchKeySet keys, const Tensor& x, const Tensor& descale) {
  using torch::autograd::isFwGradDefined;
  if (torch::autograd::compute_requires_grad(descale) || isFwGradDefined(descale)) {
    fail("descale", "wants a gradient, which it does not get; pass descale.detach()");
  }
  if (isFwGradDefined(x)) fail("x", "has a tangent, which quantize_fp8 does not pass on (forward-mode AD)");
  const bool requires_grad = torch::autograd::compute_requires_grad(x);
  const auto node = requires_grad ? compat::make_node<QuantizeBackward>() : compat::NodePtr<QuantizeBackward>();
  if (node) node->set_next_edges(torch::autograd::collect_next_edges(x));
  Tensor result = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return handle().redispatch(keys & c10::after_autograd_keyset, x, descale);
  }();
  if (node) {
    torch::autograd::set_history(result, node);
    node->save(descale);
    compat::node_is_complete(node);
  }
  return result;
}

}  // namespace

fp8::Leaves fp8::go_past_quantize(torch::autograd::edge_list& edges, size_t first, const Inputs& in) {
  Leaves leaves{};
  for (size_t i = 0; i < std::size(kParts); ++i) {
    const Tensor& tensor = in.*kParts[i].tensor;
    if (!tensor.requires_grad() || tensor.scalar_type() != at::kFloat8_e4m3fn) continue;
    const auto& made_by = tensor.grad_fn();
    if (!made_by) {
      leaves[i] = (in.*kParts[i].descale).defined();
      continue;
    }
    const auto* const quantize = dynamic_cast<const QuantizeBackward*>(made_by.get());
    if (quantize == nullptr) {
      // What AOTAutograd traces with has torch's error node in the place of what is outside.
      const bool is_outside = dynamic_cast<const torch::autograd::Error*>(made_by.get()) != nullptr;
      fail(kParts[i].name, "is of torch.float8_e4m3fn, wants a gradient and ",
           is_outside ? std::string("comes from outside of what is compiled") : concat("is made by ", made_by->name()),
           ", where the gradient would be rounded to e4m3; call quantize_fp8",
           is_outside ? " inside of it" : " and pass its result as it is");
    }
    edges[first + i] = quantize->next_edge(0);
  }
  return leaves;
}

TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) { m.impl("quantize_fp8", TORCH_FN(quantized)); }
TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) { m.impl("quantize_fp8", TORCH_FN(recorded)); }

}  // namespace flash_ext
