// Where one sequence of a batch lies, and its band: read once per tile, so that nothing else asks whether the batch is
// dense or packed.
//
//   dense    rows [0, len) of batch element b                                 (no pointer)
//   packed   rows [cu_seqlens[b], cu_seqlens[b + 1]) of one long row dimension, per side
//   seqused  of the key rows only the first seqused_k[b]                      (a cache that is not full)
//
// Called by every kernel at the start of a tile, on host and device; the batch strides of a packed side are 0.
// Invariant: 0 <= len_q, and 0 <= len_k <= the key rows that exist, so a wrong seqused_k, which lives on the device
// and cannot be checked by the caller, never leaves the tensor. Positions inside a sequence start at 0: the band, alibi
// and dropout see the same numbers packed and dense.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "core/band.h"
#include "core/portable.h"

namespace flash_ext {

struct SeqInfo {
  int64_t q_begin = 0;  // first row of the sequence in q, out, d_out, dq
  int64_t k_begin = 0;  // first row in k, v, dk, dv
  int64_t len_q = 0;
  int64_t len_k = 0;
  Band band;

  FLASH_DEVICE Range queries(int64_t m_block, int64_t block_m) const { return block(m_block, block_m, len_q); }
  FLASH_DEVICE Range keys(int64_t n_block, int64_t block_n) const { return block(n_block, block_n, len_k); }

 private:
  // The last block of a sequence is short, and blocks past it are empty: a grid is made for the longest sequence.
  FLASH_DEVICE static Range block(int64_t index, int64_t size, int64_t len) {
    const int64_t first = index * size;
    return {first, first + size < len ? first + size : len};
  }
};

FLASH_DEVICE SeqInfo make_seq_info(const ForwardArgs& args, int64_t b) {
  SeqInfo seq;
  seq.len_q = args.problem.len_q;
  seq.len_k = args.problem.len_k;
  if (args.cu_seqlens_q != nullptr) {
    seq.q_begin = args.cu_seqlens_q[b];
    seq.len_q = args.cu_seqlens_q[b + 1] - seq.q_begin;
  }
  if (args.cu_seqlens_k != nullptr) {
    seq.k_begin = args.cu_seqlens_k[b];
    seq.len_k = args.cu_seqlens_k[b + 1] - seq.k_begin;
  }
  if (args.seqused_k != nullptr && args.seqused_k[b] < seq.len_k) seq.len_k = args.seqused_k[b];
  if (seq.len_q < 0) seq.len_q = 0;
  if (seq.len_k < 0) seq.len_k = 0;
  seq.band = make_band(args.problem, seq.len_q, seq.len_k);
  return seq;
}

}  // namespace flash_ext
