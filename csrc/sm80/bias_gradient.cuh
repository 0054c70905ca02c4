// The gradient of a broadcast bias, as a pass of its own: one block of threads owns a tile *of the gradient* and walks
// over everything that shares it (batch elements, heads, blocks of queries or keys), in a fixed order, with the sum in
// registers. No atomics, no L x S memory, deterministic.
//
//   dbias[tile] = sum over members of dS = P o (dropout(dO V^T) - delta)
//
// Where the gradient has fewer tiles than the card has places, the members are divided among several blocks, whose
// partial sums are added up in order by a second kernel. A bias that is broadcast over nothing is written by the main
// backward kernel (bwd.cuh). Called by run_backward. Invariant: each element of the gradient is written exactly once.
#pragma once

#include "cuda/launch.h"
#include "cuda/rows.h"
#include "sm80/bwd_parts.cuh"

namespace flash_ext::sm80 {

// How the members and tiles of a gradient are laid out. `own`: the gradient has this dimension; otherwise it is summed.
struct BiasGradientPlan {
  bool own_batch[kMaxBatchDims] = {};
  bool own_head = false, own_rows = false, own_cols = false;
  int64_t owners = 1, members = 1;     // of (batch, head)
  int64_t m_blocks = 1, n_blocks = 1;  // of the scores
  int64_t parts = 1;                   // blocks that share a tile's items
  int64_t part_elements = 0;           // of one partial gradient
  float* partial = nullptr;            // [parts, part_elements]; null with one part

  FLASH_DEVICE int64_t tiles() const { return owners * (own_rows ? m_blocks : 1) * (own_cols ? n_blocks : 1); }
  // What is summed into one tile.
  FLASH_DEVICE int64_t items() const { return members * (own_rows ? 1 : m_blocks) * (own_cols ? 1 : n_blocks); }

  // The (batch, head) that is number `member` of number `owner`.
  FLASH_DEVICE void locate(const Problem& problem, int64_t owner, int64_t member, int64_t& b, int64_t& head) const {
    int64_t& h = own_head ? owner : member;
    head = h % problem.heads_q;
    h /= problem.heads_q;
    b = 0;
    int64_t weight = 1;
    for (int i = problem.batch_rank - 1; i >= 0; --i) {
      int64_t& index = own_batch[i] ? owner : member;
      b += index % problem.batch_size[i] * weight;
      index /= problem.batch_size[i];
      weight *= problem.batch_size[i];
    }
  }
};

// Warps own 16 keys, as in backward; S^T, dP^T and the gradient share the registers that dK and dV do not take.
template <class Element_, int kHeadDim_, bool kSmall_>
struct BiasGradientTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr TileShape kTile = bias_gradient_tile(sizeof(T), kHeadDim, kSmall_);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = kTile.warps * 32;
  static_assert(kBlockN == 16 * kTile.warps, "a warp owns 16 keys");
  using Tile = SmemTile<T, kHeadDim>;
  using Mods = ScoreMods<Element, kBlockM, kBlockN, kThreads>;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bias_gradient_kernel(const __grid_constant__ BackwardArgs args, const float* delta, const float* inverse,
                         const __grid_constant__ BiasGradientPlan plan) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads;
  extern __shared__ __align__(128) char smem[];

  const Problem& problem = args.fwd.problem;
  const uint32_t base = shared_address(smem);
  constexpr TileShape kTile = Traits::kTile;
  const int bias_bytes = problem.bias_dtype == DType::kFloat32 ? 4 : 2;
  const BiasGradientSmem layout = bias_gradient_smem(kTile, kHeadDim, sizeof(T), bias_bytes, problem.has_mask);
  const Tile k_smem{base}, q_smem{base + layout.q}, v_smem{base + layout.v}, d_out_smem{base + layout.d_out};
  float* const row_smem = reinterpret_cast<float*>(smem + layout.rows);  // [lse, delta, inverse][kBlockM]

