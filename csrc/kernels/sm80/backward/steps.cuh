// The steps of the main backward kernel, in the order in which its main loop (kernel.cuh) takes them: a tile of queries
// arrives, S^T becomes P^T, dP^T becomes dS^T, dQ is added to its sum, and dK and dV leave.
//
// Called by kernel.cuh. Invariant: fragments are [keys, queries]; what lies in BackwardBlock is written by one thread,
// between two __syncthreads.
#pragma once

#include "core/tile_schedule.h"
#include "kernels/sm80/backward/bias_boxes.cuh"
#include "kernels/sm80/backward/block.cuh"
#include "kernels/sm80/backward/dq_accumulate.cuh"
#include "kernels/sm80/dropout.cuh"

namespace flash_ext::sm80 {

// NOTE: dK, dV and dropout's flags are the kernel's own, and the block is handed on; forward/kernel.cuh says why.
template <class Traits>
struct Backward {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  using ScoreTile = typename Traits::ScoreTile;
  using Sums = typename Traits::Sums;
  using Block = BackwardBlock<Traits>;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads, kStages = Traits::kStages, kM = Traits::kM;
  static constexpr bool kGeneral = Traits::kGeneral;
  static constexpr bool kScaled = std::is_same_v<typename Traits::Element, Fp16>;
  // One multiply-add before ex2. Not in float nor in renormalised rows: renormalise.cuh must find the same bits.
  static constexpr bool kFolded = sizeof(T) == 2;
  static constexpr bool kSendsDbias = Traits::kSendsDbias && kHasBulkAdditions;
  // NOTE: which P the next tile drops is drawn between the products of the present one; drawn when P was there, it took
  // a fifth of the time of the warps that hold dV.
  static constexpr bool kDrawsAhead = !Traits::kPlain && sizeof(T) == 2;
  using Scores = float[kM][kBlockM / 8][4];
  using Gradient = float[kM][kHeadDim / 8][4];  // dV or dK
  using Packed = Operands<Frag, kM, kBlockM / 8>;
  using Flags = DropoutFlags<kM, kBlockM / 8>;

  const BackwardArgs& args;
  const BackwardScratch& scratch;
  const TileSchedule& schedule;
  const ScoreOptions& options;
  const BackwardSmem& layout;
  typename Traits::Mods& mods;
  SharedValue<ElementDropout>& dropout;
  float* const warp_values;  // one a warp
  float* const row_smem;     // [stage][lse, delta, what beside_lse has][kBlockM]
  const uint32_t base;
  float slope_sum = 0.f;

  __device__ __forceinline__ const Problem& problem() const { return args.fwd.problem; }
  __device__ __forceinline__ bool has(unsigned features) const { return (no_hoist(options.features) & features) != 0; }
  __device__ __forceinline__ bool drops() const { return kGeneral ? has(kDropout) : !Traits::kPlain; }
  __device__ __forceinline__ bool renormalised() const { return !(kFolded && !kGeneral) && has(kRenormalised); }
  // The first half of the warps holds dV, the second dK; one of each share keys. NOTE: found anew, to save registers.
  static __device__ __forceinline__ int warp() { return static_cast<int>(no_hoist(threadIdx.x) / 32); }
  static __device__ __forceinline__ bool holds_dv() { return warp() < Traits::kWarps / 2; }
  static __device__ __forceinline__ int pair() {
    return static_cast<int>(no_hoist(threadIdx.x) / 32 % (Traits::kWarps / 2));
  }
  static __device__ __forceinline__ int warp_key() { return pair() * kM * 16; }

