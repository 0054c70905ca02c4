// Backward: one block of threads owns kBlockN keys of one key head and walks over the queries that see them, head after
// head of its group, so that dK and dV stay in registers and grouped heads need no sum in memory. Where key and value
// heads differ in number it runs twice, once grouped by key heads for dK and dQ, once by value heads for dV.
//
//   S^T = K Q^T     P^T = e^(S^T - lse)     dV += dropout(P)^T dO     dP^T = V dO^T     dS^T = P^T o (dP^T - delta)
//   dK += dS^T Q    dQ += dS K              delta = rowsum(dO o out) - dlse
//
// FlashAttention-2 (arXiv:2307.08691), algorithm 2, with S transposed and two kinds of warps. A pair of warps, one of
// each kind, owns the same keys. One computes S^T, P^T and dV, the other dP^T, dS^T and dK; P^T and dS^T are their
// register operands. P passes from one to the other, dS to all for dQ, through shared memory. dQ of a tile is computed
// beside the next tile's softmax, and added up in float in global memory by red.add, in the order of the blocks of keys
// when deterministic. Called by backend.cpp through kernels.h. Invariant: rows past len_q are zeros in shared memory,
// which make dS = 0 and add nothing to dV; keys past len_k are masked.
#pragma once

#include "attention/tile_schedule.h"
#include "sm80/bwd_parts.cuh"
#include "sm80/shared_memory.h"

namespace flash_ext::sm80 {

// Small tiles are for cards with less shared memory than 9.0 has. Machine code for it has none of them where the others
// always fit: a tenth of what the compiler has to do. PTX of 9.0, if there is any, is for other cards, too.
template <class Traits>
__device__ constexpr bool is_reachable() {
#if __CUDA_ARCH__ == 900 && !defined(FLASH_EXT_WITH_PTX_90)
  constexpr int kLimit = 227 * 1024, kBiasBytes = Traits::kPlain ? 0 : 4, kElement = sizeof(typename Traits::T);
  constexpr BackwardShape kLarge = backward_shape(kElement, Traits::kHeadDim, false, Traits::kPlain);
  constexpr BackwardSmem kSmem = backward_smem(kLarge, Traits::kHeadDim, kElement, kBiasBytes, !Traits::kPlain);
  return !Traits::kSmall || kSmem.total + kStaticSharedBytes > kLimit;
#else
  return true;
#endif
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ TileSchedule schedule) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using ScoreTile = typename Traits::ScoreTile;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kStages = Traits::kStages, kM = Traits::kM;
  constexpr bool kScaled = std::is_same_v<typename Traits::Element, Fp16>;
  // One multiply-add before ex2. Not in float, where measure.cuh must find the same bits.
  constexpr bool kFolded = Traits::kPlain && sizeof(T) == 2;
  if constexpr (!is_reachable<Traits>()) {
    __trap();
    return;
  }
  extern __shared__ __align__(128) char smem[];

