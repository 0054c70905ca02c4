// What attention_with_cache and gather_pages compute, see cache.h; cache_ops.cpp has the operators. New rows are
// appended by a kernel (cache_append.cpp) or else by torch's operations; then the decode kernel attends
// (cache_kernel.cpp) or, where it does not, a composite that ends in a call of `attention` with packed sequences. That
// reads a cache where it lies, as rows of one long tensor in which each sequence starts somewhere; pages and fp8 are
// copied.
#include "torch/cache.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "torch/nvtx.h"
#include "torch/problem.h"

namespace flash_ext {
namespace {

using Shape64 = CacheShape<int64_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLargestE4m3 = 448.0;

using cache::is_fp8;

// Few of torch's operations know fp8; those that only move it see bytes.
Tensor movable(const Tensor& tensor) { return is_fp8(tensor) ? tensor.view(at::kByte) : tensor; }

Tensor select(const Tensor& cache, const Tensor& index) {
  return movable(cache).index_select(0, index).view(cache.scalar_type());
}

// (batch, heads) beside (batch, rows, heads, cols).
Tensor per_head(const Tensor& scale) { return scale.unsqueeze(1).unsqueeze(-1); }

// ---- append ---------------------------------------------------------------------------------------------------------

// x (B, n, heads, cols) turned by the angles of `positions` (B, n), in pairs of columns (c, c + half), or of
// neighbours.
Tensor rotated(const Tensor& x, const CacheInputs& in, const Tensor& positions, bool interleaved) {
  const auto wide = accumulate_type(x.scalar_type());
  const int64_t half = in.rotary_cos.size(1), cols = x.size(3);
  const Tensor at = positions.clamp(0, in.rotary_cos.size(0) - 1).expand({x.size(0), x.size(1)}).flatten();
  const auto angles = [&](const Tensor& table) {
    return table.index_select(0, at).to(wide).view({x.size(0), x.size(1), 1, half});
  };
  const Tensor cos = angles(in.rotary_cos), sin = angles(in.rotary_sin);
  const Tensor turning = x.narrow(3, 0, 2 * half).to(wide);
  const Tensor pairs = interleaved ? turning.unflatten(3, {half, 2}) : turning.unflatten(3, {2, half}).transpose(3, 4);
  const Tensor first = pairs.select(4, 0), second = pairs.select(4, 1);
  const Tensor turned[] = {first * cos - second * sin, first * sin + second * cos};
  const Tensor all = (interleaved ? at::stack(turned, 4) : at::stack(turned, 3)).flatten(3);
  return at::cat({all.to(x.scalar_type()), x.narrow(3, 2 * half, cols - 2 * half)}, 3);
}

// New rows as the cache holds them.
Tensor in_dtype_of(const Tensor& cache, const Tensor& fresh, const Tensor& descale) {
  if (!is_fp8(cache)) return fresh;
  Tensor wide = fresh.to(accumulate_type(fresh.scalar_type()));
  if (descale.defined()) wide = wide / per_head(descale);
  return wide.clamp(-kLargestE4m3, kLargestE4m3).to(at::kFloat8_e4m3fn);
}

// Writes the new rows to where they belong, without asking on the host whether they have a place. What has none writes
// once more what the first row that has one writes; if no row has one, all write what is in the cache there already.
void append(const CacheInputs& in, const Shape64& shape, const Tensor& length, const Tensor& key) {
  if (shape.batch * shape.added == 0 || shape.slots * shape.capacity == 0) return;
  const Tensor position = length.unsqueeze(1) + at::arange(shape.added, length.options());
  Tensor has_place = (length >= 0).unsqueeze(1).logical_and(position < shape.capacity);
  Tensor row = position.clamp(0, shape.capacity - 1), slot;
  if (in.block_table.defined()) {
    slot = in.block_table.to(at::kLong).gather(1, row.floor_divide(shape.rows));
    row = row.remainder(shape.rows);
  } else if (in.cache_batch_index.defined()) {
    slot = in.cache_batch_index.to(at::kLong).unsqueeze(1).expand_as(row);
  } else {
    slot = at::arange(shape.batch, length.options()).unsqueeze(1).expand_as(row);
  }
  has_place = has_place.logical_and(slot >= 0).logical_and(slot < shape.slots).flatten();
  slot = slot.clamp(0, shape.slots - 1).flatten();
  row = row.flatten();
  const Tensor first = has_place.to(at::kByte).argmax(0, /*keepdim=*/true);
  const Tensor first_slot = slot.index_select(0, first), first_row = row.index_select(0, first);
  const Tensor any = has_place.index_select(0, first).view({1, 1, 1});
  const c10::List<OptionalTensor> there({first_slot, first_row});
  const c10::List<OptionalTensor> places(
      {at::where(has_place, slot, first_slot), at::where(has_place, row, first_row)});
  const auto write = [&](const Tensor& into, const Tensor& fresh, const Tensor& descale) {
    Tensor cache = movable(into);
    const Tensor rows = movable(in_dtype_of(into, fresh, descale).contiguous()).flatten(0, 1);
    const Tensor instead = at::where(any, rows.index_select(0, first), at::index(cache, there));
    at::index_put_(cache, places, at::where(has_place.view({-1, 1, 1}), rows, instead));
  };
  write(in.key_cache, key, in.k_descale);
  write(in.value_cache, in.value, in.v_descale);
}

// ---- keys as packed rows --------------------------------------------------------------------------------------------

Tensor dequantised(const Tensor& cache, const Tensor& descale, at::ScalarType dtype) {
  if (!is_fp8(cache)) return cache;
  const Tensor wide = cache.to(accumulate_type(dtype));
  return (descale.defined() ? wide * per_head(descale) : wide).to(dtype);
}

// How many rows lie between the starts of two slots, where (slots, rows, heads, cols) is rows of one tensor.
std::optional<int64_t> rows_between_slots(const Tensor& cache) {
  const int64_t slots = cache.size(0), rows = cache.size(1), step = cache.stride(1);
  if (cache.size(3) > 1 && cache.stride(3) != 1) return std::nullopt;
  if (slots == 1) return rows;
  if (rows == 1) return 1;
  if (step <= 0 || cache.stride(0) % step != 0) return std::nullopt;
  const int64_t between = cache.stride(0) / step;
  const bool fits = between * (slots - 1) + rows <= std::numeric_limits<int32_t>::max();
  return fits ? std::optional(between) : std::nullopt;
}

Tensor as_rows(const Tensor& cache, int64_t between) {
  const int64_t slots = cache.size(0), rows = cache.size(1);
  const int64_t step = rows == 1 ? cache.stride(0) : cache.stride(1);
  return cache.as_strided({between * (slots - 1) + rows, cache.size(2), cache.size(3)},
                          {step, cache.stride(2), cache.stride(3)}, cache.storage_offset());
}

// (batch, columns * rows, heads, cols) of pages (pages, rows, heads, cols).
Tensor gathered(const Tensor& pool, const Tensor& block_table) {
  const int64_t pages = pool.size(0), batch = block_table.size(0);
  const int64_t columns = pages > 0 ? block_table.size(1) : 0;
  const Tensor index = block_table.narrow(1, 0, columns).clamp(0, std::max<int64_t>(pages - 1, 0)).flatten();
  return select(pool, index).view({batch, columns * pool.size(1), pool.size(2), pool.size(3)});
}

// Packed sequences of a decode call: key, value and where sequences lie. Where they do not lie one behind the other,
// the rows between the end of one and the start of the next are a sequence of their own, which has no query.
Inputs packed_inputs(const CacheInputs& in, const Shape64& shape, const Tensor& query, const Tensor& total) {
  const auto dtype = query.scalar_type();
  const auto ints = in.cache_seqlens.options();
  Tensor key = in.key_cache, value = in.value_cache, slot;
  if (in.block_table.defined()) {
    key = gathered(key, in.block_table);
    value = gathered(value, in.block_table);
  } else if (in.cache_batch_index.defined()) {
    slot = in.cache_batch_index.clamp(0, shape.slots - 1);
  }
  const auto of_sequences = [&](const Tensor& cache) {
    return slot.defined() ? select(cache, slot) : cache.narrow(0, 0, shape.batch);
  };
  if (is_fp8(key)) {  // a scale belongs to a sequence, not to a slot
    key = dequantised(of_sequences(key), in.k_descale, dtype);
    value = dequantised(of_sequences(value), in.v_descale, dtype);
    slot.reset();
  }
  auto between = rows_between_slots(key);
  if (!between.has_value() || between != rows_between_slots(value)) {
    if (key.size(0) > shape.batch) {  // whose rows may be more than 32 bits count
      key = of_sequences(key);
      value = of_sequences(value);
      slot.reset();
    }
    key = key.contiguous();
    value = value.contiguous();
    between = shape.capacity;
  }
  Inputs result;
  result.query = query.reshape({shape.batch * shape.len_q, shape.heads_q, shape.head_dim});
  result.key = as_rows(key, *between);
  result.value = as_rows(value, *between);
  result.alibi_slopes = in.alibi_slopes;
  result.sinks = in.sinks;
  result.seqused_k = total;
  if (!slot.defined() && *between == shape.capacity) {
    const Tensor every = at::arange(shape.batch + 1, ints);
    result.cu_seqlens_q = every * shape.len_q;
    result.cu_seqlens_k = every * shape.capacity;
    return result;
  }
  const auto interleaved = [](const Tensor& a, const Tensor& b) { return at::stack({a, b}, 1).flatten(); };
  const int64_t sequences = 2 * shape.batch - 1;
  const Tensor every = at::arange(shape.batch, ints), start = (slot.defined() ? slot : every) * *between;
  result.cu_seqlens_q = interleaved(every * shape.len_q, (every + 1) * shape.len_q);
  result.cu_seqlens_k = interleaved(start, start + shape.capacity);
  result.seqused_k = interleaved(total, at::zeros_like(total)).narrow(0, 0, sequences);
  if (in.alibi_slopes.defined() && in.alibi_slopes.dim() == 2 && in.alibi_slopes.size(0) > 1) {
    result.alibi_slopes = in.alibi_slopes.repeat_interleave(2, 0).narrow(0, 0, sequences);
  }
  return result;
}

// Rows of each sequence after the new ones, (B,) of int32.
Tensor total_of(const CacheInputs& in, const Shape64& shape) {
  const Tensor length = in.cache_seqlens.to(at::kLong);
  Tensor exists = length >= 0;
  if (in.cache_batch_index.defined()) {
    exists = exists.logical_and(in.cache_batch_index >= 0).logical_and(in.cache_batch_index < shape.slots);
  }
  return at::where(exists, (length + shape.added).clamp_max(shape.capacity), 0).to(at::kInt);
}

}  // namespace

// ---- kernels --------------------------------------------------------------------------------------------------------

cache::Result cache::with_cache(const CacheInputs& in, const CacheOptions& given, bool return_lse) {
  const nvtx::Range range(nvtx::Op::kAttentionWithCache);
  const auto guard = in.query.is_cpu() ? c10::OptionalDeviceGuard() : c10::OptionalDeviceGuard(in.query.device());
  const Shape64 shape = check_cache<int64_t>(in, given);
  check_cache_entries(in, given, shape);
  Tensor query = in.query;
  if (auto turned = in.key.defined() ? append_by_kernel(in, given, shape) : std::nullopt) {
    query = *std::move(turned);
  } else if (in.key.defined()) {
    const Tensor length = in.cache_seqlens.to(at::kLong);
    Tensor key = in.key;
    if (in.rotary_cos.defined()) {
      const Tensor start = length.unsqueeze(1);
      const auto at = [&](int64_t rows) { return start + at::arange(rows, length.options()); };
      key = rotated(key, in, at(shape.added), given.rotary_interleaved);
      query = rotated(query, in, given.queries_have_positions() ? at(shape.len_q) : start, given.rotary_interleaved);
    }
    append(in, shape, length, key);
  }
  const auto wide = accumulate_type(query.scalar_type());
  if (shape.batch * shape.heads_q * shape.len_q * shape.slots * shape.capacity == 0) {
    const auto sizes = {shape.batch, shape.heads_q, shape.len_q};
    const Tensor lse = return_lse ? at::full(sizes, -kInfinity, query.options().dtype(wide))
                                  : at::empty({0}, query.options().dtype(at::kFloat));
    if (return_lse && in.sinks.defined()) lse.copy_(in.sinks.unsqueeze(-1).expand(sizes));
    return {at::zeros({shape.batch, shape.len_q, shape.heads_q, shape.head_dim_v}, query.options()), lse};
  }
  if (auto result = attend_by_kernel(in, given, shape, query, return_lse)) return *std::move(result);
  Options options = given.attention;
  options.bottom_right = options.gqa = true;
  options.max_q = shape.len_q;
  options.max_k = shape.capacity;
  const Inputs packed = packed_inputs(in, shape, query, total_of(in, shape));
  const ForwardResult result = call_attention(packed, options, return_lse);
  const Tensor out = result.out.view({shape.batch, shape.len_q, shape.heads_q, shape.head_dim_v}).contiguous();
  if (!return_lse) return {out, result.lse};
  return {out, result.lse.view({shape.heads_q, shape.batch, shape.len_q}).transpose(0, 1).contiguous()};
}

cache::Result cache::with_cache_meta(const CacheInputs& in, const CacheOptions& options, bool return_lse) {
  const auto shape = check_cache<c10::SymInt>(in, options);
  const auto wide = accumulate_type(in.query.scalar_type());
  const Tensor out = at::empty_symint({shape.batch, shape.len_q, shape.heads_q, shape.head_dim_v}, in.query.options());
  if (!return_lse) return {out, at::empty({0}, in.query.options().dtype(at::kFloat))};
  return {out, at::empty_symint({shape.batch, shape.heads_q, shape.len_q}, in.query.options().dtype(wide))};
}

cache::Pages cache::gather_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                                 const Tensor& seqused_k) {
  const auto guard = query.is_cpu() ? c10::OptionalDeviceGuard() : c10::OptionalDeviceGuard(query.device());
  check_pages<int64_t>(query, key, value, block_table, seqused_k);
  check_page_entries(block_table, "seqused_k", seqused_k, 0, key.size(0), key.size(1));
  const int64_t capacity = block_table.size(1) * key.size(1);
  const Tensor cu = at::arange(block_table.size(0) + 1, block_table.options()) * capacity;
  if (key.size(0) == 0) {  // no page: rows that no length may ask for
    const auto rows = [&](const Tensor& pool) {
      return at::zeros({block_table.size(0) * capacity, pool.size(2), pool.size(3)}, pool.options());
    };
    return {rows(key), rows(value), cu};
  }
  return {gathered(key, block_table).flatten(0, 1), gathered(value, block_table).flatten(0, 1), cu};
}

cache::Pages cache::gather_pages_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& block_table, const Tensor& seqused_k) {
  check_pages<c10::SymInt>(query, key, value, block_table, seqused_k);
  const auto total = block_table.sym_size(0) * block_table.sym_size(1) * key.sym_size(1);
  const auto rows = [&](const Tensor& pool) {
    return at::empty_symint({total, pool.sym_size(2), pool.sym_size(3)}, pool.options());
  };
  return {rows(key), rows(value), at::empty_symint({block_table.sym_size(0) + 1}, block_table.options())};
}

}  // namespace flash_ext