  __shared__ struct {
    GlobalRows<T> q, k, v, d_out;
    int first_query, first_key, diagonal;
    uint32_t bh;
    TileBand band;
    bool visible;
  } block;
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<Dropout> dropout;

  const int64_t part = blockIdx.x / plan.tiles();
  const int64_t items = plan.items();
  const int64_t first_item = items * part / plan.parts, last_item = items * (part + 1) / plan.parts;
  const bool drops = problem.dropout_p > 0.0;
  const float dropout_scale = problem.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - problem.dropout_p)) : 0.f;
  const int warp_key = threadIdx.x / 32 * 16;

  float sum[1][kBlockM / 8][4];
  clear(sum);
  for (int64_t item = first_item; item < last_item; ++item) {
    __syncthreads();  // nobody reads the last item any more
    if (threadIdx.x == 0) {
      int64_t tile = blockIdx.x % plan.tiles(), member = item;
      int64_t& m_index = plan.own_rows ? tile : member;
      const int64_t m_block = m_index % plan.m_blocks;
      m_index /= plan.m_blocks;
      int64_t& n_index = plan.own_cols ? tile : member;
      const int64_t n_block = n_index % plan.n_blocks;
      n_index /= plan.n_blocks;
      int64_t b, head;
      plan.locate(problem, tile, member, b, head);
      const auto rows = [&](const TensorView& view, int64_t h, int64_t count, int64_t cols) {
        return rows_of<T>(view, batch_offset(problem, view, b) + h * view.head_stride, count, cols);
      };
      block.q = rows(args.fwd.q, head, problem.len_q, problem.head_dim);
      block.d_out = rows(args.d_out, head, args.d_out ? problem.len_q : 0, problem.head_dim_v);
      block.k = rows(args.fwd.k, head / (problem.heads_q / problem.heads_k), problem.len_k, problem.head_dim);
      block.v = rows(args.fwd.v, head / (problem.heads_q / problem.heads_v), problem.len_k, problem.head_dim_v);
      block.first_query = static_cast<int>(m_block) * kBlockM;
      block.first_key = static_cast<int>(n_block) * kBlockN;
      block.diagonal = problem.bottom_right ? static_cast<int>(problem.len_k - problem.len_q) : 0;
      block.bh = static_cast<uint32_t>(b * problem.heads_q + head);
      block.band = TileBand::make(problem);
      block.visible =
          !make_band(problem)
               .keys({block.first_query, min(int64_t{block.first_query} + kBlockM, problem.len_q)},
                     min(int64_t{block.first_key} + kBlockN, problem.len_k))
               .empty() &&
          make_band(problem)
                  .keys({block.first_query, min(int64_t{block.first_query} + kBlockM, problem.len_q)}, problem.len_k)
                  .last > block.first_key;
      mods = Traits::Mods::make(args.fwd, b, head, base + layout.bias, base + layout.mask);
      if (drops) dropout.get() = make_dropout(args.fwd.rng_state[0], args.fwd.rng_state[1], problem.dropout_p);
    }
    __syncthreads();
    if (!block.visible) continue;
    const int first_query = block.first_query, first_key = block.first_key;
    load_tile<kBlockN, kThreads>(k_smem, block.k, first_key);
    load_tile<kBlockM, kThreads>(q_smem, block.q, first_query);
    mods.load(first_query, first_key);
    cp_async_commit();
    load_tile<kBlockN, kThreads>(v_smem, block.v, first_key);
    load_tile<kBlockM, kThreads>(d_out_smem, block.d_out, first_query);
    cp_async_commit();
    for (int i = threadIdx.x; i < kBlockM; i += kThreads) {
      const bool inside = first_query + i < problem.len_q;
      const int64_t at = int64_t{block.bh} * problem.len_q + first_query + i;
      const float lse = inside ? static_cast<const float*>(args.fwd.lse)[at] : kMinusInf;
      row_smem[i] = lse == kMinusInf ? -kMinusInf : lse;
      row_smem[kBlockM + i] = inside ? delta[at] : 0.f;
      row_smem[2 * kBlockM + i] = inside && inverse != nullptr ? inverse[at] : 1.f;
    }
    cp_async_wait<1>();
    __syncthreads();  // Q, K, bias, mask, lse and delta are there

    float p_acc[1][kBlockM / 8][4];
    clear(p_acc);
    gemm_nt<Frag, kHeadDim>(p_acc, k_smem, warp_key, q_smem, 0);
    mods.template apply<true>(p_acc, warp_key, 0, first_query + block.diagonal - first_key);
    if (block.band.is_boundary(first_query, kBlockM, first_key, kBlockN)) {
      mask_band<true>(p_acc, warp_key, 0, block.band, first_query, first_key);
    }
    for_each_column(p_acc, row_smem, [](float& x, float lse) { x = exp2_fast((x - lse) * kLog2e); });
    for_each_column(p_acc, row_smem + 2 * kBlockM, [](float& x, float of_query) { x *= of_query; });
    if (drops) {
      visit_dropout<true>(p_acc, dropout.get(), block.bh, first_query / 16, (first_key + warp_key) / 16,
                          [](float& x, bool kept) { x = kept ? x : -x; });
    }
    cp_async_wait<0>();
    __syncthreads();  // V and dO are there

    float dp_acc[1][kBlockM / 8][4];
    clear(dp_acc);
    gemm_nt<Frag, kHeadDim>(dp_acc, v_smem, warp_key, d_out_smem, 0);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 of_query = *reinterpret_cast<const float2*>(row_smem + kBlockM + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float dp = dp_acc[0][n][i];
        const float p = p_acc[0][n][i];
        if (drops) dp = p > 0.f ? dp * dropout_scale : 0.f;
        sum[0][n][i] += fabsf(p) * (dp - (i % 2 == 0 ? of_query.x : of_query.y));
      }
    }
  }

  // The tile's place; a summed dimension is reduced over the tile first.
  const int64_t tile = blockIdx.x % plan.tiles();
  const int64_t m_block = plan.own_rows ? tile % plan.m_blocks : 0;
  const int64_t rest = plan.own_rows ? tile / plan.m_blocks : tile;
  const int64_t n_block = plan.own_cols ? rest % plan.n_blocks : 0;
  int64_t b, head;
  plan.locate(problem, plan.own_cols ? rest / plan.n_blocks : rest, 0, b, head);
  float* const to =
      (plan.partial != nullptr ? plan.partial + part * plan.part_elements : static_cast<float*>(args.dbias.data)) +
      batch_offset(problem, args.dbias, b) + head * args.dbias.head_stride;
  const auto write = [&](int query, int key, float x) {
    const int64_t i = plan.own_rows ? m_block * kBlockM + query : 0, j = plan.own_cols ? n_block * kBlockN + key : 0;
    if (i < problem.len_q && j < problem.len_k) to[i * args.dbias.row_stride + j * args.dbias.col_stride] = x;
  };
  if (plan.own_rows && plan.own_cols) {
    for_each_score<true>(sum, warp_key, 0, [&](float& x, int query, int key) { write(query, key, x); });
    return;
  }
  // Through shared memory as [query][key] floats, then one thread a number, in order.
  __syncthreads();
  float* const staged = reinterpret_cast<float*>(smem);
  constexpr int kWarpKeys = 16;
  // NOTE: tile by tile of one warp's keys, so that it fits whatever the head dimension leaves.
  float row_total = 0.f;  // of query threadIdx.x, where rows are kept
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) / 32 == warp) {
      for_each_score<true>(sum, 0, 0, [&](float& x, int query, int key) { staged[query * kWarpKeys + key] = x; });
    }
    __syncthreads();
    if (plan.own_cols) {
      if (threadIdx.x < kWarpKeys) {
        float total = 0.f;
        for (int query = 0; query < kBlockM; ++query) total += staged[query * kWarpKeys + threadIdx.x];
        write(0, warp * kWarpKeys + threadIdx.x, total);
      }
    } else if (threadIdx.x < kBlockM) {
      for (int key = 0; key < kWarpKeys; ++key) row_total += staged[threadIdx.x * kWarpKeys + key];
    }
  }
  if (plan.own_cols) return;
  if (plan.own_rows) {
    if (threadIdx.x < kBlockM) write(threadIdx.x, 0, row_total);
    return;
  }
  __syncthreads();
  if (threadIdx.x < kBlockM) staged[threadIdx.x] = row_total;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.f;
    for (int query = 0; query < kBlockM; ++query) total += staged[query];
    write(0, 0, total);
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

