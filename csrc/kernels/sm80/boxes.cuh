// Tiles that TMA copies, as panels of 128 bytes of each row, where the device has it (compute capability 9.0) and the
// views permit it: a thread asks for a whole tile, rows and columns that do not exist included, which become zeros.
//
// Called by forward/kernel.cuh for K and V; where boxes start also by backward/block.cuh. Invariant: a tile is
// asked for by one thread, after a barrier of all that read what was there before.
#pragma once

#include "core/args.h"
#include "gpu/fragments.cuh"
#include "gpu/tensor_map.h"

namespace flash_ext::sm80 {

// Two tensors of which tiles arrive together.
struct BoxCopies {
  cuda::TensorMap first, second;
  bool by_tma;
  int stages;  // of tiles in shared memory
};

// Where the boxes of (batch element, head) start.
__device__ __forceinline__ BoxStart box_of(const Problem& problem, const cuda::BoxSteps& steps, int64_t b, int head) {
  const int batches = inner_batch_of(problem);
  const int outer = static_cast<int>(b) / batches, inner = static_cast<int>(b) % batches;
  return {0, 0, head * steps.head, inner * steps.b0, outer * steps.b1};
}

// All columns of the tile's rows, from row `row` of the head on. `barrier` was told Tile::bytes(its rows).
template <class Tile>
__device__ __forceinline__ void load_box(Tile tile, const cuda::TensorMap& map, const BoxStart& head, int row,
                                         uint32_t barrier) {
  BoxStart at = head;
  at.row = row;
#pragma unroll
  for (int panel = 0; panel < Tile::kPitch / cuda::kBoxBytes; ++panel) {
    tma_load(tile.base + panel * Tile::kNextLine, &map.map, barrier, at);
    at.col += cuda::kBoxCols;
  }
}

}  // namespace flash_ext::sm80
