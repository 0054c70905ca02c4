// The tiles of the two-pass backward (parts.cuh) and what each keeps in shared memory.
//
// Called by rows.cpp, parts.cuh and run.cuh. Invariant: as of kernels/sm90/config.h.
#pragma once

#include "kernels/sm90/backward/config.h"

namespace flash_ext::sm90 {

// Above it the two-pass backward is the only one.
constexpr int kSmallHeadDim = 128;

constexpr int kMostSoftcap = 256;  // from above kSmallHeadDim up to it there are kernels of a softcap alone

// Which kernel of an instance a call needs: one for no scores, for a softcap alone, or (kScores) for whatever there is,
// dropout included. head_dim: of the instance.
inline ScoreKind two_pass_score_kind(const Problem& problem, int64_t head_dim) {
  if (problem.has_mask || problem.has_bias || problem.has_alibi || problem.dropout_p > 0.0) return ScoreKind::kScores;
  if (problem.softcap == 0.0) return ScoreKind::kNone;
  return head_dim <= kSmallHeadDim || head_dim > kMostSoftcap ? ScoreKind::kScores : ScoreKind::kSoftcap;
}

// Products of 64 keys and 64 queries, or fewer above head dim 256 and, with scores, above 192.
struct TwoPassShape {
  int keys = 64;            // of a tile of the keys' kernel
  bool scored = false;      // with ScoreKind::kScores, which the producer's other three warps bring
  bool late_dp = false;     // dP of a tile is computed when P is packed, because registers are scarce
  int queries = block;      // of a tile that the keys' kernel walks over
  int walked_keys = block;  // of one that the queries' kernel walks over
  // Above head dim 256 registers hold half of a gradient's columns. Of dK and dV a block sums up half, of dQ each
  // warpgroup of a tile of 64 queries; S and dP are made for each half.
  bool halves = false;
  int narrow = 0;  // columns of V and dO, where they are fewer than those of Q and K; 0: as many
  int stages = 2;  // of Q, dO and P, and of K in the queries' kernel
  int v_stages = 1;
  // Steps of 16 columns that products take from registers, because they saturate shared memory: of K in S^T and of V in
  // dP^T (splits_gradients()), of dO in dP.
  int k_steps = 0, v_steps = 0, out_steps = 0;
  bool turns = false;  // whether the warpgroups of the queries' kernel take turns, see begin_issue

