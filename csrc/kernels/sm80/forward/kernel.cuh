// Forward: one block of threads owns kBlockM queries of one head and walks over the keys that its band lets it see.
//
//   S = Q K^T     P = e^(S - m)     l += rowsum(P)     O += dropout(P) V          out = O / l     lse = m + log l
//
// FlashAttention-2 (arXiv:2307.08691), algorithm 1. Each warp owns whole rows, so that softmax needs no other warp; Q
// stays in shared memory. NOTE: what limits it on 9.0 is that a scheduler has two warps, which issue an instruction in
// 37 % of the clocks. Two halves of a block of 256 queries that take turns at the products (FlashAttention-3) were 13 %
// slower: they spilled, and a warp alone waits for its ldmatrix; blocks that start half a tile apart were as fast.
// Launched by run.cuh. Invariant: rows and keys past the sequence's last ones are zeros in shared memory; such keys
// are masked, such rows never written.
#pragma once

#include "kernels/sm80/choose_tiles.h"
#include "kernels/sm80/forward/block.cuh"
#include "kernels/sm80/forward/restore_rows.cuh"

namespace flash_ext::sm80 {

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

// The steps of a block.
// NOTE: O, and l and m of `softmax`, are the kernel's own, and the block is handed on. Arrays as members, and a member
// that refers to the block, kept the compiler from taking the others apart: up to 4 % more instructions, and spills.
template <class Traits>
struct Forward {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using KeyTile = typename Traits::KeyTile;
  using Mods = typename Traits::Mods;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads, kM = Traits::kM, kStageBytes = 2 * KeyTile::bytes(kBlockN);
  static constexpr bool kTma = Traits::kTma, kFolded = Traits::kFolded;
  using Block = ForwardBlock<Traits>;
  using Scores = float[kM][kBlockN / 8][4];
  using Out = float[kM][kHeadDim / 8][4];

  const ForwardArgs& args;
  const ScoreOptions& options;
  const BoxCopies& copies;
  const ForwardSmem& layout;
  uint64_t (&k_full)[2], (&v_full)[2];  // mbarriers of each stage, where TMA copies
  Mods& mods;
  SharedValue<ElementDropout>& dropout;
  const uint32_t base;
  const bool by_tma, ahead;  // K and V have two stages and arrive a tile ahead

  int key = 0, stage = 0, parity = 0;  // of the tile; its first key

  __device__ __forceinline__ Tile q_tile() const { return {base}; }
  __device__ __forceinline__ KeyTile k_tile(int of) const { return {base + layout.k + of * kStageBytes}; }
  __device__ __forceinline__ KeyTile v_tile(int of) const { return {base + layout.v + of * kStageBytes}; }
  __device__ __forceinline__ bool drops() const { return !Traits::kPlain && (no_hoist(options.features) & kDropout); }
  // NOTE: computed anew wherever it is used; kept, it and the addresses made of it were three registers too many.
  static __device__ __forceinline__ int warp_row() { return static_cast<int>(no_hoist(threadIdx.x)) / 32 * 16 * kM; }
  // Whether load_whole loads a tile.
  __device__ __forceinline__ bool is_whole(const Block& block, bool is_regular, int key) const {
    return __builtin_expect(is_regular && key + kBlockN <= block.k.rows, 1);
  }

  __device__ __forceinline__ void load(const Block& block, KeyTile tile, const GlobalRows<T>& rows,
                                       const cuda::TensorMap& map, const BoxStart& box, int key, uint64_t& full) const {
    constexpr LoadForm kForm = Traits::kPlain && Traits::kInterleaved ? LoadForm::kScarce : LoadForm::kRare;
    if (by_tma) {
      if (threadIdx.x != 0) return;
      barrier_expect(shared_address(&full), KeyTile::bytes(kBlockN));
      load_box(tile, map, box, key, shared_address(&full));
    } else if (!kTma && is_whole(block, rows.is_regular, key)) {
      load_whole<kBlockN, kThreads>(tile, rows, key, no_hoist(threadIdx.x));
    } else {
      load_tile<kBlockN, kThreads, kForm>(tile, rows, key);
    }
  }
  __device__ __forceinline__ void load_keys(const Block& block, int key, int to) const {
    load(block, k_tile(to), block.k, copies.first, block.k_box, key, k_full[to]);
  }
  __device__ __forceinline__ void load_values(const Block& block, int key, int to) const {
    load(block, v_tile(to), block.v, copies.second, block.v_box, key, v_full[to]);
  }
  __device__ __forceinline__ void load_mods(const Block& block, int key) const {
    if constexpr (!Traits::kPlain) {
      if (is_whole(block, mods.is_regular, key)) {
        mods.load_whole(options.features, block.first_query, key, 0, no_hoist(threadIdx.x));
      } else {
        mods.load(options.features, block.first_query, key);
      }
    }
  }

  // Starts what the first tile of keys needs, and Q.
  __device__ __forceinline__ void begin(const Block& block, bool has_keys, int key) {
    if (has_keys) {
      load_keys(block, key, 0);
      if (ahead) load_values(block, key, 0);
      load_mods(block, key);
    }
    load_tile<kBlockM, kThreads>(q_tile(), block.q, block.first_query);
    cp_async_commit();
  }

