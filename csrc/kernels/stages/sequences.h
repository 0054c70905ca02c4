// What packed sequences (core/sequences.h) need before a GPU kernel runs: the list of its tiles, made on the device, so
// that the host never reads lengths, and zeros in the rows that belong to no sequence. Host functions that launch on a
// stream.
#pragma once

#include "core/sequences.h"

namespace flash_ext::cuda {

// Which rows a list has tiles of.
enum class TilesOf : uint8_t { kQueries, kKeys };

// Of the list, for tiles of `block` rows.
int64_t packed_tiles_bytes(const Problem& problem, TilesOf of, int64_t block);

// Rows of a result, of which those that belong to no sequence become 0.
struct UnusedRows {
  TensorView view;  // without data: nothing
  TilesOf of = TilesOf::kQueries;
  int64_t heads = 0, cols = 0;
  int element_bytes = 0;  // 2 or 4
};

// What else is made ready with a list.
struct PackedResults {
  UnusedRows rows[3];
  float* lse = nullptr;         // [h_q, rows_q]: -inf in rows of no sequence
  uint32_t* counter = nullptr;  // becomes 0
};

// Writes the list to scratch of packed_tiles_bytes: first the tiles that have most to do, behind the last one entries
// whose b is -1, most_packed_tiles in all. The order is a function of the lengths alone. Where cu_q, or cu_k of a list
// of keys, does not ascend, there is no tile, and no row of results belongs to a sequence. A kernel that is launched
// behind it by launch_dependent may read all that once it has waited.
//
// together: how many rows of keys (queries of a list of keys) stay in L2. Tiles of so few sequences' may stand in any
// order, the longest first; of 0 those of a sequence follow each other. Only short lists of few sequences heed it.
const PackedTile* prepare_packed(const Problem& problem, const Sequences& sequences, TilesOf of, int64_t block,
                                 void* scratch, const PackedResults& results, void* stream, int together = 0);

// How many tiles the list has, in device memory; prepare_packed writes it, too.
const int64_t* packed_tile_count(const Problem& problem, TilesOf of, int64_t block, const PackedTile* tiles);

}  // namespace flash_ext::cuda
