// The tiles of this backend and what each keeps in shared memory. Host and device read the same functions, so that
// plan(), the launch and the kernel cannot disagree.
//
// Two tiles a (element, head dimension, pass): `large` for speed, `small` for few queries, for cards with less shared
// memory (8.6, 8.9 and 12.x have 99 KiB a block) and where two of them are faster (takes_small_tiles). Called by
// kernel.cuh of forward/, backward/, bias_gradient/, forward_single_tile/ and backward_single_tile/. Invariant: every
// buffer starts at a multiple of 128 bytes; head dimensions are padded to the bucket with zeros.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "core/portable.h"

namespace flash_ext::sm80 {

struct TileShape {
  int block_m;  // queries
  int block_n;  // keys
  int warps;    // each owns block_m / warps queries forward; backward as BackwardShape and BiasGradientShape say

  constexpr bool operator==(const TileShape&) const = default;
};

// A warp that owns 32 rows reads each fragment of K and V for two mma; with 16 rows shared memory, and not the tensor
// cores, is the limit (128 bytes a clock against about 1,270 multiply-adds of mma.sync on Hopper). What keeps large
// head dimensions at 16 rows are the 255 registers: out takes rows * head_dim / 32 of them.
constexpr TileShape forward_tile(int element_bytes, int head_dim, bool small, bool plain) {
  if (element_bytes == 2) {
    if (small) return head_dim <= 128 || plain ? TileShape{64, 64, 4} : TileShape{64, 32, 4};
    if (head_dim <= 64 && plain) return {128, 128, 4};
    return head_dim <= 128 ? TileShape{128, 64, 4} : TileShape{128, 64, 8};
  }
  // float splits every operand in two, so a warp has 16 rows at most.
  if (small) return head_dim <= 128 ? TileShape{64, 32, 4} : TileShape{64, 16, 4};
  if (head_dim <= 64) return {128, 64, 8};
  return head_dim <= 128 ? TileShape{128, 32, 8} : TileShape{64, 16, 4};
}

// The rows of a bias or mask tile: whole half lines, so that they can be swizzled.
constexpr int aux_pitch(int block_n, int element_bytes) { return (block_n * element_bytes + 63) / 64 * 64; }

struct ForwardSmem {
  int q = 0, k = 0, v = 0, bias = 0, mask = 0;  // offsets
  int total = 0;
};

// Whether TMA can copy tiles of K and V, panels of 64 columns of a 16-bit type, where the device has it.
constexpr bool has_boxes(int element_bytes, int head_dim) { return element_bytes == 2 && head_dim % 64 == 0; }

// bias_bytes: of one element, 0 without a bias. stages: of K and V, which lie side by side.
FLASH_DEVICE constexpr ForwardSmem forward_smem(TileShape tile, int head_dim, int element_bytes, int bias_bytes,
                                                bool has_mask, int stages) {
  ForwardSmem smem;
  const int row = head_dim * element_bytes;
  smem.k = tile.block_m * row;
  smem.v = smem.k + tile.block_n * row;
  smem.bias = smem.k + stages * 2 * tile.block_n * row;
  smem.mask = smem.bias + (bias_bytes > 0 ? tile.block_m * aux_pitch(tile.block_n, bias_bytes) : 0);
  smem.total = smem.mask + (has_mask ? tile.block_m * aux_pitch(tile.block_n, 1) : 0);
  return smem;
}

// Backward keeps K and V of one block of keys and walks over the queries. Half of the warps hold dV, half dK; in each
// half a warp owns key_rows keys. NOTE: what limits these kernels on Hopper are the reads of shared memory (at head
// dimension 64 2.9 passes an mma and 72 % of its bandwidth when every warp held both gradients of 16 keys); with 32
// keys a fragment of Q and dO serves two mma.
struct BackwardShape {
  TileShape tile;
  int key_rows;  // of a warp
  int stages;    // of Q, dO, bias and mask; with two, dQ of a tile is computed beside the next tile's softmax
  int dq_warps_m, dq_warps_n;  // dQ [block_m, head_dim] is laid over the last dq_warps_m x dq_warps_n of the warps

