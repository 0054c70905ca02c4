// The seam between the CPU backend and its vector code: plain structures that describe a tile, and one table of
// functions for each compute type and instruction set.
//
// vector_kernels.cpp fills the tables, once per instruction set; vector_table() picks one at run time. forward.cpp,
// backward.cpp and bias_gradient.cpp call them. No torch header and no inline code here that a variant
// calls: they are compiled with different flags, and an inline function would be merged by the linker into any one of
// them. Invariant: operand and accumulator tiles are padded to multiples of kPad columns with zeros, so that a kernel
// never has a tail; only tensors of the caller (Source, Sink) have exact extents.
#pragma once

#include <cstdint>

#include "core/dropout.h"
#include "core/score_mod.h"

namespace flash_ext::cpu {

constexpr int kPad = 16;

// Queries of one tile of backward and keys of one product of forward. [depth][kPanel] is then contiguous, 16 KiB of
// fp32 at depth 64; a leading dimension of a whole block would put all rows of a panel into a quarter of the L1
// cache's sets.
constexpr int kPanel = 64;

enum class Element : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64, kBool };

// Rows and columns of a tensor of the caller, already at the tile's first element; strides in elements.
struct Source {
  const void* data = nullptr;
  Element type = Element::kFloat32;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};
struct Sink {
  void* data = nullptr;
  Element type = Element::kFloat32;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// What the products read and what they sum in. kPairs: a product's right operand stores rows 2i and 2i + 1 interleaved.
struct ComputeF32 {
  using Operand = float;
  using Acc = float;
  static constexpr bool kPairs = false;
};
struct ComputeBf16 {
  using Operand = uint16_t;
  using Acc = float;
  static constexpr bool kPairs = true;
};
struct ComputeF64 {
  using Operand = double;
  using Acc = double;
  static constexpr bool kPairs = false;
};

// Element (r, c) of a tile is kept when low <= c - r < high, r < rows and c < cols. In a tile of S, r is the query.
struct TileDiagonals {
  int low = 0;
  int high = 0;
  int rows = 0;
  int cols = 0;
};

// The general path's inputs, as tiles of the same orientation as the scores; ld 0 where all rows are equal.
template <class Acc>
struct ScoreInputs {
  StandardScoreMods<Acc> mods;
  Acc distance = 0;           // i + offset - j of the tile's first element
  const Acc* bias = nullptr;  // [rows, cols]
  int ld_bias = 0;
  const Acc* mask = nullptr;  // [rows, cols], zero: removed
  int ld_mask = 0;
};

// S -> P of one tile, and the row statistics: online_softmax.h over `rows` rows at once.
template <class Compute>
struct SoftmaxTile {
  using Acc = typename Compute::Acc;
  Acc* scores = nullptr;  // [rows, cols]
  int ld_scores = 0;
  typename Compute::Operand* probs = nullptr;  // [rows, cols]; may be scores when the types agree
  int ld_probs = 0;
  int rows = 0;
  int cols = 0;
  Acc scale = 1;
  const TileDiagonals* band = nullptr;  // null: every element is kept
  const uint8_t* keep = nullptr;        // [rows, cols] dropout; null: none
  int ld_keep = 0;
  Acc keep_scale = 1;
  Acc* row_max = nullptr;  // [rows] in and out
  Acc* row_sum = nullptr;
  Acc* out = nullptr;  // [rows, out_cols] rescaled; null on the first tile of a row block
  int ld_out = 0;
  int out_cols = 0;
};

// Sums over the keys of every query, [cols] each, from which the slope's gradient is made.
template <class Acc>
struct SlopeSums {
  Acc* gradient = nullptr;  // of -distance * dS
  Acc* d_score = nullptr;   // of dS
  Acc* distance = nullptr;  // of distance * P
  Acc* prob = nullptr;      // of P
  int lost = 0;             // where the lost low parts of gradient and d_score lie, relative to them
};

// S^T and dP^T -> P^T and dS^T of one tile; rows are keys, columns are queries.
template <class Compute>
struct GradientTile {
  using Acc = typename Compute::Acc;
  using Operand = typename Compute::Operand;
  const Acc* scores = nullptr;   // [rows, cols]
  const Acc* d_probs = nullptr;  // [rows, cols]; null: only probs are wanted
  int ld = 0;
  int rows = 0;
  int cols = 0;
  Acc scale = 1;
  const Acc* lse = nullptr;             // [cols], +inf for a query without keys
  const Acc* delta = nullptr;           // [cols]
  const Acc* d_lse = nullptr;           // [cols]; null: 0. Apart from delta: of one key dP - delta is 0, bit for bit
  bool has_empty = false;               // there is a query without keys, or one of the padding
  const TileDiagonals* band = nullptr;  // null: every element is kept
  const uint8_t* keep = nullptr;        // [rows, cols] dropout; null: none
  Acc keep_scale = 1;
  const ScoreInputs<Acc>* inputs = nullptr;  // null: plain scores, or a bias where it lies:
  Source bias;                               // [cols, rows], rows and cols multiples of kPad; data null: none
  const Acc* renorm = nullptr;               // [cols] factor of every probability; null: 1
  Acc* raw_probs = nullptr;  // P^T without it, which sum_probs leaves there for gradient: scores itself, or null

