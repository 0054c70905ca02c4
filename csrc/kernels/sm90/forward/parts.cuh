// What the forward kernel is made of beside its two roles: its traits, the turns of the warpgroups, the products, P of
// a tile, and how out leaves. Called by kernel.cuh, fp8.cuh and packed.cuh.
#pragma once

#include <type_traits>

#include "core/online_softmax.h"
#include "kernels/sm90/forward/work.cuh"
#include "kernels/sm90/pipeline.cuh"
#include "kernels/sm90/products.cuh"
#include "kernels/sm90/scores.cuh"

namespace flash_ext::sm90 {

// In the place of fp8.cuh's SumOfO.
struct NoSum {};

// Work_: what the producer hands over of each tile.
template <class T_, int kHeadDim_, ForwardShape kShape_, class Work_, class Params_>
struct TraitsOfWork {
  using T = T_;
  using Work = Work_;
  using Params = Params_;
  static constexpr ForwardShape kShape = kShape_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kShape.block_m(), kBlockN = kShape.block_n;
  static constexpr int kValueDim = kShape.values(kHeadDim), kConsumers = kShape.consumers;
  static constexpr bool kFp8 = kShape.fp8;
  using In = std::conditional_t<kFp8, E4m3, T>;  // of Q, K, P and V
  // Of the tiles: columns of Q and K, rows and columns of V.
  static constexpr int kCols = kShape.columns(kHeadDim);
  static constexpr int kValueRows = kShape.value_rows(kHeadDim), kValueCols = kShape.value_columns(kHeadDim);
  static constexpr int kPanels = panels(kCols), kValuePanels = panels(kValueCols);
  static constexpr int kPRegisters = kShape.p_registers();
  static constexpr int kOnes = kFp8 ? kOnesRows : 0;  // columns of O beside V's, the first of them the sum of P
  static constexpr int kORegisters = (kValueDim + kOnes) / 2;
  static constexpr int kValueBoxRows = kFp8 ? kValueDim : kBlockN;
  static constexpr ForwardSmem kSmem = forward_smem(kShape, kHeadDim, sizeof(Work));
  static constexpr int kQBytes = tile_bytes(64, kCols), kKBytes = tile_bytes(kBlockN, kCols);
  static constexpr int kVBytes = tile_bytes(kValueRows, kValueCols);
  static constexpr int kQTiles = kShape.q_stages * kConsumers;
  static constexpr bool kStaged = kShape.q_stages > 1 && !kFp8;          // out goes through Q's stage
  static constexpr bool kStagedInSum = kFp8 && sum_is_shared(kHeadDim);  // or SumOfO's place
  static constexpr bool kScored = kShape.scored;
  static constexpr bool kHasLimit = !kScored || kHeadDim <= 128;  // NOTE: else 4 to 8 bytes were spilled
  static constexpr bool kSpeculative = kShape.split == kSpeculates;
  // NOTE: at head dim 64 two were up to 2 % slower.
  static constexpr int kSumsOfRow = kHeadDim > 64 ? 2 : 1;
  using Softmax = std::conditional_t<kSpeculative, SpeculativeSoftmax<T, kSumsOfRow>, RowSoftmax<kHasLimit>>;
  static constexpr bool kAddsEarly = false;  // a tile's sums are a row's before O is there
  using Function = void;                     // in the place of the softcap, see cap_or_call
  using Sum = NoSum;
  using QState = RingState<kShape.q_stages>;
  using KvState = RingState<kShape.stages>;
  using WorkState = RingState<kWorks>;