  constexpr bool deferred() const { return stages == 2; }
};

constexpr BackwardShape backward_shape(int element_bytes, int head_dim, bool small, bool plain) {
  if (element_bytes == 2) {
    if (small) {
      return head_dim <= 128 ? BackwardShape{{32, 64, 4}, 32, 1, 2, 2} : BackwardShape{{32, 32, 4}, 16, 1, 2, 2};
    }
    if (head_dim > 128) return {{64, 64, 8}, 16, plain ? 2 : 1, 2, 4};
    // NOTE: with score modifications the warps that hold dV have more to do: dQ by the others alone is 4 % faster, and
    // 9 % slower without modifications (bf16, head dimension 128; the others follow it unmeasured).
    if (!plain) return {{64, 128, 8}, 32, 2, 2, 2};
    if (head_dim <= 64) return {{128, 128, 8}, 32, 2, 4, 2};
    return head_dim <= 96 ? BackwardShape{{64, 128, 8}, 32, 2, 4, 2} : BackwardShape{{64, 128, 8}, 32, 2, 2, 4};
  }
  if (small) return head_dim <= 128 ? BackwardShape{{32, 32, 4}, 16, 1, 2, 2} : BackwardShape{{16, 32, 4}, 16, 1, 1, 4};
  if (head_dim <= 96) return {{64, 64, 8}, 16, 2, 4, 2};
  if (head_dim <= 192) return {{32, 64, 8}, 16, head_dim <= 128 ? 2 : 1, 2, 4};
  return {{16, 64, 8}, 16, 2, 1, 8};
}

struct BackwardSmem {
  int k = 0, v = 0, q = 0, d_out = 0, p = 0, ds = 0, rows = 0, bias = 0, mask = 0, dq = 0;  // offsets of stage 0
  int p_stage = 0;  // bytes from a stage of P to the next
  int dq_rows = 0;  // of a warp's rows of fragments of dQ, how many are staged at once for bulk additions
  int total = 0;

