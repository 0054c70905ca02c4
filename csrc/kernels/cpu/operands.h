// Tiles of the caller's tensors as a product or the score chain wants them: in place where that is possible, else
// loaded into scratch.
//
// Called by forward, backward and the bias gradient for every tile. Invariant: a tile used in place is never read
// outside the tensor: padding rows or columns always mean a copy.
#pragma once

#include <climits>
#include <type_traits>

#include "kernels/cpu/work.h"

namespace flash_ext::cpu {

template <class Acc>
constexpr Element kAccElement = std::is_same_v<Acc, double> ? Element::kFloat64 : Element::kFloat32;

template <class Compute>
constexpr Element kNative = std::is_same_v<Compute, ComputeBf16>  ? Element::kBFloat16
                            : std::is_same_v<Compute, ComputeF64> ? Element::kFloat64
                                                                  : Element::kFloat32;

// The inner dimension of a product: even for pairs.
template <class Compute>
int depth_of(int64_t head_dim) {
  return static_cast<int>(Compute::kPairs ? round_up(head_dim, 2) : head_dim);
}

// Leading dimension of a staged copy, so that a transpose may read whole vectors.
inline int staged_ld(int64_t head_dim) { return static_cast<int>(round_up(head_dim, 2 * kPad)); }

template <class Compute>
struct Left {
  const typename Compute::Operand* data;
  int64_t ld;
};

// Left operand of rows_padded rows and depth_of(cols) columns.
template <class Compute>
Left<Compute> left_rows(const VectorKernels<Compute>& kernels, const Source& src, int rows, int rows_padded, int cols,
                        typename Compute::Operand* scratch) {
  const int depth = depth_of<Compute>(cols);
  if (src.type == kNative<Compute> && src.col_stride == 1 && rows == rows_padded && depth == cols &&
      src.row_stride >= cols && src.row_stride <= INT_MAX) {
    return {static_cast<const typename Compute::Operand*>(src.data), src.row_stride};
  }
  const int ld = staged_ld(cols);
  kernels.load(src, rows, cols, scratch, ld, rows_padded, ld);
  return {scratch, ld};
}

// A tile that a transpose may read: whole vectors along the columns.
template <class Compute>
Left<Compute> staged_rows(const VectorKernels<Compute>& kernels, const Source& src, int rows, int cols,
                          typename Compute::Operand* scratch) {
  if (src.type == kNative<Compute> && src.col_stride == 1 && cols % (2 * kPad) == 0 && src.row_stride >= 0 &&
      src.row_stride % 2 == 0 && src.row_stride <= INT_MAX) {
    return {static_cast<const typename Compute::Operand*>(src.data), src.row_stride};
  }
  const int ld = staged_ld(cols);
  kernels.load(src, rows, cols, scratch, ld, rows, ld);
  return {scratch, ld};
}

// Whether few_scores and few_outputs serve this call.
template <class Compute>
bool few_queries(const ForwardArgs& args) {
  const bool converts = args.problem.dtype == DType::kFloat16 && !Compute::kPairs;
  const int64_t most = converts ? kFewHalfQueries : kFewQueries<Compute>;
  return args.problem.len_q <= most && args.k.col_stride == 1 && args.v.col_stride == 1;
}

inline bool few_keys(const ForwardArgs& args) {
  return args.problem.len_k <= kFewKeys && args.q.col_stride == 1 && args.k.col_stride == 1 && args.v.col_stride == 1;
}

// Bias, mask, slope and softcap of one tile.
template <class Compute>
class ScoreInputLoader {
 public:
  using Acc = typename Compute::Acc;

  // Scratch for tiles of up to rows x cols elements, either way round.
  void carve(Arena& arena, const Problem& problem, int64_t rows, int64_t cols, bool transposed) {
    if (problem.has_bias) bias_ = {arena.take<Acc>(rows * cols)};
    if (problem.has_mask) mask_ = {arena.take<Acc>(rows * cols)};
    if (transposed && (problem.has_bias || problem.has_mask)) staged_ = arena.take<Acc>(rows * cols);
  }

  static bool needed(const Problem& problem) {
    return problem.has_bias || problem.has_mask || problem.has_alibi || problem.softcap != 0.0;
  }

