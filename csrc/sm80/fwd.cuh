// Forward: one block of threads owns kBlockM queries of one head and walks over the keys that its band lets it see.
//
//   S = Q K^T     P = e^(S - m)     l += rowsum(P)     O += dropout(P) V          out = O / l     lse = m + log l
//
// FlashAttention-2 (arXiv:2307.08691), algorithm 1. Each warp owns whole rows, so that softmax needs no other warp; Q
// stays in shared memory, K and V follow each other: while S is computed V arrives, while P V is computed the next K.
// m is brought up to date only when a maximum grew by more than 2^8 (FlashAttention-4's lazy rescaling): until then P
// is at most 2^8 and O needs no correction. NOTE: what limits it on 9.0 is that a scheduler has two warps, which issue
// an instruction in 37 % of the clocks. Two halves of a block of 256 queries that take turns at the products
// (FlashAttention-3) were 13 % slower: they spilled, and a warp alone waits for its ldmatrix; copies issued between the
// steps of the products, 0 to 9 %; blocks that start half a tile apart were as fast. Called by backend.cpp through
// kernels.h. Invariant: rows past len_q and keys past len_k are zeros in shared memory; keys past len_k are masked,
// rows past len_q never written.
#pragma once

#include "attention/online_softmax.h"
#include "attention/seq_info.h"
#include "attention/tile_schedule.h"
#include "cuda/inspect.h"
#include "cuda/launch.h"
#include "sm80/dropout.cuh"
#include "sm80/shared_memory.h"

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
  static constexpr int kM = kBlockM / kTile.warps / 16;  // 16-row fragments of a warp
  static constexpr int kMinBlocks = kThreads == 128 ? 2 : 1;
  static constexpr bool kAhead = Frag::kAhead && kHeadDim <= 64;
  using Tile = SmemTile<T, kHeadDim>;
  using Mods = ScoreMods<Element, kBlockM, kBlockN, kThreads>;
};

// The running softmax of a warp's rows: thread-local sums over its own columns, maxima of whole rows.
template <int kM>
struct SoftmaxRows {
  float row_max[kM][2];
  float row_sum[kM][2];
  // A row's maximum is beyond kFar, in log2. In the multiply-add before ex2 score * to_log2 is exact and maximum *
  // to_log2 is rounded: there the difference alone is more than ex2 takes, and step() subtracts the maximum first.
  static constexpr float kFar = 0x1p29f;
  bool far = false;

