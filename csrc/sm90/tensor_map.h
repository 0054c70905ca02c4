// Tensor maps for TMA: a view of (batch..., head, row, col) as five dimensions, so that rows past a sequence's end read
// as zeros and are never written, whatever lies behind them.
//
//   dimension 0 col (64 a box: one panel)   1 row   2 head   3 last batch dimension   4 first batch dimension
//
// A dimension of stride 0 (a broadcast) gets size 1 in the map, and BoxSteps multiplies its coordinate by 0. Called by
// forward, backward and the tests. Invariant: what tma_refuses lets pass encodes; nothing here touches the device.
#pragma once

#include <cuda.h>

#include "attention/args.h"

namespace flash_ext::sm90 {

// What a (head, batch) index is multiplied by to become a coordinate: 1, or 0 along a broadcast.
struct BoxSteps {
  int head = 0, b0 = 0, b1 = 0;
};

struct TensorMap {
  CUtensorMap map;
  BoxSteps steps;
};

// Null: accepts. Otherwise why the view cannot be addressed by TMA, as the end of a sentence that names the tensor.
// What a dimension of size 1 has for a stride is nobody's business: frameworks write anything there.
const char* tma_refuses(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows);

// Boxes of box_rows rows by 64 columns of a 16-bit type, 128-byte swizzle.
TensorMap make_tensor_map(const Problem& problem, const TensorView& view, int64_t heads, int64_t rows, int64_t cols,
                          int box_rows);

}  // namespace flash_ext::sm90