  static constexpr int block = 64, threads = 384;
  constexpr int producer_registers() const { return scored ? 56 : halves ? 72 : 24; }  // as of BackwardShape
  constexpr int consumer_registers() const { return scored ? 224 : halves ? 216 : 240; }
  // Whether a warpgroup has dV of a tile of keys and the other dK, because both do not fit the registers of one.
  constexpr bool splits_gradients() const { return keys == block; }
  // Of P on its way from one to the other, 16 bits a pair, and with scores what dropout drops, a word a thread.
  constexpr int p_bytes() const { return splits_gradients() ? block * queries * 2 + (scored ? 128 * 4 : 0) : 0; }
  // Of keys that TMA brings at once, so that both kernels' tiles are whole boxes.
  constexpr int key_box() const { return block % walked_keys == 0 ? walked_keys : 16; }
  constexpr int values(int head_dim) const { return narrow > 0 ? narrow : head_dim; }
  constexpr int query_rows() const { return halves ? block : 2 * block; }  // of a tile of the queries' kernel
};

constexpr TwoPassShape two_pass_shape(int head_dim, ScoreKind kind, bool narrow = false) {
  // NOTE: above 256 as many rows as fit beside K and V of 64 keys, or Q and dO of 64 queries, and with scores fewer of
  // these, for slots; with turns dQ took 6 to 7 % longer.
  const bool scored = kind == ScoreKind::kScores, small = head_dim <= kSmallHeadDim;
  if (head_dim > 384) return {.scored = scored, .queries = 16, .walked_keys = scored ? 16 : 32, .halves = true};
  if (head_dim > 256) return {.scored = scored, .queries = 32, .walked_keys = scored ? 32 : 48, .halves = true};
  TwoPassShape shape{.keys = small ? 128 : 64, .scored = scored, .late_dp = scored && head_dim > 64};
  shape.turns = small || !scored;  // NOTE: with scores at 192 dQ took 3 % longer
  if (scored && head_dim > 192) {
    // NOTE: with 64 of both the kernels spilled 48 and 128 bytes, and slots had no room. Turns took 1 % longer, dP in
    // registers of its own 4 %.
    shape.queries = shape.walked_keys = 32;
    shape.stages = 3;
    shape.k_steps = shape.v_steps = 8;
  }
  if (narrow) shape.narrow = kNarrowValues;
  if (!scored && head_dim <= 192) {  // there is room
    shape.stages = 3;
    shape.v_stages = 2;
    if (!small) shape.k_steps = shape.v_steps = 8;
    shape.out_steps = std::min(shape.values(head_dim) / 16, 8);
  }
  return shape;
}

inline bool is_two_pass_narrow(const Problem& problem, int head_dim) {
  return has_narrow_values(problem, head_dim) && two_pass_score_kind(problem, head_dim) == ScoreKind::kNone;
}

// A tile of bias and mask.
constexpr int largest_slot(int queries, int keys) { return queries * (score_pitch(keys, 4) + score_pitch(keys, 1)); }
constexpr int largest_keys_slot(TwoPassShape shape) { return largest_slot(shape.queries, shape.keys); }
constexpr int largest_queries_slot(TwoPassShape shape) { return largest_slot(TwoPassShape::block, shape.walked_keys); }
constexpr int kDrawKeyBytes = 8 * 64;  // Philox' keys, a copy of each warp that draws

struct KeysSmem {
  int k = 0, v = 0, q = 0, d_out = 0, p = 0, stats = 0, draw_keys = 0, scores = 0, barriers = 0;  // offsets
  int score_bytes = 0;
  int total = 0;  // and what it takes to align the first tile
};

constexpr KeysSmem keys_smem(TwoPassShape shape, int head_dim) {
  const int stages = shape.stages;
  const int tile = tile_bytes(shape.queries, head_dim), d_out = tile_bytes(shape.queries, shape.values(head_dim));
  const int barriers = 16 * (1 + 3 * stages + (shape.scored ? kScoreStages : 0));
  KeysSmem smem;
  smem.v = smem.k + tile_bytes(shape.keys, head_dim);
  smem.q = smem.v + tile_bytes(shape.keys, shape.values(head_dim));
  smem.d_out = smem.q + stages * tile;
  smem.p = smem.d_out + stages * d_out;
  smem.stats = smem.p + stages * shape.p_bytes();
  smem.draw_keys = smem.stats + kQueryStats * stages * shape.queries * 4;
  smem.scores = smem.draw_keys + (shape.scored ? kDrawKeyBytes : 0);
  const int left = kSharedMemoryLimit - kTileAlign - smem.scores - barriers;
  smem.score_bytes = shape.scored ? std::min(left / 16 * 16, kScoreStages * largest_keys_slot(shape)) : 0;
  smem.barriers = smem.scores + smem.score_bytes;
  smem.total = smem.barriers + barriers + kTileAlign;
  return smem;
}

struct QueriesSmem {
  int q = 0, d_out = 0, k = 0, v = 0, scores = 0, barriers = 0;
  int score_bytes = 0;
  int total = 0;
};

constexpr QueriesSmem queries_smem(TwoPassShape shape, int head_dim) {
  const int values = shape.values(head_dim), tile = tile_bytes(shape.walked_keys, head_dim);
  const int barriers = 16 * (1 + shape.stages + shape.v_stages + (shape.scored ? kScoreStages : 0));
  QueriesSmem smem;
  smem.d_out = smem.q + tile_bytes(shape.query_rows(), head_dim);
  smem.k = smem.d_out + tile_bytes(shape.query_rows(), values);
  smem.v = smem.k + shape.stages * tile;
  smem.scores = smem.v + shape.v_stages * tile_bytes(shape.walked_keys, values);
  const int left = kSharedMemoryLimit - kTileAlign - smem.scores - barriers;
  smem.score_bytes = shape.scored ? std::min(left / 16 * 16, kScoreStages * largest_queries_slot(shape)) : 0;
  smem.barriers = smem.scores + smem.score_bytes;
  smem.total = smem.barriers + barriers + kTileAlign;
  return smem;
}

// Of the queries' kernel.
inline TileSchedule two_pass_queries(const Problem& problem, TwoPassShape shape, int64_t sms) {
  const int64_t kv_head_bytes = problem.len_k * (problem.head_dim + problem.head_dim_v) * 2;
  return make_tile_schedule(problem, shape.query_rows(), kv_head_bytes, kL2OfKeys, sms);
}

constexpr bool two_pass_fits(TwoPassShape shape, int head_dim) {
  const KeysSmem keys = keys_smem(shape, head_dim);
  const QueriesSmem queries = queries_smem(shape, head_dim);
  return keys.total <= kSharedMemoryLimit && queries.total <= kSharedMemoryLimit &&
         (!shape.scored ||
          (keys.score_bytes >= largest_keys_slot(shape) && queries.score_bytes >= largest_queries_slot(shape)));
}

}  // namespace flash_ext::sm90
