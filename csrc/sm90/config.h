// The tiles of this backend, what each keeps in shared memory and how the warpgroups take turns. Host and device read
// the same functions, so that plan(), the launch and the kernel cannot disagree.
//
// Called by fwd.cuh. Invariant: every tile starts at a multiple of 1024 bytes (descriptor.h); registers of all
// warpgroups together fit the 65,536 of a multiprocessor.
#pragma once

#include <cstdint>

#include "attention/portable.h"
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

constexpr ForwardShape forward_shape(int head_dim) {
  if (head_dim <= 64) return {3, 128, 2, 2, Schedule::kPingPong};
  if (head_dim <= 96) return {2, 128, 2, 2, Schedule::kPingPong};
  if (head_dim <= 128) return {2, 128, 2, 2, Schedule::kPingPong};
  if (head_dim <= 192) return {2, 112, 2, 1, Schedule::kPingPong};
  return {2, 80, 2, 1, Schedule::kPingPong};
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
static_assert(forward_smem(forward_shape(64), 64).total <= kSharedMemoryLimit);
static_assert(forward_smem(forward_shape(96), 96).total <= kSharedMemoryLimit);
static_assert(forward_smem(forward_shape(128), 128).total <= kSharedMemoryLimit);
static_assert(forward_smem(forward_shape(192), 192).total <= kSharedMemoryLimit);
static_assert(forward_smem(forward_shape(256), 256).total <= kSharedMemoryLimit);

}  // namespace flash_ext::sm90
