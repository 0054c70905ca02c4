// The numbers of a decode kernel: rows of a tile, how its warps share rows and keys, and the ring of keys and values.
//
//   16 rows   4 warps with keys of their own each, no barrier in the loop
//   64 rows   2 groups with keys of their own, whose warps (2 of 32 rows; head dimension 256: 4 of 16) share them
//
// Read by the kernel, by run.cuh and by merge.cu, which plans. Invariant: a warp's out, 16 kM x kHeadDim floats, is at
// most 128 registers a thread.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/smem.h"

namespace flash_ext::decode {

// A cache of e4m3: its products are of fp16, which holds every e4m3 number.
struct Fp8 {};

constexpr int kFewRows = 16, kManyRows = 64;
constexpr int kMaxStages = 4;
// Of a run: less to merge is worth a longer one, but a tile of keys takes 0.7 us. And of a piece.
constexpr int kLeastRunKeys = 128, kLeastPieceKeys = 256;

template <class Cache_, int kHeadDim_, int kRows_>
struct Traits {
  using Cache = Cache_;
  static constexpr bool kFp8 = std::is_same_v<Cache, Fp8>;
  using T = std::conditional_t<kFp8, __half, Cache>;  // what is multiplied
  static constexpr int kHeadDim = kHeadDim_, kRows = kRows_;
  static constexpr int kRowBytes = kHeadDim * (kFp8 ? 1 : 2), kRowChunks = kRowBytes / kChunkBytes;
  static constexpr int kM = kRows == kManyRows && kHeadDim <= 128 ? 2 : 1;  // 16 rows each, of a warp
  static constexpr int kRowWarps = kRows / (16 * kM);
  static constexpr int kGroups = kRows == kManyRows ? 2 : 4;
  static constexpr int kGroupThreads = 32 * kRowWarps, kThreads = kGroups * kGroupThreads;
  static constexpr int kMinBlocks = kHeadDim == 256 ? 1 : 2;  // on a multiprocessor
  // Of a group. NOTE: e4m3 at head dimension 128 has no registers for 32 keys beside 64 rows.
  static constexpr int kKeys = kRows == kManyRows ? (kFp8 && kHeadDim == 128 ? 16 : 32) : (kRowBytes <= 128 ? 32 : 16);
  static constexpr int kTileKeys = kGroups * kKeys;
  static_assert(kLeastRunKeys % kTileKeys == 0 && kLeastPieceKeys % kTileKeys == 0);
  static constexpr bool kQueryInRegisters = kM == 1 && kHeadDim <= 128;

  static constexpr int kTileBytes = kKeys * kRowBytes;  // of keys, and of values, of a group
  static constexpr int kStageBytes = 2 * kTileBytes, kRingBytes = kGroups * kStageBytes;  // of all groups
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  // What the groups merge at last, in the place of the ring and of Q behind it.
  static constexpr int kOutPitch = kHeadDim + 8;  // floats
  static constexpr int kOutBytes = kGroups * kRows * kOutPitch * 4;
  static constexpr int kSumBytes = kGroups * kRows * 8;
  static int64_t shared_bytes(int stages) { return std::max(stages * kRingBytes + kQueryBytes, kOutBytes + kSumBytes); }
};

}  // namespace flash_ext::decode
