// See quantize.h. Below autograd, 16-bit numbers on a GPU have kernels (core/quantize.h), all others torch operations.
// A compiler sees those of descale_fp8; quantize_fp8 stays one call.
#include "torch/quantize.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "core/quantize.h"
#include "torch/check_parts.h"
#include "torch/cuda_runtime.h"
#include "torch/nodes.h"
#include "torch/problem.h"

namespace flash_ext {
namespace {

constexpr double kLargest = 448.0;  // of e4m3, which has no infinity

// ---- by kernels -----------------------------------------------------------------------------------------------------

// Sizes and strides of up to four dimensions, the first of them 1 where there are fewer.
struct Rows {
  int64_t size[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 1};

  explicit Rows(const Tensor& x) {
    for (int64_t i = 0, at = 4 - x.dim(); i < x.dim(); ++i, ++at) {
      size[at] = x.size(i);
      stride[at] = size[at] == 1 ? 0 : x.stride(i);
    }
    if (size[3] == 1) stride[3] = 1;
  }
  // Whether threads may take so many numbers of a row at once.
  bool has_chunks(const void* data, int64_t numbers, int64_t bytes) const {
    return stride[3] == 1 && size[3] % numbers == 0 && reinterpret_cast<uintptr_t>(data) % bytes == 0 &&
           std::all_of(stride, stride + 3, [&](int64_t x) { return x % numbers == 0; });
  }
};

bool has_kernel(const Tensor& x) {
  const auto dtype = x.scalar_type();
  if (!kWithCuda || !x.is_cuda() || (dtype != at::kHalf && dtype != at::kBFloat16) || x.dim() > 4) return false;
  if (x.numel() == 0 || x.numel() >= QuantizeArgs::kMostNumbers || x.is_conj() || x.is_neg()) return false;
  return Rows(x).has_chunks(x.const_data_ptr(), 8, 16) && cuda_device_info(x.device()).compute_capability >= 80;
}

// For kernels on x's device, the current one. descale: of as many dimensions.
QuantizeArgs args_of(const Tensor& x, const Tensor& descale) {
  QuantizeArgs args;
  args.dtype = dtype_of(x.scalar_type());
  args.x = x.const_data_ptr();
  args.descale = const_cast<float*>(descale.const_data_ptr<float>());
  const Rows rows(x), factors(descale);
  std::copy_n(rows.size, 4, args.size);
  std::copy_n(rows.stride, 3, args.x_stride);
  std::copy_n(factors.stride, 3, args.descale_stride);
  args.stream = current_cuda_stream(x.device());
  return args;
}

Tensor quantized_by_kernel(const Tensor& x, const Tensor& descale) {
  const c10::DeviceGuard guard(x.device());
  Tensor x8 = at::empty_like(x, x.options().dtype(at::kFloat8_e4m3fn));
  const Rows rows(x8);
  if (!rows.has_chunks(x8.const_data_ptr(), 8, 8)) return {};
  QuantizeArgs args = args_of(x, descale);
  args.x8 = static_cast<uint8_t*>(x8.mutable_data_ptr());
  std::copy_n(rows.stride, 3, args.x8_stride);
  if constexpr (kWithCuda) run_quantize(args);
  return x8;
}

// rows: the dimension that has one number together with the last one; -1: none, a number for each row.
Tensor descale_by_kernel(const Tensor& x, int64_t rows) {
  const c10::DeviceGuard guard(x.device());
  const bool per_row = rows < 0;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = 1;
  if (!per_row) sizes[rows] = 1;
  const auto options = x.options().dtype(at::kFloat);
  const Tensor descale = per_row ? at::empty(sizes, options) : at::zeros(sizes, options);
  QuantizeArgs args = args_of(x, descale);
  // Blocks walk the last but one: the rows, or the longer one.
  const int64_t at = !per_row ? 4 - x.dim() + rows : args.size[1] > args.size[2] ? 1 : 2;
  std::swap(args.size[at], args.size[2]);
  std::swap(args.x_stride[at], args.x_stride[2]);
  std::swap(args.descale_stride[at], args.descale_stride[2]);
  if constexpr (kWithCuda) run_descale(args, per_row);
  return descale;
}

// ---------------------------------------------------------------------------------------------------------------------

bool has_one_of_each_row(const Tensor& x, const Tensor& descale) {
  if (descale.dim() != x.dim() || descale.size(-1) != 1 || descale.device() != x.device()) return false;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    if (descale.size(i) != x.size(i) && descale.size(i) != 1) return false;
  }
  return true;
}

// Composite: a compiler sees the operations, which it fuses.
Tensor descale_of(const Tensor& x, at::IntArrayRef dim) {
  const at::NoGradGuard no_grad;
  const bool per_row = dim.size() == 1;
  const int64_t rows = dim.size() == 2 ? dim[0] + (dim[0] < 0 ? x.dim() : 0) : -1;
  if ((per_row || (rows >= 0 && rows < x.dim() - 1)) && dim.back() == -1 && !at::isTensorSubclassLike(x) &&
      has_kernel(x)) {
    return descale_by_kernel(x.detach(), rows);
  }
  // NOTE: a product, as of the kernel and of compilers, which make one of a division by a constant.
  const Tensor largest = x.detach().abs().nan_to_num(0.0, 0.0).amax(dim, true);
  const Tensor wide = largest.scalar_type() == at::kDouble ? largest : largest.to(at::kFloat);
  constexpr double kLeast = std::numeric_limits<float>::min(), kMost = std::numeric_limits<float>::max();
  return at::where(largest == 0, at::Scalar(1.0), (wide * (1.0 / kLargest)).clamp(kLeast, kMost).to(at::kFloat));
}

Tensor quantized(const Tensor& x, const Tensor& descale) {
  const auto dtype = x.scalar_type();
  if (!is_supported(dtype)) {
    fail("x", "is of ", dtype_text(dtype), "; it must be of torch.float16, torch.bfloat16, torch.float32 or ",
         "torch.float64");
  }
  if (descale.scalar_type() != at::kFloat) {
    fail("descale", "is of ", dtype_text(descale.scalar_type()), "; it must be of torch.float32");
  }
  if (!at::isTensorSubclassLike(x) && has_kernel(x) && has_one_of_each_row(x, descale)) {
    if (Tensor x8 = quantized_by_kernel(x, descale); x8.defined()) return x8;
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
TORCH_LIBRARY_IMPL(flash_ext, CompositeImplicitAutograd, m) { m.impl("descale_fp8", TORCH_FN(descale_of)); }

}  // namespace flash_ext
