// Merging of leading dimensions, see problem.h.
#include "torch/problem.h"

#include <ATen/Context.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "torch/fp8.h"

namespace flash_ext {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      return DType::kFloat32;
  }
}

namespace {

// torch's setting for matrix products on CUDA; each of its switches ends there. Up to 2.9 it is asked by name.
template <class Backend, class Operation, class Precision>
bool tf32_is_allowed(Precision (at::Context::*precision)(Backend, Operation) const) {
  return (at::globalContext().*precision)(Backend::CUDA, Operation::MATMUL) == Precision::TF32;
}

[[maybe_unused]] bool tf32_is_allowed(std::string (at::Context::*precision)(const std::string&, const std::string&)
                                          const) {
  return (at::globalContext().*precision)("cuda", "matmul") == "tf32";
}

}  // namespace

double scale_of(const Options& options, int64_t head_dim) {
  // Without elements every score is 0, which an infinite factor would make NaN.
  return options.scale.value_or(head_dim > 0 ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : 1.0);
}

at::ScalarType accumulate_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

ProblemBuilder::ProblemBuilder(const Inputs& in, const Options& options, const Shape<int64_t>& shape)
    : batch_(shape.batch) {
  Problem& p = problem_;
  p.dtype = dtype_of(result_type(in, options));
  for (const int64_t size : shape.batch) p.batch *= size;
  p.heads_q = shape.heads_q;
  p.heads_k = shape.heads_k;
  p.heads_v = shape.heads_v;
  p.len_q = shape.len_q;
  p.len_k = shape.len_k;
  p.packed = shape.packed;
  p.rows_q = shape.rows_q;
  p.rows_k = shape.rows_k;
  if (p.packed) {  // what a caller gives may be more
    p.len_q = std::min(p.len_q, p.rows_q);
    p.len_k = std::min(p.len_k, p.rows_k);
  }
  p.head_dim = shape.head_dim;
  p.head_dim_v = shape.head_dim_v;
  p.scale = scale_of(options, shape.head_dim);
  p.softcap = options.softcap;
  p.causal = options.causal;
  p.bottom_right = options.bottom_right;
  p.window_left = options.window_left.value_or(kUnbounded);
  p.window_right = options.window_right.value_or(kUnbounded);
  p.dropout_p = options.dropout_p;
  p.batch_invariant = options.batch_invariant;
  p.deterministic = options.deterministic.value_or(false) || p.batch_invariant;
  // NOTE: not for few queries or keys, whose products cuBLAS does not always round either: up to 103 the error was up
  // to 30 times that of eager attention, and PyTorch's own tests failed up to 408. Lengths of a packed call are those
  // of its longest sequence, so a call that is batch-invariant never rounds.
  constexpr int64_t kLeastTf32 = 512;
  p.allow_tf32 = p.dtype == DType::kFloat32 && !in.query.is_cpu() && !p.batch_invariant &&
                 std::min(p.len_q, p.len_k) >= kLeastTf32 && tf32_is_allowed(&at::Context::float32Precision);
  p.has_mask = in.mask.defined();
  p.has_bias = in.bias.defined();
  p.has_alibi = in.alibi_slopes.defined();
  p.has_sinks = in.sinks.defined();
  p.constant_lse = options.constant_lse;
  p.fp8 = fp8::has(in);
  p.row_descales = p.fp8 && fp8::has_row_descales(in);
  if (p.has_bias) p.bias_dtype = dtype_of(in.bias.scalar_type());
}

DropoutPlace dropout_place(const Options& options, int64_t heads_q, int64_t first_batch) {
  const auto number = [](const c10::SymInt& given) { return given.guard_int(__FILE__, __LINE__); };
  const auto word = [](int64_t x) { return static_cast<uint32_t>(x); };
  const int64_t given = number(options.dropout_heads), heads = given == 0 ? heads_q : given;
  return {.first = {.bh = word(first_batch * heads + number(options.dropout_first_head)),
                    .q16 = word(number(options.dropout_first_query) / 16),
                    .k16 = word(number(options.dropout_first_key) / 16)},
          .other_heads = word(heads - heads_q)};
}

void ProblemBuilder::add(TensorView& view, const Tensor& tensor, int64_t heads, int64_t rows, int64_t cols) {
  add(view, tensor, 3, {heads, rows, cols});
}

void ProblemBuilder::add_per_head(TensorView& view, const Tensor& tensor, int64_t heads) {
  add(view, tensor, 1, {heads, 1, 1});
}

