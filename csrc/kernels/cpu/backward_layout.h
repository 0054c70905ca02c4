// Scratch of the backward passes: what a worker keeps for its panels of queries and for one tile, and what all share.
//
// BackwardTiles serves both passes (backward_tiles.h), BackwardLayout the sweep (backward.cpp), which plan() measures
// and every worker carves anew. Invariant: nothing is carved that the problem does not need, and sizes follow from the
// problem and its partition alone.
#pragma once

#include <algorithm>

#include "kernels/cpu/operands.h"

namespace flash_ext::cpu {

// Scratch of `panels` panels of queries and of one tile.
template <class Compute>
struct BackwardTiles {
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;

  int block_n = kPad;
  int panels = 1;
  int depth = 0, depth_v = 0;  // inner dimensions of S^T and dP^T
  int cols = 0, cols_v = 0;    // d and d_v, padded

  Operand* q_transposed = nullptr;      // [panels][depth][kPanel]
  Operand* q_rows = nullptr;            // [panels][kPanel][cols]
  Operand* d_out_transposed = nullptr;  // [panels][depth_v][kPanel]
  Operand* d_out_rows = nullptr;        // [panels][kPanel][cols_v]
  Acc* lse = nullptr;                   // [panels][kPanel]
  Acc* delta = nullptr;                 // [panels][kPanel]
  Acc* renorm = nullptr;                // [panels][kPanel]
  bool* renormalised = nullptr;         // [panels]

  Operand* k_left = nullptr;          // [block_n, staged_ld(d)]
  Operand* v_left = nullptr;          // [block_n, staged_ld(d_v)]
  Operand* staged = nullptr;          // [kPanel, staged_ld(max(d, d_v))]
  Operand* few_q = nullptr;           // [kFewQueries, staged_ld(d)]; null without pairs: q_rows serve
  Operand* few_d_out = nullptr;       // [kFewQueries, staged_ld(d_v)]; null without pairs: d_out_rows serve
  Acc* out_acc = nullptr;             // [kPanel, cols_v]
  Acc* d_out_acc = nullptr;           // [kPanel, cols_v]; null without pairs: d_out_rows serve
  Acc* scores = nullptr;              // [block_n, kPanel]
  Acc* d_probs = nullptr;             // [block_n, kPanel]
  Operand* probs = nullptr;           // [block_n, kPanel]; scores itself where the types agree
  Operand* d_scores = nullptr;        // [block_n, kPanel]; d_probs itself where the types agree
  Operand* d_scores_right = nullptr;  // [block_n, kPanel]; d_scores itself without pairs
  uint8_t* keep = nullptr;            // [block_n, kPanel]
  Acc* all_delta = nullptr;           // [batch, heads_q, len_q], shared: what renormalise() found, for the bias's pass
  Acc* all_renorm = nullptr;          // [batch, heads_q, len_q], shared
  ScoreInputLoader<Compute> inputs;

  // As many blocks of keys in each of `key_parts` parts.
  BackwardTiles(const Problem& problem, int64_t rows, int64_t key_parts = 1) {
    const int64_t keys = std::max<int64_t>(round_up(problem.len_k, kPad), kPad);
    block_n = static_cast<int>(std::min<int64_t>(Tiles<Compute>::kBackwardN, keys));
    if (key_parts > 1) {
      const int64_t blocks = round_up((keys + block_n - 1) / block_n, key_parts);
      block_n = static_cast<int>(round_up((keys + blocks - 1) / blocks, kPad));
    }
    panels = static_cast<int>((rows + kPanel - 1) / kPanel);
    depth = depth_of<Compute>(problem.head_dim);
    depth_v = depth_of<Compute>(problem.head_dim_v);
    cols = static_cast<int>(round_up(problem.head_dim, kPad));
    cols_v = static_cast<int>(round_up(problem.head_dim_v, kPad));
  }

  void carve(Arena& arena, const Problem& problem) {
    const int64_t queries = int64_t{panels} * kPanel;
    const int64_t tile = int64_t{block_n} * kPanel;
    q_transposed = arena.take<Operand>(queries * depth);
    q_rows = arena.take<Operand>(queries * cols);
    d_out_transposed = arena.take<Operand>(queries * depth_v);
    d_out_rows = arena.take<Operand>(queries * cols_v);
    lse = arena.take<Acc>(queries);
    delta = arena.take<Acc>(queries);
    renorm = arena.take<Acc>(queries);
    renormalised = arena.take<bool>(panels);
    k_left = arena.take<Operand>(int64_t{block_n} * staged_ld(problem.head_dim));
    v_left = arena.take<Operand>(int64_t{block_n} * staged_ld(problem.head_dim_v));
    staged = arena.take<Operand>(int64_t{kPanel} * staged_ld(std::max(problem.head_dim, problem.head_dim_v)));
    out_acc = arena.take<Acc>(int64_t{kPanel} * cols_v);
    scores = arena.take<Acc>(tile);
    d_probs = arena.take<Acc>(tile);
    if constexpr (Compute::kPairs) {
      few_q = arena.take<Operand>(kFewQueries<Compute> * staged_ld(problem.head_dim));
      few_d_out = arena.take<Operand>(kFewQueries<Compute> * staged_ld(problem.head_dim_v));
      d_out_acc = arena.take<Acc>(int64_t{kPanel} * cols_v);
      probs = arena.take<Operand>(tile);
      d_scores = arena.take<Operand>(tile);
      d_scores_right = arena.take<Operand>(tile);
    } else {
      probs = scores;
      d_scores = d_scores_right = d_probs;
    }
    if (problem.dropout_p > 0.0) keep = arena.take<uint8_t>(tile);
    inputs.carve(arena, problem, block_n, kPanel, /*transposed=*/true);
  }
};

constexpr int kSlopeRows = 6;  // gradient, dS, what both lost, distance, P

template <class Compute>
struct BackwardLayout {
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;

