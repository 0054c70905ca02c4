// What a tensor map is to a kernel: gpu/host/tensor_map.h makes them, and says what their dimensions are.
#pragma once

#include <cuda.h>

namespace flash_ext::cuda {

constexpr int kBoxBytes = 128;  // of a row
constexpr int kBoxCols = kBoxBytes / 2;

// Of packed sequences: where every sequence ends, as a coordinate of rows.
constexpr int kPackedEnd = 1 << 30;

// What a (head, batch) index is multiplied by to become a coordinate: 1, or 0 along a broadcast.
struct BoxSteps {
  int head = 0, b0 = 0, b1 = 0;
};

struct TensorMap {
  CUtensorMap map;
  BoxSteps steps;
};

}  // namespace flash_ext::cuda