  __device__ __forceinline__ SoftmaxRows() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      row_max[m][0] = row_max[m][1] = kMinusInf;
      row_sum[m][0] = row_sum[m][1] = 0.f;
    }
  }

  // O is rescaled where a maximum moved. kFolded: one multiply-add before ex2; otherwise the maximum is subtracted
  // first, which in float rounds less. to_log2: what one unit of score is in log2.
  template <bool kFolded, int kN, int kD>
  __device__ __forceinline__ void rescale(float (&s)[kM][kN][4], float (&o)[kM][kD][4], float to_log2) {
    float tile_max[kM][2];
    bool grew = far;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = kMinusInf;
#pragma unroll
        for (int n = 0; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        tile_max[m][half] = x;
        grew |= (x - row_max[m][half]) * to_log2 > 8.f;  // not before subtracting: finfo.min times log2(e) is -inf
      }
    }
    if (__any_sync(~0u, grew)) {
      far = false;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float before = row_max[m][half];
          const float after = fmaxf(before, tile_max[m][half]);
          const float factor = before == kMinusInf ? 0.f : exp2_fast((before - after) * to_log2);
          row_max[m][half] = after;
          row_sum[m][half] *= factor;
#pragma unroll
          for (int n = 0; n < kD; ++n) {
            o[m][n][2 * half] *= factor;
            o[m][n][2 * half + 1] *= factor;
          }
          if (kFolded && fabsf(after * to_log2) > kFar && after != kMinusInf) {
            far = true;
#pragma unroll
            for (int n = 0; n < kN; ++n) {
              s[m][n][2 * half] -= after;
              s[m][n][2 * half + 1] -= after;
            }
          }
        }
      }
    }
  }

  // What is subtracted from the scores of a row, in log2 where kFolded.
  template <bool kFolded>
  __device__ __forceinline__ float shift(int m, int half, float to_log2) const {
    const float x = row_max[m][half] == kMinusInf ? 0.f : row_max[m][half];
    return !kFolded ? x : (fabsf(x * to_log2) > kFar ? 0.f : x * to_log2);
  }
  template <bool kFolded>
  static __device__ __forceinline__ float exponential(float x, float shift, float to_log2) {
    return kFolded ? exp2_fast(fmaf(x, to_log2, -shift)) : exp2_fast((x - shift) * to_log2);
  }

  // S becomes P. NOTE: a tile's sum is taken first, so that its rounding does not grow with the row.
  template <bool kFolded, int kN>
  __device__ __forceinline__ void exponentials(float (&s)[kM][kN][4], float to_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_shift = shift<kFolded>(m, half, to_log2);
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = exponential<kFolded>(s[m][n][i], row_shift, to_log2);
            sum += s[m][n][i];
          }
        }
        row_sum[m][half] += sum;
      }
    }
  }

  // Whole-row sums, over the four threads that share a row.
  __device__ __forceinline__ float total(int m, int half) const {
    float sum = row_sum[m][half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ TileSchedule schedule,
                   ScoreOptions options) {
  using Frag = typename Traits::Frag;
  using T = typename Traits::T;
  using Tile = typename Traits::Tile;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kM = Traits::kM;
  char* const smem = dynamic_shared();

  const Problem& problem = args.problem;
  const uint32_t base = shared_address(smem);
  const int bias_bytes = Traits::kPlain || !problem.has_bias ? 0 : (problem.bias_dtype == DType::kFloat32 ? 4 : 2);
  constexpr TileShape kTile = Traits::kTile;
  const ForwardSmem layout = forward_smem(kTile, kHeadDim, sizeof(T), bias_bytes, !Traits::kPlain && problem.has_mask);
  const Tile q_smem{base}, k_smem{base + layout.k}, v_smem{base + layout.v};

  // NOTE: what is read once a tile lies in shared memory, because it must not occupy registers during the products.
  __shared__ struct {
    GlobalRows<T> q, k, v, out;
    TileBand band;
    int first_query, first_key, last_key;
    int whole_keys;  // load_whole loads tiles that end before it
    float* lse;
    uint32_t bh;
  } block;
  __shared__ typename Traits::Mods mods;
  __shared__ SharedValue<Dropout> dropout;
  if (threadIdx.x == 0) {
    const auto [b, head, m_block] = schedule.at<uint32_t>(blockIdx.x);
    const int head_k = static_cast<int>(head) / (static_cast<int>(problem.heads_q) / static_cast<int>(problem.heads_k));
    const int head_v = static_cast<int>(head) / (static_cast<int>(problem.heads_q) / static_cast<int>(problem.heads_v));
    const auto rows = [&](const TensorView& view, int64_t h, int64_t count, int64_t cols) {
      return rows_of<T>(view, batch_offset(problem, view, b) + h * view.head_stride, count, cols);
    };
    block.q = rows(args.q, head, problem.len_q, problem.head_dim);
    block.k = rows(args.k, head_k, problem.len_k, problem.head_dim);
    block.v = rows(args.v, head_v, problem.len_k, problem.head_dim_v);
    block.out = rows(args.out, head, problem.len_q, problem.head_dim_v);
    block.band = TileBand::make(problem);
    const int64_t first = m_block * kBlockM;
    const Range keys = make_band(problem).keys({first, min(first + kBlockM, problem.len_q)}, problem.len_k);
    block.first_key = static_cast<int>(keys.first) / kBlockN * kBlockN;
    block.last_key = keys.empty() ? block.first_key : static_cast<int>(keys.last);
    block.first_query = static_cast<int>(first);
    block.lse =
        args.lse == nullptr ? nullptr : static_cast<float*>(args.lse) + (b * problem.heads_q + head) * problem.len_q;
    block.bh = static_cast<uint32_t>(b * problem.heads_q + head);
    bool is_regular =
        block.k.is_regular && block.v.is_regular && problem.head_dim == kHeadDim && problem.head_dim_v == kHeadDim;
    if constexpr (!Traits::kPlain) {
      mods = Traits::Mods::make(args, b, head, base + layout.bias, base + layout.mask);
      is_regular =
          is_regular && mods.is_regular && (!(options.features & (kBias | kMask)) || first + kBlockM <= problem.len_q);
      if (options.features & kDropout) {
        dropout.get() = make_dropout(args.rng_state[0], args.rng_state[1], problem.dropout_p);
      }
    }
    block.whole_keys = is_regular ? static_cast<int>(problem.len_k) : 0;
  }
  __syncthreads();
  const auto drops = [&] { return !Traits::kPlain && (opaque(options.features) & kDropout); };
  // The last keys come first: with ALiBi they tend to have the largest scores, and O is not rescaled for each tile.
  const int tiles = (block.last_key - block.first_key + kBlockN - 1) / kBlockN;
  const int start = block.first_key + max(tiles - 1, 0) * kBlockN;

  // NOTE: computed anew wherever it is used; kept, it and the addresses made of it were three registers too many.
  const auto warp_row = [] { return static_cast<int>(opaque(threadIdx.x)) / 32 * 16 * kM; };
  float o_acc[kM][kHeadDim / 8][4];
  clear(o_acc);
  SoftmaxRows<kM> softmax;

  const auto is_whole = [&](int key) { return __builtin_expect(key + kBlockN <= block.whole_keys, 1); };
  // NOTE: P of the next step of keys is computed between the products of the present one, which the tensor core takes
  // in no faster than one in six clocks. The general kernel, where that was 1 to 6 % faster, too, spilled, and so
  // does 8.0.
  constexpr bool kInterleaved = Traits::kPlain && sizeof(T) == 2 && (kHeadDim != 128 || cuda::kComputeCapability >= 90);
  constexpr LoadForm kForm = kInterleaved ? LoadForm::kScarce : LoadForm::kRare;
  // K, and what else the scores of a tile need.
  const auto load_keys = [&](int key) {
    if (is_whole(key)) {
      const unsigned thread = opaque(threadIdx.x);
      load_whole<kBlockN, kThreads>(k_smem, block.k, key, thread);
      if constexpr (!Traits::kPlain) mods.load_whole(options.features, block.first_query, key, 0, thread);
    } else {
      load_tile<kBlockN, kThreads, kForm>(k_smem, block.k, key);
      if constexpr (!Traits::kPlain) mods.load(options.features, block.first_query, key);
    }
  };
  load_tile<kBlockM, kThreads>(q_smem, block.q, block.first_query);
  load_keys(start);
  cp_async_commit();

  for (int key = start; key >= block.first_key && tiles > 0; key -= kBlockN) {
    cp_async_wait<0>();
    __syncthreads();  // this K (bias, mask) is there for all; nobody reads the last V any more
    if (is_whole(key)) {
      load_whole<kBlockN, kThreads>(v_smem, block.v, key, opaque(threadIdx.x));
    } else {
      load_tile<kBlockN, kThreads, kForm>(v_smem, block.v, key);
    }
    cp_async_commit();

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
    constexpr bool kFolded = Traits::kPlain || sizeof(T) == 2;
    softmax.template rescale<kFolded>(s_acc, o_acc, options.to_log2);

    const auto begin_next = [&] {
      cp_async_wait<0>();
      __syncthreads();  // this V is there for all; nobody reads this K (bias, mask) any more
      if (key > block.first_key) load_keys(key - kBlockN);
      cp_async_commit();
    };
    if constexpr (kInterleaved) {
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
    } else {
      softmax.template exponentials<kFolded>(s_acc, options.to_log2);
      if (drops()) {
        visit_dropout<false>(s_acc, dropout.get(), block.bh, (block.first_query + warp_row()) / 16, key / 16,
                             [](float& x, bool kept) { x = kept ? x : 0.f; });
      }
      const auto p = operands<Frag>(s_acc);
      begin_next();
      gemm_from_registers<Frag, Traits::kAhead>(o_acc, p, v_smem, 0, 0);
    }
  }
  cp_async_wait<0>();

  const float dropout_scale = drops() ? options.dropout_scale : 1.f;
  const float to_natural = options.features & kRaw ? options.scale : 1.f;
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
      }
      const int query = block.first_query + warp_row() + m * 16 + half * 8 + threadIdx.x % 32 / 4;
      if (block.lse != nullptr && threadIdx.x % 4 == 0 && query < problem.len_q) {
        const float row_max = softmax.row_max[m][half];
        const float lse = sizeof(T) == 4 ? log_sum_exp(row_max, to_natural, sum) : row_max * to_natural + logf(sum);
        block.lse[query] = sum == 0.f ? kMinusInf : lse;
      }
    }
  }
  // The warp's own rows of Q become the stage of its part of out.
  store_accumulators<Frag>(o_acc, q_smem, warp_row(), 0, block.out, block.first_query + warp_row());
}

