// What a block of the main backward kernel reads once a tile of queries or less: where its rows lie, which tiles it
// visits, the numbers of its head. It lies in shared memory, because it must not occupy registers during the products.
//
// Called by steps.cuh: found by one thread, which every other one waits for before it reads. Invariant: heads of a
// group follow each other, so that all of them but the first are found by stepping on.
#pragma once

#include "core/tile_schedule.h"
#include "kernels/sm80/backward/dq_accumulate.cuh"
#include "kernels/sm80/backward/parts.cuh"
#include "kernels/sm80/boxes.cuh"

namespace flash_ext::sm80 {

template <class Traits>
struct BackwardBlock {
  using T = typename Traits::T;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr bool kScaled = std::is_same_v<typename Traits::Element, Fp16>;

  uint32_t tile;  // whose sums are the block's; kNoSums: it has none
  GlobalRows<T> q, d_out, k, v, dk, dv;
  int head, heads_left, q_per_k, q_per_v;  // heads_left: after this one
  bool is_regular;                         // load_whole loads its whole tiles
  bool new_k, new_v;                       // this query head is the first of its key or value head
  const float *lse, *delta, *beside_lse;
  float *dq_accum, *dbias, *slope;  // dq_accum with direct_dq: dQ itself, whatever its type
  int* turn;
  TileBand band;
  int first_key, n_block, first_query, last_query;
  int key_from_diagonal;  // first_key less where the diagonal of query 0 lies
  uint32_t bh;
  BoxStart dbias_box;          // of bias_boxes.cuh, at the block's first key
  uint32_t dq_stage;           // shared memory of all warps' stages of dQ
  int dq_rows;                 // BackwardSmem::dq_rows; 0: fragments without a stage, -1: rows
  float bound, delta_max;      // of dS, fp16
  float ds_scale, ds_unscale;  // of dS in fp16, and of dK; powers of two
  Sequence sequence;

  __device__ __forceinline__ void find(const BackwardArgs& args, const BackwardScratch& scratch,
                                       const TileSchedule& schedule, const Place& place, int64_t first_head,
                                       int group_size) {
    const Problem& problem = args.fwd.problem;
    const auto [b, group, key_tile, at] = place;
    const int64_t first_bh = b * problem.heads_q + first_head, row = row_index(problem, at, b, first_head);
    // Of the head in what has blocks of a head.
    const int64_t head_tiles = problem.packed ? first_head : first_bh;
    sequence = at;
    head = static_cast<int>(first_head);
    heads_left = group_size - 1;
    q_per_k = static_cast<int>(problem.heads_q) / static_cast<int>(problem.heads_k);
    q_per_v = static_cast<int>(problem.heads_q) / static_cast<int>(problem.heads_v);
    // A gradient in float is addressed in its own elements: only data and strides of these are used.
    const auto gradient = [&](const TensorView& view, bool in_accum, int64_t h, int64_t cols) {
      GlobalRows<T> result = head_rows<T>(problem, view, b, h, place.sequence.row_k, place.sequence.len_k, cols);
      if (in_accum) {
        result.data = reinterpret_cast<T*>(static_cast<float*>(view.data) + batch_offset(problem, view, b) +
                                           h * view.head_stride + place.sequence.row_k * view.row_stride);
      }
      return result;
    };
    q = head_rows<T>(problem, args.fwd.q, b, first_head, at.row_q, at.len_q, problem.head_dim);
    d_out = head_rows<T>(problem, args.d_out, b, first_head, at.row_q, args.d_out ? at.len_q : 0, problem.head_dim_v);
    k = head_rows<T>(problem, args.fwd.k, b, head / q_per_k, at.row_k, at.len_k, problem.head_dim);
    v = head_rows<T>(problem, args.fwd.v, b, head / q_per_v, at.row_k, args.d_out ? at.len_k : 0,
                     problem.head_dim_v);  // lse needs none
    if (args.dk) dk = gradient(args.dk, args.dk_in_accum, head / q_per_k, problem.head_dim);
    if (args.dv) dv = gradient(args.dv, args.dv_in_accum, head / q_per_v, problem.head_dim_v);
    new_k = new_v = true;
    lse = static_cast<const float*>(args.fwd.lse) + row;
    delta = scratch.delta + row;
    beside_lse = scratch.beside_lse + row * scratch.beside_lse_size;
    dq_accum = scratch.dq_accum + row * problem.head_dim;
    if constexpr (Traits::kDirectDq) {
      if (scratch.direct_dq) {
        const int64_t first =
            batch_offset(problem, args.dq, b) + first_head * args.dq.head_stride + at.row_q * args.dq.row_stride;
        dq_accum = reinterpret_cast<float*>(static_cast<char*>(args.dq.data) + first * dq_bytes(args));
      }
    }
    turn = scratch.dq_semaphore + head_tiles * scratch.m_blocks * Traits::kWarps;
    slope = problem.wants_dalibi ? scratch.slopes + head_tiles * schedule.blocks + key_tile : nullptr;
    if (problem.packed) {
      turn += first_tile(b, at.row_q, kBlockM) * Traits::kWarps;
      if (slope != nullptr) slope += first_tile(b, at.row_k, kBlockN);
    }
    dbias = nullptr;
    if (scratch.direct_dbias) {
      dbias = static_cast<float*>(args.dbias.data) + batch_offset(problem, args.dbias, b) +
              first_head * args.dbias.head_stride;
    }
    if (Traits::kSendsDbias) {
      dbias_box = box_of(problem, scratch.dbias_map.steps, b, head);
      dbias_box.col = static_cast<int>(key_tile) * kBlockN;
    }
    band = make_tile_band(problem, at);
    n_block = static_cast<int>(key_tile);
    first_key = n_block * kBlockN;
    key_from_diagonal = first_key - diagonal_of(problem, sequence);
    Range queries = make_band(problem, at).queries({first_key, min(first_key + kBlockN, at.len_k)}, at.len_q);
    if constexpr (Traits::kGeneral) {
      const MaskRange seen = scratch.ranges.at(b, group, key_tile);
      queries = {max(queries.first, int64_t{seen.first}), min(queries.last, int64_t{seen.last})};
    }
    first_query = static_cast<int>(queries.first) / kBlockM * kBlockM;
    last_query = (static_cast<int>(queries.last) - 1) / kBlockM * kBlockM;
    if (queries.empty()) last_query = first_query - kBlockM;
    bh = static_cast<uint32_t>(first_bh);
    if constexpr (kScaled) {
      bound = delta_max = 0.f;
      for (int64_t h = first_bh; h < first_bh + group_size; ++h) {
        bound = fmaxf(bound, scratch.bounds[h * 2]);
        delta_max = fmaxf(delta_max, scratch.bounds[h * 2 + 1]);
      }
      ds_scale = ds_unscale = 1.f;
    }
  }

