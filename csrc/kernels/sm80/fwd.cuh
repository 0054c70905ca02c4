// Forward: one block of threads owns kBlockM queries of one head and walks over the keys that its band lets it see.
//
//   S = Q K^T     P = e^(S - m)     l += rowsum(P)     O += dropout(P) V          out = O / l     lse = m + log l
//
// FlashAttention-2 (arXiv:2307.08691), algorithm 1. Each warp owns whole rows, so that softmax needs no other warp; Q
// stays in shared memory. K and V of a tile have one place each: while S is computed V arrives, while P V is computed
// the next K. Where TMA copies them (9.0) and shared memory permits it they have two, and arrive a tile ahead. NOTE:
// what limits it on 9.0 is that a scheduler has two warps, which issue an instruction in 37 % of the clocks. Two halves
// of a block of 256 queries that take turns at the products (FlashAttention-3) were 13 % slower: they spilled, and a
// warp alone waits for its ldmatrix; blocks that start half a tile apart were as fast. Launched by run_fwd.cuh.
// Invariant: rows past len_q and keys past len_k are zeros in shared memory; keys past len_k are masked, rows past
// len_q never written.
#pragma once

#include "core/tile_schedule.h"
#include "kernels/sm80/boxes.cuh"
#include "kernels/sm80/dropout.cuh"
#include "kernels/sm80/restore_rows.cuh"
#include "kernels/sm80/shared_memory.h"
#include "kernels/sm80/softmax.cuh"

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
  static constexpr bool kBoxes = has_boxes(sizeof(T), kHeadDim);
  using Tile = SmemTile<T, kHeadDim>;
  using Mods = ScoreMods<Element, kBlockM, kBlockN, kThreads>;
};

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ TileSchedule schedule,
                   ScoreOptions options, const __grid_constant__ BoxCopies copies) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kM = Traits::kM;
  constexpr bool kTma = Traits::kBoxes && kComputeCapability >= 90;
  using KeyTile = SmemTile<T, kHeadDim, kTma ? kBlockN : 0>;
  char* const smem = dynamic_shared_1024();

  const Problem& problem = args.problem;
  const uint32_t base = shared_address(smem);
  const int bias_bytes = Traits::kPlain || !problem.has_bias ? 0 : (problem.bias_dtype == DType::kFloat32 ? 4 : 2);
  constexpr TileShape kTile = Traits::kTile;
  const ForwardSmem layout =
      forward_smem(kTile, kHeadDim, sizeof(T), bias_bytes, !Traits::kPlain && problem.has_mask, copies.stages);
  const Tile q_smem{base};
  constexpr int kStageBytes = 2 * KeyTile::bytes(kBlockN);
  const auto k_tile = [&](int stage) { return KeyTile{base + layout.k + stage * kStageBytes}; };
  const auto v_tile = [&](int stage) { return KeyTile{base + layout.v + stage * kStageBytes}; };
  const bool by_tma = kTma && copies.by_tma, ahead = kTma && !Traits::kPlain && copies.stages == 2;

  // NOTE: what is read once a tile lies in shared memory, because it must not occupy registers during the products.
  __shared__ struct {
    GlobalRows<T> q, k, v, out;
    TileBand band;
    int first_query, first_key, last_key;
    float* lse;
    uint32_t bh;
    BoxStart k_box, v_box;
  } block;
  __shared__ uint64_t k_full[2], v_full[2];  // mbarriers
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<Dropout> dropout;
  // NOTE: a warp each, because the block waits for it: 1,400 clocks, 2,100 when one thread found all. In float 8.0
  // spills at head dimension 256 where more than one does.
  constexpr bool kByWarps = sizeof(T) == 2;
  if (threadIdx.x % (kByWarps ? 32 : kThreads) == 0) {
    const auto is_mine = [](unsigned warp) { return !kByWarps || threadIdx.x / 32 == warp; };
    const auto [b, head, m_block] = schedule.at<uint32_t>(blockIdx.x);
    const int64_t first = m_block * kBlockM;
    const auto rows = [&](const TensorView& view, int64_t h, int64_t count, int64_t cols) {
      return rows_of<T>(view, batch_offset(problem, view, b) + h * view.head_stride, count, cols);
    };
    const auto group_head = [&](int64_t heads) {
      return static_cast<int>(head) / (static_cast<int>(problem.heads_q) / static_cast<int>(heads));
    };
    if (is_mine(0)) {
      block.q = rows(args.q, head, problem.len_q, problem.head_dim);
      block.band = TileBand::make(problem);
      const Range keys = make_band(problem).keys({first, min(first + kBlockM, problem.len_q)}, problem.len_k);
      block.first_key = static_cast<int>(keys.first) / kBlockN * kBlockN;
      block.last_key = keys.empty() ? block.first_key : static_cast<int>(keys.last);
      block.first_query = static_cast<int>(first);
      block.bh = static_cast<uint32_t>(b * problem.heads_q + head);
      block.lse = args.lse == nullptr ? nullptr : static_cast<float*>(args.lse) + block.bh * problem.len_q;
    }
    if (is_mine(1)) {
      const int head_k = group_head(problem.heads_k);
      block.k = rows(args.k, head_k, problem.len_k, problem.head_dim);
      block.k.is_regular = block.k.is_regular && problem.head_dim == kHeadDim;
      if constexpr (kTma) {
        block.k_box = box_of(problem, copies.first.steps, b, head_k);
        for (int i = 0; i < 2; ++i) {
          barrier_init(shared_address(&k_full[i]), 1);
          barrier_init(shared_address(&v_full[i]), 1);
        }
        fence_barrier_init();
      }
    }
    if (is_mine(2)) {
      const int head_v = group_head(problem.heads_v);
      block.v = rows(args.v, head_v, problem.len_k, problem.head_dim_v);
      block.v.is_regular = block.v.is_regular && problem.head_dim_v == kHeadDim;
      if constexpr (kTma) block.v_box = box_of(problem, copies.second.steps, b, head_v);
    }
    if (is_mine(3)) {
      block.out = rows(args.out, head, problem.len_q, problem.head_dim_v);
      if constexpr (!Traits::kPlain) {
        mods = Traits::Mods::make(args, b, head, base + layout.bias, base + layout.mask);
        mods.is_regular = mods.is_regular && first + kBlockM <= problem.len_q;
        if (options.features & kDropout) {
          dropout.get() = make_dropout(args.rng_state[0], args.rng_state[1], problem.dropout_p);
        }
      }
    }
  }
  __syncthreads();
  const auto drops = [&] { return !Traits::kPlain && (no_hoist(options.features) & kDropout); };
  // The last keys come first: with ALiBi they tend to have the largest scores, and O is not rescaled for each tile.
  const int tiles = (block.last_key - block.first_key + kBlockN - 1) / kBlockN;
  const int start = block.first_key + max(tiles - 1, 0) * kBlockN;

  // NOTE: computed anew wherever it is used; kept, it and the addresses made of it were three registers too many.
  const auto warp_row = [] { return static_cast<int>(no_hoist(threadIdx.x)) / 32 * 16 * kM; };
  constexpr bool kFolded = sizeof(T) == 2;
  float o_acc[kM][kHeadDim / 8][4];
  clear(o_acc);
  SoftmaxRows<kM> softmax;

  const auto is_whole = [&](bool is_regular, int key) {  // so that load_whole loads it
    return __builtin_expect(is_regular && key + kBlockN <= block.k.rows, 1);
  };
  // NOTE: P of the next step of keys is computed between the products of the present one, which the tensor core takes
  // in no faster than one in six clocks. 8.0 spills where it is in the general kernel or head dimension is 128.
  constexpr bool kInterleaved = sizeof(T) == 2 && (kComputeCapability >= 90 || (Traits::kPlain && kHeadDim != 128));
  constexpr LoadForm kForm = Traits::kPlain && kInterleaved ? LoadForm::kScarce : LoadForm::kRare;
  const auto load = [&](KeyTile tile, const GlobalRows<T>& rows, const cuda::TensorMap& map, const BoxStart& box,
                        int key, uint64_t& full) {
    if (by_tma) {
      if (threadIdx.x != 0) return;
      barrier_expect(shared_address(&full), KeyTile::bytes(kBlockN));
      load_box(tile, map, box, key, shared_address(&full));
    } else if (!kTma && is_whole(rows.is_regular, key)) {
      load_whole<kBlockN, kThreads>(tile, rows, key, no_hoist(threadIdx.x));
    } else {
      load_tile<kBlockN, kThreads, kForm>(tile, rows, key);
    }
  };
  const auto load_keys = [&](int key, int stage) {
    load(k_tile(stage), block.k, copies.first, block.k_box, key, k_full[stage]);
  };
  const auto load_values = [&](int key, int stage) {
    load(v_tile(stage), block.v, copies.second, block.v_box, key, v_full[stage]);
  };
  const auto load_mods = [&](int key) {
    if constexpr (!Traits::kPlain) {
      if (is_whole(mods.is_regular, key)) {
        mods.load_whole(options.features, block.first_query, key, 0, no_hoist(threadIdx.x));
      } else {
        mods.load(options.features, block.first_query, key);
      }
    }
  };
  if (tiles > 0) {
    load_keys(start, 0);
    if (ahead) load_values(start, 0);
    load_mods(start);
  }
  load_tile<kBlockM, kThreads>(q_smem, block.q, block.first_query);
  cp_async_commit();

  int stage = 0, parity = 0;  // of the tile
  for (int key = start; key >= block.first_key && tiles > 0; key -= kBlockN) {
    if (by_tma) barrier_wait(shared_address(&k_full[stage]), parity);
    cp_async_wait<0>();
    __syncthreads();  // this K (bias, mask) is there for all; nobody reads the last V, nor the last K, any more
    if (!ahead) {
      load_values(key, 0);
    } else if (key > block.first_key) {
      load_keys(key - kBlockN, stage ^ 1);
      load_values(key - kBlockN, stage ^ 1);
    }
    cp_async_commit();
    const KeyTile k_smem = k_tile(stage), v_smem = v_tile(stage);
    if constexpr (kMayBeExact<Frag, kHeadDim>) {
      if (has_exact_scores(problem)) {
        if (key == start) add_exact_columns<Frag, true, kBlockM, kThreads>(q_smem);
        add_exact_columns<Frag, false, kBlockN, kThreads>(k_smem);
        __syncthreads();
      }
    }

    float s_acc[kM][kBlockN / 8][4];
    clear(s_acc);
    gemm_nt<Frag, kHeadDim, Traits::kAhead>(s_acc, q_smem, warp_row(), k_smem, 0);
    if constexpr (!Traits::kPlain) {
      const int64_t offset = problem.bottom_right ? problem.len_k - problem.len_q : 0;
      mods.template apply<false>(options.features, s_acc, warp_row(), 0,
                                 block.first_query + static_cast<int>(offset) - key);
    }
    if (block.band.is_boundary(block.first_query, kBlockM, key, kBlockN)) {
      mask_band<false>(s_acc, warp_row(), 0, block.band, block.first_query, key);
    }
    // In float P of the largest score is 1, and not what ex2 makes of a difference.
    softmax.template rescale<kFolded>(s_acc, o_acc, options.to_log2, sizeof(T) == 4 ? 0.f : 8.f);

    const auto begin_next = [&] {
      if (!ahead) {
        cp_async_wait<0>();
        __syncthreads();  // this V is there for all; nobody reads this K (bias, mask) any more
        if (key > block.first_key) {
          load_keys(key - kBlockN, 0);
          load_mods(key - kBlockN);
        }
        cp_async_commit();
      }
      if (by_tma) barrier_wait(shared_address(&v_full[stage]), parity);
      if (ahead) stage ^= 1;
      if (stage == 0) parity ^= 1;
    };
    const auto one_after_the_other = [&] {
      softmax.template exponentials<kFolded>(s_acc, options.to_log2);
      if (drops()) {
        visit_dropout<false>(s_acc, dropout.get(), block.bh, (block.first_query + warp_row()) / 16, key / 16,
                             [](float& x, bool kept) { x = kept ? x : 0.f; });
      }
      const auto p = operands<Frag>(s_acc);
      begin_next();
      gemm_from_registers<Frag, void, Traits::kAhead>(o_acc, p, v_smem, 0, 0);
    };
    if constexpr (!kInterleaved) {
      one_after_the_other();
    } else if (drops()) {
      one_after_the_other();
    } else {
      begin_next();
      float shift[kM][2], sum[kM][2] = {};
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        shift[m][0] = softmax.template shift<kFolded>(m, 0, options.to_log2);
        shift[m][1] = softmax.template shift<kFolded>(m, 1, options.to_log2);
      }
      gemm_from_accumulators<Frag, Traits::kAhead>(o_acc, s_acc, v_smem, [&](int m, int n, int half) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          float& x = s_acc[m][n][i];
          x = softmax.template exponential<kFolded>(x, shift[m][half], options.to_log2);
          sum[m][half] += x;
        }
      });
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        softmax.row_sum[m][0] += sum[m][0];
        softmax.row_sum[m][1] += sum[m][1];
      }
    }
  }
  cp_async_wait<0>();
  if (block.last_key == block.first_key) __syncthreads();  // without keys no other barrier waits for all copies of Q

  const float dropout_scale = drops() ? options.dropout_scale : 1.f;
  const float to_natural = options.features & kRaw ? options.scale : 1.f;
  constexpr bool kRestores = Frag::kSplit;
  bool has_nan[2] = {};  // rows g and g + 8, see restore_rows.cuh
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.total(m, half);
      const float inverse = sum == 0.f ? 0.f : dropout_scale / sum;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        o_acc[m][n][2 * half] *= inverse;
        o_acc[m][n][2 * half + 1] *= inverse;
        has_nan[half] |= kRestores && (is_nan(o_acc[m][n][2 * half]) || is_nan(o_acc[m][n][2 * half + 1]));
      }
      has_nan[half] |= is_nan(sum);
      const int query = block.first_query + warp_row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
      if (block.lse != nullptr && threadIdx.x % 4 == 0 && query < problem.len_q) {
        const float row_max = softmax.row_max[m][half];
        float lse = row_max * to_natural + logf(sum);
        if constexpr (sizeof(T) == 4) lse = log_sum_exp(row_max, to_natural, sum);
        block.lse[query] = sum == 0.f ? kMinusInf : lse;
      }
    }
  }
  // The warp's own rows of Q become the stage of its part of out.
  store_accumulators<Frag>(o_acc, q_smem, warp_row(), 0, block.out, block.first_query + warp_row());
  if constexpr (kRestores) {
    static_assert(kM == 1);
    const unsigned low = __ballot_sync(~0u, has_nan[0]), high = __ballot_sync(~0u, has_nan[1]);
    if ((low | high) != 0) restore_rows(args, block.bh, block.first_query + warp_row(), low, high);
  }
}

}  // namespace flash_ext::sm80
