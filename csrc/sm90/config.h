// The tiles of this backend, what each keeps in shared memory, how the warpgroups take turns and in which order tiles
// run. Host and device read the same functions, so that plan(), the launch and the kernel cannot disagree.
//
// Called by backend.cpp, fwd.cuh and run_fwd.cuh. Invariant: every tile starts at a multiple of 1024 bytes
// (descriptor.h); registers of all warpgroups together fit the 65,536 of a multiprocessor.
#pragma once

#include <cstdint>

#include "attention/band.h"
#include "attention/portable.h"
#include "attention/tile_schedule.h"
#include "sm90/descriptor.h"

namespace flash_ext::sm90 {

// How the matrix products of one warpgroup overlap softmax.
enum class Schedule : uint8_t {
  kSerial,    // S, softmax, O: only other warpgroups overlap
  kOverlap,   // S of the next tile and O of this one are issued together; softmax of the next runs under O
  kPingPong,  // the same, and one warpgroup after the other issues its products
  kExpMutex,  // O of this tile and S of the next are issued together; one warpgroup after the other exponentiates
};

struct ForwardShape {
  int consumers;  // warpgroups of 64 queries
  int block_n;    // keys
  int stages;     // of K and of V
  int q_stages;   // 2: the next tile's Q arrives during this one
  Schedule schedule;
  int lazy_limit = 8;  // log2 of what P may become before O is rescaled; 0: as soon as a maximum grows

  constexpr int block_m() const { return consumers * 64; }
  constexpr int threads() const { return (consumers + 1) * 128; }
  // What setmaxnreg gives: 128 * (24 + 2 * 240) and 128 * (32 + 3 * 160) are at most 65,536.
  constexpr int producer_registers() const { return consumers == 2 ? 24 : 32; }
  constexpr int consumer_registers() const { return consumers == 2 ? 240 : 160; }
};

// Short rows of scores run on a persistent grid, whose next Q and K arrive under the end of the tile before; long ones
// one tile a block, because the hardware evens out what tiles of a causal band differ by, and the static walk does not.
// Each has the shape that was fastest on an H200 (bf16, 16k tokens, TFLOP/s at S = 1k / 16k, not causal and causal):
//
//   64    192x128 ping-pong, persistent  395/529 264/504     192x128 overlap    357/556 206/532
//   96    128x128 ping-pong, persistent  450/553 353/542     128x128 ping-pong  440/546 270/552
//   128   128x128 overlap, persistent    531/639 400/600     192x80 ping-pong   509/723 304/709
//   192   128x112 ping-pong, persistent  523/754 386/560     128x112 ping-pong  552/796 357/777
//   256   128x80 overlap, persistent     588/764 362/558     128x80 overlap     615/809 411/793
constexpr ForwardShape forward_shape(int head_dim, bool persistent) {
  if (head_dim <= 64) return {3, 128, 2, 2, persistent ? Schedule::kPingPong : Schedule::kOverlap};
  if (head_dim <= 96) return {2, 128, 2, 2, Schedule::kPingPong};
  if (head_dim <= 128 && persistent) return {2, 128, 2, 2, Schedule::kOverlap};
  if (head_dim <= 128) return {3, 80, 2, 2, Schedule::kPingPong};
  if (head_dim <= 192) return {2, 112, 2, 1, Schedule::kPingPong};
  return {2, 80, 2, 1, Schedule::kOverlap};
}

// keys: that a query sees on average. Where the two cross in the same measurement (of powers of two); from 192 on there
// is no room for a second Q, and only the uneven tiles of a causal band gain.
inline bool is_persistent(const Problem& problem, int head_dim) {
  const Band band = make_band(problem);
  const auto seen = [&](int64_t query) { return band.keys({query, query + 1}, problem.len_k).size(); };
  const int64_t keys = (seen(problem.len_q / 4) + seen(problem.len_q * 3 / 4)) / 2;
  if (head_dim <= 64) return keys <= 2560;
  if (head_dim <= 128) return keys <= 1280;
  return head_dim <= 192 && keys <= 640 && seen(0) != seen(problem.len_q - 1);
}

// Longest tiles first, inside sections of key heads whose K and V stay in L2.
inline TileSchedule forward_schedule(const Problem& problem, int block_m) {
  constexpr int64_t kL2Budget = 32 << 20;  // of the 50 to 60 MB of H100 and H200
  const int64_t kv_head_bytes = problem.len_k * (problem.head_dim + problem.head_dim_v) * 2;
  return make_tile_schedule(problem, block_m, kv_head_bytes, kL2Budget);
}

struct ForwardSmem {
  int q = 0, k = 0, v = 0, barriers = 0;  // offsets
  int total = 0;                          // and what it takes to align the first tile
};

constexpr ForwardSmem forward_smem(ForwardShape shape, int head_dim) {
  ForwardSmem smem;
  smem.k = shape.q_stages * tile_bytes(shape.block_m(), head_dim);
  smem.v = smem.k + shape.stages * tile_bytes(shape.block_n, head_dim);
  smem.barriers = smem.v + shape.stages * tile_bytes(shape.block_n, head_dim);
  smem.total = smem.barriers + 8 * (4 * shape.stages + 2 * shape.q_stages) + kTileAlign;
  return smem;
}

constexpr int kSharedMemoryLimit = 227 * 1024;  // of one block on 9.0
constexpr bool fits(int head_dim) {
  return forward_smem(forward_shape(head_dim, false), head_dim).total <= kSharedMemoryLimit &&
         forward_smem(forward_shape(head_dim, true), head_dim).total <= kSharedMemoryLimit;
}
static_assert(fits(64) && fits(96) && fits(128) && fits(192) && fits(256));

}  // namespace flash_ext::sm90
