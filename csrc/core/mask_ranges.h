// Which queries and keys a mask leaves to each other, tile by tile, so that kernels leave out tiles that it hides: of a
// tile of queries the keys from the first that one of them sees to the last, and of a tile of keys the queries.
//
// Found on the device by kernels/stages/mask_ranges.cu; read where sm80 and sm90 find which tiles meet. Invariant:
// beyond a range everything is hidden; within it scores are masked as ever. A hidden score adds exactly 0 to every sum
// of finite numbers, so that these have the same bits with ranges and without.
#pragma once

#include "core/args.h"

namespace flash_ext {

struct alignas(8) MaskRange {
  int first, last;  // one past the end; both 0 where all is hidden
};

struct MaskRanges {
  const MaskRange* data = nullptr;  // null: nothing is known
  int b = 0, head = 0, tile = 0;    // steps, 0 where the mask is the same for all

  FLASH_DEVICE MaskRange at(int batch, int of_head, int of_tile) const {
    return data == nullptr ? MaskRange{0, INT32_MAX} : *find(batch, of_head, of_tile);
  }
  FLASH_DEVICE const MaskRange* find(int batch, int of_head, int of_tile) const {
    return data + (batch * b + of_head * head + of_tile * tile);
  }
};

// Whether they are looked for. Not where results are batch-invariant: what is no number shows whether a tile was left
// out, and how much is in the batch decides that. NOTE: it is a launch more; calls a little smaller, 8x16x1024x64 on
// 132 multiprocessors, take 120 us forward. Where it begins to pay was not measured.
inline bool finds_mask_ranges(const Problem& problem, int64_t multiprocessors) {
  return problem.has_mask && !problem.packed && !problem.batch_invariant &&
         problem.batch * problem.heads_q * problem.len_q >= (multiprocessors << 20) / problem.len_k;
}

}  // namespace flash_ext