  // (1) of the schedule: S may be computed.
  __device__ __forceinline__ void turn_to_keys(const Block& block) {
    if (by_tma) barrier_wait(shared_address(&k_full[stage]), parity);
    cp_async_wait<0>();
    __syncthreads();  // this K (bias, mask) is there for all; nobody reads the last V, nor the last K, any more
    if (!ahead) {
      load_values(block, key, 0);
    } else if (key > block.first_key) {
      load_keys(block, key - kBlockN, stage ^ 1);
      load_values(block, key - kBlockN, stage ^ 1);
    }
    cp_async_commit();
  }

  // (2) of the schedule: O may be.
  __device__ __forceinline__ void turn_to_values(const Block& block) {
    if (!ahead) {
      cp_async_wait<0>();
      __syncthreads();  // this V is there for all; nobody reads this K (bias, mask) any more
      if (key > block.first_key) {
        load_keys(block, key - kBlockN, 0);
        load_mods(block, key - kBlockN);
      }
      cp_async_commit();
    }
    if (by_tma) barrier_wait(shared_address(&v_full[stage]), parity);
    if (ahead) stage ^= 1;
    if (stage == 0) parity ^= 1;
  }

  // What few columns of float lack (add_exact_columns).
  __device__ __forceinline__ void make_scores_exact(KeyTile k, bool is_first) const {
    if constexpr (kMayBeExact<Frag, kHeadDim>) {
      if (has_exact_scores(args.problem)) {
        if (is_first) add_exact_columns<Frag, true, kBlockM, kThreads>(q_tile());
        add_exact_columns<Frag, false, kBlockN, kThreads>(k);
        __syncthreads();
      }
    }
  }

  // What lies between Q K^T and the softmax.
  __device__ __forceinline__ void modify(const Block& block, Scores& s) const {
    if constexpr (!Traits::kPlain) {
      mods.template apply<false>(options.features, s, warp_row(), 0, block.first_query + block.diagonal - key);
    }
    if (block.band.is_boundary(block.first_query, kBlockM, key, kBlockN)) {
      mask_band<false>(s, warp_row(), 0, block.band, block.first_query, key);
    }
  }

  __device__ __forceinline__ void drop(const Block& block, Scores& p) const {
    visit_dropout<false>(p, dropout.get(), dropout.get().first.at(block.bh, block.first_query + warp_row(), key),
                         [](float& x, bool kept) { x = kept ? x : 0.f; });
  }

