// Which of its tiles a problem gets on a card: what the kernels of a pass keep in shared memory, against what a block
// may have there. Host code without CUDA syntax.
//
// Called by plan_forward and plan_backward, which choose the tiles, and by rows.cpp, which says what the smallest need.
// Invariant: both ask shared_bytes, so what a row accepts can be started with the tiles of its plan.
#pragma once

#include <algorithm>

#include "core/band.h"
#include "core/device.h"
#include "core/tile_schedule.h"
#include "kernels/sm80/config.h"
#include "kernels/sm80/sequence.h"

namespace flash_ext::sm80 {

// What a plan has chosen, for the run.
struct ForwardChoice {
  bool small_tiles;
  bool tensor_maps;  // tiles are copied by TMA
  int stages;
  int64_t resident;   // blocks that run at a time; 0: not known
  bool finds_ranges;  // finds_mask_ranges
};

struct BackwardChoice {
  bool small_tiles;
  bool dbias_in_bias_dtype;
  int64_t shared_limit, shared_bytes;  // of a block of the main kernel: what it may have, what it has
  int64_t resident;                    // blocks that run at a time, 0: not known
  bool finds_ranges;
};

struct OneTileChoice {
  int64_t grid;
  int shared_bytes;
};

// Tiles of a head of one batch element or, at most, of all packed sequences.
inline int64_t query_tiles(const Problem& problem, int64_t block_m) {
  return problem.packed ? most_packed_tiles(problem, problem.rows_q, block_m) : block_count(problem.len_q, block_m);
}
inline int64_t key_tiles(const Problem& problem, int64_t block_n) {
  return problem.packed ? most_packed_tiles(problem, problem.rows_k, block_n) : block_count(problem.len_k, block_n);
}

// The order of the tiles of packed sequences, as their list has them, of `groups` heads, `section` of which share the
// L2 cache.
inline TileSchedule packed_schedule(const Problem& problem, int64_t rows, int64_t block, int64_t groups,
                                    int64_t section) {
  TileSchedule schedule;
  schedule.blocks = most_packed_tiles(problem, rows, block);
  schedule.heads_k = schedule.kv_heads = groups;
  schedule.section = section;
  return schedule;
}

// What a kernel declares statically, from above: only the compiler knows; backward/renormalise.cuh has as much.
constexpr int64_t kStaticSharedBytes = 1024;

// Positions are 32-bit in the kernels, and sums of two of them must be.
constexpr int64_t kMaxLength = int64_t{1} << 30;

// Of backward/renormalise.cuh, which has one tile for all cards, and room for any bias and mask. Floats above head
// dimension 128 have half of the queries, for cards with 99 KiB.
constexpr TileShape renormalise_tile(int element_bytes, int head_dim) {
  return {element_bytes == 4 && head_dim > 128 ? 16 : 32, 32, 2};
}

constexpr int64_t renormalise_shared_bytes(int head_dim, int element_bytes) {
  const TileShape tile = renormalise_tile(element_bytes, head_dim);
  return 2 * (tile.block_m + tile.block_n) * head_dim * element_bytes +
         tile.block_m * (aux_pitch(tile.block_n, 4) + aux_pitch(tile.block_n, 1));
}

// Keys below which a row is renormalised. In 16-bit types the roundings of P and dS hide the rest, but with one key
// eager attention has dS = 0 exactly; a few more cost nothing.
constexpr int64_t few_keys(bool is_float) { return is_float ? 64 : 16; }

// Whether all rows are to be renormalised. In 16-bit types only a bias or an unusual scale leads to an lse beyond 2^12,
// and a few rows with few keys among many others do not matter: all rows must be of that kind.
inline bool is_inexact(const Problem& problem) {
  const Band band = make_band(problem);
  const bool one_key = band.upper <= band.lower;
  // NOTE: a causal call of one query, say, whose only row sees one key: dQ of 0.95 where eager has 0, at a mean of 8.
  return problem.dtype == DType::kFloat32 || problem.has_bias || problem.wants_dalibi || one_key ||
         band.keys({0, problem.len_q}, problem.len_k).size() < few_keys(false);
}

// Whether backward/renormalise.cuh runs. Of packed sequences the shortest may have few keys, which the host does not
// know; a batch-invariant call takes their way.
inline bool may_be_inexact(const Problem& problem) {
  return problem.packed || problem.batch_invariant || is_inexact(problem);
}

// Whether dS is P o ((dP - delta) + dlse), with delta from backward/renormalise.cuh, and not P o (dP - (delta - dlse)).
// With one key dP - delta is 0 and dS is dlse, bit for bit; the gradients of a bias and of slopes add that up. The
// others are products, which round as much themselves.
inline bool is_dlse_apart(const Problem& problem) { return problem.wants_dalibi || problem.wants_dbias; }

inline bool is_plain_backward(const Problem& problem) {
  return is_plain(problem) && !problem.wants_dbias && !problem.wants_dalibi;
}

// ScoreKind::kDropout. Its scores stay raw.
inline bool has_dropout_alone(const Problem& problem) {
  Problem rest = problem;
  rest.dropout_p = 0.0;
  return problem.dropout_p > 0.0 && is_plain_backward(rest) && !is_inexact(problem) && !problem.batch_invariant;
}

// Whether the main kernel has no other way to rows whose lse is far from 0 than what backward/renormalised_rows.cuh
// finds.
inline bool finds_renorm_rows(const Problem& problem) {
  return problem.dtype != DType::kFloat32 &&
         (is_plain_backward(problem) || has_dropout_alone(problem) || !may_be_inexact(problem));
}

// What kHasBulkAdditions is in the kernels' machine code for the device, and may be where they are compiled from PTX.
inline bool has_bulk_additions(const DeviceInfo& device) { return device.compute_capability >= 90; }

// Of a block of the pass's hungriest kernel, static and dynamic. `head_dim` is that of the instance.
inline int64_t shared_bytes(const Problem& problem, Pass pass, int head_dim, bool small, const DeviceInfo& device) {
  const int element_bytes = problem.dtype == DType::kFloat32 ? 4 : 2;
  const int bias_bytes = bias_bytes_of(problem);
  if (pass == Pass::kForward) {
    const TileShape tile = forward_tile(element_bytes, head_dim, small, is_plain(problem));
    return kStaticSharedBytes + forward_smem(tile, head_dim, element_bytes, bias_bytes, problem.has_mask, 1).total;
  }
  const BackwardShape shape = backward_shape(element_bytes, head_dim, small, is_plain_backward(problem));
  const BackwardNeeds needs = backward_needs(problem, head_dim, has_bulk_additions(device));
  int64_t bytes = backward_smem(shape, head_dim, element_bytes, needs).total;
  if (may_be_inexact(problem)) bytes = std::max(bytes, renormalise_shared_bytes(head_dim, element_bytes));
  if (problem.wants_dbias) {
    const TileShape tile = bias_gradient_shape(element_bytes, head_dim, true).tile;  // its larger one is its own choice
    const int gradient = bias_gradient_smem(tile, head_dim, element_bytes, bias_bytes, problem.has_mask).total;
    bytes = std::max<int64_t>(bytes, gradient);
  }
  return kStaticSharedBytes + bytes;
}

// Whether tiles are copied by TMA, where the views permit it.
inline bool has_tensor_maps(const DeviceInfo& device, int element_bytes, int head_dim) {
  return has_boxes(element_bytes, head_dim) && device.compute_capability >= 90;
}

// Of blocks with so much shared memory, static and dynamic, how many a multiprocessor has room for.
inline int64_t resident_blocks(int64_t bytes, const DeviceInfo& device) {
  constexpr int64_t kReserved = 1024;  // of each block, by the system
  return bytes > device.shared_memory_per_block ? 0 : device.shared_memory_per_multiprocessor / (bytes + kReserved);
}

// Of K and V forward: two where TMA copies them, nothing else is loaded for each tile and a multiprocessor can have
// `blocks` blocks, or as many as with one. NOTE: H200, head dimension 128 (64): two stages are 1.11 (1.05) times as
// fast with dropout and 1.06 (1.03) with slopes; with a bias or a mask, whose copies need a second barrier, 0.98
// to 1.00; in the plain kernel 0.98, where it does not spill.
inline int forward_stages(const Problem& problem, TileShape tile, int head_dim, int element_bytes, int blocks,
                          const DeviceInfo& device) {
  if (!has_tensor_maps(device, element_bytes, head_dim) || is_plain(problem)) return 1;
  if (problem.has_bias || problem.has_mask) return 1;
  const auto resident = [&](int stages) {
    const int64_t bytes = kStaticSharedBytes + forward_smem(tile, head_dim, element_bytes, 0, false, stages).total;
    return std::min<int64_t>(blocks, resident_blocks(bytes, device));
  };
  return resident(2) >= std::max<int64_t>(1, resident(1)) ? 2 : 1;
}

// Small tiles for cards where the large ones do not fit and, forward, for few queries or so few tiles that each of the
// small ones, of half the queries, has a multiprocessor to itself.
// NOTE: and from 9.0 on where a large one is alone on a multiprocessor and two small ones are not. Alone it waits for
// its first keys and for its out; two wait while the other multiplies, and end more evenly. H200, head dimension 256,
// 16k tokens: 0.87 of the time at S = 512 causal, 0.98 full, 0.96 and 0.99 at 4k. They load each key twice as often,
// from L2, which is not measured on 8.0.
inline bool takes_small_tiles(const Problem& problem, Pass pass, int head_dim, const DeviceInfo& device) {
  if (pass == Pass::kForward) {
    const int element_bytes = problem.dtype == DType::kFloat32 ? 4 : 2;
    const TileShape large = forward_tile(element_bytes, head_dim, false, is_plain(problem));
    const int64_t tiles = query_tiles(problem, large.block_m) * elements_of(problem) * problem.heads_q;
    const bool few = problem.len_q <= 64 || 2 * tiles <= device.multiprocessors;
    if (few && !problem.batch_invariant) return true;
    const bool may_pair = large.warps == 8 && element_bytes == 2 && is_plain(problem);
    if (may_pair && device.compute_capability >= 90 &&
        resident_blocks(shared_bytes(problem, pass, head_dim, true, device), device) >= 2) {
      return true;
    }
  }
  return shared_bytes(problem, pass, head_dim, false, device) > device.shared_memory_per_block;
}

}  // namespace flash_ext::sm80
