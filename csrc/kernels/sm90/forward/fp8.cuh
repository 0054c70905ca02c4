// Q, K and V of e4m3 in the forward kernel: the same kernel with products of e4m3, and a Work that has the descales of
// its head.
//
//   S = Q K^T     P = e^(f S - m) in e4m3     O += P V     l' = rowsum(P)     out = v O / l'
//
// with f = scale * q_descale * k_descale and v = v_descale, of a head; lse has the sum of P before it is rounded, l'
// that of what V is multiplied by. Two numbers of e4m3 are one of 16 bits to TMA and to the tiles (descriptor.h): a
// step of wgmma is 32 bytes of a row either way. Both operands of such a product are K-major, so V comes transposed,
// from scratch (kernels/stages/transpose_values.h), and with its keys in the order in which a thread holds them: the
// accumulators of S are then, packed, the operand P of the next product. Called by kernel.cuh (device) and run.cuh
// (host). Invariant: a value behind the last key is 0 in scratch.
#pragma once

#include <limits>

#include "core/online_softmax.h"
#include "kernels/sm90/forward/parts.cuh"

namespace flash_ext::sm90 {

struct Fp8Params : ForwardParams {
  HeadNumbers q_descale, k_descale, v_descale;  // without data they are 1
  float* sums;                                  // scratch of SumOfO
};

struct alignas(16) Fp8Work : Work {
  float to_log2;  // of q k^T, never 0, because -inf times it is what a hidden score is; may be negative
  float value;    // of out
  int unused_[2];

  template <class Traits>
  static __device__ __forceinline__ Fp8Work at(const Fp8Params& params, Found linear) {
    Fp8Work work;
    static_cast<Work&>(work) = Work::at<Traits>(params, linear);
    const auto descale = [&](const HeadNumbers& view, int head) {
      return view.data == nullptr ? 1.f : view.data[work.b0 * view.b0 + work.b1 * view.b1 + head * view.head];
    };
    const int head_k = work.head / params.group_k;
    work.to_log2 = params.to_log2 * descale(params.q_descale, work.head) * descale(params.k_descale, head_k);
    constexpr float kLeast = 0x1p-126f;
    if (fabsf(work.to_log2) < kLeast) work.to_log2 = kLeast;  // NaN stays
    work.value = descale(params.v_descale, work.head / params.group_v);
    return work;
  }

  __device__ __forceinline__ float scale_of(const Fp8Params&) const { return fabsf(to_log2) * kLn2Float; }

  // Of values transposed: columns are keys.
  template <int kBlockN>
  __device__ __forceinline__ Box v_box(const Fp8Params& params, int row) const {
    Box result = box(params.v, head / params.group_v, 0);
    result.at.col = row / 2;
    return result;
  }
};

static_assert(sizeof(Fp8Work) == kFp8WorkBytes);

__device__ __forceinline__ bool is_nan(float x) { return x != x; }

// Where a score's factor is negative: the maximum is taken before it is multiplied.
template <int kCount>
__device__ __forceinline__ void negate_scores(float (&s)[kCount], float factor) {
  if (!(factor < 0.f)) return;
#pragma unroll
  for (float& x : s) x = -x;
}

// What a thread has of its two rows in shared memory: two numbers of each kind. NOTE: its index is read each time,
// because at head dim 256 there is no register to keep it in. kThreads: of all consumers.
template <int kThreads>
struct RowNumbers {
  enum Kind { kMaxima, kFactors, kSums };
  uint32_t all;  // of all threads

  __device__ __forceinline__ uint32_t at(Kind kind) const {
    return all + (kind * kThreads - 128 + thread_index_again()) * 8;
  }
  __device__ __forceinline__ float2 load(Kind kind) const { return load_shared2(at(kind)); }
  __device__ __forceinline__ void store(Kind kind, float first, float second) const {
    store_shared(at(kind), first, second);
  }
  __device__ __forceinline__ void multiply(Kind kind, const float (&factor)[2]) const {
    const float2 before = load(kind);
    store(kind, before.x * factor[0], before.y * factor[1]);
  }
};

// As SpeculativeSoftmax, with P of a maximum 2^kUp and below e4m3's 448: each of a thread's two rows may sum up to that
// in a tile, so that a row whose scores are all alike never does. minus: kUp less the maximum, in log2; NaN where each
// tile raises it, because there is no key yet, or because the maximum in log2 is so large that its rounding would
// count. NOTE: registers of RowStats spilled: maxima lie in shared memory, where only who raises them looks. Two sums
// of each row, because one after the other they waited for each other (3 % of a call).
template <int kBlockN, int kThreads, bool kSharesSums>
struct Fp8Softmax {
  static constexpr float kMost = 448.f, kLost = 0x1p120f, kFar = 0x1p16f;
  static constexpr int kUp = [] {
    int up = 0;
    while (kBlockN / 4 << (up + 1) <= 448) ++up;
    return up;
  }();
  using Numbers = RowNumbers<kThreads>;
  Numbers rows;
  float to_log2;  // at least 0
  float minus[2], sum[2], row_sum[2];

