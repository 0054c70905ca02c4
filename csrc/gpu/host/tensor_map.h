// Tensor maps for TMA: a view of (batch..., head, row, col) as five dimensions, so that rows past a sequence's end read
// as zeros and are never written, whatever lies behind them.
//
//   dimension 0 col (64 a box: one panel)   1 row   2 head   3 last batch dimension   4 first batch dimension
//
// A dimension of stride 0 (a broadcast) gets size 1 in the map, and BoxSteps multiplies its coordinate by 0. Called by
// both backends and the tests. Invariant: what tma_refuses lets pass encodes; nothing here touches the device.
#pragma once

#include "core/args.h"
#include "gpu/tensor_map.h"

namespace flash_ext::cuda {

// Of packed sequences, whose rows follow each other in a tensor, dimension 1 ends with every sequence, at E = 2^30
// (kPackedEnd), so that rows beyond read as zeros and are not written, as those behind the last are. Dimension 3 is the
// row where the sequence ends, and dimension 4 takes E rows away again, by a stride that wraps around: 2^34 bytes less
// a row, of which E times 2^34 is 2^64, or nothing.
//
//   row r of a sequence of `len` rows from `first` on      1 E - len + r   3 first + len   4 E
//
// NOTE: with an address before the tensor's in place of dimension 4 a box that lies outside as a whole, of which
// nothing is read, was an illegal access wherever nothing was mapped at that address.
//
// Null: accepts. Otherwise why the view cannot be addressed by TMA, as the end of a sentence that names the tensor.
// What a dimension of size 1 has for a stride is nobody's business: frameworks write anything there.
const char* tma_refuses(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows);

// Two numbers of 8 bits as one of 16, for a view whose strides are even.
inline TensorView pairs_of(TensorView view) {
  for (int64_t& stride : view.batch_stride) stride /= 2;
  view.head_stride /= 2;
  view.row_stride /= 2;
  return view;
}

// How much of a row L2 asks memory for when a box misses it. NOTE: with 256 bytes, which are two boxes', decoding reads
// 4.2 instead of 4.5 TB/s and short causal forwards take 2 % longer; backward of long full calls is 3 % faster.
enum class Promotion : uint8_t { k128, k256 };

// Boxes of box_rows rows by 64 columns of a 16-bit type, of box_heads heads one behind the other, 128-byte swizzle; or
// by half as many columns, with a swizzle of 64 bytes.
TensorMap make_tensor_map(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                          int box_rows, Promotion promotion, int box_heads = 1, int box_cols = kBoxCols);

// The same of a tensor of packed sequences, of which kernels make the coordinates as above. rows: of the tensor.
TensorMap make_packed_map(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                          int box_rows, Promotion promotion);

}  // namespace flash_ext::cuda
