// Backward: one block of threads owns kBlockN keys of one key head and walks over the queries that see them, head after
// head of its group, so that dK and dV stay in registers and grouped heads need no sum in memory. Where key and value
// heads differ in number it runs twice, once grouped by key heads for dK and dQ, once by value heads for dV.
//
//   S^T = K Q^T     P^T = e^(S^T - lse)     dV += dropout(P)^T dO     dP^T = V dO^T     dS^T = P^T o (dP^T - delta)
//   dK += dS^T Q    dQ += dS K              delta = rowsum(dO o out) - dlse
//
// FlashAttention-2 (arXiv:2307.08691), algorithm 2, with S transposed: a warp owns whole rows of S^T, so P^T and dS^T
// are register operands of dV and dK, and only dS passes through shared memory, for dQ. dQ is added up in float in
// global memory by red.add, in the order of the blocks of keys when deterministic. Called by backend.cpp through
// kernels.h. Invariant: rows past len_q have lse = +inf in shared memory, hence P = 0, as have rows without keys; keys
// past len_k are masked.
#pragma once

#include "attention/tile_schedule.h"
#include "sm80/bwd_parts.cuh"

namespace flash_ext::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ TileSchedule schedule) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using ScoreTile = typename Traits::ScoreTile;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kStages = Traits::kStages, kSplit = Traits::kSplit;
  constexpr int kQueries = Traits::kQueries, kColumns = Traits::kColumns;
  constexpr bool kScaled = std::is_same_v<typename Traits::Element, Fp16>;
  // One multiply-add before ex2. Not in float, where measure.cuh must find the same bits.
  constexpr bool kFolded = Traits::kPlain && sizeof(T) == 2;
  extern __shared__ __align__(128) char smem[];

  const Problem& problem = args.fwd.problem;
  const uint32_t base = shared_address(smem);
  const int bias_bytes = Traits::kPlain || !problem.has_bias ? 0 : (problem.bias_dtype == DType::kFloat32 ? 4 : 2);
  constexpr BackwardShape kShape = Traits::kShape;
  const BackwardSmem layout =
      backward_smem(kShape, kHeadDim, sizeof(T), bias_bytes, !Traits::kPlain && problem.has_mask);
  const Tile k_smem{base + layout.k}, v_smem{base + layout.v};
  const ScoreTile p_smem{base + layout.p}, ds_smem{base + layout.ds};
  float* const row_smem = reinterpret_cast<float*>(smem + layout.rows);  // [stage][lse, delta, inverse][kBlockM]

  // What is read once a tile or less, see fwd.cuh.
  __shared__ struct {
    uint32_t tile;  // of the schedule
    GlobalRows<T> q, d_out, k, v, dk, dv;
    int head, q_per_k, q_per_v;
    bool new_k, new_v;  // this query head is the first of its key or value head
    const float *lse, *delta, *inverse;
    float *dq_accum, *dbias, *slope;
    int* turn;
    TileBand band;
    int first_key, n_block, first_query, last_query, diagonal;
    uint32_t bh;
    float bound;  // of dS, fp16
  } block;
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<Dropout> dropout;
  __shared__ float warp_values[32];

  if (threadIdx.x == 0) {
    block.tile = blockIdx.x;
    if (scratch.turns != nullptr) {
      block.tile = atomicAdd(scratch.turns + problem.batch * problem.heads_q * scratch.m_blocks, 1);
    }
  }
  const int members = static_cast<int>(problem.heads_q / schedule.heads_k);
  const bool drops = !Traits::kPlain && problem.dropout_p > 0.0;
  const bool measured = !kFolded && scratch.inverse != nullptr;
  const int warp = threadIdx.x / 32;
  const int warp_key = warp / kSplit * 16;
  const int warp_query = warp % kSplit * kQueries;  // of S^T
  const int warp_col = warp % kSplit * kColumns;    // of dK and dV
  const float to_log2 = Traits::kPlain ? static_cast<float>(problem.scale * 1.4426950408889634) : kLog2e;
  const float dropout_scale = problem.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - problem.dropout_p)) : 0.f;

  // NOTE: everything is found here, before dK and dV occupy half of the registers; later heads only step on.
  if (threadIdx.x == 0) {
    const auto [b, group, n_block] = schedule.at<uint32_t>(block.tile);
    const int64_t head = group * members, bh = b * problem.heads_q + head;
    const int q_per_k = static_cast<int>(problem.heads_q) / static_cast<int>(problem.heads_k);
    const int q_per_v = static_cast<int>(problem.heads_q) / static_cast<int>(problem.heads_v);
    const auto rows = [&](const TensorView& view, int64_t h, int64_t count, int64_t cols) {
      return rows_of<T>(view, batch_offset(problem, view, b) + h * view.head_stride, count, cols);
    };
    // A gradient in float is addressed in its own elements: only data and strides of these are used.
    const auto gradient = [&](const TensorView& view, bool in_accum, int64_t h, int64_t cols) {
      GlobalRows<T> result = rows(view, h, problem.len_k, cols);
      if (in_accum) {
        result.data = reinterpret_cast<T*>(static_cast<float*>(view.data) + batch_offset(problem, view, b) +
                                           h * view.head_stride);
      }
      return result;
    };
    block.q = rows(args.fwd.q, head, problem.len_q, problem.head_dim);
    block.d_out = rows(args.d_out, head, args.d_out ? problem.len_q : 0, problem.head_dim_v);
    block.k = rows(args.fwd.k, static_cast<int>(head) / q_per_k, problem.len_k, problem.head_dim);
    block.v = rows(args.fwd.v, static_cast<int>(head) / q_per_v, problem.len_k, problem.head_dim_v);
    if (args.dk) block.dk = gradient(args.dk, args.dk_in_accum, static_cast<int>(head) / q_per_k, problem.head_dim);
    if (args.dv) block.dv = gradient(args.dv, args.dv_in_accum, static_cast<int>(head) / q_per_v, problem.head_dim_v);
    block.head = static_cast<int>(head);
    block.q_per_k = q_per_k;
    block.q_per_v = q_per_v;
    block.new_k = block.new_v = true;
    block.lse = static_cast<const float*>(args.fwd.lse) + bh * problem.len_q;
    block.delta = scratch.delta + bh * problem.len_q;
    block.inverse = scratch.inverse + bh * problem.len_q;
    block.dq_accum = scratch.dq_accum + bh * problem.len_q * problem.head_dim;
    block.turn = scratch.turns + bh * scratch.m_blocks;
    block.slope = problem.wants_dalibi ? scratch.slopes + bh * schedule.blocks + n_block : nullptr;
    block.dbias = nullptr;
    if (scratch.direct_dbias) {
      block.dbias =
          static_cast<float*>(args.dbias.data) + batch_offset(problem, args.dbias, b) + head * args.dbias.head_stride;
    }
    block.band = TileBand::make(problem);
    block.n_block = static_cast<int>(n_block);
    block.first_key = block.n_block * kBlockN;
    const Range queries = make_band(problem).queries(
        {block.first_key, min(int64_t{block.first_key} + kBlockN, problem.len_k)}, problem.len_q);
    block.first_query = static_cast<int>(queries.first) / kBlockM * kBlockM;
    block.last_query = queries.empty() ? block.first_query : static_cast<int>(queries.last);
    block.diagonal = problem.bottom_right ? static_cast<int>(problem.len_k - problem.len_q) : 0;
    block.bh = static_cast<uint32_t>(bh);
    if constexpr (kScaled) {
      float out_norm = 0.f, delta_max = 0.f;
      for (int64_t h = bh; h < bh + members; ++h) {
        out_norm = fmaxf(out_norm, scratch.bounds[h * 2]);
        delta_max = fmaxf(delta_max, scratch.bounds[h * 2 + 1]);
      }
      block.bound = out_norm;
      warp_values[31] = delta_max;
    }
    if constexpr (!Traits::kPlain) {
      mods = Traits::Mods::make(args.fwd, b, head, base + layout.bias, base + layout.mask);
      if (drops) {
        dropout.get() = make_dropout(args.fwd.rng_state[0], args.fwd.rng_state[1], problem.dropout_p);
      }
    }
  }

  float dk_acc[1][kColumns / 8][4], dv_acc[1][kColumns / 8][4];
  clear(dk_acc);
  clear(dv_acc);
  float ds_scale = 1.f, ds_unscale = 1.f;  // of dS in fp16, and of dk_acc; powers of two

  for (int member = 0; member < members; ++member) {
    __syncthreads();
    if (block.new_k) load_tile<kBlockN, kThreads>(k_smem, block.k, block.first_key);
    if (block.new_v) load_tile<kBlockN, kThreads>(v_smem, block.v, block.first_key);

    const auto load_queries = [&](int first_query, int stage) {
      load_tile<kBlockM, kThreads>(Tile{base + layout.q + stage * Tile::bytes(kBlockM)}, block.q, first_query);
      load_tile<kBlockM, kThreads>(Tile{base + layout.d_out + stage * Tile::bytes(kBlockM)}, block.d_out, first_query);
    };
    // lse and delta of a query pass through registers, because lse is changed on the way.
    const auto read_row = [&](int first_query) {
      const int query = first_query + static_cast<int>(threadIdx.x);
      const bool inside = threadIdx.x < kBlockM && query < problem.len_q;
      return inside ? make_float3(block.lse[query], block.delta[query], measured ? block.inverse[query] : 1.f)
                    : make_float3(kMinusInf, 0.f, 1.f);
    };
    const auto write_row = [&](float3 row, int stage) {
      if (threadIdx.x >= kBlockM) return;
      float* const to = row_smem + stage * 3 * kBlockM + threadIdx.x;
      to[0] = row.x == kMinusInf ? -kMinusInf : (kFolded ? row.x * kLog2e - Traits::kPShift : row.x);
      to[kBlockM] = row.y;
      to[2 * kBlockM] = row.z;
    };

    int stage = 0;
    if (block.first_query < block.last_query) {
      load_queries(block.first_query, 0);
      write_row(read_row(block.first_query), 0);
      if constexpr (!Traits::kPlain) mods.load(block.first_query, block.first_key);
    }
    cp_async_commit();
    if constexpr (kScaled) {
      cp_async_wait<0>();
      __syncthreads();
      const float delta_max = warp_values[31];
      const float v_max = tile_max_abs<Tile::bytes(kBlockN), kThreads>(v_smem.base, warp_values);
      const float bound =
          v_max * sqrtf(static_cast<float>(problem.head_dim_v)) * block.bound * dropout_scale + delta_max;
      const float before = ds_unscale;
      ds_scale = fp16_scale(bound);
      ds_unscale = 1.f / ds_scale;
      if (member > 0) for_each_score<true>(dk_acc, 0, 0, [&](float& x, int, int) { x *= ds_scale * before; });
    }
    float slope_sum = 0.f;

    for (int query = block.first_query; query < block.last_query; query += kBlockM) {
      const Tile q_smem{base + layout.q + stage * Tile::bytes(kBlockM)};
      const Tile d_out_smem{base + layout.d_out + stage * Tile::bytes(kBlockM)};
      const float* const lse_row = row_smem + stage * 3 * kBlockM + warp_query;
      cp_async_wait<0>();
      __syncthreads();  // this Q, dO (bias, mask) are there for all; nobody reads dS, or the other stage, any more
      const bool goes_on = query + kBlockM < block.last_query;
      float3 next_row;
      if (kStages == 2 && goes_on) {
        load_queries(query + kBlockM, stage ^ 1);
        next_row = read_row(query + kBlockM);
      }
      cp_async_commit();

      float p_acc[1][kQueries / 8][4];
      clear(p_acc);
      gemm_nt<Frag, kHeadDim>(p_acc, k_smem, warp_key, q_smem, warp_query);
      if constexpr (!Traits::kPlain) {
        mods.template apply<true>(p_acc, warp_key, warp_query, query + block.diagonal - block.first_key,
                                  // 1 - t^2 waits where dS will be written, at this lane's own places: no registers are
                                  // left for it, and P in T is too coarse to find t again.
                                  [&](const float(&capped)[1][kQueries / 8][4]) {
                                    float slope[1][kQueries / 8][4];
#pragma unroll
                                    for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
                                      for (int i = 0; i < 4; ++i) {
                                        const float t = capped[0][n][i] * mods.inverse_cap;
                                        slope[0][n][i] = 1.f - t * t;
                                      }
                                    }
                                    store_scores(ds_smem, operands<Frag>(slope).row[0], warp_key, warp_query);
                                  });
      }
      if (block.band.is_boundary(query, kBlockM, block.first_key, kBlockN)) {
        mask_band<true>(p_acc, warp_key, warp_query, block.band, query, block.first_key);
      }
      if constexpr (Traits::kPlain && !kFolded) {
        for_each_score<true>(p_acc, 0, 0,
                             [&](float& x, int, int) { x = __fmul_rn(x, static_cast<float>(problem.scale)); });
      }
      for_each_column(p_acc, lse_row, [&](float& x, float lse) {
        x = kFolded ? exp2_fast(fmaf(x, to_log2, -lse)) : exp2_fast((x - lse) * kLog2e + Traits::kPShift);
      });
      if (measured) for_each_column(p_acc, lse_row + 2 * kBlockM, [](float& x, float inverse) { x *= inverse; });
      // A dropped P keeps its size and turns negative, so that one array serves dV and dS.
      if (drops) {
        visit_dropout<true>(p_acc, dropout.get(), block.bh, (query + warp_query) / 16,
                            (block.first_key + warp_key) / 16, [](float& x, bool kept) { x = kept ? x : -x; });
      }
      // NOTE: from here on P is what the products see, rounded to T: dS takes it as well, because P in float beside dP
      // would spill (eager attention rounds P and dP).
      auto p_frag = operands<Frag>(p_acc);
      float ds_acc[1][kQueries / 8][4];
      clear(ds_acc);
      gemm_nt<Frag, kHeadDim>(ds_acc, v_smem, warp_key, d_out_smem, warp_query);
      if (kStages == 2 && goes_on) write_row(next_row, stage ^ 1);
      if (drops) {
        with_p(ds_acc, p_frag.row[0], [&](float& x, float p) { x = p > 0.f ? x * dropout_scale : 0.f; });
      }
      for_each_column(ds_acc, lse_row + kBlockM, [](float& x, float delta) { x -= delta; });
      with_p(ds_acc, p_frag.row[0], [&](float& x, float p) { x *= Traits::kPlain ? p : fabsf(p); });
      if (kScaled) for_each_score<true>(ds_acc, 0, 0, [](float& x, int, int) { x *= 1.f / 1024.f; });
      if constexpr (!Traits::kPlain) {
        if (block.dbias != nullptr) {
          for_each_score<true>(ds_acc, warp_key, warp_query, [&](float& x, int i, int j) {
            if (query + i < problem.len_q && block.first_key + j < problem.len_k) {
              block.dbias[(query + i) * args.dbias.row_stride + (block.first_key + j) * args.dbias.col_stride] = x;
            }
          });
        }
        if (problem.wants_dalibi) {
          for_each_score<true>(ds_acc, warp_key, warp_query, [&](float& x, int i, int j) {
            slope_sum -= x * fabsf(static_cast<float>(query + i + block.diagonal - block.first_key - j));
          });
        }
        if (mods.cap != 0.f) {
          multiply_scores<Frag>(ds_acc, ds_smem, warp_key, warp_query);
        }
      }
      if (kScaled) {
        for_each_score<true>(ds_acc, 0, 0, [&](float& x, int, int) { x *= ds_scale; });
      }
      if (drops) p_frag.row[0].drop_negative();

      const auto ds_frag = operands<Frag>(ds_acc);
      store_scores(ds_smem, ds_frag.row[0], warp_key, warp_query);
      if constexpr (kSplit == 1) {
        gemm_from_registers<Frag>(dv_acc, p_frag, d_out_smem, 0, 0);
      } else {
        store_scores(p_smem, p_frag.row[0], warp_key, warp_query);
      }
      __syncthreads();  // dS (and P) of all warps are there; nobody reads bias and mask any more
      if constexpr (!Traits::kPlain) {
        if (goes_on) mods.load(query + kBlockM, block.first_key);
        cp_async_commit();
      }
      if constexpr (kSplit == 1) {
        gemm_from_registers<Frag>(dk_acc, ds_frag, q_smem, 0, 0);
      } else {
        gemm_nn<Frag, kBlockM>(dv_acc, p_smem, warp_key, d_out_smem, warp_col);
        gemm_nn<Frag, kBlockM>(dk_acc, ds_smem, warp_key, q_smem, warp_col);
      }

      if (problem.wants_dq) {
        float dq_acc[Traits::kDqM][Traits::kDqN][4];
        clear(dq_acc);
        const int dq_warp = opaque(warp);
        const int dq_row = dq_warp / Traits::kDqWarpsN * Traits::kDqM * 16;
        const int dq_col = dq_warp % Traits::kDqWarpsN * Traits::kDqN * 8;
        gemm_tn<Frag, kBlockN>(dq_acc, ds_smem, dq_row, k_smem, dq_col);
        // NOTE: asked of the parameters and not of the pointer. With `pointer == nullptr ? nullptr : pointer + i`,
        // tested for null, one fp16 instance on 9.0 took the branch with a null pointer; probably the comparison did
        // not wait for the zero that was written (CS2R).
        const bool ordered = scratch.turns != nullptr;
        int* const turn = block.turn + query / kBlockM;
        const int predecessors = block.n_block - max(query + block.band.lower, 0) / kBlockN;
        if (ordered) wait_for_turn(turn, predecessors);
        add_to_global(dq_acc, block.dq_accum, static_cast<int>(problem.head_dim), dq_col, query + dq_row,
                      static_cast<int>(problem.len_q), ds_unscale);
        if (ordered) end_turn(turn, predecessors);
      }
      if (kStages == 2) {
        stage ^= 1;
      } else if (goes_on) {
        const float3 row = read_row(query + kBlockM);
        __syncthreads();  // nobody reads Q and dO any more
        load_queries(query + kBlockM, 0);
        write_row(row, 0);
        cp_async_commit();
      }
    }
    cp_async_wait<0>();
    if constexpr (!Traits::kPlain) {
      if (problem.wants_dalibi) {
        const float sum = block_sum<kThreads>(slope_sum, warp_values);
        if (threadIdx.x == 0) *block.slope = sum;
      }
    }

    __syncthreads();  // nobody reads this head's `block`, K or V any more
    if (member + 1 < members && threadIdx.x == 0) {
      ++block.head;
      block.new_k = block.head % block.q_per_k == 0;
      block.new_v = block.head % block.q_per_v == 0;
      block.q.advance(args.fwd.q.head_stride);
      block.d_out.advance(args.d_out.head_stride);
      if (block.new_k) block.k.advance(args.fwd.k.head_stride);
      if (block.new_v) block.v.advance(args.fwd.v.head_stride);
      block.lse += problem.len_q;
      block.delta += problem.len_q;
      block.inverse += problem.len_q;
      block.dq_accum += problem.len_q * problem.head_dim;
      block.turn += scratch.m_blocks;
      if (block.slope != nullptr) block.slope += schedule.blocks;
      if (block.dbias != nullptr) block.dbias += args.dbias.head_stride;
      ++block.bh;
      if constexpr (!Traits::kPlain) mods.next_head(args.fwd);
    }
  }

  // K and V become the stages of their gradients.
  const auto store = [&](float(&acc)[1][kColumns / 8][4], const GlobalRows<T>& to, bool in_accum, Tile stage_tile,
                         float factor) {
    for_each_score<true>(acc, 0, 0, [&](float& x, int, int) { x *= factor; });
    if (in_accum && sizeof(T) == 2) {
      const GlobalRows<float> wide{
          reinterpret_cast<float*>(to.data), to.row_stride, to.col_stride, to.rows, to.cols, false};
      store_float(acc, warp_col, wide, block.first_key + warp_key);
    } else {
      store_accumulators<Frag>(acc, stage_tile, warp_key, warp_col, to, block.first_key + warp_key);
    }
  };
  if (args.dk) store(dk_acc, block.dk, args.dk_in_accum, k_smem, static_cast<float>(problem.scale) * ds_unscale);
  if (args.dv) {
    store(dv_acc, block.dv, args.dv_in_accum, v_smem, (drops ? dropout_scale : 1.f) * (kScaled ? 1.f / 1024.f : 1.f));
  }
}

}  // namespace flash_ext::sm80
