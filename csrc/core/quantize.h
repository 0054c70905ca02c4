// What the kernels are handed that make e4m3 of 16-bit numbers: of a tensor (outer, heads, rows, cols)
//
//   descale = max |x| / 448 over a row, or over the rows of a head       1 where all is 0
//   x8      = x / descale, at most 448 either way
//
// Filled by torch/quantize.cpp, run by kernels/stages/quantize.cu. Invariant: columns are innermost, rows begin at
// multiples of 8 numbers, of x at one of 16 bytes; there is at least one number, and there are fewer than kMostNumbers.
#pragma once

#include <cstdint>

#include "core/args.h"

namespace flash_ext {

struct QuantizeArgs {
  static constexpr int64_t kMostNumbers = int64_t{1} << 34;  // eighths are counted in 32 bits

  DType dtype = DType::kBFloat16;  // of x: 16 bits
  const void* x = nullptr;
  uint8_t* x8 = nullptr;
  float* descale = nullptr;
  int64_t size[4] = {1, 1, 1, 1};
  int64_t x_stride[3] = {}, x8_stride[3] = {}, descale_stride[3] = {};  // in elements
  void* stream = nullptr;
};

// The largest finite magnitudes over 448. A number for each head (per_row false): descale is dense, (outer, heads), and
// 0 before.
[[gnu::visibility("default")]] void run_descale(const QuantizeArgs& args, bool per_row);
[[gnu::visibility("default")]] void run_quantize(const QuantizeArgs& args);

}  // namespace flash_ext