  const Problem& problem = args.fwd.problem;
  const uint32_t base = shared_address(smem);
  const int bias_bytes = Traits::kPlain || !problem.has_bias ? 0 : (problem.bias_dtype == DType::kFloat32 ? 4 : 2);
  constexpr BackwardShape kShape = Traits::kShape;
  const BackwardSmem layout =
      backward_smem(kShape, kHeadDim, sizeof(T), bias_bytes, !Traits::kPlain && problem.has_mask);
  const Tile k_smem{base + layout.k}, v_smem{base + layout.v};
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
      block.tile = atomicAdd(scratch.turns + problem.batch * problem.heads_q * scratch.m_blocks * Traits::kWarps, 1);
    }
  }
  const int members = static_cast<int>(problem.heads_q / schedule.heads_k);
  const bool drops = !Traits::kPlain && problem.dropout_p > 0.0;
  const bool measured = !kFolded && scratch.inverse != nullptr;
  // The first half of the warps holds dV, the second dK; a pair of warps, one of each, shares its keys. NOTE: computed
  // anew wherever they are used, because no registers are left.
  const auto warp = [] { return static_cast<int>(opaque(threadIdx.x) / 32); };
  const auto holds_dv = [&] { return warp() < Traits::kWarps / 2; };
  const auto pair = [] { return static_cast<int>(opaque(threadIdx.x) / 32 % (Traits::kWarps / 2)); };
  const auto warp_key = [&] { return pair() * kM * 16; };
  const auto p_buffer = [&] { return base + layout.p + warp_key() * kBlockM * static_cast<int>(sizeof(T)); };
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
    block.turn = scratch.turns + bh * scratch.m_blocks * Traits::kWarps;
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
    block.last_query = (static_cast<int>(queries.last) - 1) / kBlockM * kBlockM;
    if (queries.empty()) block.last_query = block.first_query - kBlockM;
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

  float acc[kM][kHeadDim / 8][4];  // dV or dK
  clear(acc);
  float ds_scale = 1.f, ds_unscale = 1.f;  // of dS in fp16, and of dK; powers of two
  // fn(accumulator, its sum), see kSumTiles
  const auto visit_sums = [&](const auto& fn) {
    float* sum = scratch.sums + int64_t{block.tile} * (kThreads * Traits::kAccumulators) + threadIdx.x;
    for_each_score<true>(acc, 0, 0, [&](float& x, int, int) {
      fn(x, *sum);
      sum += kThreads;
    });
  };

  const auto ds_tile = [&](int stage) {
    return ScoreTile{base + layout.ds + (Traits::kDeferred ? stage * ScoreTile::bytes(kBlockN) : 0)};
  };

  // S^T becomes P^T; a dropped P keeps its size and turns negative, so that one array serves dV and dS.
  const auto score_to_p = [&](float(&s_acc)[kM][kBlockM / 8][4], int query, int stage) {
    const float* const lse_row = row_smem + stage * 3 * kBlockM;
    if constexpr (!Traits::kPlain) {
      mods.template apply<true>(s_acc, warp_key(), 0, query + block.diagonal - block.first_key, stage,
                                // 1 - t^2 waits for the partner where it will write dS: no registers are left for it,
                                // and P in T is too coarse to find t again.
                                [&](const float(&capped)[kM][kBlockM / 8][4]) {
                                  float slope[kM][kBlockM / 8][4];
                                  for_each_pair(slope, capped, [&](float& x, float y) {
                                    const float t = y * mods.inverse_cap;
                                    x = 1.f - t * t;
                                  });
                                  store_scores(ds_tile(stage), operands<Frag>(slope), warp_key());
                                });
    }
    if (block.band.is_boundary(query, kBlockM, block.first_key, kBlockN)) {
      mask_band<true>(s_acc, warp_key(), 0, block.band, query, block.first_key);
    }
    if constexpr (Traits::kPlain && !kFolded) {
      for_each_score<true>(s_acc, 0, 0,
                           [&](float& x, int, int) { x = __fmul_rn(x, static_cast<float>(problem.scale)); });
    }
    // Rows without keys have lse = -inf and scores of -inf: any finite number serves them.
    for_each_column(
        s_acc, lse_row,
        [&](float lse) {
          return kFolded ? fminf(fmaf(lse, -kLog2e, Traits::kPShift), 1e30f) : (lse == kMinusInf ? 0.f : lse);
        },
        [&](float& x, float shift) {
          x = kFolded ? exp2_fast(fmaf(x, to_log2, shift)) : exp2_fast((x - shift) * kLog2e + Traits::kPShift);
        });
    if (measured) for_each_column(s_acc, lse_row + 2 * kBlockM, [](float& x, float inverse) { x *= inverse; });
    if (drops) {
      visit_dropout<true>(s_acc, dropout.get(), block.bh, query / 16, (block.first_key + warp_key()) / 16,
                          [](float& x, bool kept) { x = kept ? x : -x; });
    }
  };

  // dP^T - delta of rows that have keys, by their dlse.
  const auto add_dlse = [&](float(&dp_acc)[kM][kBlockM / 8][4], int query, int stage) {
    const int column = lane_column() * 2;
    const float* const d_lse = scratch.d_lse + int64_t{block.bh} * opaque(problem.len_q) + query + column;
    const int left = opaque(static_cast<int>(problem.len_q) - query - column);
    const float* const lse_row = row_smem + stage * 3 * kBlockM + column;
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool has_keys = n * 8 + i < left && lse_row[n * 8 + i] != kMinusInf;
        const float x = has_keys ? d_lse[n * 8 + i] : 0.f;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          dp_acc[m][n][i] += x;
          dp_acc[m][n][i + 2] += x;
        }
      }
    }
  };

  // dP^T becomes dS^T. NOTE: P is what the products see, rounded to T, because P in float beside dP would spill (eager
  // attention rounds P and dP).
  float slope_sum = 0.f;
  const auto dp_to_ds = [&](float(&dp_acc)[kM][kBlockM / 8][4], int query, int stage) {
    if (drops) with_p<Frag>(dp_acc, p_buffer(), [&](float& x, float p) { x = p > 0.f ? x * dropout_scale : 0.f; });
    for_each_column(dp_acc, row_smem + (stage * 3 + 1) * kBlockM, [](float& x, float delta) { x -= delta; });
    if constexpr (!Traits::kPlain) {
      if (scratch.d_lse != nullptr) add_dlse(dp_acc, query, stage);
    }
    with_p<Frag>(dp_acc, p_buffer(), [&](float& x, float p) { x *= Traits::kPlain ? p : fabsf(p); });
    if (kScaled) for_each_score<true>(dp_acc, 0, 0, [](float& x, int, int) { x *= 1.f / 1024.f; });
    if constexpr (!Traits::kPlain) {
      if (block.dbias != nullptr) {
        for_each_score<true>(dp_acc, warp_key(), 0, [&](float& x, int i, int j) {
          if (query + i < problem.len_q && block.first_key + j < problem.len_k) {
            block.dbias[(query + i) * args.dbias.row_stride + (block.first_key + j) * args.dbias.col_stride] = x;
          }
        });
      }
      if (problem.wants_dalibi) {
        visit_distance<true>(dp_acc, warp_key(), 0, query + block.diagonal - block.first_key,
                             [&](float& x, float away) { slope_sum -= x * away; });
      }
      if (mods.cap != 0.f) multiply_scores<Frag>(dp_acc, ds_tile(stage), warp_key());
    }
    if (kScaled) for_each_score<true>(dp_acc, 0, 0, [&](float& x, int, int) { x *= ds_scale; });
  };

  for (int member = 0; member < members; ++member) {
    __syncthreads();
    if (block.new_k) load_tile<kBlockN, kThreads>(k_smem, block.k, block.first_key);
    if (block.new_v) load_tile<kBlockN, kThreads>(v_smem, block.v, block.first_key);

    // Everything a tile of queries brings.
    const auto load_queries = [&](int first_query, int stage) {
      load_tile<kBlockM, kThreads>(Tile{base + layout.q + stage * Tile::bytes(kBlockM)}, block.q, first_query);
      load_tile<kBlockM, kThreads>(Tile{base + layout.d_out + stage * Tile::bytes(kBlockM)}, block.d_out, first_query);
      if constexpr (!Traits::kPlain) mods.load(first_query, block.first_key, stage);
      if (threadIdx.x < kBlockM) {
        const int query = first_query + static_cast<int>(threadIdx.x);
        const bool inside = query < problem.len_q;
        const int row = inside ? query : 0;
        const uint32_t to = base + layout.rows + (stage * 3 * kBlockM + static_cast<int>(threadIdx.x)) * 4;
        cp_async_4(to, block.lse + row, inside);
        cp_async_4(to + kBlockM * 4, block.delta + row, inside);
        if (measured) cp_async_4(to + 2 * kBlockM * 4, block.inverse + row, inside);
      }
    };

    int stage = 0;
    if (block.first_query <= block.last_query) load_queries(block.last_query, 0);
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
      if (member > 0 && !holds_dv())
        for_each_score<true>(acc, 0, 0, [&](float& x, int, int) { x *= ds_scale * before; });
    }
    slope_sum = 0.f;

    // dQ of the tile at `query`, whose dS is complete.
    const auto add_dq = [&](int query, int ds_stage) {
      if (!problem.wants_dq || warp() < Traits::kFirstDqWarp) return;
      const int dq_warp = warp() - Traits::kFirstDqWarp;
      const int dq_row = dq_warp / Traits::kDqWarpsN * Traits::kDqM * 16;
      const int dq_col = dq_warp % Traits::kDqWarpsN * Traits::kDqN * 8;
#pragma unroll Traits::kDqPart == Traits::kDqN ? 8 : 1
      for (int n = 0; n < Traits::kDqN; n += Traits::kDqPart) {
        float dq_acc[Traits::kDqM][Traits::kDqPart][4];
        clear(dq_acc);
        gemm_tn<Frag, kBlockN>(dq_acc, ds_tile(ds_stage), dq_row, k_smem, dq_col + n * 8);
        // NOTE: asked of the parameters and not of the pointer. With `pointer == nullptr ? nullptr : pointer + i`,
        // tested for null, one fp16 instance on 9.0 took the branch with a null pointer; probably the comparison did
        // not wait for the zero that was written (CS2R).
        const bool ordered = scratch.turns != nullptr;
        int* const turn = block.turn + query / kBlockM * Traits::kWarps + dq_warp;
        const int predecessors = block.n_block - max(query + block.band.lower, 0) / kBlockN;
        if (ordered && n == 0) wait_for_turn(turn, predecessors);
        add_to_global(dq_acc, block.dq_accum, static_cast<int>(problem.head_dim), dq_col + n * 8, query + dq_row,
                      static_cast<int>(problem.len_q), ds_unscale);
        if (ordered && n + Traits::kDqPart == Traits::kDqN) end_turn(turn, predecessors);
      }
    };

    // NOTE: from the last queries to the first. Under a causal band the first that see a key have the largest P, and
    // when they came first, each later one was rounded to the sum's last place.
    for (int query = block.last_query; query >= block.first_query; query -= kBlockM) {
      const Tile q_smem{base + layout.q + stage * Tile::bytes(kBlockM)};
      const Tile d_out_smem{base + layout.d_out + stage * Tile::bytes(kBlockM)};
      cp_async_wait<0>();
      __syncthreads();  // this tile's loads and the last one's dS are there for all; nobody reads the other stage
      const bool goes_on = query > block.first_query;
      if (kStages == 2 && goes_on) load_queries(query - kBlockM, stage ^ 1);
      cp_async_commit();

      float s_acc[kM][kBlockM / 8][4];
      if (holds_dv()) {
        clear(s_acc);
        gemm_nt<Frag, kHeadDim>(s_acc, k_smem, warp_key(), q_smem, 0);
        score_to_p(s_acc, query, stage);
        auto p_frag = operands<Frag>(s_acc);
        send(p_buffer(), p_frag);
        pair_arrive(1 + pair());
        if (drops) {
#pragma unroll
          for (int m = 0; m < kM; ++m) p_frag.row[m].drop_negative();
        }
        gemm_from_registers<Frag>(acc, p_frag, d_out_smem, 0, 0);
        if (Traits::kDeferred && Traits::kFirstDqWarp == 0 && query < block.last_query) {
          add_dq(query + kBlockM, stage ^ 1);
        }
      } else {
        if (Traits::kDeferred && query < block.last_query) add_dq(query + kBlockM, stage ^ 1);
        clear(s_acc);
        gemm_nt<Frag, kHeadDim>(s_acc, v_smem, warp_key(), d_out_smem, 0);
        pair_wait(1 + pair());
        dp_to_ds(s_acc, query, stage);
        const auto ds_frag = operands<Frag>(s_acc);
        store_scores(ds_tile(stage), ds_frag, warp_key());
        gemm_from_registers<Frag>(acc, ds_frag, q_smem, 0, 0);
      }
      if (kStages == 2) {
        stage ^= 1;
      } else {
        __syncthreads();  // dS of all warps is there; nobody reads Q and dO any more
        if (goes_on) {
          load_queries(query - kBlockM, 0);
          cp_async_commit();
        }
        add_dq(query, 0);
      }
      if (kScaled && scratch.sums != nullptr && query / kBlockM % kSumTiles == kSumTiles - 1) {
        const float factor = holds_dv() ? 1.f : ds_unscale;
        visit_sums([&](float& x, float& sum) {
          sum = fmaf(x, factor, sum);
          x = 0.f;
        });
      }
    }
    cp_async_wait<0>();
    if (Traits::kDeferred && block.first_query <= block.last_query) {
      __syncthreads();  // the last dS is there
      add_dq(block.first_query, stage ^ 1);
    }
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
      const int64_t len_q = opaque(problem.len_q);
      block.lse += len_q;
      block.delta += len_q;
      block.inverse += len_q;
      block.dq_accum += len_q * problem.head_dim;
      block.turn += opaque(scratch.m_blocks) * Traits::kWarps;
      if (block.slope != nullptr) block.slope += opaque(schedule.blocks);
      if (block.dbias != nullptr) block.dbias += opaque(args.dbias.head_stride);
      ++block.bh;
      if constexpr (!Traits::kPlain) mods.next_head(args.fwd);
    }
  }

  if (kScaled && scratch.sums != nullptr) {
    const float factor = holds_dv() ? 1.f : ds_scale;
    visit_sums([&](float& x, float& sum) {
      x = fmaf(sum, factor, x);
      sum = 0.f;  // for the launch that computes dV, where there is one
    });
  }
  // K and V become the stages of their gradients.
  const auto store = [&](const GlobalRows<T>& to, bool in_accum, Tile stage_tile, float factor) {
    for_each_score<true>(acc, 0, 0, [&](float& x, int, int) { x *= factor; });
    if (in_accum && sizeof(T) == 2) {
      const GlobalRows<float> wide{
          reinterpret_cast<float*>(to.data), to.row_stride, to.col_stride, to.rows, to.cols, false};
      store_float(acc, 0, wide, block.first_key + warp_key());
    } else {
      store_accumulators<Frag>(acc, stage_tile, warp_key(), 0, to, block.first_key + warp_key());
    }
  };
  if (holds_dv() && args.dv) {
    store(block.dv, args.dv_in_accum, v_smem, (drops ? dropout_scale : 1.f) * (kScaled ? 1.f / 1024.f : 1.f));
  }
  if (!holds_dv() && args.dk) {
    store(block.dk, args.dk_in_accum, k_smem, static_cast<float>(problem.scale) * ds_unscale);
  }
}

}  // namespace flash_ext::sm80