void ProblemBuilder::add(TensorView& view, const Tensor& tensor, int64_t trailing, const int64_t (&sizes)[3]) {
  if (!tensor.defined()) return;
  const auto tensor_sizes = tensor.sizes();
  const auto tensor_strides = tensor.strides();
  const int64_t rank = tensor.dim();
  // Stride of the dimension that stands `from_right` places from the end, 0 where the tensor is broadcast.
  const auto stride = [&](int64_t from_right, int64_t size) -> int64_t {
    const int64_t i = rank - from_right;
    return i < 0 || (tensor_sizes[i] == 1 && size != 1) ? 0 : tensor_strides[i];
  };
  Entry& entry = entries_.emplace_back();
  entry.view = &view;
  // NOTE: the cast only removes const: kernels read inputs and write outputs through one kind of view.
  entry.value.data = const_cast<void*>(tensor.const_data_ptr());
  entry.value.head_stride = stride(trailing, sizes[0]);
  if (trailing == 3) {
    entry.value.row_stride = stride(2, sizes[1]);
    entry.value.col_stride = stride(1, sizes[2]);
  }
  const auto batch_rank = static_cast<int64_t>(batch_.size());
  entry.batch_strides.resize(batch_.size());
  for (int64_t i = 0; i < batch_rank; ++i) entry.batch_strides[i] = stride(trailing + batch_rank - i, batch_[i]);
}

void ProblemBuilder::add_rows(TensorView& view, const Tensor& tensor, int64_t heads, int64_t rows, int64_t cols) {
  if (!problem_.packed) return add(view, tensor, heads, rows, cols);
  if (!tensor.defined()) return;
  Entry& entry = entries_.emplace_back();
  entry.view = &view;
  entry.value.data = const_cast<void*>(tensor.const_data_ptr());
  entry.value.row_stride = tensor.stride(0);
  entry.value.head_stride = tensor.stride(1);
  entry.value.col_stride = tensor.stride(2);
  entry.batch_strides.resize(batch_.size());  // 0: a sequence is found by its rows
}

void ProblemBuilder::finish(Problem& problem) {
  // Merge dimension i into the one before it where every tensor steps through both with one stride.
  Sizes<int64_t> kept;  // indices of the innermost dimension of each merged group
  Sizes<int64_t> merged_sizes;
  for (int64_t i = 0; i < static_cast<int64_t>(batch_.size()); ++i) {
    if (batch_[i] == 1) continue;
    bool merges = !kept.empty();
    for (size_t e = 0; merges && e < entries_.size(); ++e) {
      merges = entries_[e].batch_strides[kept.back()] == entries_[e].batch_strides[i] * batch_[i];
    }
    if (merges) {
      kept.back() = i;
      merged_sizes.back() *= batch_[i];
    } else {
      kept.push_back(i);
      merged_sizes.push_back(batch_[i]);
    }
  }
  problem = problem_;
  problem.batch_rank = static_cast<int>(kept.size());
  if (kept.size() > kMaxBatchDims) return;
  for (size_t i = 0; i < kept.size(); ++i) problem.batch_size[i] = merged_sizes[i];
  for (const Entry& entry : entries_) {
    *entry.view = entry.value;
    for (size_t i = 0; i < kept.size(); ++i) entry.view->batch_stride[i] = entry.batch_strides[kept[i]];
  }
}

void set_wanted(Problem& problem, const GradMask& wanted, const TensorView& dbias) {
  problem.wants_dq = wanted[kDq];
  problem.wants_dk = wanted[kDk];
  problem.wants_dv = wanted[kDv];
  problem.wants_dbias = wanted[kDbias];
  problem.wants_dalibi = wanted[kDslopes];
  Problem own = problem;  // whether one more batch element shares it must not choose the kernels of the others
  if (problem.batch_invariant) own.batch_rank = 0;
  problem.whole_dbias = wanted[kDbias] && problem.batch_rank <= kMaxBatchDims && is_whole(own, dbias);
}

namespace {

bool is_broadcast(const Tensor& tensor, int64_t dim) { return tensor.stride(dim) == 0 && tensor.size(dim) > 1; }

// A copy with the last dimension innermost and the others in their order; the first `dims` keep their broadcasts.
Tensor gathered(const Tensor& tensor, int64_t dims) {
  const Tensor whole = without_broadcasts(tensor, dims);
  const Sizes<int64_t> sizes(whole.sizes());
  const Tensor copy = at::empty_strided(sizes, strides_in_order_of<int64_t>(sizes, whole), whole.options());
  copy.copy_(whole);
  return copy.expand(tensor.sizes());
}

}  // namespace

