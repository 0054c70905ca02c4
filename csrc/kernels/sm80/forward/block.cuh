// What a block of the forward kernel works on, and what it keeps in shared memory beside its tiles: read once a tile of
// keys, it must not occupy registers during the products.
//
// Called by kernel.cuh: four threads (in float one) find it, and the others wait for them. Invariant: the keys of a
// block are whole tiles from `first_key` on; without keys last_key is first_key. q, k, v and out have the rows of one
// sequence.
#pragma once

#include "core/mask_ranges.h"
#include "core/tile_schedule.h"
#include "gpu/softmax.cuh"
#include "kernels/sm80/boxes.cuh"
#include "kernels/sm80/dropout.cuh"

namespace flash_ext::sm80 {

// kPlain: scale > 0 and nothing but the band between q k^T and the softmax; m is then in units of q k^T, as it is where
// ScoreMods leaves scores raw.
template <class Element_, int kHeadDim_, bool kSmall_, bool kPlain_>
struct ForwardTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kPlain = kPlain_;
  static constexpr TileShape kTile = forward_tile(sizeof(T), kHeadDim, kSmall_, kPlain_);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.warps * 32;
  static_assert(kTile.warps >= 4, "four warps find where the tile lies");
  static constexpr int kM = kBlockM / kTile.warps / 16;  // 16-row fragments of a warp
  static constexpr int kMinBlocks = kThreads == 128 ? 2 : 1;
  static constexpr bool kAhead = Frag::kAhead && kHeadDim <= 64;
  static constexpr bool kTma = has_boxes(sizeof(T), kHeadDim) && kComputeCapability >= 90;
  static constexpr bool kFolded = sizeof(T) == 2;  // one multiply-add before ex2
  // NOTE: P of the next step of keys is computed between the products of the present one, which the tensor core takes
  // in no faster than one in six clocks. 8.0 spills where it is in the general kernel or head dimension is 128.
  static constexpr bool kInterleaved = sizeof(T) == 2 && (kComputeCapability >= 90 || (kPlain && kHeadDim != 128));
  using Tile = SmemTile<T, kHeadDim>;
  using KeyTile = SmemTile<T, kHeadDim, kTma ? kBlockN : 0>;
  using Mods = ScoreMods<Element, kBlockM, kBlockN, kThreads>;
};

template <class Traits>
struct ForwardBlock {
  using T = typename Traits::T;

  GlobalRows<T> q, k, v, out;
  TileBand band;
  int first_query, first_key, last_key;
  float* lse;  // of the first query of the sequence
  uint32_t bh;
  BoxStart k_box, v_box;
  // NOTE: last, because what the loop reads keeps its places so. Between the others these made 8.0 spill.
  Sequence sequence;
  int diagonal;

  // Queries and keys, K, V, and out with what changes scores, by one thread each.
  // NOTE: a warp each, because the block waits for it: 1,400 clocks, 2,100 when one thread found all. In float 8.0
  // spills at head dimension 256 where more than one does.
  __device__ __forceinline__ void find(const ForwardArgs& args, const TileSchedule& schedule, const PackedTile* tiles,
                                       unsigned features, const MaskRanges& ranges, const BoxCopies& copies,
                                       uint32_t base, const ForwardSmem& layout, uint64_t (&k_full)[2],
                                       uint64_t (&v_full)[2], typename Traits::Mods& mods,
                                       SharedValue<ElementDropout>& dropout) {
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
    constexpr bool kByWarps = sizeof(T) == 2;
    if (threadIdx.x % (kByWarps ? 32 : Traits::kThreads) != 0) return;
    const auto is_mine = [](unsigned warp) { return !kByWarps || threadIdx.x / 32 == warp; };
    const Problem& problem = args.problem;
    const Place place = place_of(problem, schedule.at<uint32_t>(blockIdx.x), tiles);
    const auto [b, head, m_block, at] = place;
    if (is_mine(0)) sequence = at;
    if (place.is_empty()) return;
    const int64_t first = m_block * kBlockM;
    const auto group_head = [&](int64_t heads) {
      return static_cast<int>(head) / (static_cast<int>(problem.heads_q) / static_cast<int>(heads));
    };
    if (is_mine(0)) {
      q = head_rows<T>(problem, args.q, b, head, at.row_q, at.len_q, problem.head_dim);
      band = make_tile_band(problem, at);
      diagonal = diagonal_of(problem, at);
      Range keys = make_band(problem, at).keys({first, min(first + kBlockM, int64_t{at.len_q})}, at.len_k);
      if constexpr (!Traits::kPlain) {
        const MaskRange seen = ranges.at(b, head, m_block);
        keys = {max(keys.first, int64_t{seen.first}), min(keys.last, int64_t{seen.last})};
      }
      first_key = static_cast<int>(keys.first) / kBlockN * kBlockN;
      last_key = keys.empty() ? first_key : static_cast<int>(keys.last);
      first_query = static_cast<int>(first);
      bh = static_cast<uint32_t>(b * problem.heads_q + head);
      lse = args.lse == nullptr ? nullptr : static_cast<float*>(args.lse) + row_index(problem, at, b, head);
    }
    if (is_mine(1)) {
      const int head_k = group_head(problem.heads_k);
      k = head_rows<T>(problem, args.k, b, head_k, at.row_k, at.len_k, problem.head_dim);
      k.is_regular = k.is_regular && problem.head_dim == Traits::kHeadDim;
      if constexpr (Traits::kTma) {
        k_box = box_of(problem, copies.first.steps, b, head_k);
        for (int i = 0; i < 2; ++i) {
          barrier_init(shared_address(&k_full[i]), 1);
          barrier_init(shared_address(&v_full[i]), 1);
        }
        fence_barrier_init();
      }
    }
    if (is_mine(2)) {
      const int head_v = group_head(problem.heads_v);
      v = head_rows<T>(problem, args.v, b, head_v, at.row_k, at.len_k, problem.head_dim_v);
      v.is_regular = v.is_regular && problem.head_dim_v == Traits::kHeadDim;
      if constexpr (Traits::kTma) v_box = box_of(problem, copies.second.steps, b, head_v);
    }
    if (is_mine(3)) {
      out = head_rows<T>(problem, args.out, b, head, at.row_q, at.len_q, problem.head_dim_v);
      if constexpr (!Traits::kPlain) {
        mods = Traits::Mods::make(args, b, head, at, base + layout.bias, base + layout.mask);
        mods.is_regular = mods.is_regular && first + kBlockM <= at.len_q;
        if (features & kDropout) dropout.get() = dropout_of(args, b);
      }
    }
  }
};

}  // namespace flash_ext::sm80