// ---- host -----------------------------------------------------------------------------------------------------------

// fn(Traits) of the instance that serves the problem.
template <class Element, int kHeadDim, class Fn>
auto with_forward_traits(const Problem& problem, bool small, const Fn& fn) {
  const bool plain = is_plain(problem);
  if (small) {
    return plain ? fn(ForwardTraits<Element, kHeadDim, true, true>())
                 : fn(ForwardTraits<Element, kHeadDim, true, false>());
  }
  return plain ? fn(ForwardTraits<Element, kHeadDim, false, true>())
               : fn(ForwardTraits<Element, kHeadDim, false, false>());
}

template <class Traits>
ForwardSmem forward_smem_of(const Problem& problem) {
  constexpr TileShape kTile = Traits::kTile;
  return forward_smem(kTile, Traits::kHeadDim, sizeof(typename Traits::T), bias_bytes_of(problem), problem.has_mask);
}

inline TileSchedule forward_schedule(const Problem& problem, int block_m, int element_bytes) {
  constexpr int64_t kL2Budget = 24 << 20;  // of the 40 to 60 MB of A100 and H200
  const int64_t kv_head_bytes = problem.len_k * (problem.head_dim + problem.head_dim_v) * element_bytes;
  return make_tile_schedule(problem, block_m, kv_head_bytes, kL2Budget);
}