// Room for partial gradients: few tiles means a small gradient.
constexpr int64_t kBiasPartialBytes = 2 << 20;

// True where the main kernel writes the gradient, element by element.
inline bool bias_is_whole(const Problem& problem, const TensorView& dbias) {
  bool whole = (dbias.head_stride != 0 || problem.heads_q == 1) && (dbias.row_stride != 0 || problem.len_q == 1) &&
               (dbias.col_stride != 0 || problem.len_k == 1);
  for (int i = 0; i < problem.batch_rank; ++i) {
    whole = whole && (dbias.batch_stride[i] != 0 || problem.batch_size[i] == 1);
  }
  return whole;
}

// Elements of the gradient: the bias's own shape, which is dense.
inline int64_t bias_elements(const Problem& problem, const TensorView& dbias) {
  int64_t count = (dbias.head_stride != 0 ? problem.heads_q : 1) * (dbias.row_stride != 0 ? problem.len_q : 1) *
                  (dbias.col_stride != 0 ? problem.len_k : 1);
  for (int i = 0; i < problem.batch_rank; ++i) count *= dbias.batch_stride[i] != 0 ? problem.batch_size[i] : 1;
  return count;
}

template <class Element, int kHeadDim, bool kSmall>
void run_bias_gradient(const BackwardArgs& args, const BackwardScratch& scratch) {
  using Traits = BiasGradientTraits<Element, kHeadDim, kSmall>;
  constexpr int64_t kPlaces = 256;  // about the blocks that run at once
  const Problem& problem = args.fwd.problem;
  BiasGradientPlan plan;
  plan.own_head = args.dbias.head_stride != 0;
  plan.own_rows = args.dbias.row_stride != 0;
  plan.own_cols = args.dbias.col_stride != 0;
  (plan.own_head ? plan.owners : plan.members) *= problem.heads_q;
  for (int i = 0; i < problem.batch_rank; ++i) {
    plan.own_batch[i] = args.dbias.batch_stride[i] != 0;
    (plan.own_batch[i] ? plan.owners : plan.members) *= problem.batch_size[i];
  }
  plan.m_blocks = block_count(problem.len_q, Traits::kBlockM);
  plan.n_blocks = block_count(problem.len_k, Traits::kBlockN);
  plan.part_elements = bias_elements(problem, args.dbias);
  const int64_t room = kBiasPartialBytes / 4 / plan.part_elements;
  plan.parts = std::max<int64_t>(1, std::min({kPlaces / plan.tiles(), plan.items(), room}));
  if (plan.parts > 1) plan.partial = scratch.bias_partial;
  constexpr TileShape kTile = Traits::kTile;
  const int shared =
      bias_gradient_smem(kTile, kHeadDim, sizeof(typename Traits::T), bias_bytes_of(problem), problem.has_mask).total;
  cuda::launch(bias_gradient_kernel<Traits>, cuda::grid_of(plan.tiles() * plan.parts), Traits::kThreads, shared,
               args.fwd.stream, args, scratch.delta, scratch.inverse, plan);
  if (plan.parts > 1) {
    cuda::sum_parts(static_cast<float*>(args.dbias.data), scratch.bias_partial, plan.part_elements, plan.parts,
                    args.fwd.stream);
  }
}

}  // namespace flash_ext::sm80