Tensor without_broadcasts(Tensor tensor, int64_t dims) {
  for (int64_t i = 0; i < dims; ++i) {
    if (is_broadcast(tensor, i)) tensor = tensor.narrow(i, 0, 1);
  }
  return tensor;
}

bool has_scattered_columns(const Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 0 || tensor.size(-1) == 1) return false;
  return tensor.stride(-1) != 1 && tensor.stride(-1) != 0;
}

int64_t bytes_of_copy(const Tensor& tensor) {
  return without_broadcasts(tensor, tensor.dim()).numel() * static_cast<int64_t>(tensor.element_size());
}

Tensor gather_columns(const Tensor& tensor) {
  return has_scattered_columns(tensor) && tensor.is_cuda() ? gathered(tensor, tensor.dim()) : tensor;
}

Tensor gather_rows(const Tensor& grad_out) {
  if (!grad_out.defined() || !grad_out.is_cuda()) return grad_out;
  const bool repeats = is_broadcast(grad_out, -1) || is_broadcast(grad_out, -2);
  return repeats || has_scattered_columns(grad_out) ? gathered(grad_out, grad_out.dim() - 2) : grad_out;
}

std::optional<Inputs> gather_columns(const Inputs& in) {
  bool any = false;
  for (const Tensor* tensor : {&in.query, &in.key, &in.value, &in.mask, &in.bias}) {
    any = any || (has_scattered_columns(*tensor) && tensor->is_cuda());
  }
  Tensor Inputs::*const lengths[] = {&Inputs::cu_seqlens_q, &Inputs::cu_seqlens_k, &Inputs::seqused_q,
                                     &Inputs::seqused_k};
  for (const auto tensor : lengths) any = any || ((in.*tensor).defined() && !(in.*tensor).is_contiguous());
  if (!any) return std::nullopt;
  Inputs result = in;
  for (const auto tensor : lengths) {
    if ((in.*tensor).defined()) result.*tensor = (in.*tensor).contiguous();
  }
  for (Tensor* tensor : {&result.query, &result.key, &result.value, &result.mask, &result.bias}) {
    *tensor = gather_columns(*tensor);
  }
  return result;
}

namespace {

void add_descale(ProblemBuilder& builder, TensorView& view, const Inputs& in, const fp8::Part& part, int64_t heads,
                 int64_t rows) {
  const Tensor& descale = in.*part.descale;
  if (!descale.defined()) return;
  if (!fp8::is_per_row(in, part)) return builder.add_per_head(view, descale, heads);
  if (!in.packed()) return builder.add(view, descale.unsqueeze(-1), heads, rows, 1);
  builder.add_rows(view, descale.expand({1, heads, rows}).select(0, 0).transpose(0, 1).unsqueeze(-1), heads, rows, 1);
}

}  // namespace

void add_inputs(ProblemBuilder& builder, ForwardArgs& args, const Inputs& in, const Shape<int64_t>& shape) {
  builder.add_rows(args.q, in.query, shape.heads_q, shape.len_q, shape.head_dim);
  builder.add_rows(args.k, in.key, shape.heads_k, shape.len_k, shape.head_dim);
  builder.add_rows(args.v, in.value, shape.heads_v, shape.len_k, shape.head_dim_v);
  builder.add(args.mask, in.mask, shape.heads_q, shape.len_q, shape.len_k);
  builder.add(args.bias, in.bias, shape.heads_q, shape.len_q, shape.len_k);
  builder.add_per_head(args.alibi, in.alibi_slopes, shape.heads_q);
  builder.add_per_head(args.sinks, in.sinks, shape.heads_q);
  if (fp8::has(in)) {
    add_descale(builder, args.q_descale, in, fp8::kParts[0], shape.heads_q, shape.packed ? shape.rows_q : shape.len_q);
    add_descale(builder, args.k_descale, in, fp8::kParts[1], shape.heads_k, shape.packed ? shape.rows_k : shape.len_k);
    add_descale(builder, args.v_descale, in, fp8::kParts[2], shape.heads_v, shape.packed ? shape.rows_k : shape.len_k);
  }
  const auto lengths = [](const Tensor& tensor) {
    return tensor.defined() ? static_cast<const int32_t*>(tensor.const_data_ptr()) : nullptr;
  };
  args.sequences = {lengths(in.cu_seqlens_q), lengths(in.cu_seqlens_k.defined() ? in.cu_seqlens_k : in.cu_seqlens_q),
                    lengths(in.seqused_q), lengths(in.seqused_k)};
}

}  // namespace flash_ext
