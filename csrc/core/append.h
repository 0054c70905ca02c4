// What the kernel is handed that appends new rows to a cache, in place, turned by rotary angles where they are given:
//
//   (x_a, x_b) -> (x_a cos - x_b sin, x_a sin + x_b cos)      columns (a, b): (c, c + half), or (2c, 2c + 1)
//   interleaved
//
// and queries likewise, into a tensor of their own. New row i of sequence b has place lengths[b] + i of the sequence;
// of its position in the tables, too long ones are the last. Filled by torch/cache_append.cpp, run by
// kernels/stages/append.cu. Invariant: a row whose place, slot or page is not there is not written.
#pragma once

#include <cstdint>

#include "core/decode.h"

namespace flash_ext {

// Rows (batch, rows, heads, cols) from one tensor into another; strides in elements.
struct RowCopy {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t from_stride[4] = {}, to_stride[4] = {};  // to a cache: (slot or page, row, head, col)
  int rows = 0, heads = 0, cols = 0;
  HeadView descale;  // fp8: what numbers are divided by
};

struct AppendArgs {
  DType dtype = DType::kBFloat16;  // of new rows and queries: 16 bits
  bool fp8 = false;                // the caches are of e4m3
  int batch = 0, capacity = 0, slots = 0, page_rows = 0;
  const int32_t* lengths = nullptr;
  const int32_t* slot_of = nullptr;
  const int32_t* table = nullptr;
  int64_t table_stride = 0;
  RowCopy key, value, query;  // query has no rows where it does not turn

  const void* cos = nullptr;  // (positions, half); null: nothing turns
  const void* sin = nullptr;
  int64_t cos_stride[2] = {}, sin_stride[2] = {};
  bool float_angles = false;  // else of dtype
  int positions = 0, half = 0;
  bool interleaved = false;
  bool queries_move = false;  // query i turns by position lengths[b] + i, not all by lengths[b]
  void* stream = nullptr;
};

[[gnu::visibility("default")]] void run_append(const AppendArgs& args);

}  // namespace flash_ext