  __device__ __forceinline__ Tile k_tile() const { return {base + layout.k}; }
  __device__ __forceinline__ Tile v_tile() const { return {base + layout.v}; }
  __device__ __forceinline__ Tile q_tile(int of) const { return {base + layout.q + of * Tile::bytes(kBlockM)}; }
  __device__ __forceinline__ Tile d_out_tile(int of) const { return {base + layout.d_out + of * Tile::bytes(kBlockM)}; }
  __device__ __forceinline__ uint32_t p_buffer(int stage) const {  // of this warp and its partner
    return base + layout.p + stage * layout.p_stage + warp_key() * kBlockM * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ ScoreTile ds_tile(int of) const {
    return {base + layout.ds + (Traits::kDeferred ? of * ScoreTile::bytes(kBlockN) : 0)};
  }

  // ---- The block and its heads

  // NOTE: everything is found here, before dK and dV occupy half of the registers; later heads only step on.
  __device__ __forceinline__ void find(Block& block) const {
    if (threadIdx.x != 0) return;
    block.tile = blockIdx.x;
    if (scratch.dq_semaphore != nullptr) {
      block.tile = atomicAdd(
          scratch.dq_semaphore + elements_of(problem()) * problem().heads_q * scratch.m_blocks * Traits::kWarps, 1);
      block.tile -= scratch.first_batch * static_cast<unsigned>(schedule.size());  // of the launches before
    }
    ::flash_ext::Tile tile = schedule.at<uint32_t>(block.tile);
    tile.b += scratch.first_batch;
    const Place place = place_of(problem(), tile, scratch.tiles);
    block.sequence = place.sequence;
    if (place.is_empty()) return;
    const int group_size = static_cast<int>(problem().heads_q / schedule.heads_k);
    const int64_t first_head = place.head * group_size;
    block.find(args, scratch, schedule, place, first_head, group_size);
    if (kScaled && problem().packed) block.tile = packed_sums(place, schedule.heads_k, kBlockM, kBlockN);
    if constexpr (kGeneral) {
      mods = Traits::Mods::make(args.fwd, place.b, first_head, place.sequence, base + layout.bias, base + layout.mask);
    }
    if (drops()) dropout.get() = dropout_of(args.fwd, place.b);
    block.find_regular(problem(), mods);
    block.dq_stage = base + layout.dq;
    const int dq_rows = scratch.dq_semaphore != nullptr ? 0 : layout.dq_rows;
    block.dq_rows = problem().head_dim != kHeadDim || problem().packed ? -1 : dq_rows;
  }

  // K, V and the last tile of queries of a head begin to arrive. In fp16 dS gets its scale.
  __device__ __forceinline__ void begin_head(Block& block, Gradient& acc) {
    __syncthreads();
    if (block.new_k) load_tile<kBlockN, kThreads>(k_tile(), block.k, block.first_key);
    if (block.new_v) load_tile<kBlockN, kThreads>(v_tile(), block.v, block.first_key);
    if (block.first_query <= block.last_query) load_queries(block, block.last_query, 0);
    cp_async_commit();
    if constexpr (kScaled) find_ds_scale(block, acc);
    slope_sum = 0.f;
  }

  __device__ __forceinline__ void find_ds_scale(Block& block, Gradient& acc) const {
    cp_async_wait<0>();
    __syncthreads();
    const float v_max = tile_max_abs<Tile::bytes(kBlockN), kThreads>(v_tile().base, warp_values);
    const float bound =
        v_max * sqrtf(static_cast<float>(problem().head_dim_v)) * block.bound * options.dropout_scale + block.delta_max;
    const float scale = fp16_scale(bound), before = block.ds_unscale;
    if (!holds_dv()) for_each_score<true>(acc, 0, 0, [&](float& x, int, int) { x *= scale * before; });
    __syncthreads();  // all have read what was before
    if (threadIdx.x == 0) {
      block.ds_scale = scale;
      block.ds_unscale = 1.f / scale;
    }
  }

  // The last dQ, and the gradient of the head's slope.
  __device__ __forceinline__ void end_head(Block& block, int stage) const {
    cp_async_wait<0>();
    if (Traits::kDeferred && block.first_query <= block.last_query) {
      __syncthreads();  // the last dS is there
      add_dq(block, block.first_query, stage ^ 1);
    }
    if constexpr (kGeneral) {
      if (has(kSlopeGradient)) {
        const float sum = block_reduce<kThreads>(slope_sum, warp_values, [](float a, float b) { return a + b; });
        if (threadIdx.x == 0) *block.slope = sum;
      }
    }
  }

  // False after the last head of the group.
  __device__ __forceinline__ bool next_head(Block& block) const {
    const bool has_next = block.heads_left > 0;
    __syncthreads();  // nobody reads this head's `block`, K or V any more
    if (has_next && threadIdx.x == 0) {
      block.next_head(args, scratch, schedule);
      if constexpr (kGeneral) mods.next_head(args.fwd);
      block.find_regular(problem(), mods);
    }
    return has_next;
  }

  // ---- Tiles of queries

  // Everything a tile of queries brings.
  __device__ __forceinline__ void load_queries(Block& block, int first_query, int to_stage) const {
    const Tile q = q_tile(to_stage), d_out = d_out_tile(to_stage);
    if (__builtin_expect(block.is_regular && first_query + kBlockM <= block.q.rows, 1)) {
      const unsigned thread = no_hoist(threadIdx.x);
      load_whole<kBlockM, kThreads>(q, block.q, first_query, thread);
      load_whole<kBlockM, kThreads>(d_out, block.d_out, first_query, thread);
      if constexpr (kGeneral) mods.load_whole(options.features, first_query, block.first_key, to_stage, thread);
    } else {
      load_tile<kBlockM, kThreads, LoadForm::kRare>(q, block.q, first_query);
      load_tile<kBlockM, kThreads, LoadForm::kRare>(d_out, block.d_out, first_query);
      if constexpr (kGeneral) mods.load(options.features, first_query, block.first_key, to_stage);
    }
    if (threadIdx.x < kBlockM) {
      const int query = first_query + static_cast<int>(threadIdx.x);
      const bool inside = query < block.q.rows;
      const int row = inside ? query : 0;
      const uint32_t to = base + layout.rows + (to_stage * 3 * kBlockM + static_cast<int>(threadIdx.x)) * 4;
      // Past the last +inf; such a query is hidden, too.
      if (inside) {
        cp_async_4(to, block.lse + row, true);
      } else {
        store_shared(to, __float_as_uint(-kMinusInf));
      }
      cp_async_4(to + kBlockM * 4, block.delta + row, inside);
      if (renormalised()) cp_async_4(to + 2 * kBlockM * 4, block.beside_lse + row, inside);
    }
  }

  // dQ += dS K of the tile at `query`, whose dS is complete.
  __device__ __forceinline__ void add_dq(const Block& block, int query, int stage) const {
    if (!problem().wants_dq || warp() < Traits::kFirstDqWarp) return;
    const int dq_warp = warp() - Traits::kFirstDqWarp;
    const int dq_row = dq_warp / Traits::kDqWarpsN * Traits::kDqM * 16;
    const int dq_col = dq_warp % Traits::kDqWarpsN * Traits::kDqN * 8;
#pragma unroll Traits::kDqPart == Traits::kDqN ? 8 : 1
    for (int n = 0; n < Traits::kDqN; n += Traits::kDqPart) {
      float dq_acc[Traits::kDqM][Traits::kDqPart][4];
      clear(dq_acc);
      gemm_tn<Frag, kBlockN>(dq_acc, ds_tile(stage), dq_row, k_tile(), dq_col + n * 8);
      if constexpr (kMayBeExact<Frag, kHeadDim>) {
        if (has_exact_scores(problem()) && dq_col + n == 0) {
#pragma unroll
          for (int i = 0; i < Traits::kDqM * 4; ++i) dq_acc[i / 4][0][i % 4] += dq_acc[i / 4][1][i % 4];  // hi + lo
        }
      }
      if (Traits::kDirectDq && scratch.direct_dq) {
        block.store_dq(dq_acc, args, dq_col + n * 8, query + dq_row, options.scale * block.unscale_of_ds());
        continue;
      }
      // NOTE: asked of the parameters and not of the pointer. With `pointer == nullptr ? nullptr : pointer + i`,
      // tested for null, one fp16 instance on 9.0 took the branch with a null pointer; probably the comparison did
      // not wait for the zero that was written (CS2R).
      const bool ordered = scratch.dq_semaphore != nullptr;
      int* const turn = block.turn + query / kBlockM * Traits::kWarps + dq_warp;
      const int predecessors = block.n_block - max(query + block.band.lower, 0) / kBlockN;
      if (ordered && n == 0) wait_for_turn(turn, predecessors);
      const int cols = static_cast<int>(problem().head_dim), rows = block.q.rows;
      const int staged_rows = block.dq_rows;
      const float unscale = block.unscale_of_ds();
      if (!kHasBulkAdditions || staged_rows < 0) {
        add_to_rows(dq_acc, block.dq_accum, cols, dq_col + n * 8, query + dq_row, rows, unscale);
      } else if constexpr (kHasBulkAdditions) {
        const uint32_t to = block.dq_stage + (dq_warp * Traits::kDqN + n) * staged_rows * 512;
        add_fragments(dq_acc, block.dq_accum, cols, dq_col + n * 8, query + dq_row, rows, unscale, to, staged_rows,
                      n == 0);
      }
      if (ordered && n + Traits::kDqPart == Traits::kDqN) end_turn(turn, predecessors);
    }
  }

  __device__ __forceinline__ bool has_hidden(const Block& block, int query) const {  // which visit_band visits
    return block.band.is_boundary(query, kBlockM, block.first_key, kBlockN) ||
           (Traits::kClearsHidden && query + kBlockM > block.q.rows);
  }
  template <class Fn>
  __device__ __forceinline__ void visit_band(const Block& block, int query, const Fn& fn) const {
    visit_hidden<kM, kBlockM / 8>(block.band, block.q.rows, query, block.first_key + warp_key(), fn);
  }
  // dS of hidden pairs becomes 0. `hides`: has_hidden, unless it is asked late.
  template <class Ds>
  __device__ __forceinline__ void clear_hidden(const Block& block, Ds& ds, int query, int stage, bool hides) const {
    if (Traits::kAsksLate ? has_hidden(block, query) : hides) visit_band(block, query, clears_hidden(ds));
    if (kGeneral && has(kMask | kBias) && warp_has_special(ds)) {
      mods.template visit_unseen<kM, kBlockM / 8>(options.features, warp_key(), stage, row_smem + stage * 3 * kBlockM,
                                                  clears_hidden(ds));
    }
  }

  // ---- P and dV

  // S^T becomes P^T; a dropped P turns negative, so that one array serves dV and dS.
  __device__ __forceinline__ void score_to_p(const Block& block, Scores& s, int query, int stage) const {
    const float* const lse_row = row_smem + stage * 3 * kBlockM;
    modify(block, s, query, stage);
    exponentials(block, s, query, lse_row);
    if (!kDrawsAhead && drops())
      visit_dropout<true>(s, dropout.get(), of_map(block, query), [](float& x, bool kept) { x = kept ? x : -x; });
  }

  // NOTE: in float of head dimension 256 the block's number was loaded before S, and spilled.
  __device__ __forceinline__ int key_from_diagonal(const Block& block) const {
    if constexpr (sizeof(typename Traits::T) == 2 || kHeadDim <= 192) return block.key_from_diagonal;
    return block.first_key - diagonal_of(problem(), *no_hoist(&block.sequence));
  }

  // What lies between Q K^T and the softmax.
  __device__ __forceinline__ void modify(const Block& block, Scores& s, int query, int stage) const {
    if constexpr (kGeneral) {
      mods.template apply<true>(
          options.features, s, warp_key(), 0, query - key_from_diagonal(block), stage,
          // It waits for the partner where that will write dS: no registers are left for it, and P in T is too coarse
          // to find it again.
          [&](const Scores& slope) { store_scores(ds_tile(stage), operands<Frag>(slope), warp_key()); });
    }
    if (has_hidden(block, query)) visit_band(block, query, sets_hidden(s, kMinusInf));
    if constexpr (!kGeneral && !kFolded) {
      for_each_score<true>(s, 0, 0, [&](float& x, int, int) { x = __fmul_rn(x, options.scale); });
    }
  }

  // Rows without keys have lse = -inf and scores of -inf: any finite number serves them.
  __device__ __forceinline__ void exponentials(const Block& block, Scores& s, int query, const float* lse_row) const {
    if (kFolded && !is_rare<kBlockM>(lse_row, renormalised())) {
      for_each_column(
          s, lse_row, [&](float lse) { return minimum(fmaf(lse, -kLog2eFloat, Traits::kPShift), 1e30f); },
          [&](float& x, float shift) { x = exp2_fast(fmaf(x, options.to_log2, shift)); });
    } else if (kFolded && !renormalised()) {
      exponentials_of_renorm_rows(s, lse_row, reinterpret_cast<const float2*>(block.beside_lse) + query,
                                  options.to_log2, Traits::kPShift);
    } else {
      for_each_column(
          s, lse_row, [&](float lse) { return lse == kMinusInf ? 0.f : lse; },
          [&](float& x, float shift) {
            x = exp2_fast((without_split_nan<Frag>(x, options.features) - shift) * kLog2eFloat + Traits::kPShift);
          });
      if (renormalised()) for_each_column(s, lse_row + 2 * kBlockM, [](float& x, float inverse) { x *= inverse; });
    }
  }

  __device__ __forceinline__ DropoutBlock of_map(const Block& block, int query) const {  // of this warp's scores
    return dropout.get().first.at(block.bh, query, block.first_key + warp_key());
  }
  __device__ __forceinline__ void draw(const Block& block, Flags& flags, int query, int part, int parts) const {
    flags.draw(dropout.get(), of_map(block, query), part, parts);
  }

  // P to the partner. Behind it what was dropped is 0.
  __device__ __forceinline__ void pass_on(Packed& p, const Flags& flags, int stage) const {
    if constexpr (kDrawsAhead) {
      if (drops()) {
#pragma unroll
        for (int m = 0; m < kM; ++m) p.row[m].negate(flags.row[m]);
      }
    }
    send(p_buffer(stage), p);
    pair_arrive(1 + pair());
    if (drops()) {
#pragma unroll
      for (int m = 0; m < kM; ++m) p.row[m].drop_negative();
    }
  }

  // dV += P^T dO
  __device__ __forceinline__ void add_dv(const Block& block, Gradient& dv, const Packed& p, Tile d_out, Flags& flags,
                                         int query) const {
    // NOTE: asked where dropout is alone, too: without that branch ptxas spills there, 4 to 12 bytes.
    if (kDrawsAhead && has(kDropout)) {
      gemm_from_registers<Frag>(dv, p, d_out, 0, 0, [&](int i, int n) { draw(block, flags, query - kBlockM, i, n); });
    } else {
      gemm_from_registers<Frag, Sums>(dv, p, d_out, 0, 0);
    }
  }

  // ---- dS

  // dS^T of dP^T.
  __device__ __forceinline__ Packed dp_to_ds(const Block& block, Scores& dp, int query, int stage) {
    const float* const delta = row_smem + (stage * 3 + 1) * kBlockM;
    const bool hides = !Traits::kAsksLate && has_hidden(block, query);  // before P is waited for
    if constexpr (Traits::kPacksDs) {
      if (!kGeneral || !has(kSlopeGradient | kBiasGradient | kDlseApart))
        return packed_ds(block, dp, delta, query, stage, hides);
    }
    return float_ds(block, dp, delta, query, stage, hides);
  }

  __device__ __forceinline__ Packed packed_ds(const Block& block, const Scores& dp, const float* delta, int query,
                                              int stage, bool hides) const {
    Packed ds;
    const auto make = [&]<bool kDrops>(std::bool_constant<kDrops>) {
      subtract_delta<Frag, kDrops, kGeneral>(ds, dp, delta, options.dropout_scale);
      pair_wait(1 + pair());
      multiply_by_p<Frag, kDrops>(ds, p_buffer(stage), delta);
    };
    drops() ? make(std::true_type()) : make(std::false_type());
    clear_hidden(block, ds, query, stage, hides);
    if constexpr (kSendsDbias) {
      if (has(kBiasBoxes)) {
        BoxStart at = block.dbias_box;
        at.col += warp_key();
        at.row = query;
        send_dbias(ds, p_buffer(stage), scratch.dbias_map, scratch.adds_dbias, at);
      }
    }
    if (kGeneral && has(kCap)) multiply_scores<Frag>(ds, ds_tile(stage), warp_key());
    return ds;
  }

  // NOTE: P is rounded to T: in float beside dP it would spill, and eager attention rounds both.
  __device__ __forceinline__ Packed float_ds(const Block& block, Scores& dp, const float* delta, int query, int stage,
                                             bool hides) {
    pair_wait(1 + pair());
    if (drops()) {
      with_p<Frag>(dp, p_buffer(stage), [&](float& x, float p) { x = p > 0.f ? x * options.dropout_scale : 0.f; });
    }
    for_each_column(dp, delta, [](float& x, float number) { x -= number; });
    if constexpr (kGeneral) {
      if (has(kDlseApart)) {
        const int64_t row = block.delta - no_hoist(scratch.delta) + query;
        add_dlse(dp, row_smem + stage * 3 * kBlockM, scratch.d_lse + row, block.q.rows - query);
      }
    }
    with_p<Frag>(dp, p_buffer(stage), [&](float& x, float p) { x *= Traits::kPlain ? p : fabsf(p); });
    if constexpr (Traits::kClearsHidden) clear_hidden(block, dp, query, stage, hides);
    if (kScaled) for_each_score<true>(dp, 0, 0, [](float& x, int, int) { x *= 1.f / 1024.f; });
    if constexpr (kGeneral) {
      if (has(kBiasGradient)) {
        store_transposed(dp, block.dbias, args.dbias, query, block.q.rows, block.first_key + warp_key(), block.k.rows);
      }
      if (has(kSlopeGradient)) {
        slope_sum -= weighted_by_distance(dp, block.first_key + warp_key(), query + block.diagonal(), block.k.rows);
      }
      if (has(kCap)) multiply_scores<Frag>(dp, ds_tile(stage), warp_key());
    }
    if constexpr (kScaled) {
      const float scale = block.scale_of_ds();
      for_each_score<true>(dp, 0, 0, [&](float& x, int, int) { x *= scale; });
    }
    return operands<Frag>(dp);
  }

  // dS to its place, where all warps read it for dQ.
  __device__ __forceinline__ void share_ds(const Packed& ds, int stage) const {
    __syncwarp();  // all lanes have read P, which may lie there
    store_scores(ds_tile(stage), ds, warp_key());
  }
  __device__ __forceinline__ void wait_for_dbias() const {
    if constexpr (kSendsDbias) {
      if (has(kBiasBoxes)) bulk_wait_read();  // the partner's next P comes there
    }
  }

  __device__ __forceinline__ void add_to_sums(const Block& block, Gradient& acc, int query) const {
    if (kScaled && block.has_sums(scratch) && query / kBlockM % kSumTiles == kSumTiles - 1) {
      const float factor = holds_dv() ? 1.f : block.unscale_of_ds();
      visit_sums<kThreads>(scratch.sums, block.tile, acc, [&](float& x, float& sum) {
        sum = fmaf(x, factor, sum);
        x = 0.f;
      });
    }
  }
  __device__ __forceinline__ void take_sums(const Block& block, Gradient& acc) const {
    if (kScaled && block.has_sums(scratch)) {
      const float factor = holds_dv() ? 1.f : block.scale_of_ds();
      visit_sums<kThreads>(scratch.sums, block.tile, acc, [&](float& x, float& sum) {
        x = fmaf(sum, factor, x);
        sum = 0.f;  // for the launch that computes dV, where there is one
      });
    }
  }

  // K and V become the stages of their gradients.
  __device__ __forceinline__ void store(Block& block, Gradient& acc) const {
    const bool is_dv = holds_dv();
    if (is_dv ? !args.dv : !args.dk) return;
    const float dv_factor = (drops() ? options.dropout_scale : 1.f) * (kScaled ? 1.f / 1024.f : 1.f);
    const float factor = is_dv ? dv_factor : options.scale * block.unscale_of_ds();
    for_each_score<true>(acc, 0, 0, [&](float& x, int, int) { x *= factor; });
    const GlobalRows<T>& to = is_dv ? block.dv : block.dk;
    const int first_row = block.first_key + warp_key();
    if (sizeof(T) == 2 && (is_dv ? args.dv_in_accum : args.dk_in_accum)) {
      store_float(acc, 0, in_floats(to), first_row);
    } else {
      store_accumulators<Frag>(acc, is_dv ? v_tile() : k_tile(), warp_key(), 0, to, first_row);
    }
  }
};

}  // namespace flash_ext::sm80