  // P = e^(S - m), l += rowsum(P) and O += P V, P of a step of keys between the products of the one before.
  __device__ __forceinline__ void multiply_exponentials(Out& o, Scores& s, KeyTile v, SoftmaxRows<kM>& softmax) const {
    float shift[kM][2], sum[kM][2] = {};
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      shift[m][0] = softmax.template shift<kFolded>(m, 0, options.to_log2);
      shift[m][1] = softmax.template shift<kFolded>(m, 1, options.to_log2);
    }
    gemm_from_accumulators<Frag, Traits::kAhead>(o, s, v, [&](int m, int n, int half) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        float& x = s[m][n][i];
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

  // out = O / l, lse = m + log l. Where Frag splits its numbers, has_nan: rows g and g + 8, see restore_rows.cuh.
  __device__ __forceinline__ void finish_rows(const Block& block, Out& o, const SoftmaxRows<kM>& softmax,
                                              bool (&has_nan)[2]) const {
    const float dropout_scale = drops() ? options.dropout_scale : 1.f;
    const float to_natural = options.features & kRaw ? options.scale : 1.f;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = block.first_query + warp_row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
        float sum = softmax.total(m, half), keys = dropout_scale, sink = kMinusInf;
        if (args.problem.has_sinks) {
          const int head = static_cast<int>(block.bh % static_cast<uint32_t>(args.problem.heads_q));
          sink = sink_of<float>(args, block.bh / static_cast<uint32_t>(args.problem.heads_q), head,
                                min(query, block.q.rows - 1));  // of folded heads each row has its own
          const auto joined = with_sink(softmax.row_max[m][half] * to_natural, sum, sink);
          sum = joined.sum;
          keys *= joined.factor;
        }
        const float inverse = sum == 0.f ? 0.f : keys / sum;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          o[m][n][2 * half] *= inverse;
          o[m][n][2 * half + 1] *= inverse;
          has_nan[half] |= Frag::kSplit && (is_nan(o[m][n][2 * half]) || is_nan(o[m][n][2 * half + 1]));
        }
        has_nan[half] |= is_nan(sum);
        if (block.lse != nullptr && threadIdx.x % 4 == 0 && query < block.q.rows) {
          const float row_max = softmax.row_max[m][half];
          const bool is_sink = sink > row_max * to_natural;
          const float max = is_sink ? sink : row_max, unit = is_sink ? 1.f : to_natural;
          float lse = max * unit + logf(sum);
          if constexpr (sizeof(T) == 4) lse = log_sum_exp(max, unit, sum);
          block.lse[query] = sum == 0.f ? kMinusInf : lse;
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Block& block, Out& o, const SoftmaxRows<kM>& softmax) const {
    bool has_nan[2] = {};
    finish_rows(block, o, softmax, has_nan);
    // The warp's own rows of Q become the stage of its part of out.
    store_accumulators<Frag>(o, q_tile(), warp_row(), 0, block.out, block.first_query + warp_row());
    if constexpr (Frag::kSplit) {
      static_assert(kM == 1);
      const unsigned low = __ballot_sync(~0u, has_nan[0]), high = __ballot_sync(~0u, has_nan[1]);
      if ((low | high) != 0) restore_rows(args, block.sequence, block.bh, block.first_query + warp_row(), low, high);
    }
  }
};

// All warps do the same, each with 16 kM rows of S, P and O in its registers. What a tile of keys goes through:
//
//                             K and V have one place each            two (`ahead`, nothing else is loaded)
//   (1) wait, __syncthreads   K, bias and mask are there;            K is there;
//                             nobody reads the last V                nobody reads the last K and V
//       begin to load         V                                      K and V of the next tile
//       S = Q K^T, mods, band
//       m; l and O follow
//   (2) wait, __syncthreads   V is there;                            V is there (no __syncthreads)
//                             nobody reads K, bias and mask
//       begin to load         K, bias and mask of the next tile      -
//       P = e^(S - m), l, O += P V
//
// A wait is for this thread's cp.async or, where thread 0 has TMA copy (9.0), for the mbarrier of K or V of the stage,
// whose parity changes when its place is used again. P comes before (2) where tiles are not kInterleaved, and with
// dropout. Shared memory: Q, K and V of each stage, bias, mask (forward_smem); out takes the place of Q.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ TileSchedule schedule,
                   const PackedTile* packed_tiles, ScoreOptions options, const __grid_constant__ BoxCopies copies,
                   const __grid_constant__ MaskRanges ranges) {
  using Step = Forward<Traits>;
  using Frag = typename Traits::Frag;
  constexpr int kBlockN = Traits::kBlockN;
  const Problem& problem = args.problem;
  const uint32_t base = shared_address(dynamic_shared_1024());
  constexpr TileShape kTile = Traits::kTile;
  const ForwardSmem layout =
      forward_smem(kTile, Traits::kHeadDim, sizeof(typename Traits::T), Traits::kPlain ? 0 : bias_bytes_of(problem),
                   !Traits::kPlain && problem.has_mask, copies.stages);
  const bool by_tma = Traits::kTma && copies.by_tma, ahead = Traits::kTma && !Traits::kPlain && copies.stages == 2;
  __shared__ ForwardBlock<Traits> block;
  __shared__ uint64_t k_full[2], v_full[2];
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<ElementDropout> dropout;
  block.find(args, schedule, packed_tiles, options.features, ranges, copies, base, layout, k_full, v_full, mods,
             dropout);
  __syncthreads();
  if (problem.packed && block.sequence.len_q == 0) return;  // behind the list's last tile

  Step step{args, options, copies, layout, k_full, v_full, mods, dropout, base, by_tma, ahead};
  // The last keys come first: with ALiBi they tend to have the largest scores, and O is not rescaled for each tile.
  const int tiles = (block.last_key - block.first_key + kBlockN - 1) / kBlockN;
  const int start = block.first_key + max(tiles - 1, 0) * kBlockN;
  typename Step::Out o;
  clear(o);
  SoftmaxRows<Traits::kM> softmax;
  step.begin(block, tiles > 0, start);
  for (step.key = start; step.key >= block.first_key && tiles > 0; step.key -= kBlockN) {
    step.turn_to_keys(block);
    const auto k = step.k_tile(step.stage), v = step.v_tile(step.stage);
    step.make_scores_exact(k, step.key == start);

    typename Step::Scores s;
    clear(s);
    gemm_nt<Frag, Traits::kHeadDim, Traits::kAhead>(s, step.q_tile(), Step::warp_row(), k, 0);  // S = Q K^T
    step.modify(block, s);
    // m. In float P of the largest score is 1, and not what ex2 makes of a difference.
    softmax.template rescale<Traits::kFolded>(s, o, options.to_log2, Traits::kFolded ? 8.f : 0.f);

    if (!Traits::kInterleaved || step.drops()) {
      softmax.template exponentials<Traits::kFolded>(s, options.to_log2);  // P, and l += rowsum(P)
      if (step.drops()) step.drop(block, s);
      const auto p = operands<Frag>(s);
      step.turn_to_values(block);
      gemm_from_registers<Frag, void, Traits::kAhead>(o, p, v, 0, 0);  // O += P V
    } else if constexpr (Traits::kInterleaved) {
      step.turn_to_values(block);
      step.multiply_exponentials(o, s, v, softmax);
    }
  }
  cp_async_wait<0>();
  if (block.last_key == block.first_key) __syncthreads();  // without keys no other barrier waits for all copies of Q
  step.store(block, o, softmax);
}

}  // namespace flash_ext::sm80
