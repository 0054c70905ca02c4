// See fp8.h. Sizes may be symbolic, and nothing waits for a device.
#include "torch/fp8.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

#include "torch/check_parts.h"

namespace flash_ext::fp8 {
namespace {

// Dimensions of (..., heads, length, head_dim): packed sequences are (sequences, heads, rows, head_dim).
int64_t rank_of(const Inputs& in, const Part& part) { return in.packed() ? 4 : (in.*part.tensor).dim(); }

// Which sequence a row belongs to; of nobody's rows any.
Tensor owners(const Tensor& cu_seqlens, const c10::SymInt& rows) {
  const c10::SymInt sequences = cu_seqlens.sym_size(0) - 1;
  const Tensor behind = cu_seqlens.narrow_symint(0, 1, sequences).contiguous();
  const Tensor every = at::arange(at::Scalar(rows), cu_seqlens.options());
  return at::searchsorted(behind, every, /*out_int32=*/false, /*right=*/true).clamp_max(at::Scalar(sequences - 1));
}

}  // namespace

bool has_any(const Inputs& in) {
  return std::any_of(std::begin(kParts), std::end(kParts),
                     [&](const Part& part) { return (in.*part.tensor).scalar_type() == at::kFloat8_e4m3fn; });
}

bool is_per_row(const Inputs& in, const Part& part) {
  const Tensor& descale = in.*part.descale;
  return descale.defined() && descale.dim() == rank_of(in, part) - 1;
}

bool has_row_descales(const Inputs& in) {
  return std::any_of(std::begin(kParts), std::end(kParts), [&](const Part& part) { return is_per_row(in, part); });
}

void check_dtypes(const Inputs& in, const Options& options) {
  const auto dtype = in.query.scalar_type();
  const bool is_fp8 = has(in);
  if (options.out_dtype.has_value()) {
    const at::ScalarType wanted = *options.out_dtype;
    if (is_fp8 && wanted != at::kBFloat16 && wanted != at::kHalf) {
      fail("out_dtype", "is ", dtype_text(wanted),
           "; beside inputs of torch.float8_e4m3fn it must be None, torch.bfloat16 or torch.float16");
    }
    if (!is_fp8 && wanted != dtype) {
      fail("out_dtype", "is ", dtype_text(wanted), "; beside inputs of ", dtype_text(dtype),
           " it must be None or their dtype");
    }
  }
  for (const Part& part : kParts) {
    const Tensor& descale = in.*part.descale;
    if (!descale.defined()) continue;
    if (!is_fp8) {
      fail(part.descale_name, "is given beside a ", part.name, " of ", dtype_text(dtype),
           "; only torch.float8_e4m3fn has descales");
    }
    if (descale.scalar_type() != at::kFloat) {
      fail(part.descale_name, "is of ", dtype_text(descale.scalar_type()), "; it must be of torch.float32");
    }
  }
}

template <class Int>
void check_descales(const Inputs& in, const Shape<Int>& shape) {
  for (const Part& part : kParts) {
    const Tensor& descale = in.*part.descale;
    if (!descale.defined()) continue;
    const auto sizes = sizes_of<Int>(descale), of = sizes_of<Int>(in.*part.tensor);
    Sizes<Int> rows(of.begin(), of.end() - 1);
    Sizes<Int> heads(rows.begin(), rows.end() - 1);
    if (in.packed()) {
      heads = {shape.batch[0], of[1]};
      rows = {Int(1), of[1], of[0]};
    }
    const Sizes<Int>& wanted = is_per_row(in, part) ? rows : heads;
    bool fits = sizes.size() <= wanted.size();
    for (size_t i = 1; fits && i <= sizes.size(); ++i) {
      fits = broadcasts_to(sizes[sizes.size() - i], wanted[wanted.size() - i]);
    }
    if (!fits) {
      fail(part.descale_name, "of shape ", shape_text<Int>(descale), " broadcasts neither to ", shape_text<Int>(heads),
           in.packed() ? " [sequences, heads]" : " [batch, heads]", " nor, with ", static_cast<int64_t>(rows.size()),
           " dimensions, to ", shape_text<Int>(rows), in.packed() ? " [1, heads, rows]" : " [batch, heads, rows]",
           " of ", part.name);
    }
  }
}

void check_no_gradient(const Inputs& in) {
  for (const Part& part : kParts) {
    const Tensor& descale = in.*part.descale;
    if (torch::autograd::compute_requires_grad(descale) || torch::autograd::isFwGradDefined(descale)) {
      fail(part.descale_name, "wants a gradient, which descales do not get; pass ", part.descale_name, ".detach()");
    }
  }
}

void check_not_recorded(const Inputs& in, const char* beside) {
  for (const Part& part : kParts) {
    if (!torch::autograd::compute_requires_grad(in.*part.tensor)) continue;
    fail(part.name, "is of torch.float8_e4m3fn and wants a gradient beside ", beside,
         ", where it would be rounded to e4m3; such derivatives are taken of 16-bit inputs");
  }
}

Tensor factor(const Inputs& in, const Part& part) {
  const Tensor& descale = in.*part.descale;
  if (!descale.defined()) return {};
  if (!in.packed()) return is_per_row(in, part) ? descale.unsqueeze(-1) : descale.unsqueeze(-1).unsqueeze(-1);
  if (is_per_row(in, part)) return descale.select(0, 0).transpose(0, 1).unsqueeze(-1);
  if (descale.dim() < 2) return descale.unsqueeze(-1);
  const c10::SymInt sequences = descale.sym_size(0);
  if (known_equal<c10::SymInt>(sequences, 0)) return {};  // every row is nobody's
  if (known_equal<c10::SymInt>(sequences, 1)) return descale.select(0, 0).unsqueeze(-1);
  const bool of_keys = part.tensor != &Inputs::query && in.cu_seqlens_k.defined();
  const Tensor owner = owners(of_keys ? in.cu_seqlens_k : in.cu_seqlens_q, (in.*part.tensor).sym_size(0));
  return descale.index_select(0, owner).unsqueeze(-1);
}

Inputs dequantised(const Inputs& in, const Options& options, bool in_place) {
  Inputs result = in;
  for (const Part& part : kParts) {
    Tensor& tensor = result.*part.tensor;
    const auto dtype = result_type(in, options);
    tensor = tensor.to(dtype);  // exact
    const Tensor descale = factor(in, part);
    result.*part.descale = Tensor();
    if (!descale.defined()) continue;
    if (in_place) {  // NOTE: in float and rounded once, as below, with 7 bytes a number instead of 15
      tensor.mul_(descale);
    } else {
      tensor = (tensor * descale).to(dtype);
    }
  }
  return result;
}

template void check_descales(const Inputs&, const Shape<int64_t>&);
template void check_descales(const Inputs&, const Shape<c10::SymInt>&);

}  // namespace flash_ext::fp8
