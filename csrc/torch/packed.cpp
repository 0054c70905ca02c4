// See packed.h. Everything that Padding does is made of differentiable operations.
#include "torch/packed.h"

#include <ATen/ATen.h>

#include <cstdlib>
#include <string_view>

namespace flash_ext::packed {
namespace {

// Of one side of a call. `cu` and `used` are named as the arguments are.
// A sequence without queries, of `queries`, has no wrong keys: cache.cpp has such between others.
void check_side(std::string_view cu_name, const Tensor& cu_seqlens, std::string_view used_name, const Tensor& used,
                int64_t rows, std::string_view longest_name, int64_t longest, const Tensor& queries) {
  const Tensor cu_queries = queries.cpu().to(at::kLong).contiguous();
  const auto is_empty = [&](int64_t b) {
    const auto* const start = cu_queries.const_data_ptr<int64_t>();
    return start[b] == start[b + 1];
  };
  const Tensor cu = cu_seqlens.cpu().to(at::kLong).contiguous();
  const auto* const at = cu.const_data_ptr<int64_t>();
  const auto fail = [](std::string_view name, int64_t entry, int64_t value, const std::string& rest) {
    throw AttentionError(std::string(name), concat("has ", value, " at entry ", entry, "; ", rest));
  };
  for (int64_t i = 0; i < cu.size(0); ++i) {
    if (at[i] < 0 || at[i] > rows) fail(cu_name, i, at[i], concat("it must be from 0 to the ", rows, " rows"));
    if (i == 0 || is_empty(i - 1)) continue;
    if (at[i] < at[i - 1]) fail(cu_name, i, at[i], concat("it must not be less than the ", at[i - 1], " before it"));
    if (!used.defined() && at[i] - at[i - 1] > longest) {  // else rows that are not in use may be beyond
      fail(cu_name, i, at[i],
           concat("the sequence that ends there has ", at[i] - at[i - 1], " rows, more than ", longest_name,
                  ", which is ", longest));
    }
  }
  if (!used.defined()) return;
  const Tensor in_use = used.cpu().to(at::kLong).contiguous();
  for (int64_t b = 0; b < in_use.size(0); ++b) {
    const int64_t count = in_use.const_data_ptr<int64_t>()[b], length = at[b + 1] - at[b];
    if (!is_empty(b) && (count < 0 || count > length)) {
      fail(used_name, b, count, concat("it must be from 0 to the ", length, " rows of the sequence"));
    }
    if (!is_empty(b) && count > longest) {
      fail(used_name, b, count, concat("it must be at most ", longest_name, ", which is ", longest));
    }
  }
}

}  // namespace

bool entries_are_checked() {
  static const bool wanted = [] {
    const char* const value = std::getenv("FLASH_EXT_CHECK");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return wanted;
}

void check_entries(const Inputs& in, const Shape<int64_t>& shape) {
  if (!entries_are_checked() || !in.packed()) return;
  check_side("cu_seqlens_q", in.cu_seqlens_q, "seqused_q", in.seqused_q, shape.rows_q, "max_q", shape.len_q,
             in.cu_seqlens_q);
  const bool shared = !in.cu_seqlens_k.defined();
  check_side(shared ? "cu_seqlens_q" : "cu_seqlens_k", shared ? in.cu_seqlens_q : in.cu_seqlens_k, "seqused_k",
             in.seqused_k, shape.rows_k, "max_k", shape.len_k, in.cu_seqlens_q);
}

Options dense_options(Options options) {
  options.max_q = options.max_k = 0;
  options.gqa = true;
  return options;
}

std::vector<Sequence> sequences_of(const Inputs& in, const Shape<int64_t>& shape) {
  Problem problem;
  problem.len_q = shape.len_q;
  problem.len_k = shape.len_k;
  problem.rows_q = shape.rows_q;
  problem.rows_k = shape.rows_k;
  const Tensor lengths[] = {in.cu_seqlens_q.contiguous(),
                            (in.cu_seqlens_k.defined() ? in.cu_seqlens_k : in.cu_seqlens_q).contiguous(),
                            in.seqused_q.defined() ? in.seqused_q.contiguous() : Tensor(),
                            in.seqused_k.defined() ? in.seqused_k.contiguous() : Tensor()};
  const auto data = [](const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<int32_t>() : nullptr; };
  const Sequences sequences{data(lengths[0]), data(lengths[1]), data(lengths[2]), data(lengths[3])};
  std::vector<Sequence> result;
  for (int64_t b = 0; b < shape.batch[0]; ++b) result.push_back(sequence_of(problem, sequences, b));
  return result;
}

Tensor cut_rows(const Tensor& tensor, int64_t first, int64_t len) {
  return tensor.defined() ? tensor.narrow(0, first, len).transpose(0, 1).unsqueeze(0) : Tensor();
}

Tensor cut_lse(const Tensor& lse, const Sequence& sequence) {
  return lse.defined() ? lse.narrow(1, sequence.row_q, sequence.len_q).unsqueeze(0) : Tensor();
}

Tensor cut_scores(const Tensor& scores, int64_t b, const Sequence& sequence) {
  if (!scores.defined()) return {};
  Tensor result = scores;
  while (result.dim() < 4) result = result.unsqueeze(0);
  const auto cut = [&](int64_t dim, int64_t first, int64_t len) {
    if (result.size(dim) > 1) result = result.narrow(dim, first, len);
  };
  cut(0, b, 1);
  cut(2, 0, sequence.len_q);
  cut(3, 0, sequence.len_k);
  return result;
}

Tensor cut_slopes(const Tensor& slopes, int64_t b) {
  return slopes.defined() && slopes.dim() > 1 && slopes.size(0) > 1 ? slopes.narrow(0, b, 1) : slopes;
}

Inputs cut(const Inputs& in, int64_t b, const Sequence& sequence) {
  Inputs alone;
  alone.query = cut_rows(in.query, sequence.row_q, sequence.len_q);
  alone.key = cut_rows(in.key, sequence.row_k, sequence.len_k);
  alone.value = cut_rows(in.value, sequence.row_k, sequence.len_k);
  alone.mask = cut_scores(in.mask, b, sequence);
  alone.bias = cut_scores(in.bias, b, sequence);
  alone.alibi_slopes = cut_slopes(in.alibi_slopes, b);
  alone.sinks = in.sinks;
  return alone;
}

Padding::Side::Side(const Tensor& cu_seqlens, const Tensor& used, const c10::SymInt& longest_, const c10::SymInt& rows_)
    : longest(longest_.guard_int(__FILE__, __LINE__)), rows(rows_) {
  const Tensor cu = cu_seqlens.to(at::kLong).clamp(at::Scalar(0), at::Scalar(rows));
  const auto sequences = cu.sym_size(0) - 1;
  const Tensor first = cu.narrow_symint(0, 0, sequences), behind = cu.narrow_symint(0, 1, sequences);
  Tensor len = (behind - first).clamp(0, longest);
  if (used.defined()) len = at::minimum(len, used.to(at::kLong).clamp_min(0));
  const Tensor at = at::arange(longest, cu.options());
  length = len.unsqueeze(-1);
  is_padding = at >= length;
  row = (first.unsqueeze(-1) + at).masked_fill(is_padding, 0).flatten();
  const Tensor every = at::arange(at::Scalar(rows), cu.options());
  const Tensor owner = at::searchsorted(behind.contiguous(), every, /*out_int32=*/false, /*right=*/true)
                           .clamp_max(at::Scalar(sequences - 1));
  const Tensor in_sequence = every - first.index_select(0, owner);
  is_nobodys = (in_sequence < 0).logical_or(in_sequence >= len.index_select(0, owner));
  position = (owner * longest + in_sequence).masked_fill(is_nobodys, 0);
}

Tensor Padding::Side::pad(const Tensor& tensor) const {
  if (!tensor.defined()) return {};
  const auto sizes = tensor.sym_sizes();
  const auto sequences = is_padding.sym_size(0);
  if (sizes[0] == 0) return at::zeros_symint({sequences, sizes[1], longest, sizes[2]}, tensor.options());
  const Tensor all = tensor.index_select(0, row).view_symint({sequences, longest, sizes[1], sizes[2]});
  return all.masked_fill(is_padding.unsqueeze(-1).unsqueeze(-1), 0.0).transpose(1, 2);
}

Tensor Padding::Side::unpad(const Tensor& padded, double empty) const {
  if (!padded.defined()) return {};
  const auto sizes = padded.sym_sizes();
  const Tensor all = padded.transpose(1, 2).reshape_symint({sizes[0] * sizes[2], sizes[1], sizes[3]});
  return all.index_select(0, position).masked_fill(is_nobodys.unsqueeze(-1).unsqueeze(-1), empty);
}

namespace {

// What a caller gives may be more than there is; a mask or bias is made for it.
c10::SymInt longest_of(const Inputs& in, const c10::SymInt& given, const c10::SymInt& rows) {
  return in.mask.defined() || in.bias.defined() ? given : given.min(rows);
}

}  // namespace

Padding::Padding(const Inputs& in, const Options& options)
    : queries_(in.cu_seqlens_q, in.seqused_q, longest_of(in, options.max_q, in.query.sym_size(0)),
               in.query.sym_size(0)),
      keys_(in.cu_seqlens_k.defined() ? in.cu_seqlens_k : in.cu_seqlens_q, in.seqused_k,
            longest_of(in, options.max_k, in.key.sym_size(0)), in.key.sym_size(0)) {
  const Tensor offset = options.bottom_right ? keys_.length - queries_.length : at::zeros_like(queries_.length);
  offset_ = offset.unsqueeze(-1).unsqueeze(-1);
}

Tensor Padding::pad_lse(const Tensor& lse) const {
  return lse.defined() ? pad_queries(lse.transpose(0, 1).unsqueeze(-1)).squeeze(-1) : Tensor();
}

Tensor Padding::unpad_lse(const Tensor& padded, double empty) const {
  return padded.defined() ? queries_.unpad(padded.unsqueeze(-1), empty).squeeze(-1).transpose(0, 1) : Tensor();
}

Inputs Padding::inputs(const Inputs& in) const {
  Inputs padded;
  padded.query = pad_queries(in.query);
  padded.key = pad_keys(in.key);
  padded.value = pad_keys(in.value);
  padded.mask = in.mask;
  padded.bias = in.bias;
  padded.alibi_slopes = in.alibi_slopes;
  padded.sinks = in.sinks;
  return padded;
}

Tensor Padding::hidden(const Tensor& i, const Tensor& j) const {
  const auto beyond = [](const Tensor& position, const Tensor& length) {
    return position >= length.unsqueeze(-1).unsqueeze(-1);
  };
  return beyond(i, queries_.length).logical_or(beyond(j, keys_.length));
}

}  // namespace flash_ext::packed