  // Queries [query, query + rows) and keys [key, key + cols); with transposed, rows are keys and columns queries.
  ScoreInputs<Acc> load(const VectorKernels<Compute>& kernels, const ForwardArgs& args, int64_t b, int64_t head,
                        Range queries, Range keys, bool transposed) const {
    const Problem& problem = args.problem;
    ScoreInputs<Acc> inputs;
    static_cast<Softcap<Acc>&>(inputs.mods) = make_softcap<Acc>(problem.softcap);
    static_cast<Bias&>(inputs.mods).on = problem.has_bias;
    if (problem.has_alibi) {
      const int64_t index = batch_offset(problem, args.alibi, b) + head * args.alibi.head_stride;
      static_cast<Alibi<Acc>&>(inputs.mods) = {true,
                                               static_cast<Acc>(static_cast<const float*>(args.alibi.data)[index])};
    }
    const int64_t offset = problem.bottom_right ? problem.len_k - problem.len_q : 0;
    inputs.distance = static_cast<Acc>(queries.first + offset - keys.first);
    if (problem.has_bias) {
      const Source src =
          source_at(problem, args.bias, element_of(problem.bias_dtype), b, head, queries.first, keys.first);
      inputs.bias = bias_.numbers;
      inputs.ld_bias = bias_.load(*this, kernels, src, queries.size(), keys.size(), transposed);
    }
    if (problem.has_mask) {
      const Source src = source_at(problem, args.mask, Element::kBool, b, head, queries.first, keys.first);
      inputs.mask = mask_.numbers;
      inputs.ld_mask = mask_.load(*this, kernels, src, queries.size(), keys.size(), transposed);
    }
    return inputs;
  }

 private:
  // A loaded tile. The next call of load() leaves it where it asks for the same one, as heads do that share a mask, or
  // batches a bias.
  struct Tile {
    Acc* numbers = nullptr;
    const void* from = nullptr;
    int64_t queries = 0, keys = 0;
    int ld = 0;

    int load(const ScoreInputLoader& loader, const VectorKernels<Compute>& kernels, const Source& src, int64_t rows,
             int64_t cols, bool transposed) {
      if (from == src.data && queries == rows && keys == cols) return ld;
      from = src.data;
      queries = rows;
      keys = cols;
      return ld = loader.load_tile(kernels, src, rows, cols, transposed, numbers);
    }
  };

  // Returns the leading dimension, 0 when one row stands for all.
  int load_tile(const VectorKernels<Compute>& kernels, Source src, int64_t queries, int64_t keys, bool transposed,
                Acc* dst) const {
    int rows = static_cast<int>(queries), cols = static_cast<int>(keys);
    int rows_padded = static_cast<int>(round_up(rows, kPad)), cols_padded = static_cast<int>(round_up(cols, kPad));
    if (transposed && src.col_stride == 1 && src.row_stride != 0 && src.type == kAccElement<Acc> &&
        cols == cols_padded && src.row_stride <= INT_MAX) {
      kernels.transpose_acc(static_cast<const Acc*>(src.data), static_cast<int>(src.row_stride), rows, cols, dst,
                            rows_padded);
      return rows_padded;
    }
    if (transposed && src.col_stride == 1 && src.row_stride != 0) {
      kernels.load_acc(src, rows, cols, staged_, cols_padded, rows_padded, cols_padded);
      kernels.transpose_acc(staged_, cols_padded, rows_padded, cols_padded, dst, rows_padded);
      return rows_padded;
    }
    if (transposed) {
      std::swap(src.row_stride, src.col_stride);
      std::swap(rows, cols);
      std::swap(rows_padded, cols_padded);
    }
    if (src.row_stride == 0) {
      kernels.load_acc(src, 1, cols, dst, cols_padded, 1, cols_padded);
      return 0;
    }
    kernels.load_acc(src, rows, cols, dst, cols_padded, rows_padded, cols_padded);
    return cols_padded;
  }

  mutable Tile bias_, mask_;  // as what they point to
  Acc* staged_ = nullptr;
};

}  // namespace flash_ext::cpu