template <class Element, int kHeadDim>
Plan plan_forward(const Problem& problem, const DeviceInfo& device) {
  const auto make = [&]<class Traits>(Traits) {
    const ForwardSmem smem = forward_smem_of<Traits>(problem);
    Plan plan;
    constexpr bool kTf32 = std::is_same_v<Element, Tf32>;
    plan.kernel = kTf32 ? (Traits::kPlain ? "sm80.forward.plain.tf32" : "sm80.forward.general.tf32")
                        : (Traits::kPlain ? "sm80.forward.plain" : "sm80.forward.general");
    plan.block_m = Traits::kBlockM;
    plan.block_n = Traits::kBlockN;
    plan.stages = 1;
    plan.on_chip[0] = {"q", smem.k};
    plan.on_chip[1] = {"k", smem.v - smem.k};
    plan.on_chip[2] = {"v", smem.bias - smem.v};
    int next = 3;
    if (smem.mask > smem.bias) plan.on_chip[next++] = {"bias", smem.mask - smem.bias};
    if (smem.total > smem.mask) plan.on_chip[next++] = {"mask", smem.total - smem.mask};
    plan.on_chip_limit = device.shared_memory_per_block;
    plan.grid = forward_schedule(problem, Traits::kBlockM, sizeof(typename Traits::T)).size();
    if (device.multiprocessors > 0) {
      plan.waves = static_cast<double>(plan.grid) / (device.multiprocessors * Traits::kMinBlocks);
    }
    return plan;
  };
  const bool small = takes_small_tiles(problem, Pass::kForward, kHeadDim, device);
  Plan plan = with_forward_traits<Element, kHeadDim>(problem, small, make);
  plan.small_tiles = small;
  return plan;
}

template <class Element, int kHeadDim>
void run_forward(const ForwardArgs& args, const Plan& plan) {
  with_forward_traits<Element, kHeadDim>(args.problem, plan.small_tiles, [&]<class Traits>(Traits) {
    TileSchedule schedule = forward_schedule(args.problem, Traits::kBlockM, sizeof(typename Traits::T));
    schedule.batch_inner = batch_shares_scores(args.problem, args);
    cuda::launch(forward_kernel<Traits>, cuda::grid_of(schedule.size()), Traits::kThreads,
                 forward_smem_of<Traits>(args.problem).total, args.stream, args, schedule,
                 ScoreOptions::of(args, Traits::kPlain || sizeof(typename Traits::T) == 2));
  });
}

template <class Element, int kHeadDim>
void inspect_forward(const Problem& problem, Plan& plan) {
  with_forward_traits<Element, kHeadDim>(problem, plan.small_tiles, [&]<class Traits>(Traits) {
    cuda::inspect(forward_kernel<Traits>, Traits::kThreads, forward_smem_of<Traits>(problem).total, plan);
  });
}

}  // namespace flash_ext::sm80
