// From checked tensors to the structures that backends read: leading dimensions merged jointly, broadcasts as strides
// of 0, nothing copied. Called by ops.cpp once per forward and once per backward.
#pragma once

#include "api/checks.h"
#include "attention/args.h"

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

// Which gradients backward is asked for.
void set_wanted(Problem& problem, const GradMask& wanted);

// The views of forward's inputs, added to the builder.
void add_inputs(ProblemBuilder& builder, ForwardArgs& args, const Inputs& in, const Shape<int64_t>& shape);

}  // namespace flash_ext
