// Forward of problems whose queries and keys of a head fit one tile, as in windowed vision models: S and P of a head
// are there at once, so that nothing is rescaled.
//
//   S = Q K^T     P = e^(S - m)     out = P V / rowsum(P)     lse = m + log rowsum(P)
//
// In a tile of 144 keys S and P are there in parts, one after the other, with a running maximum.
//
// A block of threads walks units of items (one_tile.cuh): the loads of the next head run beside the products of this
// one, and a bias that heads share is loaded once for 32 of them. A warp owns 16 queries, from S to out.
//
// Launched by run.cuh. Invariant: rows past len_q are zeros in shared memory and never written; keys past len_k are
// zeros there and masked.
#pragma once

#include "gpu/softmax.cuh"
#include "kernels/sm80/one_tile.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_, int kBlock_>
struct OneTileForwardTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_, kBlock = kBlock_, kThreads = kBlock / 16 * 32;
  static constexpr int kBlocksPerSm = one_tile_forward_blocks(kHeadDim, kBlock);
  // NOTE: 18 warps have 96 registers each; 144 keys are 72.
  static constexpr int kPart = one_tile_part(kBlock), kParts = kBlock / kPart;
  using Tile = SmemTile<T, kHeadDim>;
  using Mods = ScoreMods<Element, kBlock, kBlock, kThreads>;
};

enum OneTileForwardView { kForwardQ, kForwardK, kForwardV, kForwardOut };

// The steps of a block. NOTE: S and O are the kernel's own, as in forward/kernel.cuh.
template <class Traits>
struct OneTileForward {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using Item = OneTileItem<kOneTileForwardViews>;
  static constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  static constexpr int kPart = Traits::kPart, kParts = Traits::kParts;
  using Part = float[1][kPart / 8][4];  // of S or P
  using Out = float[1][kHeadDim / 8][4];

  const ForwardArgs& args;
  const ScoreOptions& options;
  const OneTileForm& form;
  const uint32_t base;

  __device__ __forceinline__ const Problem& problem() const { return args.problem; }
  __device__ __forceinline__ Tile tile(int which, uint32_t n) const {
    return {base + (static_cast<int>(n % 2) * 3 + which) * Tile::bytes(kBlock)};
  }
  __device__ __forceinline__ int len_q() const { return static_cast<int>(problem().len_q); }
  // NOTE: computed anew wherever they are used, because registers are scarce.
  static __device__ __forceinline__ int warp_row() { return static_cast<int>(no_hoist(threadIdx.x)) / 32 * 16; }
  static __device__ __forceinline__ int row() { return warp_row() + lane_row(); }  // of this lane; its other is 8 on

  __device__ __forceinline__ void load(const Item& item, uint32_t n) const {
    if (!item.exists) return;
    const int len_k = static_cast<int>(problem().len_k);
    const int cols = static_cast<int>(problem().head_dim), cols_v = static_cast<int>(problem().head_dim_v);
    load_one_tile<kBlock, kThreads>(tile(kForwardQ, n), args.q, item.at[kForwardQ], len_q(), cols, form.is_regular);
    load_one_tile<kBlock, kThreads>(tile(kForwardK, n), args.k, item.at[kForwardK], len_k, cols, form.is_regular);
    load_one_tile<kBlock, kThreads>(tile(kForwardV, n), args.v, item.at[kForwardV], len_k, cols_v, form.is_regular);
  }

  // S = Q K^T of a part of the keys.
  __device__ __forceinline__ void multiply_s(uint32_t n, int part, Part& s) const {
    clear(s);
    gemm_nt<Frag, kHeadDim>(s, tile(kForwardQ, n), warp_row(), tile(kForwardK, n), kPart * part);
  }
  // What lies between Q K^T and the softmax.
  __device__ __forceinline__ void modify(const typename Traits::Mods& mods, int part, Part& s) const {
    const int col = kPart * part;
    mods.template apply<false>(options.features, s, warp_row(), col, diagonal_of(problem(), whole_sequence(problem())));
    hide_outside(problem(), form, s, warp_row(), col, kMinusInf);
  }
  // O += P V
  __device__ __forceinline__ void add_values(uint32_t n, int part, const Part& p, Out& o) const {
    gemm_from_registers<Frag>(o, operands<Frag>(p), tile(kForwardV, n), kPart * part, 0);
  }