  Partition cut;
  BackwardTiles<Compute> tiles;
  int64_t n_blocks = 0;
  int64_t keys = 0;      // len_k, padded
  bool streams = false;  // one panel of queries is all that a key meets: dK and dV are written block by block

  // One worker's scratch.
  Operand* k_transposed = nullptr;  // [n_blocks][cols][block_n]
  Acc* dq_transposed = nullptr;     // [panels][cols][kPanel]; [panels][kPanel][cols] with few queries or keys
  Acc* dq_rows = nullptr;           // [kPanel][cols]
  Acc* bias_tile = nullptr;         // [block_n][kPanel] dS^T
  Acc* slope = nullptr;             // [panels][kSlopeRows][kPanel] SlopeSums
  Acc* dk = nullptr;                // [keys, cols], or [block_n, cols] if it streams; without chunks
  Acc* dv = nullptr;                // [keys, cols_v], or [block_n, cols_v]; without chunks

  // Shared by all.
  Acc* dk_slots = nullptr;       // [units, chunks][keys, cols]
  Acc* dv_slots = nullptr;       // [units, chunks][keys, cols_v]
  Acc* dq_slots = nullptr;       // [batch, heads_q, row blocks, key_parts] of dq_transposed, where those are several
  double* slope_sums = nullptr;  // [batch, heads_q, m_blocks]
  Acc* key_sums = nullptr;       // [units, chunks][heads][keys] BiasRoute::kKeys
  int64_t tables = 0;            // bias_tables()
  Acc* bias_sums = nullptr;      // [tables][len_q, len_k] BiasRoute::kTiles

  BackwardLayout(const Problem& problem, const Partition& partition)
      : cut(partition), tiles(problem, partition.block_m, partition.key_parts) {
    n_blocks = (problem.len_k + tiles.block_n - 1) / tiles.block_n;
    keys = n_blocks * tiles.block_n;
    streams = cut.row_blocks == 1 && tiles.panels == 1;
  }

  int64_t dq_size() const { return int64_t{tiles.panels} * tiles.cols * kPanel; }
  // The slot of the first part.
  Acc* dq_slot(int64_t batch_head, int64_t m_block) const {
    return dq_slots + (batch_head * cut.m_blocks + m_block) * cut.key_parts * dq_size();
  }

  int64_t carve_worker(const Problem& problem, void* base) {
    Arena arena(base);
    tiles.carve(arena, problem);
    if (problem.wants_dq) {
      k_transposed = arena.take<Operand>(keys * tiles.cols);
      dq_transposed = arena.take<Acc>(dq_size());
      dq_rows = arena.take<Acc>(int64_t{kPanel} * tiles.cols);
    }
    if (problem.wants_dbias) bias_tile = arena.take<Acc>(int64_t{tiles.block_n} * kPanel);
    if (problem.wants_dalibi) slope = arena.take<Acc>(int64_t{tiles.panels} * kSlopeRows * kPanel);
    if (cut.chunks == 1) {
      const int64_t rows = streams ? tiles.block_n : keys;
      if (problem.wants_dk) dk = arena.take<Acc>(rows * tiles.cols);
      if (problem.wants_dv) dv = arena.take<Acc>(rows * tiles.cols_v);
    }
    return arena.used();
  }

  int64_t carve_shared(const Problem& problem, void* base) {
    Arena arena(base);
    if (cut.chunks > 1) {
      if (problem.wants_dk) dk_slots = arena.take<Acc>(cut.items * keys * tiles.cols);
      if (problem.wants_dv) dv_slots = arena.take<Acc>(cut.items * keys * tiles.cols_v);
    }
    if (cut.key_parts > 1 && problem.wants_dq) {
      dq_slots = arena.take<Acc>(cut.m_blocks * problem.batch * problem.heads_q * cut.key_parts * dq_size());
    }
    if (problem.wants_dbias) {
      const int64_t rows = problem.batch * problem.heads_q * problem.len_q;
      key_sums = arena.take<Acc>(cut.items * cut.heads * keys);
      bias_sums = arena.take<Acc>(tables * problem.len_q * problem.len_k);
      tiles.all_delta = arena.take<Acc>(rows);
      tiles.all_renorm = arena.take<Acc>(rows);
    }
    if (problem.wants_dalibi) slope_sums = arena.take<double>(problem.batch * problem.heads_q * cut.m_blocks);
    return arena.used();
  }
};

}  // namespace flash_ext::cpu