  Operand* probs = nullptr;           // [rows, cols] P^T, with dropout
  Operand* d_scores = nullptr;        // [rows, cols] dS^T as a left operand
  Operand* d_scores_right = nullptr;  // the same as a right operand; only with kPairs
  Acc* d_bias = nullptr;              // [rows, ld_d_bias] gradient of the modified score
  int ld_d_bias = 0;
  bool adds_d_bias = false;
  Sink bias_sink;  // with `bias` and instead of d_bias: [cols, rows] in Acc; data null: not wanted
  const SlopeSums<Acc>* slope = nullptr;
};

// P or dS of a few rows: element (row, key) is data[row * row_stride + key * key_stride]. With kPairs, keys 2i and
// 2i + 1 are neighbours, and the strides count such pairs.
template <class Operand>
struct FewWeights {
  const Operand* data = nullptr;
  int row_stride = 0;
  int key_stride = 0;
};

template <class Compute>
struct VectorKernels {
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;

  // dst[r][c] = src, zeros up to [rows_padded, cols_padded].
  void (*load)(const Source& src, int rows, int cols, Operand* dst, int ld, int rows_padded, int cols_padded);
  void (*load_acc)(const Source& src, int rows, int cols, Acc* dst, int ld, int rows_padded, int cols_padded);
  // Right operand [k = row][n = col], zeros up to rows_padded (even); cols is a multiple of kPad.
  void (*right_operand)(const Operand* src, int ld_src, int rows, int cols, Operand* dst, int rows_padded);
  // Right operand [k = col][n = row] with leading dimension ld_dst >= rows_padded, a multiple of kPad; rows beyond
  // `rows` are zeros. src must be readable up to a multiple of kPad columns (2 kPad with kPairs).
  void (*right_transposed)(const Operand* src, int ld_src, int rows, int cols, Operand* dst, int ld_dst,
                           int rows_padded);
  // Left operand dst[col][row], zeros up to [cols_padded, rows_padded].
  void (*left_transposed)(const Operand* src, int ld_src, int rows, int cols, Operand* dst, int ld_dst, int rows_padded,
                          int cols_padded);
  // dst[col][row] = src[row][col]; cols a multiple of kPad, dst has room for rows rounded up to one, zeros.
  void (*transpose_acc)(const Acc* src, int ld_src, int rows, int cols, Acc* dst, int ld_dst);

  // The products of a few rows, on K and V as they lie (few_rows_kernels.h): columns are contiguous, q has zeros up to
  // a multiple of 2 kPad with kPairs, else of kPad. transposed: scores[key][row], with zeros up to [round_up(keys),
  // ld].
  void (*few_scores)(const Operand* q, int ld_q, int rows, const Source& k, int keys, int depth, Acc* scores, int ld,
                     bool transposed);
  void (*few_outputs)(const FewWeights<Operand>& p, int rows, const Source& v, int keys, int d_v, Acc* out, int ld_out,
                      bool add);

  void (*modify_scores)(Acc* scores, int ld, int rows, int cols, Acc scale, const ScoreInputs<Acc>& inputs);
  void (*softmax)(const SoftmaxTile<Compute>& tile);
  // Column sums, compensated: sums[0][c] += P, and with d_probs sums[1][c] += P (dropped) dP; sums[2] and sums[3] hold
  // what rounding lost of them. Rows of kPanel.
  void (*sum_probs)(const GradientTile<Compute>& tile, Acc* sums);
  void (*gradient)(const GradientTile<Compute>& tile);

  // sink = src * scale, or with row_sums src / row_sums[r], and 0 where that is 0.
  void (*store)(const Acc* src, int ld, int rows, int cols, Acc scale, const Acc* row_sums, const Sink& sink);
  // out[r] = sum over c of a[r][c] * b[r][c], cols a multiple of kPad.
  void (*dot_rows)(const Acc* a, const Acc* b, int ld, int rows, int cols, Acc* out);
  // out[r] += sum of row r; cols a multiple of kPad.
  void (*add_row_sums)(const Acc* src, int ld, int rows, int cols, Acc* out);
  void (*add)(Acc* dst, const Acc* src, int64_t count);
  // dst[col][row] = src[row][col], or +=; src is readable up to multiples of kPad, dst has what `rows` and `cols` say.
  void (*store_transposed)(const Acc* src, int ld_src, int rows, int cols, Acc* dst, int64_t ld_dst, bool add);
  // keep[r][c] of the dropout map at (bh, q0 + r, k0 + c), or [c][r] when transposed; all multiples of 16.
  void (*keep_tile)(const Dropout& dropout, uint32_t bh, int64_t q0, int64_t k0, int rows, int cols, bool transposed,
                    uint8_t* keep, int ld);
  // C = A B or C += A B, for machines and types without a fast product; n is a multiple of kPad. Null with kPairs.
  void (*product)(int m, int n, int k, const Operand* a, int ld_a, const Operand* b, int ld_b, Acc* c, int ld_c,
                  bool add);
};

struct VectorTable {
  VectorKernels<ComputeF32> f32;
  VectorKernels<ComputeBf16> bf16;
  VectorKernels<ComputeF64> f64;

  template <class Compute>
  const VectorKernels<Compute>& get() const;
};
template <>
inline const VectorKernels<ComputeF32>& VectorTable::get<ComputeF32>() const {
  return f32;
}
template <>
inline const VectorKernels<ComputeBf16>& VectorTable::get<ComputeBf16>() const {
  return bf16;
}
template <>
inline const VectorKernels<ComputeF64>& VectorTable::get<ComputeF64>() const {
  return f64;
}

// The table of the best instruction set that this machine has and torch allows (ATEN_CPU_CAPABILITY).
const VectorTable& vector_table();

}  // namespace flash_ext::cpu