  __device__ __forceinline__ explicit Fp8Softmax(uint32_t all_rows) : rows{all_rows} {}

  __device__ __forceinline__ void reset() {
    minus[0] = minus[1] = std::numeric_limits<float>::quiet_NaN();
    rows.store(Numbers::kMaxima, kMinusInf, kMinusInf);
    row_sum[0] = row_sum[1] = 0.f;  // where they are not shared
    if constexpr (kSharesSums) rows.store(Numbers::kSums, 0.f, 0.f);
  }
  __device__ __forceinline__ bool wants_maxima() const { return __any_sync(~0u, is_nan(minus[0]) || is_nan(minus[1])); }
  __device__ __forceinline__ bool exceeds(float most) const {
    return __any_sync(~0u, !(sum[0] <= most && sum[1] <= most));
  }

  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2], const float (&above)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[2] = {};
#pragma unroll
      for (int i = 2 * half; i < kBlockN / 2; i += i % 2 == 0 ? 1 : 3) {
        s[i] = exp2_fast(fmaf(s[i], to_log2, above[half]));
        sums[i % 2] += s[i];
      }
      sum[half] = sums[0] + sums[1];
    }
  }
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2]) { exponentiate(s, minus); }

  __device__ __forceinline__ void raise(float (&factor)[2], float (&s)[kBlockN / 2]) {
    float own[2], above[2], far[2];
    own_max<0, kBlockN>(own, s);
    const float2 saved = rows.load(Numbers::kMaxima);
    const float before[2] = {saved.x, saved.y};
    float max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = fmaxf(before[half], whole_row_max(own[half]));
      factor[half] = before[half] == kMinusInf ? 0.f : exp2_fast((before[half] - max[half]) * to_log2);
      const bool has_keys = max[half] != kMinusInf, is_far = has_keys && fabsf(max[half] * to_log2) > kFar;
      far[half] = is_far ? max[half] : 0.f;
      above[half] = has_keys && !is_far ? kUp - max[half] * to_log2 : kUp;
      minus[half] = has_keys && !is_far ? above[half] : std::numeric_limits<float>::quiet_NaN();
    }
    rows.store(Numbers::kMaxima, max[0], max[1]);
    scale_sums(factor);
    if (__any_sync(~0u, far[0] != 0.f || far[1] != 0.f)) {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) s[i] -= far[i / 2 % 2];
    }
    exponentiate(s, above);
  }
  __device__ __forceinline__ void lower(float (&factor)[2], float (&p)[kBlockN / 2]) {
    float own[2];
    own_max<0, kBlockN>(own, p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = whole_row_max(own[half]), before = minus[half];
      if (most > 1 << kUp) minus[half] -= log2f(most) - kUp;
      factor[half] = exp2_fast(minus[half] - before);
      sum[half] *= factor[half];
    }
    scale_sums(factor);
    rows.store(Numbers::kMaxima, (kUp - minus[0]) / to_log2, (kUp - minus[1]) / to_log2);
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) p[i] *= factor[i / 2 % 2];
  }
  __device__ __forceinline__ void add() {
    if constexpr (kSharesSums) {
      const float2 before = rows.load(Numbers::kSums);
      rows.store(Numbers::kSums, before.x + sum[0], before.y + sum[1]);
    } else {
      row_sum[0] += sum[0];
      row_sum[1] += sum[1];
    }
  }
  __device__ __forceinline__ void scale_sums(const float (&factor)[2]) {
    if constexpr (kSharesSums) {
      rows.multiply(Numbers::kSums, factor);
    } else {
      row_sum[0] *= factor[0];
      row_sum[1] *= factor[1];
    }
  }

  // In units of 1.
  __device__ __forceinline__ float total(int half) const {
    float own = row_sum[half];
    if constexpr (kSharesSums) {
      const float2 sums = rows.load(Numbers::kSums);
      own = half == 0 ? sums.x : sums.y;
    }
    return sum_of_quad(own) / (1 << kUp);
  }
  // factor: of a score, as it was for this row.
  __device__ __forceinline__ float natural_max(int half, float factor) const {
    const float2 max = rows.load(Numbers::kMaxima);
    return (half == 0 ? max.x : max.y) * factor;
  }
};

