// What can be wrong with a call of attention_with_cache or gather_pages, see cache.h; for int64_t and for SymInt.
#include <ATen/ATen.h>

#include <limits>

#include "torch/cache.h"
#include "torch/check_parts.h"
#include "torch/packed.h"

namespace flash_ext {
namespace {

template <class Int>
Int size(const Tensor& tensor, int64_t dim) {
  return sizes_of<Int>(tensor)[dim];
}

template <class Int>
void need_dims(const char* name, const Tensor& tensor, const char* meaning) {
  if (tensor.dim() == 4) return;
  fail(name, "of shape ", shape_text<Int>(tensor), " has ", tensor.dim(), " dimensions; it needs 4: ", meaning);
}

template <class Int>
void need(const char* name, const Tensor& tensor, const Sizes<Int>& sizes, const char* meaning, at::ScalarType dtype) {
  if (!tensor.defined()) return;
  const auto seen = sizes_of<Int>(tensor);
  bool fits = seen.size() == sizes.size() && tensor.scalar_type() == dtype;
  for (size_t i = 0; fits && i < sizes.size(); ++i) fits = must_equal(seen[i], sizes[i]);
  if (fits) return;
  fail(name, "of shape ", shape_text<Int>(tensor), " and ", dtype_text(tensor.scalar_type()), " is not ",
       shape_text<Int>(c10::ArrayRef<Int>(sizes)), " [", meaning, "] of ", dtype_text(dtype));
}

void need_device(const char* name, const Tensor& tensor, const Tensor& query) {
  if (!tensor.defined() || tensor.device() == query.device()) return;
  fail(name, "is on ", tensor.device(), ", but query is on ", query.device(), "; all tensors must be on one device");
}

void need_both(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) {
  if (tensor.defined() == other.defined()) return;
  fail(tensor.defined() ? name : other_name, "is given without ", tensor.defined() ? other_name : name,
       "; they come together");
}

// (batch, columns) of torch.int32.
template <class Int>
void need_table(const Tensor& table, const Int& batch) {
  if (table.dim() == 2 && table.scalar_type() == at::kInt && must_equal(size<Int>(table, 0), batch)) return;
  fail("block_table", "of shape ", shape_text<Int>(table), " and ", dtype_text(table.scalar_type()), " is not (", batch,
       ", pages of a sequence) of torch.int32");
}

template <class Int>
void check_caches(const CacheInputs& in, CacheShape<Int>& shape) {
  const Tensor &k = in.key_cache, &v = in.value_cache;
  const auto dtype = in.query.scalar_type();
  if (!is_supported(dtype)) {
    fail("query", "is of ", dtype_text(dtype),
         "; it must be of torch.float16, torch.bfloat16, torch.float32 or torch.float64");
  }
  if (k.scalar_type() != v.scalar_type() || (k.scalar_type() != dtype && k.scalar_type() != at::kFloat8_e4m3fn)) {
    fail("key_cache and value_cache", "are of ", dtype_text(k.scalar_type()), " and ", dtype_text(v.scalar_type()),
         "; both must be of query's ", dtype_text(dtype), " or of torch.float8_e4m3fn");
  }
  for (const int64_t dim : {0, 1}) {
    if (!must_equal(size<Int>(k, dim), size<Int>(v, dim))) {
      fail("value_cache", "of shape ", shape_text<Int>(v), " does not have the ", dim == 0 ? "slots" : "rows",
           " of key_cache, whose shape is ", shape_text<Int>(k));
    }
  }
  if (!must_equal(size<Int>(k, 3), shape.head_dim)) {
    fail("key_cache", "of shape ", shape_text<Int>(k), " has head dimension ", size<Int>(k, 3), ", but query has ",
         shape.head_dim, "; they must be equal");
  }
  for (const auto& [name, scale, heads] : {std::tuple{"k_descale", &in.k_descale, &shape.heads_k},
                                           std::tuple{"v_descale", &in.v_descale, &shape.heads_v}}) {
    if (!scale->defined()) continue;
    if (k.scalar_type() == dtype) fail(name, "is given, but the caches are not of torch.float8_e4m3fn");
    need<Int>(name, *scale, {shape.batch, *heads}, "batch, heads of the cache", at::kFloat);
  }
}

template <class Int>
void check_places(const CacheInputs& in, CacheShape<Int>& shape) {
  need<Int>("cache_seqlens", in.cache_seqlens, {shape.batch}, "batch", at::kInt);
  need<Int>("cache_batch_index", in.cache_batch_index, {shape.batch}, "batch", at::kInt);
  if (in.block_table.defined()) {
    if (in.cache_batch_index.defined()) {
      fail("cache_batch_index", "is given beside block_table, which already says where each sequence lies");
    }
    need_table(in.block_table, shape.batch);
    shape.capacity = size<Int>(in.block_table, 1) * shape.rows;
  } else {
    if (!in.cache_batch_index.defined() && !expect(c10::sym_ge(shape.slots, shape.batch))) {
      fail("key_cache", "has ", shape.slots, " slots, fewer than the ", shape.batch, " sequences of query");
    }
    shape.capacity = shape.rows;
  }
  if (known(c10::sym_gt(shape.batch * shape.capacity, Int(std::numeric_limits<int32_t>::max())))) {
    fail("key_cache", "holds ", shape.batch, " sequences of ", shape.capacity, " rows; together there may be 2^31 - 1");
  }
}

template <class Int>
void check_new_rows(const CacheInputs& in, CacheShape<Int>& shape) {
  need_both("key", in.key, "value", in.value);
  need_both("rotary_cos", in.rotary_cos, "rotary_sin", in.rotary_sin);
  const auto dtype = in.query.scalar_type();
  if (in.key.defined()) {
    need_dims<Int>("key", in.key, "(batch, new rows, heads, head_dim)");
    shape.added = size<Int>(in.key, 1);
    const char* const meaning = "batch, new rows, heads and columns of the cache";
    need<Int>("key", in.key, {shape.batch, shape.added, shape.heads_k, shape.head_dim}, meaning, dtype);
    need<Int>("value", in.value, {shape.batch, shape.added, shape.heads_v, shape.head_dim_v}, meaning, dtype);
  }
  if (!in.rotary_cos.defined()) return;
  if (!in.key.defined()) fail("rotary_cos", "is given without key, the new rows that it rotates");
  const Tensor& cos = in.rotary_cos;
  const auto type = cos.scalar_type();
  const bool fits = cos.dim() == 2 && (type == dtype || type == at::kFloat) && !known_equal<Int>(size<Int>(cos, 0), 0);
  if (!fits || !expect(c10::sym_le(size<Int>(cos, 1) * 2, shape.head_dim))) {
    fail("rotary_cos", "of shape ", shape_text<Int>(cos), " and ", dtype_text(type),
         " is not (positions, half of the rotated columns), at least one position and at most the head dimension ",
         shape.head_dim, ", of torch.float32 or query's ", dtype_text(dtype));
  }
  need<Int>("rotary_sin", in.rotary_sin, {size<Int>(cos, 0), size<Int>(cos, 1)}, "as rotary_cos", type);
}

}  // namespace

template <class Int>
CacheShape<Int> check_cache(const CacheInputs& in, const CacheOptions& options) {
  need_dims<Int>("query", in.query, "(batch, queries, heads, head_dim)");
  for (const auto& [name, cache] : {std::pair{"key_cache", &in.key_cache}, std::pair{"value_cache", &in.value_cache}}) {
    need_dims<Int>(name, *cache, "(batch, rows, heads, head_dim), or (pages, rows of a page, heads, head_dim)");
  }
  for (const auto& [name, tensor] : kCacheInputs) need_device(name, in.*tensor, in.query);
  CacheShape<Int> shape;
  shape.batch = size<Int>(in.query, 0);
  shape.len_q = size<Int>(in.query, 1);
  shape.heads_q = size<Int>(in.query, 2);
  shape.head_dim = size<Int>(in.query, 3);
  shape.slots = size<Int>(in.key_cache, 0);
  shape.rows = size<Int>(in.key_cache, 1);
  shape.heads_k = size<Int>(in.key_cache, 2);
  shape.heads_v = size<Int>(in.value_cache, 2);
  shape.head_dim_v = size<Int>(in.value_cache, 3);
  check_caches(in, shape);
  check_places(in, shape);
  check_new_rows(in, shape);
  check_options(options.attention);
  Shape<Int> dense;
  dense.rank = 4;
  dense.batch.push_back(shape.batch);
  dense.heads_q = shape.heads_q;
  dense.heads_k = shape.heads_k;
  dense.heads_v = shape.heads_v;
  try {
    check_grouped_heads(dense);
  } catch (const AttentionError& error) {
    throw AttentionError(error.argument() + "_cache", error.rest());
  }
  check_per_head("alibi_slopes", in.alibi_slopes, dense);
  if (in.sinks.defined() && in.sinks.dim() != 1) {
    fail("sinks", "of shape ", shape_text<Int>(in.sinks), " is not (", shape.heads_q, ",) [heads]");
  }
  check_per_head("sinks", in.sinks, dense);
  check_sinks_dtype(in.sinks, in.query.scalar_type());
  if (in.alibi_slopes.defined() && in.alibi_slopes.scalar_type() != at::kFloat) {
    fail("alibi_slopes", "is of ", dtype_text(in.alibi_slopes.scalar_type()), "; it must be of torch.float32");
  }
  return shape;
}

template <class Int>
void check_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                 const Tensor& seqused_k) {
  for (const auto& [name, tensor] : {std::pair{"key", &key}, std::pair{"value", &value}}) {
    need_dims<Int>(name, *tensor, "with block_table, (pages, rows of a page, heads, head_dim)");
    need_device(name, *tensor, query);
  }
  need_device("block_table", block_table, query);
  need_device("seqused_k", seqused_k, query);
  for (const int64_t dim : {0, 1}) {
    if (!must_equal(size<Int>(key, dim), size<Int>(value, dim))) {
      fail("value", "of shape ", shape_text<Int>(value), " does not have the pages of key, whose shape is ",
           shape_text<Int>(key));
    }
  }
  if (seqused_k.dim() != 1 || seqused_k.scalar_type() != at::kInt) {
    fail("seqused_k", "of shape ", shape_text<Int>(seqused_k), " and ", dtype_text(seqused_k.scalar_type()),
         " is not (sequences,) of torch.int32");
  }
  need_table(block_table, size<Int>(seqused_k, 0));
}

