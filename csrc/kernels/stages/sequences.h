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

// Writes the list to scratch of packed_tiles_bytes: first the tiles that have most to do, behind the last one entries
// whose b is -1, most_packed_tiles in all. The order is a function of the lengths alone.
const PackedTile* list_packed_tiles(const Problem& problem, const Sequences& sequences, TilesOf of, int64_t block,
                                    void* scratch, void* stream);

// Zeros in rows of `view` that belong to no sequence, of all its heads and `cols` columns of `element_bytes`; in all of
// them where the list of the kernel that writes the others, `tiles`, has no tile.
void clear_unused_rows(const Problem& problem, const Sequences& sequences, TilesOf of, const PackedTile* tiles,
                       const TensorView& view, int64_t heads, int64_t cols, int64_t element_bytes, void* stream);

// -inf in lse [h_q, rows_q], float, of such rows.
void clear_unused_lse(const Problem& problem, const Sequences& sequences, const PackedTile* tiles, float* lse,
                      void* stream);

}  // namespace flash_ext::cuda