// O beyond the last tiles of keys. wgmma adds products of e4m3 up with 13 bits behind the point, so each kTiles of them
// what it has is added here, in float: shared memory or scratch that a thread has for itself. Where the maximum grows
// the sum is not multiplied at once; a factor of each row waits for that. tiles: of keys, that O has met.
template <int kHeadDim, int kThreads>
struct SumOfO {
  static constexpr bool kIsShared = sum_is_shared(kHeadDim);
  static constexpr int kTiles = tiles_of_sum(kHeadDim), kRegisters = sum_registers(kHeadDim);
  uint32_t shared;  // of all warps
  float* scratch;   // of all blocks
  RowNumbers<kThreads> rows;

  // Of this warp; its out goes through it, too, where it is shared.
  static __device__ __forceinline__ uint32_t of_warp(uint32_t sums) {
    return sums + (threadIdx.x / 32 - 4) * sum_bytes(kHeadDim);
  }
  // Four numbers of a thread from the i-th on: 16 bytes of each lane, one such group after the other.
  __device__ __forceinline__ uint32_t shared_at(int i) const {
    return of_warp(shared) + threadIdx.x % 32 * 16 + i * 128;
  }
  __device__ __forceinline__ float4& scratch_at(int i) const {
    constexpr int kWarps = kThreads / 32;
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32 - 4;
    float* const of_this = scratch + warp * kRegisters * 32;
    return reinterpret_cast<float4*>(of_this)[i / 4 * 32 + threadIdx.x % 32];
  }

  // After each tile but the last; O may begin again.
  __device__ __forceinline__ void take(float (&o_acc)[kRegisters], int tiles) const {
    if (tiles % kTiles != 0) return;
    join(o_acc, tiles - kTiles);
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      if constexpr (kIsShared) {
        store_shared4(shared_at(i), o_acc[i], o_acc[i + 1], o_acc[i + 2], o_acc[i + 3]);
      } else {
        scratch_at(i) = make_float4(o_acc[i], o_acc[i + 1], o_acc[i + 2], o_acc[i + 3]);
      }
      o_acc[i] = o_acc[i + 1] = o_acc[i + 2] = o_acc[i + 3] = 0.f;
    }
    rows.store(rows.kFactors, 1.f, 1.f);
  }
  // O of all tiles.
  __device__ __forceinline__ void join(float (&o_acc)[kRegisters], int tiles) const {
    if (tiles < kTiles) return;
    const float2 factor = rows.load(rows.kFactors);
#pragma unroll
    for (int i = 0; i < kRegisters; i += 4) {
      float4 sum;
      if constexpr (kIsShared) {
        load_shared(sum, shared_at(i));
      } else {
        sum = scratch_at(i);
      }
      o_acc[i] = fmaf(sum.x, factor.x, o_acc[i]);
      o_acc[i + 1] = fmaf(sum.y, factor.x, o_acc[i + 1]);
      o_acc[i + 2] = fmaf(sum.z, factor.y, o_acc[i + 2]);
      o_acc[i + 3] = fmaf(sum.w, factor.y, o_acc[i + 3]);
    }
  }
  __device__ __forceinline__ void scale(const float (&factor)[2], int tiles) const {
    if (tiles < kTiles) return;
    rows.multiply(rows.kFactors, factor);
  }
};

// Rows behind those of V in each stage: ones, and zeros up to what wgmma takes. Out is divided by the sum of P as it
// was rounded, so that a key with nearly all of a row's weight gives its value without that rounding; lse has the other
// sum.
template <class Traits>
__device__ __forceinline__ void write_ones(const typename Traits::Rings& rings) {
  constexpr int kWords = kOnesRows * kPanelBytes / 4, kEach = kPanelBytes / 4;
  constexpr int kPlaces = Traits::kShape.stages * Traits::kValuePanels;
  for (int i = threadIdx.x; i < kPlaces * kWords; i += Traits::kShape.threads()) {
    const int place = i / kWords, word = i % kWords;
    const uint32_t panel =
        rings.v.tile(place / Traits::kValuePanels) + place % Traits::kValuePanels * panel_size(Traits::kValueRows);
    store_shared(panel + panel_size(Traits::kValueDim) + word * 4, word < kEach ? 0x38383838u : 0u);
  }
  fence_async_proxy();
}

template <class T, int kHeadDim, ForwardShape kShape>
struct Fp8Traits : TraitsOfWork<T, kHeadDim, kShape, Fp8Work, Fp8Params> {
  using Sum = SumOfO<kHeadDim, kShape.consumers * 128>;
  using Softmax = Fp8Softmax<kShape.block_n, kShape.consumers * 128, !sum_is_shared(kHeadDim)>;
  static constexpr bool kAddsEarly = !sum_is_shared(kHeadDim);  // NOTE: else 12 bytes were spilled
  static constexpr bool kPacked = false;
  static_assert(kShape.fp8 && !kShape.shares_keys && !kShape.scored && kShape.split == kSpeculates);
};

}  // namespace flash_ext::sm90
