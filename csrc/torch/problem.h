// From checked tensors to the structures that backends read: leading dimensions merged jointly, broadcasts as strides
// of 0, nothing copied but, for GPUs, what has scattered columns. Called by ops.cpp once per forward and once per
// backward, and by explain.cpp.
#pragma once

#include <optional>

#include "core/args.h"
#include "torch/checks.h"

namespace flash_ext {

// Collects the tensors of one call and writes their views once all are known, because leading dimensions can only be
// merged where every tensor agrees.
class ProblemBuilder {
 public:
  ProblemBuilder(const Inputs& in, const Options& options, const Shape<int64_t>& shape);

  // A tensor of (..., heads, rows, cols), right-aligned; `heads` is the number of heads that it is read with.
  void add(TensorView& view, const Tensor& tensor, int64_t heads, int64_t rows, int64_t cols);
  // A tensor of (..., heads): rows and columns are broadcast.
  void add_per_head(TensorView& view, const Tensor& tensor, int64_t heads);
  // A tensor with a row for each query or key of the call, packed or not.
  void add_rows(TensorView& view, const Tensor& tensor, int64_t heads, int64_t rows, int64_t cols);

  // Where more leading dimensions remain than a Problem holds, batch_rank says so (dispatch.h then finds that every
  // backend refuses), and batch_size and the views are not written.
  void finish(Problem& problem);

 private:
  struct Entry {
    TensorView* view;
    TensorView value;  // without batch strides
    Sizes<int64_t> batch_strides;
  };
  void add(TensorView& view, const Tensor& tensor, int64_t trailing, const int64_t (&sizes)[3]);

  Problem problem_;
  Sizes<int64_t> batch_;
  c10::SmallVector<Entry, 12> entries_;
};

DType dtype_of(at::ScalarType type);
at::ScalarType accumulate_type(at::ScalarType type);  // double for double, else float
// The factor of the scores: the caller's, else 1 / sqrt(head_dim).
double scale_of(const Options& options, int64_t head_dim);

// Where the call lies in the map of dropout; first_batch: of its batch elements.
DropoutPlace dropout_place(const Options& options, int64_t heads_q, int64_t first_batch);

// Which gradients backward is asked for.
void set_wanted(Problem& problem, const GradMask& wanted, const TensorView& dbias);

// GPU kernels move rows by 16 bytes. A last dimension with another stride than 1 (or 0, one number for all) would be
// read element by element, and again by every tile that needs it.
bool has_scattered_columns(const Tensor& tensor);
// One element of each broadcast dimension, of the first `dims`.
Tensor without_broadcasts(Tensor tensor, int64_t dims);
// Of the copy: a dimension of stride 0 counts once.
int64_t bytes_of_copy(const Tensor& tensor);
// The tensor itself or, on a GPU where its columns are scattered, a copy with the last dimension innermost; the others
// keep their order and their broadcasts, so that leading dimensions merge as before.
Tensor gather_columns(const Tensor& tensor);
// The same of grad_out, whose rows and columns are also written out where it repeats them: .sum() expands one number,
// and a kernel that loads rows cannot. Its batches and heads stay broadcast.
Tensor gather_rows(const Tensor& grad_out);
// The inputs with all of them gathered; none where there is nothing to copy.
std::optional<Inputs> gather_columns(const Inputs& in);

// The views of forward's inputs, added to the builder, and where packed sequences lie.
void add_inputs(ProblemBuilder& builder, ForwardArgs& args, const Inputs& in, const Shape<int64_t>& shape);

}  // namespace flash_ext
