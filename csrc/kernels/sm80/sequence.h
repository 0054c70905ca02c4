// Where the rows of a block's tile lie: those of a batch element or, in a packed call, of a sequence, which a list of
// tiles made on the device (kernels/stages/sequences.h) tells by the block's number.
//
// Called by forward/block.cuh, backward/steps.cuh, backward/block.cuh, backward/renormalise.cuh and what they call.
// Invariant: a block's lengths are its sequence's, never the problem's, and it has no tile where the list has ended.
#pragma once

#include "core/sequences.h"
#include "core/tile_schedule.h"

namespace flash_ext::sm80 {

// Of a call that is not packed.
FLASH_DEVICE Sequence whole_sequence(const Problem& problem) {
  return {0, 0, static_cast<int>(problem.len_q), static_cast<int>(problem.len_k)};
}

// To what knows rows alone packed sequences are one batch element of rows_q queries and rows_k keys.
FLASH_DEVICE int64_t elements_of(const Problem& problem) { return problem.packed ? 1 : problem.batch; }
FLASH_DEVICE int64_t rows_of_head(const Problem& problem) { return problem.packed ? problem.rows_q : problem.len_q; }

struct Place {
  int64_t b, head, block;
  Sequence sequence;

  FLASH_DEVICE bool is_empty() const { return b < 0; }
};

// `tile`: of the schedule, whose blocks are those of the list in a packed call.
FLASH_DEVICE Place place_of(const Problem& problem, const Tile& tile, const PackedTile* tiles) {
  if (!problem.packed) return {tile.b, tile.head, tile.block, whole_sequence(problem)};
  const PackedTile packed = tiles[tile.block];
  return {packed.b, tile.head, packed.block, packed.sequence};
}

// Of the sequence's first query in lse and what is laid out like it: [b, h_q, s_q] or, packed, [h_q, rows_q].
FLASH_DEVICE int64_t row_index(const Problem& problem, const Sequence& sequence, int64_t b, int64_t head) {
  return problem.packed ? head * problem.rows_q + sequence.row_q : (b * problem.heads_q + head) * problem.len_q;
}

// Where the tiles of a sequence, whose rows begin at `row`, may stand without meeting another's, below
// most_packed_tiles.
FLASH_DEVICE int64_t first_tile(int64_t b, int64_t row, int64_t block) { return row / block + b; }

}  // namespace flash_ext::sm80