void check_page_entries(const Tensor& block_table, const char* lengths_name, const Tensor& lengths, int64_t added,
                        int64_t pages, int64_t rows) {
  if (!packed::entries_are_checked() || block_table.numel() == 0) return;
  const Tensor table = block_table.cpu().to(at::kLong).contiguous(), used = lengths.cpu().to(at::kLong).contiguous();
  const int64_t columns = table.size(1);
  for (int64_t b = 0; b < table.size(0); ++b) {
    const int64_t length = used.const_data_ptr<int64_t>()[b];
    if (length < 0 || length + added > columns * rows) {
      fail(lengths_name, "has ", length, " at entry ", b, "; it must be from 0 to ", columns * rows - added,
           ", rows of a sequence's pages in block_table",
           added > 0 ? concat(" that leave room for the ", added, " new ones") : "");
    }
    for (int64_t i = 0; i * rows < length + added; ++i) {
      const int64_t page = table.const_data_ptr<int64_t>()[b * columns + i];
      if (page >= 0 && page < pages) continue;
      fail("block_table", "has ", page, " at entry (", b, ", ", i, "); it must be from 0 to ", pages - 1,
           ", one of the ", pages, " pages");
    }
  }
}

void check_cache_entries(const CacheInputs& in, const CacheOptions& options, const CacheShape<int64_t>& shape) {
  if (!packed::entries_are_checked()) return;
  if (in.block_table.defined()) {
    check_page_entries(in.block_table, "cache_seqlens", in.cache_seqlens, shape.added, shape.slots, shape.rows);
  }
  const auto check = [&](const char* name, const Tensor& tensor, int64_t most, const std::string& meaning) {
    if (!tensor.defined()) return;
    const Tensor values = tensor.cpu().to(at::kLong).contiguous();
    for (int64_t b = 0; b < values.size(0); ++b) {
      const int64_t value = values.const_data_ptr<int64_t>()[b];
      if (value >= 0 && value <= most) continue;
      fail(name, "has ", value, " at entry ", b, "; it must be from 0 to ", most, meaning);
    }
  };
  const std::string room = shape.added > 0 ? concat(" that leave room for the ", shape.added, " new ones") : "";
  check("cache_seqlens", in.cache_seqlens, shape.capacity - shape.added, ", rows of a sequence" + room);
  check("cache_batch_index", in.cache_batch_index, shape.slots - 1, concat(", one of the ", shape.slots, " slots"));
  if (in.rotary_cos.defined()) {
    const int64_t positions = in.rotary_cos.size(0), queries = options.queries_have_positions() ? shape.len_q : 1;
    const int64_t last = std::max(shape.added, queries);
    check("cache_seqlens", in.cache_seqlens, positions - last,
          concat(", where rotary_cos has the ", positions, " positions that are rotated"));
  }
}

template CacheShape<int64_t> check_cache(const CacheInputs&, const CacheOptions&);
template CacheShape<c10::SymInt> check_cache(const CacheInputs&, const CacheOptions&);
template void check_pages<int64_t>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);
template void check_pages<c10::SymInt>(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&);

}  // namespace flash_ext
