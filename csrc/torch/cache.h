// attention_with_cache: queries attend to a cache of keys and values, to which new rows may be appended first, in
// place.
//
//   cache (slots, S, heads, cols)       sequence b has slot b, or cache_batch_index[b]; its first cache_seqlens[b] rows
//   pool  (pages, page rows, heads, cols)    sequence b has pages block_table[b, 0], block_table[b, 1], ...
//
// cache_checks.cpp finds what is wrong with a call, cache_ops.cpp has the operators, cache.cpp computes,
// cache_append.cpp and cache_kernel.cpp have kernels compute, bindings.cpp calls. Invariant: what lengths, indices and
// pages hold is never read on the host (but by FLASH_EXT_CHECK=1) and, whatever it is, leads to no access outside the
// tensors.
#pragma once

#include "torch/checks.h"

namespace flash_ext {

// An undefined tensor is an absent one.
struct CacheInputs {
  Tensor query, key_cache, value_cache, cache_seqlens;
  Tensor key, value, block_table, cache_batch_index, rotary_cos, rotary_sin, k_descale, v_descale, alibi_slopes, sinks;
};

struct CacheInput {
  const char* name;
  Tensor CacheInputs::*tensor;
};

// In the order of the schema; the first four are required.
inline constexpr CacheInput kCacheInputs[] = {
    {"query", &CacheInputs::query},
    {"key_cache", &CacheInputs::key_cache},
    {"value_cache", &CacheInputs::value_cache},
    {"cache_seqlens", &CacheInputs::cache_seqlens},
    {"key", &CacheInputs::key},
    {"value", &CacheInputs::value},
    {"block_table", &CacheInputs::block_table},
    {"cache_batch_index", &CacheInputs::cache_batch_index},
    {"rotary_cos", &CacheInputs::rotary_cos},
    {"rotary_sin", &CacheInputs::rotary_sin},
    {"k_descale", &CacheInputs::k_descale},
    {"v_descale", &CacheInputs::v_descale},
    {"alibi_slopes", &CacheInputs::alibi_slopes},
    {"sinks", &CacheInputs::sinks},
};
inline constexpr size_t kRequiredCacheInputs = 4;

struct CacheOptions {
  Options attention;
  bool rotary_interleaved = false;

  // Whether rotary turns each query by a position of its own, and not all of a sequence by one.
  bool queries_have_positions() const {
    return attention.causal || attention.window_left.has_value() || attention.window_right.has_value();
  }
};

// Sizes of a checked call.
template <class Int>
struct CacheShape {
  Int batch = 0, len_q = 0, heads_q = 0, heads_k = 0, heads_v = 0, head_dim = 0, head_dim_v = 0;
  Int slots = 0, rows = 0;  // of the caches; pages and their rows where they are paged
  Int capacity = 0;         // rows that a sequence can have
  Int added = 0;            // new rows of each sequence
};

// Throws AttentionError; otherwise the call can be computed, and nothing has been written yet.
template <class Int>
CacheShape<Int> check_cache(const CacheInputs& in, const CacheOptions& options);

// What gather_pages is given.
template <class Int>
void check_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                 const Tensor& seqused_k);

// With FLASH_EXT_CHECK=1 in the environment: throws AttentionError for a wrong entry, and waits for the device.
void check_cache_entries(const CacheInputs& in, const CacheOptions& options, const CacheShape<int64_t>& shape);
void check_page_entries(const Tensor& block_table, const char* lengths_name, const Tensor& lengths, int64_t added,
                        int64_t pages, int64_t rows);

// Appends the new rows of a checked call; returns the queries, after rotary where it is asked for. Nothing where the
// kernel does not take it, and nothing is written then.
std::optional<Tensor> append_by_kernel(const CacheInputs& in, const CacheOptions& options,
                                       const CacheShape<int64_t>& shape);

// The attention of a checked call whose new rows are in the caches, of `query` after rotary; nothing where the kernel
// does not take it.
std::optional<std::tuple<Tensor, Tensor>> attend_by_kernel(const CacheInputs& in, const CacheOptions& options,
                                                           const CacheShape<int64_t>& shape, const Tensor& query,
                                                           bool return_lse);

// The operators' kernels of CPU, CUDA and Meta.
namespace cache {
using Result = std::tuple<Tensor, Tensor>;
using Pages = std::tuple<Tensor, Tensor, Tensor>;

inline bool is_fp8(const Tensor& tensor) { return tensor.scalar_type() == at::kFloat8_e4m3fn; }

Result with_cache(const CacheInputs& in, const CacheOptions& given, bool return_lse);
Result with_cache_meta(const CacheInputs& in, const CacheOptions& options, bool return_lse);
Pages gather_pages(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                   const Tensor& seqused_k);
Pages gather_pages_meta(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table,
                        const Tensor& seqused_k);
}  // namespace cache

// Through the dispatcher.
std::tuple<Tensor, Tensor> call_attention_with_cache(const CacheInputs& in, const CacheOptions& options,
                                                     bool return_lse);
std::tuple<Tensor, Tensor, Tensor> call_gather_pages(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const Tensor& block_table, const Tensor& seqused_k);

}  // namespace flash_ext