  // Bytes of a warp's stage.
  FLASH_DEVICE constexpr int dq_stage(BackwardShape shape, int head_dim) const {
    return dq_rows * (head_dim / shape.dq_warps_n) * 16 * 4;
  }
};

constexpr int kBulkLimit = 226 * 1024;  // of shared memory, where bulk additions are: 9.0 has 227 KiB, 1 is static

// What is kept beside K, V, Q and dO.
struct BackwardNeeds {
  int bias_bytes = 0;  // of one element, 0 without a bias
  bool has_mask = false;
  bool p_apart = false;   // P has a place of its own; else it lies where the same keys' dS will be
  bool has_bulk = false;  // the device has bulk additions, gpu/arch.h
};

// What is there for bulk additions comes last, so that a kernel without them may be started with it.
// NOTE: at head dimension 128 P in dS's place leaves room to stage all of dQ beside a bias in 16 bits. Staged in two
// halves, the second waited for the first to be read: 7 % of the kernel.
FLASH_DEVICE constexpr BackwardSmem backward_smem(BackwardShape shape, int head_dim, int element_bytes,
                                                  BackwardNeeds needs) {
  BackwardSmem smem;
  const auto [block_m, block_n, warps] = shape.tile;
  const int row = head_dim * element_bytes;
  const int scores = block_n * aux_pitch(block_m, element_bytes);
  smem.v = block_n * row;
  smem.q = smem.v + block_n * row;
  smem.d_out = smem.q + shape.stages * block_m * row;
  smem.p = smem.d_out + shape.stages * block_m * row;
  smem.ds = smem.p + (needs.p_apart ? scores : 0);
  smem.p_stage = needs.p_apart || !shape.deferred() ? 0 : scores;
  smem.rows = smem.ds + (shape.deferred() ? 2 : 1) * scores;
  smem.bias = smem.rows + 3 * shape.stages * block_m * 4;
  smem.mask = smem.bias + (needs.bias_bytes > 0 ? shape.stages * block_m * aux_pitch(block_n, needs.bias_bytes) : 0);
  smem.dq = smem.mask + (needs.has_mask ? shape.stages * block_m * aux_pitch(block_n, 1) : 0);
  // All rows, half of them or none.
  const int warps_of_dq = shape.dq_warps_m * shape.dq_warps_n;
  smem.dq_rows = needs.has_bulk && shape.deferred() && element_bytes == 2 ? block_m / shape.dq_warps_m / 16 : 0;
  for (; smem.dq_rows > 0; smem.dq_rows /= 2) {
    if (smem.dq + warps_of_dq * smem.dq_stage(shape, head_dim) <= kBulkLimit) break;
  }
  smem.total = smem.dq + warps_of_dq * smem.dq_stage(shape, head_dim);
  return smem;
}

// The pass of its own for a broadcast bias's gradient: no dK and dV in registers, so its tiles are larger. A warp owns
// warp_keys x (the warp's share of block_m) scores, three times: sum, S and dP. Its loads come from L2, which gives
// about 20 bytes a clock and multiprocessor: by that arithmetic 128 x 128 scores of head dimension 128 take 6,600
// clocks to load where nothing is shared with the item before, and 3,300 to multiply. Measured: about 12,000, why is
// open.
struct BiasGradientShape {
  TileShape tile;
  int warp_keys;  // 16 or 32
};

constexpr BiasGradientShape bias_gradient_shape(int element_bytes, int head_dim, bool small) {
  if (element_bytes == 2) {
    if (small) return head_dim <= 128 ? BiasGradientShape{{64, 64, 4}, 32} : BiasGradientShape{{32, 32, 4}, 16};
    return head_dim <= 128 ? BiasGradientShape{{128, 128, 8}, 32} : BiasGradientShape{{64, 128, 8}, 32};
  }
  if (small) return head_dim <= 128 ? BiasGradientShape{{32, 32, 4}, 16} : BiasGradientShape{{16, 16, 1}, 16};
  return head_dim <= 128 ? BiasGradientShape{{64, 64, 8}, 16} : BiasGradientShape{{32, 64, 8}, 16};
}

// Where one tile holds all queries and keys of a head: one_tile.cuh, which has 64 items ahead of what is done to the
// scores of two, and of the first. A tile of 144 is for windows of 12 x 12, up to head dim 32: its backward takes 169
// KiB. views: tensors of an item.
constexpr int kOneTile = 64, kLargeTile = 144, kOneTileModsBytes = 128;
constexpr int one_tile_head_dim(int block) { return block == kOneTile ? 64 : 32; }  // the largest
constexpr int one_tile_part(int block) { return block == kOneTile ? block : 48; }   // keys that a warp takes at once
constexpr int one_tile_item_bytes(int views) { return 8 * views + 40; }
constexpr int one_tile_items_bytes(int views) { return 64 * one_tile_item_bytes(views) + 3 * kOneTileModsBytes; }

// backward_single_tile/kernel.cuh
constexpr int kOneTileBackwardViews = 7;
constexpr int one_tile_backward_blocks(int head_dim, int block) {  // of a multiprocessor
  return block > kOneTile ? 1 : head_dim <= 32 ? 3 : 2;
}

struct OneTileBackwardSmem {
  int p = 0, ds = 0, items = 0, bias = 0, mask = 0;  // offsets; two stages of Q, K, V and dO begin at 0
  int total = 0;
};

FLASH_DEVICE constexpr OneTileBackwardSmem one_tile_backward_smem(int head_dim, int block, int bias_bytes,
                                                                  bool has_mask) {
  OneTileBackwardSmem smem;
  smem.p = 2 * 4 * block * head_dim * 2;
  smem.ds = smem.p + block * aux_pitch(block, 2);
  smem.items = smem.ds + block * aux_pitch(block, 2);
  smem.bias = smem.items + one_tile_items_bytes(kOneTileBackwardViews);
  smem.mask = smem.bias + (bias_bytes > 0 ? block * aux_pitch(block, bias_bytes) : 0);
  smem.total = smem.mask + (has_mask ? block * aux_pitch(block, 1) : 0);
  return smem;
}

// forward_single_tile/kernel.cuh
constexpr int kOneTileForwardViews = 4;
constexpr int one_tile_forward_blocks(int head_dim, int block) {  // of a multiprocessor, at most
  return block > kOneTile ? 2 : head_dim <= 32 ? 5 : 4;
}

struct OneTileForwardSmem {
  int items = 0, bias = 0, mask = 0;  // offsets; two stages of Q, K and V begin at 0
  int total = 0;
};

FLASH_DEVICE constexpr OneTileForwardSmem one_tile_forward_smem(int head_dim, int block, int bias_bytes,
                                                                bool has_mask) {
  OneTileForwardSmem smem;
  smem.items = 2 * 3 * block * head_dim * 2;
  smem.bias = smem.items + one_tile_items_bytes(kOneTileForwardViews);
  smem.mask = smem.bias + (bias_bytes > 0 ? block * aux_pitch(block, bias_bytes) : 0);
  smem.total = smem.mask + (has_mask ? block * aux_pitch(block, 1) : 0);
  return smem;
}

// Items that are found ahead, in a ring: a warp finds 32 at once, and the last two are still read.
constexpr int kBiasItems = 64, kBiasItemBytes = 80;

struct BiasGradientSmem {
  int q = 0, v = 0, d_out = 0, rows = 0, items = 0, bias = 0, mask = 0;  // offsets; K begins at 0
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
  smem.items = smem.rows + 2 * 4 * tile.block_m * 4;
  smem.bias = smem.items + kBiasItems * kBiasItemBytes;
  smem.mask = smem.bias + tile.block_m * aux_pitch(tile.block_n, bias_bytes);
  smem.total = smem.mask + (has_mask ? tile.block_m * aux_pitch(tile.block_n, 1) : 0);
  return smem;
}

// Nothing but the band lies between q k^T and the softmax, whose maximum may be taken before scaling.
inline bool is_plain(const Problem& problem) {
  return !problem.has_bias && !problem.has_mask && !problem.has_alibi && problem.softcap == 0.0 &&
         problem.dropout_p == 0.0 && problem.scale > 0.0;
}

// With one key P is 1 and dS is P dlse: in eager attention dP - delta is exactly 0 there, and the difference of two
// roundings is all that would be left of it here. So dP is 0, and delta only says whether the product with the values
// is a number (kernels/stages/rows.cu). NOTE: half types lose it among the roundings of P. A batch-invariant call does
// as one beside a sequence of more keys: backward/renormalise.cuh finds dP for delta.
FLASH_DEVICE constexpr bool has_one_float_key(const Problem& problem) {
  return problem.len_k == 1 && problem.dtype == DType::kFloat32 && !problem.batch_invariant && !problem.has_sinks &&
         !problem.constant_lse;
}

FLASH_DEVICE constexpr int bias_bytes_of(const Problem& problem) {
  return problem.has_bias ? (problem.bias_dtype == DType::kFloat32 ? 4 : 2) : 0;
}

// P lies apart where dS's place is taken (by a softcap's derivative), where P's own is for something else (boxes of a
// bias's gradient), and where there is room anyway: at head dimension 64 it was up to 2 % faster. `head_dim` is that of
// the instance.
inline BackwardNeeds backward_needs(const Problem& problem, int head_dim, bool has_bulk) {
  const bool has_room = !problem.has_bias || head_dim <= 64;
  return {bias_bytes_of(problem), problem.has_mask, has_room || problem.softcap != 0.0 || problem.wants_dbias,
          has_bulk};
}

}  // namespace flash_ext::sm80