  // Q: a tile a consumer and stage, at stage * consumers + consumer.
  struct Rings {
    Ring<kQBytes> q;
    Ring<kKBytes> k;
    Ring<kVBytes> v;
    Ring<sizeof(Work)> works;
    Ring<0> scores;  // its stages' size is a parameter
    uint32_t sums;   // of SumOfO
    uint32_t rows;   // of fp8.cuh's RowNumbers
  };
  static __device__ __forceinline__ Rings rings(uint32_t base) {
    const uint32_t q = base + kSmem.barriers, k = q + kQTiles * 16, v = k + kShape.stages * 16;
    const uint32_t works = v + kShape.stages * 16;
    return {{base, q},
            {base + kSmem.k, k},
            {base + kSmem.v, v},
            {base + kSmem.works, works},
            {base + kSmem.scores, works + kWorks * 16},
            base + kSmem.sums,
            base + kSmem.rows};
  }
};

template <class T, int kHeadDim, ForwardShape kShape>
struct ForwardTraits
    : TraitsOfWork<T, kHeadDim, kShape, Work, std::conditional_t<kShape.scored, ScoredParams, ForwardParams>> {
  static constexpr bool kPacked = false;
};

// Named barriers: consumer warpgroup w has kTurnBarrier + w for its turn and own_barrier + w for itself.
constexpr int kTurnBarrier = 1;
template <class Traits>
constexpr int own_barrier = kTurnBarrier + Traits::kConsumers;

template <class Traits>
__device__ __forceinline__ void take_turn(int consumer) {
  if constexpr (Traits::kShape.schedule == Schedule::kPingPong) named_barrier_sync(kTurnBarrier + consumer, 256);
}
// Lets the next warpgroup go.
template <class Traits>
__device__ __forceinline__ void pass_turn(int consumer) {
  if constexpr (Traits::kShape.schedule == Schedule::kPingPong) {
    named_barrier_arrive(kTurnBarrier + (consumer + 1 == Traits::kConsumers ? 0 : consumer + 1), 256);
  }
}

// S = Q K^T, not waited for.
template <class Traits>
__device__ __forceinline__ void issue_s(float (&s_acc)[Traits::kBlockN / 2], uint32_t q_tile, uint32_t k_tile) {
  issue_scores<typename Traits::In, 64, Traits::kBlockN, Traits::kCols>(s_acc, k_major(q_tile), k_tile);
}

// O += P V, not waited for.
template <class Traits>
__device__ __forceinline__ void issue_o(float (&o_acc)[Traits::kORegisters],
                                        const uint32_t (&p_frag)[Traits::kPRegisters], uint32_t v_tile) {
  if constexpr (Traits::kFp8) {
    const uint64_t v_desc = k_major(v_tile);
    constexpr int kRows = Traits::kValueRows;
    constexpr int kFirst = kRows > 256 ? 128 : 0, kLast = kRows - kFirst;  // a product has 256 columns at most
    auto& last = reinterpret_cast<float(&)[kLast / 2]>(o_acc[kFirst / 2]);
#pragma unroll
    for (int k = 0; k < Traits::kBlockN / 32; ++k) {
      const uint64_t at = v_desc + k_major_step(kRows, k);
      if constexpr (kFirst > 0) {
        Wgmma<E4m3, kFirst>::rs(reinterpret_cast<float(&)[kFirst / 2]>(o_acc), p_frag + 4 * k, at, 1);
      }
      Wgmma<E4m3, kLast>::rs(last, p_frag + 4 * k, at + k_major_rows(kFirst), 1);
    }
  } else {
    const uint64_t v_desc = mn_major(v_tile, Traits::kBlockN);
#pragma unroll
    for (int k = 0; k < Traits::kBlockN / 16; ++k) {
      Wgmma<typename Traits::T, Traits::kValueDim>::rs(o_acc, p_frag + 4 * k, v_desc + mn_major_step(k), 1);
    }
  }
  wgmma_commit();
}

// S of a warp's 16 rows once more, by mma.sync, without the other warps of the warpgroup: the same accumulators.
template <class Traits>
__device__ __forceinline__ void multiply_again(float (&s_acc)[Traits::kBlockN / 2], uint32_t q_tile, uint32_t k_tile,
                                               int warp_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (float& x : s_acc) x = 0.f;
#pragma unroll 1
  for (int col = 0; col < Traits::kCols; col += 16) {
    uint32_t a[4], b[4];
    ldmatrix_x4(a, q_tile + tile_offset(64, warp_row + lane % 16, col + lane / 16 * 8));
#pragma unroll
    for (int n = 0; n < Traits::kBlockN; n += 16) {
      ldmatrix_x4(b, k_tile + tile_offset(Traits::kBlockN, n + lane / 16 * 8 + lane % 8, col + lane / 8 % 2 * 8));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        auto& c = reinterpret_cast<float(&)[4]>(s_acc[n / 2 + 4 * i]);
        mma_m16n8k16(c, a, b[2 * i], b[2 * i + 1], typename Traits::In());
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ typename Traits::Softmax make_softmax(const typename Traits::Params& params,
                                                                 const typename Traits::Rings& rings) {
  if constexpr (Traits::kFp8) {
    return typename Traits::Softmax(rings.rows);
  } else {
    return typename Traits::Softmax(params.to_log2);
  }
}

template <class Traits>
__device__ __forceinline__ typename Traits::Sum make_sum(const typename Traits::Params& params,
                                                         const typename Traits::Rings& rings) {
  if constexpr (Traits::kFp8) {
    return {rings.sums, params.sums, {rings.rows}};
  } else {
    return {};
  }
}

// P, packed, in columns [kFirst, kLast).
template <class Traits, int kFirst, int kLast>
__device__ __forceinline__ void pack_p(uint32_t (&p_frag)[Traits::kPRegisters],
                                       const float (&s_acc)[Traits::kBlockN / 2]) {
  if constexpr (Traits::kFp8) {
#pragma unroll
    for (int i = kFirst / 8; i < kLast / 8; ++i) {  // rows g and g + 8 in turn, of 16 keys
      const float* const c = s_acc + i / 2 * 8 + i % 2 * 2;
      p_frag[i] = pack_e4m3(c[0], c[1], c[4], c[5]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Traits::kBlockN / 4; ++i) {
      if (i >= kFirst / 4 && i < kLast / 4) {
        p_frag[i] = pack(s_acc[2 * i], s_acc[2 * i + 1], typename Traits::T());
      }
    }
  }
}

// P of the first tile of keys.
template <class Traits>
__device__ __forceinline__ void make_first_p(typename Traits::Softmax& softmax, float (&s_acc)[Traits::kBlockN / 2],
                                             uint32_t (&p_frag)[Traits::kPRegisters]) {
  constexpr int kBlockN = Traits::kBlockN;
  float factor[2];
  softmax.reset();
  if constexpr (Traits::kSpeculative) {
    softmax.raise(factor, s_acc);
    softmax.add();
  } else {
    float own[2];
    own_max<0, kBlockN>(own, s_acc);
    softmax.template raise<0, kBlockN>(own, factor, s_acc);
    softmax.template exponentiate<0, kBlockN>(s_acc);
  }
  pack_p<Traits, 0, kBlockN>(p_frag, s_acc);
}

// What of a later tile's softmax runs under O += P V: P, or its maxima and P of its first kSplit columns. Returns
// whether O is to be multiplied by `factor`, which mend_p() gives where softmax is speculative.
template <class Traits>
__device__ __forceinline__ bool begin_p(typename Traits::Softmax& softmax, float (&s_acc)[Traits::kBlockN / 2],
                                        float (&factor)[2]) {
  if constexpr (Traits::kSpeculative) {
    if (softmax.wants_maxima()) return true;
    softmax.exponentiate(s_acc);
    if (softmax.exceeds(Traits::Softmax::kMost)) return true;
    if constexpr (Traits::kAddsEarly) softmax.add();
    return false;
  } else {
    constexpr int kSplit = Traits::kShape.split, kBlockN = Traits::kBlockN;
    float own[2];
    own_max<0, kSplit>(own, s_acc);
    bool rescale = softmax.exceeds(own);
    factor[0] = factor[1] = 1.f;
    if (rescale) softmax.template raise<0, kSplit>(own, factor, s_acc);
    softmax.template exponentiate<0, kSplit>(s_acc);
    if constexpr (kSplit < kBlockN) {
      own_max<kSplit, kBlockN>(own, s_acc);
      rescale = rescale || softmax.exceeds(own);
      if (rescale) {
        float more[2];
        softmax.template raise<kSplit, kBlockN>(own, more, s_acc);
        scale_rows<kSplit>(s_acc, more);
        factor[0] *= more[0];
        factor[1] *= more[1];
      }
    }
    return rescale;
  }
}

// Where begin_p() returned true. again(): S is made once more.
template <class Traits, class Again>
__device__ __forceinline__ void mend_p(typename Traits::Softmax& softmax, float (&s_acc)[Traits::kBlockN / 2],
                                       float (&factor)[2], const Again& again) {
  if constexpr (Traits::kSpeculative) {
    const bool has_p = !softmax.wants_maxima();
    if (has_p && !softmax.exceeds(Traits::Softmax::kLost)) {
      softmax.lower(factor, s_acc);
    } else {
      if (has_p) again();
      softmax.raise(factor, s_acc);
    }
    if constexpr (Traits::kAddsEarly) softmax.add();
  }
}

// The rest of it, when P V no longer reads the packed P of the tile before.
template <class Traits>
__device__ __forceinline__ void end_p(typename Traits::Softmax& softmax, float (&s_acc)[Traits::kBlockN / 2],
                                      uint32_t (&p_frag)[Traits::kPRegisters]) {
  constexpr int kBlockN = Traits::kBlockN, kSplit = Traits::kSpeculative ? kBlockN : Traits::kShape.split;
  if constexpr (Traits::kSpeculative && !Traits::kAddsEarly) softmax.add();
  pack_p<Traits, 0, kSplit>(p_frag, s_acc);
  if constexpr (kSplit < kBlockN) {
    softmax.template exponentiate<kSplit, kBlockN>(s_acc);
    pack_p<Traits, kSplit, kBlockN>(p_frag, s_acc);
  }
}

// Of each row, from the columns behind V's. NOTE: one of them has it and the others are 0; when that one alone was read
// ptxas serialised all products (C7511).
template <int kValueDim, int kCount>
__device__ __forceinline__ void sum_of_ones(float (&sum)[2], const float (&o_sums)[kCount]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const c = o_sums + kValueDim / 2 + 2 * half;
    sum[half] = sum_of_quad(c[0] + c[1]);
  }
}

// O / l and lse of a warp's 16 rows from `row` on leave: through a stage of Q, which is the warpgroup's own, from
// registers, or as a part. warp_row: the first of them in the warpgroup.
template <class Traits, class Softmax>
__device__ __forceinline__ void store_rows(float (&o_sums)[Traits::kORegisters], const typename Traits::Params& params,
                                           const typename Traits::Rings& rings, int stage,
                                           const typename Traits::Work& done, int warp_row, int row,
                                           const Softmax& softmax, int consumer) {
  constexpr int kValueDim = Traits::kValueDim;
  auto& o_acc = reinterpret_cast<float(&)[kValueDim / 2]>(o_sums);
  const int lane = threadIdx.x % 32;
  const auto place = [&](int half) { return done.template place<Traits>(params, row + lane / 4 + 8 * half); };
  const bool is_part = Traits::kShape.shares_keys && params.parts.splits.count > 1;
  float rounded[2] = {};  // sums of P as V is multiplied by it
  if constexpr (Traits::kFp8) sum_of_ones<kValueDim>(rounded, o_sums);
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float of_keys = softmax.total(half);
    float sum = of_keys, keys = dropout_of(params).scale;
    const auto at = place(half);
    float max = sum == 0.f ? kMinusInf : softmax.natural_max(half, done.scale_of(params));
    if (params.sinks.data != nullptr && !is_part && at.exists) {
      const HeadNumbers& sinks = params.sinks;
      const int64_t of_batch = done.b0 * sinks.b0 + done.b1 * sinks.b1;
      const auto joined = with_sink(max, sum, sinks.data[of_batch + at.head * sinks.head + at.query * sinks.row]);
      max = joined.max;
      sum = joined.sum;
      keys *= joined.factor;
    }
    inverse[half] = sum == 0.f ? 0.f : keys / sum;
    if constexpr (Traits::kFp8) inverse[half] *= of_keys == 0.f ? 0.f : done.value * of_keys / rounded[half];
    if ((is_part || params.lse != nullptr) && lane % 4 == 0 && at.exists) {
      if (is_part) {
        params.parts.sums[done.part * params.parts.rows + done.row(params, at)] = {max, sum};
      } else {
        params.lse[done.row(params, at)] = max + logf(sum);
      }
    }
  }
  scale_rows<kValueDim>(o_acc, inverse);
  if constexpr (Traits::kStaged) {
    // All four warps have finished with Q; its stage belongs to out now.
    named_barrier_sync(own_barrier<Traits> + consumer, 128);
    const auto [map, at] = done.out_box(params, {done.head, row, true});
    stage_out<typename Traits::T, kValueDim>(o_acc, rings.q.tile(stage), warp_row, map.map, at);
  } else if constexpr (Traits::kStagedInSum) {
    const auto [map, at] = done.out_box(params, {done.head, row, true});
    const uint32_t tile = Traits::Sum::of_warp(rings.sums);
    stage_out<typename Traits::T, kValueDim, 16>(o_acc, tile, 0, map.map, at);
  } else if (is_part) {
    const Parts& parts = params.parts;
    float* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto at = place(half);
      rows[half] = at.exists ? parts.out + (done.part * parts.rows + done.row(params, at)) * parts.cols : nullptr;
    }
    write_part<kValueDim>(o_acc, rows, parts.cols);
  } else {
    const OutView& out = params.out_view;
    char* base = out.data + done.b0 * out.b0 + done.b1 * out.b1;
    if constexpr (Traits::kPacked) base += done.row_q * out.row;
    char* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto at = place(half);
      rows[half] = at.exists ? base + at.head * out.head + at.query * out.row : nullptr;
    }
    write_out<typename Traits::T, kValueDim>(o_acc, rows, out.cols);
  }
}

}  // namespace flash_ext::sm90