  // out = O / l, lse = m + log l. max: in units of S.
  __device__ __forceinline__ void finish_rows(const Item& item, Out& o, const float (&max)[2],
                                              const float (&sum)[2]) const {
    const float to_natural = options.features & kRaw ? options.scale : 1.f;
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = row() + 8 * i;
      float top = sum[i] == 0.f ? kMinusInf : max[i] * to_natural, all = sum[i], keys = 1.f;
      if (problem().has_sinks) {
        const auto joined = with_sink(top, all, sink_of<float>(args, item.b, item.head, min(query, len_q() - 1)));
        top = joined.max;
        all = joined.sum;
        keys = joined.factor;
      }
      inverse[i] = all == 0.f ? 0.f : keys / all;
      if (args.lse != nullptr && threadIdx.x % 4 == 0 && query < len_q()) {
        const int64_t first = (item.b * problem().heads_q + item.head) * problem().len_q;
        static_cast<float*>(args.lse)[first + query] = all == 0.f ? kMinusInf : top + logf(all);
      }
    }
    for_each_row(o, [&](float& x, int i) { x *= inverse[i]; });
  }
};

// All warps do the same, each for 16 queries. What an item goes through:
//
//   wait, __syncthreads       Q, K and V are there, and what is to be known; nobody reads what the last left
//   find                      32 items ahead, after as many; what is done to the next item's scores
//   begin to load             bias and mask, where they are new; then Q, K and V of the next item
//   S = Q K^T                 where all keys are one part
//   (wait, __syncthreads)     bias and mask are there, where they are new
//   P, O += P V               part after part, where there are several each with its S
//   out                       through the warp's own rows of Q
//
// Shared memory: two stages of Q, K and V; the items, in a ring; what is done to scores; bias; mask.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    one_tile_forward_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ BiasGradientPlan plan,
                            ScoreOptions options, OneTileForm form) {
  using Step = OneTileForward<Traits>;
  using Frag = typename Traits::Frag;
  char* const smem = dynamic_shared_128();
  const Problem& problem = args.problem;
  const OneTileForwardSmem layout =
      one_tile_forward_smem(Traits::kHeadDim, Traits::kBlock, bias_bytes_of(problem), problem.has_mask);
  const uint32_t base = shared_address(smem);
  const Step step{args, options, form, base};
  const auto view_of = [&](int i) -> OneTileView {
    return i == kForwardK   ? OneTileView{args.k, problem.heads_k}
           : i == kForwardV ? OneTileView{args.v, problem.heads_v}
                            : OneTileView{i == kForwardQ ? args.q : args.out, problem.heads_q};
  };
  char* const ring = smem + layout.items;
  const OneTileItems<typename Traits::Mods, kOneTileForwardViews, decltype(view_of)> items{
      args, plan, args.bias, options.features, ring, smem + layout.bias - 3 * kOneTileModsBytes, view_of};
  const uint32_t count = items.count();
  if (count == 0) return;
  items.find_first(base + layout.bias, base + layout.mask);
  __syncthreads();
  step.load(items.item(0), 0);
  cp_async_commit();

  for (uint32_t n = 0; n < count; ++n) {
    cp_async_wait<0>();
    __syncthreads();
    items.find_next(n);
    const auto& item = items.item(n);
    const bool exists = item.exists, new_scores = exists && item.new_scores;
    if (new_scores) items.mods_of(n).load(options.features, 0, 0);
    cp_async_commit();
    if (n + 1 < count) step.load(items.item(n + 1), n + 1);
    cp_async_commit();
    if (!exists) continue;

    const auto wait_for_scores = [&] {
      if (!new_scores) return;
      cp_async_wait<1>();
      __syncthreads();  // bias and mask are there
    };
    const auto& mods = items.mods_of(n);
    float max[2] = {kMinusInf, kMinusInf}, sum[2] = {0.f, 0.f};
    typename Step::Part s;
    typename Step::Out o;
    if constexpr (Step::kParts == 1) {
      step.multiply_s(n, 0, s);
      wait_for_scores();
      if (Step::warp_row() >= step.len_q()) continue;
      step.modify(mods, 0, s);
      exponentiate_rows(s, options.to_log2, max, sum);
      clear(o);
      step.add_values(n, 0, s, o);
    } else {
      wait_for_scores();
      if (Step::warp_row() >= step.len_q()) continue;
      SoftmaxRows<1> softmax;
      clear(o);
#pragma unroll 1  // or 24 bytes would be spilled
      for (int part = 0; Step::kPart * part < static_cast<int>(problem.len_k); ++part) {
        step.multiply_s(n, part, s);
        step.modify(mods, part, s);
        softmax.template rescale<true>(s, o, options.to_log2, 8.f);
        softmax.template exponentials<true>(s, options.to_log2);
        step.add_values(n, part, s, o);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        max[i] = softmax.row_max[0][i];
        sum[i] = softmax.total(0, i);
      }
    }
    step.finish_rows(item, o, max, sum);
    store_accumulators<Frag>(
        o, step.tile(kForwardQ, n), Step::warp_row(), 0,
        rows_of<typename Step::T>(args.out, item.at[kForwardOut], problem.len_q, problem.head_dim_v), Step::warp_row());
  }
}

}  // namespace flash_ext::sm80
