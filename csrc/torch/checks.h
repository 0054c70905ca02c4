// From tensors to a problem: every user error of the project is found here, once, and told in one sentence that names
// the argument, what was seen and what is accepted. Works on symbolic sizes as well, so that the Meta kernels and the
// real ones cannot disagree.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <string>

#include "core/args.h"
#include "torch/options.h"
#include "torch/text.h"

namespace flash_ext {

// Becomes flash_ext.AttentionError (a RuntimeError and a ValueError) in Python, RuntimeError through torch.ops.
class AttentionError : public c10::Error {
 public:
  AttentionError(std::string argument, std::string rest)
      : c10::Error({__func__, __FILE__, __LINE__}, argument + " " + rest),
        argument_(std::move(argument)),
        rest_(std::move(rest)) {}
  const std::string& argument() const { return argument_; }
  const std::string& rest() const { return rest_; }

 private:
  std::string argument_, rest_;
};

template <class Int>
using Sizes = c10::SmallVector<Int, 6>;

// Sizes of a checked call. Int is int64_t, or SymInt under tracing.
template <class Int>
struct Shape {
  int64_t rank = 2;  // dimensions of the result; rank 2 has no head dimension
  Sizes<Int> batch;  // leading dimensions of the result, before the heads
  Int heads_q = 1, heads_k = 1, heads_v = 1;
  Int len_q = 0, len_k = 0;
  Int head_dim = 1, head_dim_v = 1;
  // Packed sequences: rows of the tensors; len_q and len_k are of the longest sequence, at most, and batch is how many.
  bool packed = false;
  Int rows_q = 0, rows_k = 0;

  Sizes<Int> out_sizes() const { return of_queries(head_dim_v); }
  Sizes<Int> lse_sizes() const {
    if (packed) return {heads_q, rows_q};
    Sizes<Int> result = sizes(heads_q, len_q, head_dim_v);
    result.pop_back();
    return result;
  }
  // Of a tensor with a row for each query or key.
  Sizes<Int> of_queries(const Int& cols) const {
    return packed ? Sizes<Int>{rows_q, heads_q, cols} : sizes(heads_q, len_q, cols);
  }
  Sizes<Int> of_keys(const Int& heads, const Int& cols) const {
    return packed ? Sizes<Int>{rows_k, heads, cols} : sizes(heads, len_k, cols);
  }
  // The heads of slopes.
  Sizes<Int> heads_sizes() const {
    Sizes<Int> result(batch);
    result.push_back(heads_q);
    return result;
  }
  // [batch..., heads, rows, cols]; without heads where the result has none.
  Sizes<Int> sizes(const Int& heads, const Int& rows, const Int& cols) const {
    Sizes<Int> result(batch);
    if (rank > 2) result.push_back(heads);
    result.push_back(rows);
    result.push_back(cols);
    return result;
  }
};

// Throws AttentionError; otherwise the call is one that a backend can take.
template <class Int>
Shape<Int> check_call(const Inputs& in, const Options& options);

// Parts of it, which attention_with_cache has as well: numbers; key and value heads that divide the query heads;
// numbers of heads; the dtype of sinks.
void check_options(const Options& options);
template <class Int>
void check_grouped_heads(const Shape<Int>& shape);
template <class Int>
void check_per_head(const char* name, const Tensor& numbers, const Shape<Int>& shape);
void check_sinks_dtype(const Tensor& sinks, at::ScalarType query);

// The drop-in's own errors, which only it can make.
void check_drop_in(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
                   bool is_causal, bool enable_gqa);

// What backward is given beside the inputs of forward.
template <class Int>
void check_saved(const Shape<Int>& shape, const Inputs& in, const Tensor& grad_out, const Tensor& grad_lse,
                 const ForwardResult& saved, const Options& options);

// Strides of a dense tensor of `sizes` in the stride order of `like` (its trailing dimensions), last dimension
// innermost; dimensions without an order of their own (size 1, stride 0, not in `like`) stay where they are.
template <class Int>
Sizes<Int> strides_in_order_of(const Sizes<Int>& sizes, const Tensor& like);

// Sizes of an int64_t or symbolic tensor.
template <class Int>
c10::ArrayRef<Int> sizes_of(const Tensor& tensor);

}  // namespace flash_ext
