// Packed sequences: rows of sequences of any lengths, 0 among them, behind each other in one tensor. Rows that belong
// to no sequence (before the first, behind the last, not in use) have results of 0, an lse of -inf and gradients of 0.
//
// Called by kernels/stages/sequences.cu, which lists the tiles of a call on the device, by kernels that read the list,
// and by torch/packed.cpp on the CPU. Invariant: whatever the numbers in memory are, no sequence reaches beyond the
// tensors' rows or is longer than the problem's len_q and len_k.
#pragma once

#include <cstdint>

#include "core/band.h"
#include "core/portable.h"

namespace flash_ext {

// Rows of the tensors; positions count from 0 at row_q and row_k.
struct Sequence {
  int row_q = 0, row_k = 0;
  int len_q = 0, len_k = 0;
};

// A tile of `block` rows of queries (keys in a kernel that is parallel over keys) of one sequence.
struct alignas(16) PackedTile {
  int b;      // -1: behind the last tile of the list
  int block;  // counts from 0 in the sequence
  Sequence sequence;
  int listed;  // tiles of the list, whichever entry this is
};

// The most tiles of `block` rows that sequences can have: what a list has room for, and a grid blocks for.
inline int64_t most_packed_tiles(const Problem& problem, int64_t rows, int64_t block) {
  return rows / block + problem.batch;
}

FLASH_DEVICE Sequence sequence_of(const Problem& problem, const Sequences& sequences, int64_t b) {
  const auto bounded = [](int64_t x, int64_t most) { return static_cast<int>(x < 0 ? 0 : x > most ? most : x); };
  const auto find = [&](const int32_t* cu, const int32_t* used, int64_t rows, int64_t longest, int& first, int& len) {
    first = bounded(cu[b], rows);
    const int64_t end = bounded(cu[b + 1], rows);
    len = bounded(end - first, longest);
    if (used != nullptr) len = bounded(used[b], len);
  };
  Sequence result;
  find(sequences.cu_q, sequences.used_q, problem.rows_q, problem.len_q, result.row_q, result.len_q);
  find(sequences.cu_k, sequences.used_k, problem.rows_k, problem.len_k, result.row_k, result.len_k);
  return result;
}

// Where tiles of `block` queries of a sequence stand in an array of most_packed_tiles of all sequences; those of the
// next one begin behind them.
FLASH_DEVICE int first_packed_tile(const Sequence& sequence, int b, int block) { return sequence.row_q / block + b; }

// The band of one sequence.
FLASH_DEVICE Band make_band(const Problem& problem, const Sequence& sequence) {
  return make_band(problem, sequence.len_q, sequence.len_k);
}

FLASH_DEVICE TileBand make_tile_band(const Problem& problem, const Sequence& sequence) {
  return TileBand::make(make_band(problem, sequence), sequence.len_k);
}

}  // namespace flash_ext
