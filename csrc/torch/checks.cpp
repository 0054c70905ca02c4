// Shape algebra and the texts of errors, see checks.h. Instantiated for int64_t and for SymInt.
#include "torch/checks.h"

#include <algorithm>
#include <cmath>

#include "torch/check_parts.h"
#include "torch/fp8.h"

namespace flash_ext {

void check_options(const Options& options) {
  if (!(options.dropout_p >= 0.0 && options.dropout_p <= 1.0)) {
    fail("dropout_p", "is ", options.dropout_p, "; it must be a probability from 0 to 1");
  }
  if (options.scale.has_value() && !std::isfinite(*options.scale)) {
    fail("scale", "is ", *options.scale, "; it must be a finite number");
  }
  if (!(options.softcap >= 0.0) || !std::isfinite(options.softcap)) {
    fail("softcap", "is ", options.softcap, "; it must be finite and not negative (0 = off)");
  }
  for (const auto& [side, size] : {std::pair{"left", options.window_left}, std::pair{"right", options.window_right}}) {
    if (size.has_value() && *size < 0) {
      fail("window", "has ", *size, " on the ", side,
           "; a side is None (unbounded) or a number of keys that is not negative");
    }
  }
}

// Which part of a larger call's dropout map the call has.
template <class Int>
void check_dropout_place(const Inputs& in, const Options& options, const Shape<Int>& shape) {
  for (const auto& [name, row] : {std::pair{"dropout_first_query", &options.dropout_first_query},
                                  std::pair{"dropout_first_key", &options.dropout_first_key}}) {
    if (known((row->sym_lt(0)).sym_or((*row % 16).sym_ne(0)))) {
      fail(name, "is ", *row, "; it must be a multiple of 16 that is not negative");
    }
    if (in.packed() && !known_equal<c10::SymInt>(*row, 0)) {
      fail(name, "is ", *row, " beside cu_seqlens_q; of packed sequences only heads may be a part of a larger call's");
    }
  }
  const c10::SymInt &first = options.dropout_first_head, &heads = options.dropout_heads, here(shape.heads_q);
  if (known(first.sym_lt(0)) || known((first + here).sym_gt(known_equal<c10::SymInt>(heads, 0) ? here : heads))) {
    fail("dropout_first_head", "is ", first, " of a call with ", here, " heads; dropout_heads is ", heads,
         ", and the call's heads must lie among them (0: they are all)");
  }
}

template <class Int>
void check_grouped_heads(const Shape<Int>& shape) {
  const Int& hq = shape.heads_q;
  for (const auto& [name, heads] : {std::pair{"key", &shape.heads_k}, std::pair{"value", &shape.heads_v}}) {
    const bool divides = known_equal(*heads, Int(0)) ? must_equal(hq, Int(0)) : must_equal<Int>(hq % *heads, Int(0));
    if (!divides) {
      fail(name, "has ", *heads, " heads, which does not divide the ", hq, " heads of query (grouped-query attention)");
    }
  }
}

template <class Int>
void check_per_head(const char* name, const Tensor& numbers, const Shape<Int>& shape) {
  if (!numbers.defined()) return;
  const Sizes<Int> heads = shape.heads_sizes();
  const auto sizes = sizes_of<Int>(numbers);
  bool fits =
      shape.rank > 2 && !sizes.empty() && sizes.size() <= heads.size() && must_equal(sizes.back(), heads.back());
  for (size_t i = 1; fits && i <= sizes.size(); ++i) {
    fits = broadcasts_to(sizes[sizes.size() - i], heads[heads.size() - i]);
  }
  if (!fits) {
    fail(name, "of shape ", shape_text<Int>(numbers), " is neither (", shape.heads_q, ",) [heads] nor ",
         shape_text<Int>(heads), " [batch, heads]");
  }
}

void check_sinks_dtype(const Tensor& sinks, at::ScalarType query) {
  const auto wanted = query == at::kDouble ? at::kDouble : at::kFloat;
  if (sinks.defined() && sinks.scalar_type() != wanted) {
    fail("sinks", "is of ", dtype_text(sinks.scalar_type()), "; it must be of ", dtype_text(wanted),
         " beside a query of ", dtype_text(query));
  }
}

namespace {

void check_dtypes_and_devices(const Inputs& in, const Options& options) {
  const auto given = in.query.scalar_type();
  if (in.key.scalar_type() != given || in.value.scalar_type() != given || !(is_supported(given) || fp8::has(in))) {
    fail("query, key and value", "are of ", dtype_text(given), ", ", dtype_text(in.key.scalar_type()), " and ",
         dtype_text(in.value.scalar_type()),
         "; all three must have one dtype: torch.float16, torch.bfloat16, torch.float32, torch.float64 or "
         "torch.float8_e4m3fn");
  }
  fp8::check_dtypes(in, options);
  const auto dtype = result_type(in, options);
  const auto same_device = [&](const char* name, const Tensor& tensor) {
    if (tensor.defined() && tensor.device() != in.query.device()) {
      fail(name, "is on ", tensor.device(), ", but query is on ", in.query.device(),
           "; all tensors must be on one device");
    }
  };
  same_device("key", in.key);
  same_device("value", in.value);
  same_device("mask", in.mask);
  same_device("bias", in.bias);
  same_device("alibi_slopes", in.alibi_slopes);
  same_device("sinks", in.sinks);
  for (const fp8::Part& part : fp8::kParts) same_device(part.descale_name, in.*part.descale);
  same_device("cu_seqlens_q", in.cu_seqlens_q);
  same_device("cu_seqlens_k", in.cu_seqlens_k);
  same_device("seqused_q", in.seqused_q);
  same_device("seqused_k", in.seqused_k);
  if (in.mask.defined() && in.mask.scalar_type() != at::kBool) {
    fail("mask", "is of ", dtype_text(in.mask.scalar_type()), "; a mask must be of torch.bool (True = attend)");
  }
  if (in.bias.defined() && in.bias.scalar_type() != dtype && in.bias.scalar_type() != at::kFloat) {
    fail("bias", "is of ", dtype_text(in.bias.scalar_type()), "; it must be of ",
         in.mask.defined() ? "" : "torch.bool, ", "torch.float32 or ", fp8::has(in) ? "out's " : "query's ",
         dtype_text(dtype));
  }
  if (in.alibi_slopes.defined() && in.alibi_slopes.scalar_type() != at::kFloat) {
    fail("alibi_slopes", "is of ", dtype_text(in.alibi_slopes.scalar_type()), "; it must be of torch.float32");
  }
  check_sinks_dtype(in.sinks, dtype);
}

// The common size of a broadcast dimension, or an error that names the tensors.
template <class Int>
Int broadcast(const Int& a, const Int& b, const Inputs& in) {
  if (known_equal(a, b) || known_equal(b, Int(1))) return a;
  if (known_equal(a, Int(1))) return b;
  if (expect(c10::sym_eq(a, b))) return a;
  fail("query, key and value", "of shapes ", shape_text<Int>(in.query), ", ", shape_text<Int>(in.key), " and ",
       shape_text<Int>(in.value), " do not broadcast together in their leading dimensions");
}

template <class Int>
void check_heads(const Inputs& in, const Options& options, Shape<Int>& shape) {
  const Int hq = size_from_right<Int>(in.query, 3);
  shape.heads_k = size_from_right<Int>(in.key, 3);
  shape.heads_v = size_from_right<Int>(in.value, 3);
  if (!options.gqa) {
    shape.heads_q = broadcast(broadcast(hq, shape.heads_k, in), shape.heads_v, in);
    return;
  }
  shape.heads_q = hq;
  check_grouped_heads(shape);
}

// A mask or a bias broadcasts to the scores and may not enlarge them.
template <class Int>
void check_scores_like(const char* name, const Tensor& tensor, const Shape<Int>& shape) {
  if (!tensor.defined()) return;
  const Sizes<Int> scores = shape.sizes(shape.heads_q, shape.len_q, shape.len_k);
  const auto sizes = sizes_of<Int>(tensor);
  bool fits = sizes.size() <= scores.size();
  for (size_t i = 1; fits && i <= sizes.size(); ++i) {
    fits = broadcasts_to(sizes[sizes.size() - i], scores[scores.size() - i]);
  }
  if (!fits) {
    fail(name, "of shape ", shape_text<Int>(tensor), " does not broadcast to ", shape_text<Int>(scores),
         shape.rank > 3 ? " [batch, heads, queries, keys]"
                        : (shape.rank == 3 ? " [heads, queries, keys]" : " [queries, keys]"));
  }
}

}  // namespace

template <>
c10::ArrayRef<int64_t> sizes_of<int64_t>(const Tensor& tensor) {
  return tensor.sizes();
}

template <>
c10::ArrayRef<c10::SymInt> sizes_of<c10::SymInt>(const Tensor& tensor) {
  return tensor.sym_sizes();
}

namespace {

// Sizes of packed sequences; checks of the heads, the mask and what else dense calls have follow.
template <class Int>
Shape<Int> check_packed(const Inputs& in, const Options& options) {
  Shape<Int> shape;
  shape.packed = true;
  shape.rank = 4;
  const std::pair<const char*, const Tensor*> qkv[] = {{"query", &in.query}, {"key", &in.key}, {"value", &in.value}};
  for (const auto& [name, tensor] : qkv) {
    if (tensor->dim() != 3) {
      fail(name, "of shape ", shape_text<Int>(*tensor), " has ", tensor->dim(),
           " dimensions; packed sequences take 3: (rows of all sequences, heads, head_dim)");
    }
  }
  check_dtypes_and_devices(in, options);
  check_options(options);
  const auto of = [](const Tensor& tensor, int64_t dim) { return sizes_of<Int>(tensor)[dim]; };
  const auto check_lengths = [&](const char* name, const Tensor& tensor, const char* meaning, const auto& accepts) {
    if (!tensor.defined()) return;
    if (tensor.dim() != 1 || tensor.scalar_type() != at::kInt || !accepts(of(tensor, 0))) {
      fail(name, "of shape ", shape_text<Int>(tensor), " and ", dtype_text(tensor.scalar_type()), " is not ", meaning,
           " of torch.int32");
    }
  };
  check_lengths("cu_seqlens_q", in.cu_seqlens_q, "(sequences + 1,)",
                [](const Int& n) { return !known_equal<Int>(n, 0); });
  const Int batch = of(in.cu_seqlens_q, 0) - 1;
  check_lengths("cu_seqlens_k", in.cu_seqlens_k, "of the size of cu_seqlens_q, (sequences + 1,)",
                [&](const Int& n) { return must_equal<Int>(n, batch + 1); });
  for (const auto& [name, tensor] : {std::pair{"seqused_q", &in.seqused_q}, std::pair{"seqused_k", &in.seqused_k}}) {
    check_lengths(name, *tensor, "(sequences,)", [&](const Int& n) { return must_equal<Int>(n, batch); });
  }
  shape.batch.push_back(batch);
  shape.rows_q = of(in.query, 0);
  shape.rows_k = of(in.key, 0);
  shape.heads_q = of(in.query, 1);
  shape.heads_k = of(in.key, 1);
  shape.heads_v = of(in.value, 1);
  shape.head_dim = of(in.query, 2);
  shape.head_dim_v = of(in.value, 2);
  const auto longest = [&](const char* name, const c10::SymInt& given) -> Int {
    if (known(given.sym_lt(0))) fail(name, "is ", given, "; it must be a number of rows that is not negative");
    if constexpr (std::is_same_v<Int, c10::SymInt>) {
      return given;
    } else {
      return given.guard_int(__FILE__, __LINE__);
    }
  };
  shape.len_q = longest("max_q", options.max_q);
  shape.len_k = longest("max_k", options.max_k);
  if (!must_equal(of(in.key, 2), shape.head_dim)) {
    fail("key", "of shape ", shape_text<Int>(in.key), " has head dimension ", of(in.key, 2), ", but query has ",
         shape.head_dim, "; they must be equal");
  }
  if (!must_equal(of(in.value, 0), shape.rows_k)) {
    fail("value", "of shape ", shape_text<Int>(in.value), " has ", of(in.value, 0), " rows, but key has ", shape.rows_k,
         "; they must be equal");
  }
  if (!in.cu_seqlens_k.defined() && !must_equal(shape.rows_k, shape.rows_q)) {
    fail("cu_seqlens_k", "is None, which means the sequences of cu_seqlens_q, but key has ", shape.rows_k,
         " rows and query ", shape.rows_q);
  }
  check_grouped_heads(shape);
  return shape;
}

void check_dense(const Inputs& in, const Options& options) {
  for (const auto& [name, tensor] : {std::pair{"cu_seqlens_k", &in.cu_seqlens_k}, std::pair{"seqused_q", &in.seqused_q},
                                     std::pair{"seqused_k", &in.seqused_k}}) {
    if (tensor->defined()) fail(name, "is given without cu_seqlens_q, which makes sequences packed");
  }
  for (const auto& [name, size] : {std::pair{"max_q", &options.max_q}, std::pair{"max_k", &options.max_k}}) {
    if (!known_equal<c10::SymInt>(*size, 0)) {
      fail(name, "is given without cu_seqlens_q, which makes sequences packed");
    }
  }
}

}  // namespace

template <class Int>
Shape<Int> check_call(const Inputs& in, const Options& options) {
  if (in.packed()) {
    Shape<Int> shape = check_packed<Int>(in, options);
    check_scores_like("mask", in.mask, shape);
    check_scores_like("bias", in.bias, shape);
    check_per_head("alibi_slopes", in.alibi_slopes, shape);
    if (in.sinks.defined() && in.sinks.dim() != 1) {
      fail("sinks", "of shape ", shape_text<Int>(in.sinks), " is not (", shape.heads_q, ",) [heads]");
    }
    check_per_head("sinks", in.sinks, shape);
    check_dropout_place(in, options, shape);
    fp8::check_descales(in, shape);
    return shape;
  }
  check_dense(in, options);
  const std::pair<const char*, const Tensor*> qkv[] = {{"query", &in.query}, {"key", &in.key}, {"value", &in.value}};
  Shape<Int> shape;
  for (const auto& [name, tensor] : qkv) {
    if (tensor->dim() < 2) {
      fail(name, "of shape ", shape_text<Int>(*tensor), " has ", tensor->dim(),
           " dimensions; it needs 2 or more: (..., heads, length, head_dim)");
    }
    shape.rank = std::max(shape.rank, tensor->dim());
  }
  check_dtypes_and_devices(in, options);
  check_options(options);

  shape.len_q = size_from_right<Int>(in.query, 2);
  shape.len_k = size_from_right<Int>(in.key, 2);
  shape.head_dim = size_from_right<Int>(in.query, 1);
  shape.head_dim_v = size_from_right<Int>(in.value, 1);
  if (!must_equal(size_from_right<Int>(in.key, 1), shape.head_dim)) {
    fail("key", "of shape ", shape_text<Int>(in.key), " has head dimension ", size_from_right<Int>(in.key, 1),
         ", but query has ", shape.head_dim, "; they must be equal");
  }
  if (!must_equal(size_from_right<Int>(in.value, 2), shape.len_k)) {
    fail("value", "of shape ", shape_text<Int>(in.value), " has length ", size_from_right<Int>(in.value, 2),
         ", but key has ", shape.len_k, "; they must be equal");
  }
  for (int64_t from_right = shape.rank; from_right > 3; --from_right) {
    shape.batch.push_back(
        broadcast(broadcast(size_from_right<Int>(in.query, from_right), size_from_right<Int>(in.key, from_right), in),
                  size_from_right<Int>(in.value, from_right), in));
  }
  check_heads(in, options, shape);
  check_scores_like("mask", in.mask, shape);
  check_scores_like("bias", in.bias, shape);
  check_per_head("alibi_slopes", in.alibi_slopes, shape);
  check_per_head("sinks", in.sinks, shape);
  check_dropout_place(in, options, shape);
  fp8::check_descales(in, shape);
  return shape;
}

void check_drop_in(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
                   bool is_causal, bool enable_gqa) {
  if (query.scalar_type() == at::kFloat8_e4m3fn) {
    fail("query", "is of torch.float8_e4m3fn, which flash_ext.attention takes; scaled_dot_product_attention takes ",
         "torch.float16, torch.bfloat16, torch.float32 or torch.float64");
  }
  if (attn_mask.has_value() && attn_mask->defined() && is_causal) {
    fail("attn_mask", "is given together with is_causal=True; only one of the two may be set");
  }
  for (const auto& [name, tensor] : {std::pair{"query", &query}, std::pair{"key", &key}, std::pair{"value", &value}}) {
    if (tensor->is_nested() && tensor->layout() == at::kStrided) {
      fail(name,
           "is a nested tensor of layout torch.strided; make it one of layout torch.jagged, (B, heads, j, "
           "head_dim)");
    }
    if (enable_gqa && tensor->dim() < 3) {
      fail("enable_gqa", "is True, but ", name, " has ", tensor->dim(), " dimensions; grouped heads need 3 or more");
    }
  }
}

template <class Int>
void check_saved(const Shape<Int>& shape, const Inputs& in, const Tensor& grad_out, const Tensor& grad_lse,
                 const ForwardResult& saved, const Options& options) {
  const auto expect = [&](const char* name, const Tensor& tensor, const Sizes<Int>& sizes, at::ScalarType dtype) {
    if (!tensor.defined()) return;
    const auto seen = sizes_of<Int>(tensor);
    bool fits = seen.size() == sizes.size() && tensor.scalar_type() == dtype && tensor.device() == in.query.device();
    for (size_t i = 0; fits && i < sizes.size(); ++i) fits = must_equal(seen[i], sizes[i]);
    if (!fits) {
      fail(name, "of shape ", shape_text<Int>(tensor), ", ", dtype_text(tensor.scalar_type()), " on ", tensor.device(),
           " does not fit this call, which needs ", shape_text<Int>(sizes), ", ", dtype_text(dtype), " on ",
           in.query.device());
    }
  };
  const auto dtype = result_type(in, options);
  const auto accumulate = dtype == at::kDouble ? at::kDouble : at::kFloat;
  expect("grad_out", grad_out, shape.out_sizes(), dtype);
  expect("grad_lse", grad_lse, shape.lse_sizes(), accumulate);
  expect("out", saved.out, shape.out_sizes(), dtype);
  expect("lse", saved.lse, shape.lse_sizes(), accumulate);
  if (options.dropout_p > 0) expect("rng_state", saved.rng_state, {Int(2)}, at::kLong);
}

template <class Int>
Sizes<Int> strides_in_order_of(const Sizes<Int>& sizes, const Tensor& like) {
  const auto rank = static_cast<int64_t>(sizes.size());
  const auto like_sizes = sizes_of<Int>(like);
  const auto like_strides = strides_of<Int>(like);
  const int64_t missing = rank - static_cast<int64_t>(like_sizes.size());

  // Dimensions that have an order, outermost first, put back into the places that they held among the others.
  c10::SmallVector<int64_t, 6> order(rank), places, sorted;
  for (int64_t i = 0; i < rank; ++i) order[i] = i;
  for (int64_t i = std::max<int64_t>(missing, 0); i < rank - 1; ++i) {
    if (!known_equal(like_sizes[i - missing], Int(1)) && !known_equal(like_strides[i - missing], Int(0))) {
      places.push_back(i);
    }
  }
  sorted = places;
  // By insertion, because std::stable_sort allocates.
  const auto before = [&](int64_t a, int64_t b) {
    return is_outside(like_strides[a - missing], like_strides[b - missing]);
  };
  for (auto next = sorted.begin(); next != sorted.end(); ++next) {
    std::rotate(std::upper_bound(sorted.begin(), next, *next, before), next, next + 1);
  }
  for (size_t i = 0; i < places.size(); ++i) order[places[i]] = sorted[i];

  Sizes<Int> strides(sizes.size(), Int(1));
  Int stride = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[order[i]] = stride;
    stride = stride * at_least_one(sizes[order[i]]);
  }
  return strides;
}

template Shape<int64_t> check_call(const Inputs&, const Options&);
template Shape<c10::SymInt> check_call(const Inputs&, const Options&);
template void check_grouped_heads(const Shape<int64_t>&);
template void check_grouped_heads(const Shape<c10::SymInt>&);
template void check_per_head(const char*, const Tensor&, const Shape<int64_t>&);
template void check_per_head(const char*, const Tensor&, const Shape<c10::SymInt>&);
template void check_saved(const Shape<int64_t>&, const Inputs&, const Tensor&, const Tensor&, const ForwardResult&,
                          const Options&);
template void check_saved(const Shape<c10::SymInt>&, const Inputs&, const Tensor&, const Tensor&, const ForwardResult&,
                          const Options&);
template Sizes<int64_t> strides_in_order_of(const Sizes<int64_t>&, const Tensor&);
template Sizes<c10::SymInt> strides_in_order_of(const Sizes<c10::SymInt>&, const Tensor&);

}  // namespace flash_ext