  __device__ __forceinline__ void find_regular(const Problem& problem, const typename Traits::Mods& mods) {
    is_regular = q.is_regular && d_out.is_regular && d_out.rows > 0 && problem.head_dim == Traits::kHeadDim &&
                 problem.head_dim_v == Traits::kHeadDim;
    if constexpr (Traits::kGeneral) {
      const bool has_columns = problem.has_bias || problem.has_mask;
      is_regular = is_regular && mods.is_regular && (!has_columns || first_key + kBlockN <= sequence.len_k);
    }
  }

  __device__ __forceinline__ bool has_sums(const BackwardScratch& scratch) const {
    return scratch.sums != nullptr && tile != kNoSums;
  }

  __device__ __forceinline__ int diagonal() const { return first_key - key_from_diagonal; }

  // Of an element of dQ.
  static __device__ __forceinline__ int dq_bytes(const BackwardArgs& args) {
    return args.dq_in_accum ? 4 : static_cast<int>(sizeof(T));
  }

  template <int kM, int kN>
  __device__ __forceinline__ void store_dq(const float (&c)[kM][kN][4], const BackwardArgs& args, int col, int row,
                                           float factor) const {
    const Problem& problem = args.fwd.problem;
    const int rows = sequence.len_q, cols = static_cast<int>(problem.head_dim);
    if (sizeof(T) == 2 && args.dq_in_accum) {
      sm80::store_dq<typename Traits::Frag>(c, dq_accum, args.dq.row_stride, rows, cols, col, row, factor);
    } else {
      T* const dq = reinterpret_cast<T*>(dq_accum);
      sm80::store_dq<typename Traits::Frag>(c, dq, args.dq.row_stride, rows, cols, col, row, factor);
    }
  }

  __device__ __forceinline__ float scale_of_ds() const { return kScaled ? ds_scale : 1.f; }
  __device__ __forceinline__ float unscale_of_ds() const { return kScaled ? ds_unscale : 1.f; }

  // NOTE: parameters are hidden, or ptxas keeps them in registers across the main loop.
  __device__ __forceinline__ void next_head(const BackwardArgs& args, const BackwardScratch& scratch,
                                            const TileSchedule& schedule) {
    ++head;
    --heads_left;
    new_k = head % q_per_k == 0;
    new_v = head % q_per_v == 0;
    q.advance(args.fwd.q.head_stride);
    d_out.advance(args.d_out.head_stride);
    if (new_k) k.advance(args.fwd.k.head_stride);
    if (new_v) v.advance(args.fwd.v.head_stride);
    const int64_t rows = no_hoist(scratch.rows);
    lse += rows;
    delta += rows;
    beside_lse += rows * no_hoist(scratch.beside_lse_size);
    if (Traits::kDirectDq && scratch.direct_dq) {
      dq_accum = reinterpret_cast<float*>(reinterpret_cast<char*>(dq_accum) + args.dq.head_stride * dq_bytes(args));
    } else {
      dq_accum += rows * args.fwd.problem.head_dim;
    }
    turn += no_hoist(scratch.m_blocks) * Traits::kWarps;
    if (slope != nullptr) slope += no_hoist(schedule.blocks);
    if (dbias != nullptr) dbias += no_hoist(args.dbias.head_stride);
    if (Traits::kSendsDbias) dbias_box.head += scratch.dbias_map.steps.head;
    ++bh;
  }
};

}  // namespace flash_ext::sm80
