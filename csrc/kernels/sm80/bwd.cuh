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
// beside the next tile's softmax, and added up in float in global memory (dq_sum.cuh), in the order of the blocks of
// keys when deterministic. Called by rows.cpp through kernels.h. Invariant: rows past len_q are zeros in shared
// memory, with an lse of +inf; they and keys past len_k are hidden (hidden.cuh): P = 0 and dS = 0.
#pragma once

#include "core/tile_schedule.h"
#include "kernels/sm80/bias_boxes.cuh"
#include "kernels/sm80/bwd_block.cuh"
#include "kernels/sm80/dq_sum.cuh"
#include "kernels/sm80/dropout.cuh"
#include "kernels/sm80/shared_memory.h"

namespace flash_ext::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ TileSchedule schedule, ScoreOptions options) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using ScoreTile = typename Traits::ScoreTile;
  using Sums = typename Traits::Sums;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kStages = Traits::kStages, kM = Traits::kM;
  constexpr bool kScaled = std::is_same_v<typename Traits::Element, Fp16>;
  // One multiply-add before ex2. Not in float nor in rows that were measured: measure.cuh must find the same bits.
  constexpr bool kFolded = sizeof(T) == 2;
  if constexpr (!is_reachable<Traits>()) {
    __trap();
    return;
  }
  constexpr bool kSendsDbias = Traits::kSendsDbias && kHasBulkAdditions;
  char* const smem = dynamic_shared_1024();

  const Problem& problem = args.fwd.problem;
  const uint32_t base = shared_address(smem);
  const int bias_bytes = !Traits::kGeneral || !problem.has_bias ? 0 : (problem.bias_dtype == DType::kFloat32 ? 4 : 2);
  constexpr BackwardShape kShape = Traits::kShape;
  const BackwardSmem layout =
      backward_smem(kShape, kHeadDim, sizeof(T),
                    {bias_bytes, Traits::kGeneral && problem.has_mask,
                     !Traits::kGeneral || (options.features & kPApart) != 0, kHasBulkAdditions});
  const Tile k_smem{base + layout.k}, v_smem{base + layout.v};
  float* const row_smem = reinterpret_cast<float*>(smem + layout.rows);  // [stage][lse, delta, inverse][kBlockM]

  __shared__ BackwardBlock<Traits> block;
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<Dropout> dropout;
  __shared__ float warp_values[32];

  if (threadIdx.x == 0) {
    block.tile = blockIdx.x;
    if (scratch.turns != nullptr) {
      block.tile = atomicAdd(scratch.turns + problem.batch * problem.heads_q * scratch.m_blocks * Traits::kWarps, 1);
      block.tile -= scratch.first_batch * static_cast<unsigned>(schedule.size());  // of the launches before
    }
  }
  const auto has = [&](unsigned features) { return (no_hoist(options.features) & features) != 0; };
  const auto drops = [&] { return Traits::kGeneral ? has(kDropout) : !Traits::kPlain; };
  const auto measured = [&] { return !(kFolded && !Traits::kGeneral) && has(kMeasured); };
  // The first half of the warps holds dV, the second dK; one of each share keys. NOTE: found anew, to save registers.
  const auto warp = [] { return static_cast<int>(no_hoist(threadIdx.x) / 32); };
  const auto holds_dv = [&] { return warp() < Traits::kWarps / 2; };
  const auto pair = [] { return static_cast<int>(no_hoist(threadIdx.x) / 32 % (Traits::kWarps / 2)); };
  const auto warp_key = [&] { return pair() * kM * 16; };
  // NOTE: of parameters. Read out of `block`, it was loaded before S and spilled in fp16.
  const auto diagonal = [&] { return problem.bottom_right ? static_cast<int>(problem.len_k - problem.len_q) : 0; };
  const auto p_buffer = [&](int stage) {
    return base + layout.p + stage * layout.p_stage + warp_key() * kBlockM * static_cast<int>(sizeof(T));
  };

  // NOTE: everything is found here, before dK and dV occupy half of the registers; later heads only step on.
  if (threadIdx.x == 0) {
    const auto [place, group, n_block] = schedule.at<uint32_t>(block.tile);
    const int64_t b = place + scratch.first_batch;
    const int group_size = static_cast<int>(problem.heads_q / schedule.heads_k);
    block.find(args, scratch, schedule, b, group * group_size, n_block, group_size);
    if constexpr (Traits::kGeneral) {
      mods = Traits::Mods::make(args.fwd, b, group * group_size, base + layout.bias, base + layout.mask);
    }
    if (drops()) {
      dropout.get() = make_dropout(args.fwd.rng_state[0], args.fwd.rng_state[1], problem.dropout_p);
    }
    block.find_regular(problem, mods);
    block.dq_stage = base + layout.dq;
    block.dq_rows = problem.head_dim != kHeadDim ? -1 : (scratch.turns != nullptr ? 0 : layout.dq_rows);
  }

  float acc[kM][kHeadDim / 8][4];  // dV or dK
  clear(acc);
  const auto ds_scale = [&] { return kScaled ? block.ds_scale : 1.f; };
  const auto ds_unscale = [&] { return kScaled ? block.ds_unscale : 1.f; };
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

  // NOTE: which P the next tile drops is drawn between the products of the present one; drawn when P was there, it took
  // a fifth of the time of the warps that hold dV.
  constexpr bool kDrawsAhead = !Traits::kPlain && sizeof(T) == 2;
  DropoutFlags<kM, kBlockM / 8> flags;
  const auto draw = [&](int query, int part, int parts) {
    flags.draw(dropout.get(), block.bh, query / 16, (block.first_key + warp_key()) / 16, part, parts);
  };

  const auto has_hidden = [&](int query) {  // pairs that the band or a length hides, which visit_band visits
    return block.band.is_boundary(query, kBlockM, block.first_key, kBlockN) ||
           (Traits::kClearsHidden && query + kBlockM > problem.len_q);
  };
  const auto visit_band = [&](int query, const auto& fn) {
    visit_hidden<kM, kBlockM / 8>(block.band, static_cast<int>(problem.len_q), query, block.first_key + warp_key(), fn);
  };

  // S^T becomes P^T; a dropped P turns negative, so that one array serves dV and dS.
  const auto score_to_p = [&](float(&s_acc)[kM][kBlockM / 8][4], int query, int stage) {
    const float* const lse_row = row_smem + stage * 3 * kBlockM;
    if constexpr (Traits::kGeneral) {
      mods.template apply<true>(options.features, s_acc, warp_key(), 0, query + diagonal() - block.first_key, stage,
                                // 1 - t^2 waits for the partner where it will write dS: no registers are left for it,
                                // and P in T is too coarse to find t again.
                                [&](const float(&capped)[kM][kBlockM / 8][4]) {
                                  store_cap_slope<Frag>(ds_tile(stage), capped, mods.inverse_cap, warp_key());
                                });
    }
    if (has_hidden(query)) visit_band(query, sets_hidden(s_acc, kMinusInf));
    if constexpr (!Traits::kGeneral && !kFolded) {
      for_each_score<true>(s_acc, 0, 0, [&](float& x, int, int) { x = __fmul_rn(x, options.scale); });
    }
    // Rows without keys have lse = -inf and scores of -inf: any finite number serves them.
    if (kFolded && !is_rare<kBlockM>(lse_row, measured())) {
      for_each_column(
          s_acc, lse_row, [&](float lse) { return minimum(fmaf(lse, -kLog2e, Traits::kPShift), 1e30f); },
          [&](float& x, float shift) { x = exp2_fast(fmaf(x, options.to_log2, shift)); });
    } else if (kFolded && !measured()) {
      exponentials_of_far_rows(s_acc, lse_row, reinterpret_cast<const float2*>(block.beside_lse) + query,
                               options.to_log2, Traits::kPShift);
    } else {
      for_each_column(
          s_acc, lse_row, [&](float lse) { return lse == kMinusInf ? 0.f : lse; },
          [&](float& x, float shift) {
            x = exp2_fast((without_split_nan<Frag>(x, options.features) - shift) * kLog2e + Traits::kPShift);
          });
      if (measured()) for_each_column(s_acc, lse_row + 2 * kBlockM, [](float& x, float inverse) { x *= inverse; });
    }
    if (!kDrawsAhead && drops()) {
      visit_dropout<true>(s_acc, dropout.get(), block.bh, query / 16, (block.first_key + warp_key()) / 16,
                          [](float& x, bool kept) { x = kept ? x : -x; });
    }
  };

  // dS^T of dP^T. NOTE: P is rounded to T: in float beside dP it would spill, and eager attention rounds both.
  float slope_sum = 0.f;
  const auto ds_of = [&](float(&dp_acc)[kM][kBlockM / 8][4], int query, int stage) {
    const float* const delta = row_smem + (stage * 3 + 1) * kBlockM;
    const bool hides = !Traits::kAsksLate && has_hidden(query);  // before P is waited for
    const auto clear_hidden = [&](auto& ds) {
      if (Traits::kAsksLate ? has_hidden(query) : hides) visit_band(query, clears_hidden(ds));
      if (Traits::kGeneral && has(kMask | kBias) && warp_has_special(ds)) {
        mods.template visit_unseen<kM, kBlockM / 8>(options.features, warp_key(), stage, row_smem + stage * 3 * kBlockM,
                                                    clears_hidden(ds));
      }
    };
    if constexpr (Traits::kPacksDs) {
      if (!Traits::kGeneral || !has(kSlopeGradient | kBiasGradient | kDlseApart)) {
        Operands<Frag, kM, kBlockM / 8> ds;
        const auto make = [&]<bool kDrops>(std::bool_constant<kDrops>) {
          subtract_delta<Frag, kDrops, Traits::kGeneral>(ds, dp_acc, delta, options.dropout_scale);
          pair_wait(1 + pair());
          multiply_by_p<Frag, kDrops>(ds, p_buffer(stage), delta);
        };
        drops() ? make(std::true_type()) : make(std::false_type());
        clear_hidden(ds);
        if constexpr (kSendsDbias) {
          if (has(kBiasBoxes)) {
            BoxStart at = block.dbias_box;
            at.col += warp_key();
            at.row = query;
            send_dbias(ds, p_buffer(stage), scratch.dbias_map, scratch.adds_dbias, at);
          }
        }
        if (Traits::kGeneral && has(kCap)) multiply_scores<Frag>(ds, ds_tile(stage), warp_key());
        return ds;
      }
    }
    pair_wait(1 + pair());
    if (drops()) {
      with_p<Frag>(dp_acc, p_buffer(stage), [&](float& x, float p) { x = p > 0.f ? x * options.dropout_scale : 0.f; });
    }
    for_each_column(dp_acc, delta, [](float& x, float number) { x -= number; });
    if constexpr (Traits::kGeneral) {
      if (has(kDlseApart)) {
        const int64_t row = int64_t{block.bh} * no_hoist(problem.len_q) + query;
        add_dlse(dp_acc, row_smem + stage * 3 * kBlockM, scratch.d_lse + row, static_cast<int>(problem.len_q) - query);
      }
    }
    with_p<Frag>(dp_acc, p_buffer(stage), [&](float& x, float p) { x *= Traits::kPlain ? p : fabsf(p); });
    if constexpr (Traits::kClearsHidden) clear_hidden(dp_acc);
    if (kScaled) for_each_score<true>(dp_acc, 0, 0, [](float& x, int, int) { x *= 1.f / 1024.f; });
    if constexpr (Traits::kGeneral) {
      if (has(kBiasGradient)) {
        store_transposed(dp_acc, block.dbias, args.dbias, query, static_cast<int>(problem.len_q),
                         block.first_key + warp_key(), static_cast<int>(problem.len_k));
      }
      if (has(kSlopeGradient)) {
        slope_sum -= weighted_by_distance(dp_acc, block.first_key + warp_key(), query + diagonal(),
                                          static_cast<int>(problem.len_k));
      }
      if (has(kCap)) multiply_scores<Frag>(dp_acc, ds_tile(stage), warp_key());
    }
    if constexpr (kScaled) {
      const float scale = ds_scale();
      for_each_score<true>(dp_acc, 0, 0, [&](float& x, int, int) { x *= scale; });
    }
    return operands<Frag>(dp_acc);
  };

  bool has_next;  // head of the group
  do {
    __syncthreads();
    if (block.new_k) load_tile<kBlockN, kThreads>(k_smem, block.k, block.first_key);
    if (block.new_v) load_tile<kBlockN, kThreads>(v_smem, block.v, block.first_key);

    // Everything a tile of queries brings.
    const auto load_queries = [&](int first_query, int stage) {
      const Tile q_smem{base + layout.q + stage * Tile::bytes(kBlockM)};
      const Tile d_out_smem{base + layout.d_out + stage * Tile::bytes(kBlockM)};
      if (__builtin_expect(block.is_regular && first_query + kBlockM <= block.q.rows, 1)) {
        const unsigned thread = no_hoist(threadIdx.x);
        load_whole<kBlockM, kThreads>(q_smem, block.q, first_query, thread);
        load_whole<kBlockM, kThreads>(d_out_smem, block.d_out, first_query, thread);
        if constexpr (Traits::kGeneral) mods.load_whole(options.features, first_query, block.first_key, stage, thread);
      } else {
        load_tile<kBlockM, kThreads, LoadForm::kRare>(q_smem, block.q, first_query);
        load_tile<kBlockM, kThreads, LoadForm::kRare>(d_out_smem, block.d_out, first_query);
        if constexpr (Traits::kGeneral) mods.load(options.features, first_query, block.first_key, stage);
      }
      if (threadIdx.x < kBlockM) {
        const int query = first_query + static_cast<int>(threadIdx.x);
        const bool inside = query < problem.len_q;
        const int row = inside ? query : 0;
        const uint32_t to = base + layout.rows + (stage * 3 * kBlockM + static_cast<int>(threadIdx.x)) * 4;
        // Past len_q +inf; such a query is hidden, too.
        if (inside) {
          cp_async_4(to, block.lse + row, true);
        } else {
          store_shared(to, __float_as_uint(-kMinusInf));
        }
        cp_async_4(to + kBlockM * 4, block.delta + row, inside);
        if (measured()) cp_async_4(to + 2 * kBlockM * 4, block.beside_lse + row, inside);
      }
    };

    int stage = 0;
    if (block.first_query <= block.last_query) load_queries(block.last_query, 0);
    cp_async_commit();
    if constexpr (kScaled) {
      cp_async_wait<0>();
      __syncthreads();
      const float v_max = tile_max_abs<Tile::bytes(kBlockN), kThreads>(v_smem.base, warp_values);
      const float bound =
          v_max * sqrtf(static_cast<float>(problem.head_dim_v)) * block.bound * options.dropout_scale + block.delta_max;
      const float scale = fp16_scale(bound), before = block.ds_unscale;
      if (!holds_dv()) for_each_score<true>(acc, 0, 0, [&](float& x, int, int) { x *= scale * before; });
      __syncthreads();  // all have read what was before
      if (threadIdx.x == 0) {
        block.ds_scale = scale;
        block.ds_unscale = 1.f / scale;
      }
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
        if constexpr (kMayBeExact<Frag, kHeadDim>) {
          if (has_exact_scores(problem) && dq_col + n == 0) {
#pragma unroll
            for (int i = 0; i < Traits::kDqM * 4; ++i) dq_acc[i / 4][0][i % 4] += dq_acc[i / 4][1][i % 4];  // hi + lo
          }
        }
        if (Traits::kDirectDq && scratch.direct_dq) {
          block.store_dq(dq_acc, args, dq_col + n * 8, query + dq_row, options.scale * ds_unscale());
          continue;
        }
        // NOTE: asked of the parameters and not of the pointer. With `pointer == nullptr ? nullptr : pointer + i`,
        // tested for null, one fp16 instance on 9.0 took the branch with a null pointer; probably the comparison did
        // not wait for the zero that was written (CS2R).
        const bool ordered = scratch.turns != nullptr;
        int* const turn = block.turn + query / kBlockM * Traits::kWarps + dq_warp;
        const int predecessors = block.n_block - max(query + block.band.lower, 0) / kBlockN;
        if (ordered && n == 0) wait_for_turn(turn, predecessors);
        const int cols = static_cast<int>(problem.head_dim), rows = static_cast<int>(problem.len_q);
        const int staged_rows = block.dq_rows;
        if (!kHasBulkAdditions || staged_rows < 0) {
          add_to_rows(dq_acc, block.dq_accum, cols, dq_col + n * 8, query + dq_row, rows, ds_unscale());
        } else if constexpr (kHasBulkAdditions) {
          const uint32_t stage = block.dq_stage + (dq_warp * Traits::kDqN + n) * staged_rows * 512;
          add_fragments(dq_acc, block.dq_accum, cols, dq_col + n * 8, query + dq_row, rows, ds_unscale(), stage,
                        staged_rows, n == 0);
        }
        if (ordered && n + Traits::kDqPart == Traits::kDqN) end_turn(turn, predecessors);
      }
    };

    if (kDrawsAhead && drops() && holds_dv()) draw(block.last_query, 0, 1);

    // NOTE: from the last queries to the first. Under a causal band the first that see a key have the largest P; when
    // they came first, each later one was rounded to the sum's last place.
    for (int query = block.last_query; query >= block.first_query; query -= kBlockM) {
      const Tile q_smem{base + layout.q + stage * Tile::bytes(kBlockM)};
      const Tile d_out_smem{base + layout.d_out + stage * Tile::bytes(kBlockM)};
      cp_async_wait<0>();
      __syncthreads();  // this tile's loads and the last one's dS are there for all; nobody reads the other stage
      const bool goes_on = query > block.first_query;
      if (kStages == 2 && goes_on) load_queries(query - kBlockM, stage ^ 1);
      cp_async_commit();
      make_products_exact<Frag, kHeadDim, kBlockM, kBlockN, kThreads>(problem, q_smem, k_smem, d_out_smem, v_smem);

      float s_acc[kM][kBlockM / 8][4];
      if (holds_dv()) {
        score_product<Frag, kHeadDim, Traits::kGeneral>(options.features, s_acc, k_smem, warp_key(), q_smem, 0);
        score_to_p(s_acc, query, stage);
        auto p_frag = operands<Frag>(s_acc);
        if constexpr (kDrawsAhead) {
          if (drops()) {
#pragma unroll
            for (int m = 0; m < kM; ++m) p_frag.row[m].negate(flags.row[m]);
          }
        }
        send(p_buffer(stage), p_frag);
        pair_arrive(1 + pair());
        if (drops()) {
#pragma unroll
          for (int m = 0; m < kM; ++m) p_frag.row[m].drop_negative();
        }
        // NOTE: asked where dropout is alone, too: without that branch ptxas spills there, 4 to 12 bytes.
        if (kDrawsAhead && has(kDropout)) {
          gemm_from_registers<Frag>(acc, p_frag, d_out_smem, 0, 0, [&](int i, int n) { draw(query - kBlockM, i, n); });
        } else {
          gemm_from_registers<Frag, Sums>(acc, p_frag, d_out_smem, 0, 0);
        }
        if (Traits::kDeferred && Traits::kFirstDqWarp == 0 && query < block.last_query) {
          add_dq(query + kBlockM, stage ^ 1);
        }
      } else {
        if (Traits::kDeferred && query < block.last_query) add_dq(query + kBlockM, stage ^ 1);
        clear(s_acc);
        gemm_nt<Frag, kHeadDim>(s_acc, v_smem, warp_key(), d_out_smem, 0);
        const auto ds_frag = ds_of(s_acc, query, stage);
        __syncwarp();  // all lanes have read P, which may lie there
        store_scores(ds_tile(stage), ds_frag, warp_key());
        gemm_from_registers<Frag, Sums>(acc, ds_frag, q_smem, 0, 0);
        if constexpr (kSendsDbias) {
          if (has(kBiasBoxes)) bulk_wait_read();  // the partner's next P comes there
        }
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
        const float factor = holds_dv() ? 1.f : ds_unscale();
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
    if constexpr (Traits::kGeneral) {
      if (has(kSlopeGradient)) {
        const float sum = block_sum<kThreads>(slope_sum, warp_values);
        if (threadIdx.x == 0) *block.slope = sum;
      }
    }

    has_next = block.heads_left > 0;
    __syncthreads();  // nobody reads this head's `block`, K or V any more
    if (has_next && threadIdx.x == 0) {
      block.next_head(args, scratch, schedule);
      if constexpr (Traits::kGeneral) mods.next_head(args.fwd);
      block.find_regular(problem, mods);
    }
  } while (has_next);

  if constexpr (kHasBulkAdditions) {
    if (threadIdx.x % 32 == 0) bulk_wait();
  }
  if (kScaled && scratch.sums != nullptr) {
    const float factor = holds_dv() ? 1.f : ds_scale();
    visit_sums([&](float& x, float& sum) {
      x = fmaf(sum, factor, x);
      sum = 0.f;  // for the launch that computes dV, where there is one
    });
  }
  // K and V become the stages of their gradients.
  const bool is_dv = holds_dv();
  if (is_dv ? !args.dv : !args.dk) return;
  const float dv_factor = (drops() ? options.dropout_scale : 1.f) * (kScaled ? 1.f / 1024.f : 1.f);
  const float factor = is_dv ? dv_factor : options.scale * ds_unscale();
  for_each_score<true>(acc, 0, 0, [&](float& x, int, int) { x *= factor; });
  const GlobalRows<T>& to = is_dv ? block.dv : block.dk;
  const int first_row = block.first_key + warp_key();
  if (sizeof(T) == 2 && (is_dv ? args.dv_in_accum : args.dk_in_accum)) {
    const GlobalRows<float> wide{
        reinterpret_cast<float*>(to.data), to.row_stride, to.col_stride, to.rows, to.cols, 0, false, false};
    store_float(acc, 0, wide, first_row);
  } else {
    store_accumulators<Frag>(acc, is_dv ? v_smem : k_smem, warp_key(), 0, to, first_row);
  }
}

}  // namespace flash_ext::sm80
