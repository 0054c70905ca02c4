// The tiles of this backend and what each keeps in shared memory. Host and device read the same functions, so that
// plan(), the launch and the kernel cannot disagree.
//
// Two tiles a (element, head dimension, pass): `large` for speed, `small` for few queries and for cards with less
// shared memory (8.6, 8.9 and 12.x have 99 KiB a block). Called by fwd.cuh, bwd.cuh and bias_gradient.cuh. Invariant:
// every buffer starts at a multiple of 128 bytes; head dimensions are padded to the bucket with zeros.
#pragma once

#include <cstdint>

#include "api/backend.h"
#include "attention/args.h"
#include "attention/portable.h"

namespace flash_ext::sm80 {

struct TileShape {
  int block_m;  // queries
  int block_n;  // keys
  int warps;    // each owns block_m / warps queries forward, block_n / warps keys (times a part of them) backward
};

// A warp that owns 32 rows reads each fragment of K and V for two mma; with 16 rows shared memory, and not the tensor
// cores, is the limit (128 bytes a clock against about 1,270 multiply-adds of mma.sync on Hopper). What keeps large
// head dimensions at 16 rows are the 255 registers: out takes rows * head_dim / 32 of them.
constexpr TileShape forward_tile(int element_bytes, int head_dim, bool small, bool plain) {
  if (element_bytes == 2) {
    if (small) return head_dim <= 128 ? TileShape{64, 64, 4} : TileShape{64, 32, 4};
    if (head_dim <= 64 && plain) return {128, 128, 4};
    return head_dim <= 128 ? TileShape{128, 64, 4} : TileShape{128, 64, 8};
  }
  // float splits every operand in two, so a warp has 16 rows at most.
  if (small) return head_dim <= 128 ? TileShape{64, 32, 4} : TileShape{64, 16, 4};
  if (head_dim <= 64) return {128, 64, 8};
  return head_dim <= 128 ? TileShape{128, 32, 8} : TileShape{64, 16, 4};
}

// The rows of a bias or mask tile: whole half lines, so that they can be swizzled.
constexpr int aux_pitch(int block_n, int element_bytes) {
  return block_n * element_bytes < 64 ? 64 : block_n * element_bytes;
}

struct ForwardSmem {
  int q = 0, k = 0, v = 0, bias = 0, mask = 0;  // offsets
  int total = 0;
};

// bias_bytes: of one element, 0 without a bias.
FLASH_DEVICE constexpr ForwardSmem forward_smem(TileShape tile, int head_dim, int element_bytes, int bias_bytes,
                                                bool has_mask) {
  ForwardSmem smem;
  const int row = head_dim * element_bytes;
  smem.k = tile.block_m * row;
  smem.v = smem.k + tile.block_n * row;
  smem.bias = smem.v + tile.block_n * row;
  smem.mask = smem.bias + (bias_bytes > 0 ? tile.block_m * aux_pitch(tile.block_n, bias_bytes) : 0);
  smem.total = smem.mask + (has_mask ? tile.block_m * aux_pitch(tile.block_n, 1) : 0);
  return smem;
}

// Backward keeps K and V of one block of keys and walks over the queries. A warp owns 16 keys, whose rows of dK and dV
// stay in registers; from head dimension 192 on two warps share them, half of the columns each.
struct BackwardShape {
  TileShape tile;
  int split;       // warps that share 16 keys
  int stages;      // of Q and dO
  int dq_warps_m;  // the warps are laid over dQ [block_m, head_dim] as dq_warps_m x warps / dq_warps_m
};

constexpr BackwardShape backward_shape(int element_bytes, int head_dim, bool small) {
  if (element_bytes == 2) {
    if (small) {
      if (head_dim <= 64) return {{64, 64, 4}, 1, 1, 4};
      return head_dim <= 128 ? BackwardShape{{32, 64, 4}, 1, 1, 2} : BackwardShape{{32, 32, 4}, 2, 1, 2};
    }
    if (head_dim <= 64) return {{64, 128, 8}, 1, 2, 4};
    if (head_dim <= 96) return {{64, 128, 8}, 1, 2, 4};
    return head_dim <= 128 ? BackwardShape{{64, 128, 8}, 1, 2, 2} : BackwardShape{{64, 64, 8}, 2, 1, 2};
  }
  if (small && head_dim <= 128) return {{32, 32, 4}, 2, 1, 2};
  if (head_dim <= 96) return {{64, 64, 8}, 2, 2, 4};
  return head_dim <= 128 ? BackwardShape{{32, 64, 8}, 2, 2, 2} : BackwardShape{{64, 32, 8}, 4, 1, 2};
}

struct BackwardSmem {
  int k = 0, v = 0, q = 0, d_out = 0, p = 0, ds = 0, rows = 0, bias = 0, mask = 0;  // offsets; q, d_out: of stage 0
  int total = 0;
};

FLASH_DEVICE constexpr BackwardSmem backward_smem(BackwardShape shape, int head_dim, int element_bytes, int bias_bytes,
                                                  bool has_mask) {
  BackwardSmem smem;
  const int row = head_dim * element_bytes;
  const int scores = shape.tile.block_n * aux_pitch(shape.tile.block_m, element_bytes);
  smem.v = shape.tile.block_n * row;
  smem.q = smem.v + shape.tile.block_n * row;
  smem.d_out = smem.q + shape.stages * shape.tile.block_m * row;
  smem.p = smem.d_out + shape.stages * shape.tile.block_m * row;
  smem.ds = smem.p + (shape.split > 1 ? scores : 0);
  smem.rows = smem.ds + scores;
  smem.bias = smem.rows + 3 * shape.stages * shape.tile.block_m * 4;
  smem.mask = smem.bias + (bias_bytes > 0 ? shape.tile.block_m * aux_pitch(shape.tile.block_n, bias_bytes) : 0);
  smem.total = smem.mask + (has_mask ? shape.tile.block_m * aux_pitch(shape.tile.block_n, 1) : 0);
  return smem;
}

// The pass of its own for a broadcast bias's gradient: no dK and dV in registers, so its tiles may be larger.
constexpr TileShape bias_gradient_tile(int element_bytes, int head_dim, bool small) {
  if (element_bytes == 2) {
    if (small) return head_dim <= 128 ? TileShape{32, 64, 4} : TileShape{32, 32, 2};
    return head_dim <= 128 ? TileShape{64, 128, 8} : TileShape{64, 64, 4};
  }
  if (small) return {16, 32, 2};
  if (head_dim <= 64) return {64, 64, 4};
  return head_dim <= 128 ? TileShape{32, 64, 4} : TileShape{32, 32, 2};
}

struct BiasGradientSmem {
  int q = 0, v = 0, d_out = 0, rows = 0, bias = 0, mask = 0;  // offsets; K begins at 0
  int total = 0;
};

FLASH_DEVICE constexpr BiasGradientSmem bias_gradient_smem(TileShape tile, int head_dim, int element_bytes,
                                                           int bias_bytes, bool has_mask) {
  BiasGradientSmem smem;
  const int row = head_dim * element_bytes;
  smem.q = tile.block_n * row;
  smem.v = smem.q + tile.block_m * row;
  smem.d_out = smem.v + tile.block_n * row;
  smem.rows = smem.d_out + tile.block_m * row;
  smem.bias = smem.rows + 3 * tile.block_m * 4;
  smem.mask = smem.bias + tile.block_m * aux_pitch(tile.block_n, bias_bytes);
  smem.total = smem.mask + (has_mask ? tile.block_m * aux_pitch(tile.block_n, 1) : 0);
  return smem;
}

// Nothing but the band lies between q k^T and the softmax, whose maximum may be taken before scaling.
inline bool is_plain(const Problem& problem) {
  return !problem.has_bias && !problem.has_mask && !problem.has_alibi && problem.softcap == 0.0 &&
         problem.dropout_p == 0.0 && problem.scale > 0.0;
}

inline int bias_bytes_of(const Problem& problem) {
  return problem.has_bias ? (problem.bias_dtype == DType::kFloat32 ? 4 : 2) : 0;
}

inline int64_t on_chip_bytes(const Plan& plan) {
  int64_t sum = 0;
  for (const Plan::Use& use : plan.on_chip) sum += use.bytes;
  return sum;
}

}  // namespace flash_ext::sm80
