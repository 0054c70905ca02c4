// What backward does to rows of queries before and after its main kernel.
//
//   prepare: stats = (-lse log2(e), kNoRenorm, delta = rowsum(dO o out) - dlse), and dq_accum = 0 where there is one
//            of all queries of a tile with one that needs_renorm (0, -lse, delta) or, of those that are,
//            (-log2 Z, -shift, delta), so that P = 2^(min(s - shift, 0) log2(e) - log2 Z), see renormalise.cuh
//            with dropout (1 - p) delta, see dropout.cuh
//            where scores are added, a tile with a row whose lse is NaN is renormalised, too: (NaN, NaN, delta), and
//            one with a row that a bias leaves no key: (-inf, 0, delta)
//   finish:  dq = gradient_scale() * dq_accum, from the order of the fragments to rows
//
// Queries are padded to whole tiles: those beyond the sequence, and rows without keys, get -inf for -lse, so that their
// P is 0. Called by run.cuh and, prepare alone, backward_two_pass/run.cuh. Invariant: out and dq are dense with
// rows of a multiple of 8 elements, as torch/ allocates them, and d_out is a view that TMA accepts, so that 16 bytes at
// a time are read and written.
#pragma once

#include "core/args.h"
#include "kernels/sm90/backward/parts.cuh"
#include "kernels/sm90/backward/renormalise.cuh"

namespace flash_ext::sm90 {

constexpr int kMostLanes = 32;

// What prepare_kernel is made for, so that kernels that want the same numbers share it: kHeadDim / 8 lanes a row, a
// power of two, or kMostLanes.
template <class T_, int kHeadDim_, int kBlockM_, bool kScored_, bool kPacked_ = false>
struct PrepareTraits {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_ > 128 ? kMostLanes * 8 : kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr bool kScored = kScored_, kPacked = kPacked_, kScaled = is_scaled<T>;
  static constexpr float kPShift = p_shift<T>;
};

// dq_accum: of the same shape as rows of the padded queries, or null.
template <class Traits>
__global__ void __launch_bounds__(kRowThreads, 2)
    prepare_kernel(const __grid_constant__ BackwardArgs args, float* stats, float* bounds, float* dq_accum,
                   int m_blocks) {
  grid_dependency_launch();
  using T = typename Traits::T;
  constexpr int kLanes = Traits::kHeadDim / 8, kRows = kRowThreads / kLanes, kSteps = Traits::kBlockM / kRows;
  const Problem& problem = args.fwd.problem;
  const QueryTile<Traits> tile(problem, args.fwd.sequences, m_blocks, blockIdx.x);
  if (!tile.exists) return;
  const int first_row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, col = lane * 8;
  const int rows = static_cast<int>(tile.len_q(problem)) - tile.first_query;  // may be more than the tile's
  const T* const out_rows = tile.template rows<const T>(problem, args.fwd.out) + col;
  const T* const d_out_rows = tile.template rows<const T>(problem, args.d_out) + col;
  uint4 out[kSteps], d_out[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int row = first_row + i * kRows;
    out[i] = d_out[i] = uint4{};
    if (row < rows && col < problem.head_dim_v) {
      out[i] = *reinterpret_cast<const uint4*>(out_rows + row * args.fwd.out.row_stride);
      d_out[i] = *reinterpret_cast<const uint4*>(d_out_rows + row * args.d_out.row_stride);
    }
  }
  if (dq_accum != nullptr) {
    float4* const zeros =
        reinterpret_cast<float4*>(dq_accum + int64_t{blockIdx.x} * (Traits::kBlockM * Traits::kHeadDim));
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) zeros[i * kRowThreads + threadIdx.x] = float4{};
  }
  // A thread a row from here on, so that a warp's rows are one access; asked for before the sums.
  const int own_row = threadIdx.x;
  const bool is_inside = own_row < min(Traits::kBlockM, rows);
  const int64_t index = tile.lse_rows(problem) + tile.first_query + own_row;
  const float lse = is_inside ? static_cast<const float*>(args.fwd.lse)[index] : kMinusInf;
  const float d_lse = is_inside && args.d_lse != nullptr ? static_cast<const float*>(args.d_lse)[index] : 0.f;
  __shared__ float sums[Traits::kBlockM], all_squares[Traits::kScaled ? Traits::kBlockM : 1];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    float sum = 0.f, squares = 0.f;
    const auto add = [&](const uint4& of_out, const uint4& of_d_out) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float o[2], d[2];
        unpack(reinterpret_cast<const uint32_t*>(&of_out)[j], o[0], o[1], T());
        unpack(reinterpret_cast<const uint32_t*>(&of_d_out)[j], d[0], d[1], T());
        sum = fmaf(o[1], d[1], fmaf(o[0], d[0], sum));
        if (Traits::kScaled) squares = fmaf(d[1], d[1], fmaf(d[0], d[0], squares));
      }
    };
    add(out[i], d_out[i]);
    if constexpr (Traits::kHeadDim == kMostLanes * 8) {  // a warp a row, and there may be more columns
      const int row = first_row + i * kRows;
      for (int more = Traits::kHeadDim; row < rows && col + more < problem.head_dim_v; more += Traits::kHeadDim) {
        add(*reinterpret_cast<const uint4*>(out_rows + row * args.fwd.out.row_stride + more),
            *reinterpret_cast<const uint4*>(d_out_rows + row * args.d_out.row_stride + more));
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      if (Traits::kScaled) squares += __shfl_xor_sync(~0u, squares, step);
    }
    if (lane != 0) continue;
    sums[first_row + i * kRows] = sum;
    if (Traits::kScaled) all_squares[first_row + i * kRows] = squares;
  }
  // One of the tile's queries is; with dropout NaN counts, which the consumers must not drop, and with a bias a row
  // without keys, which may lie beside a NaN. A mask says itself what it hides.
  const auto counts = [&] { return needs_renorm(lse) || lse != lse || (lse == kMinusInf && problem.has_bias); };
  // A softcap alone keeps scores where a float tells them apart, and its kernels do not ask.
  const auto is_renormalised = [&] { return Traits::kScored ? counts() : needs_renorm(lse) && problem.softcap == 0.0; };
  const bool renorm = __syncthreads_or(is_inside && is_renormalised()) != 0;
  float* const tile_stats = stats + int64_t{blockIdx.x} * (kQueryStats * Traits::kBlockM);
  if (own_row < Traits::kBlockM) {
    float delta = lse == kMinusInf ? 0.f : (problem.constant_lse ? 0.f : sums[own_row]) - d_lse;
    if constexpr (Traits::kScored) delta *= static_cast<float>(1.0 - problem.dropout_p);
    // Of infinity and NaN NaN.
    const float minus_lse = renorm ? lse - lse + Traits::kPShift : fmaf(lse, -kLog2eFloat, Traits::kPShift);
    float* const to = tile_stats + own_row;
    to[kLseStat * Traits::kBlockM] = lse == kMinusInf ? kMinusInf : minus_lse;
    to[kRenormStat * Traits::kBlockM] = !renorm ? kNoRenorm : lse == kMinusInf ? 0.f : -lse;
    to[kDeltaStat * Traits::kBlockM] = delta;
    if constexpr (Traits::kScaled) {  // non-negative floats order like their bits; what is no number does not count
      static_assert(Traits::kBlockM % 32 == 0);
      const int most_d_out = __reduce_max_sync(~0u, __float_as_int(fmaxf(0.f, sqrtf(all_squares[own_row]))));
      const int most_delta = __reduce_max_sync(~0u, __float_as_int(fmaxf(0.f, fabsf(delta))));
      if (threadIdx.x % 32 == 0) {
        atomicMax(reinterpret_cast<int*>(bounds) + 2 * tile.bh, most_d_out);
        atomicMax(reinterpret_cast<int*>(bounds) + 2 * tile.bh + 1, most_delta);
      }
    }
  }
  if (renorm) renormalise_rows(args, tile, tile_stats);
}

constexpr int kFinishWarps = kRowThreads / 32, kFinishChunk = 16 * kPanelCols;  // numbers

// Of a warp: 16 queries by 64 columns, as one warp of the main kernel added them up, by way of 16 rows of shared
// memory.
template <class Traits>
__device__ __forceinline__ void store_dq(const BackwardArgs& args, const QueryTile<Traits>& tile, const float4 (&c)[8],
                                         float scale, const char* buffer, int first_row, int first_col) {
  using T = typename Traits::T;
  const Problem& problem = args.fwd.problem;
  const int lane = threadIdx.x % 32, col = lane % 8 * 8;
  const uint32_t rows = shared_address(buffer);
  __syncwarp();  // all lanes have read what was there before
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const auto packed = [&](float x, float y) { return pack(x * scale, y * scale, T()); };
    stmatrix_x4(rows + tile_offset(16, lane % 16, 8 * i + lane / 16 * 8), packed(c[i].x, c[i].y),
                packed(c[i].z, c[i].w), packed(c[i + 1].x, c[i + 1].y), packed(c[i + 1].z, c[i + 1].w));
  }
  __syncwarp();
  T* const dq = tile.template rows<T>(problem, args.dq) + first_col + col;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + lane / 8 + 4 * i;
    if (tile.first_query + row >= tile.len_q(problem) || first_col + col >= problem.head_dim) continue;
    *reinterpret_cast<uint4*>(dq + row * args.dq.row_stride) =
        *reinterpret_cast<const uint4*>(buffer + tile_offset(16, lane / 8 + 4 * i, col));
  }
}

constexpr int kFinishBlocks = 4;  // of finish_kernel that a multiprocessor has room for

// From the last head to the first: what was added to last is still in L2. NOTE: 0.3 and 0.6 % of a whole call of S =
// 512, full and causal; the same in prepare is nothing.
// dq_semaphore: of Persistence::kOrdered where all tiles of queries meet keys, else null. With them blocks, of which
// all have room, begin with the heads that are added up while the main kernel, of which all blocks run or have run, is
// still at the others.
template <class Traits>
__global__ void __launch_bounds__(kRowThreads, kFinishBlocks)
    finish_kernel(const __grid_constant__ BackwardArgs args, const float* dq_accum, const uint32_t* dq_semaphore,
                  TileRanges<Traits::kBlockM, Traits::kBlockN> tile_ranges, int m_blocks, unsigned tiles) {
  if (dq_semaphore == nullptr) grid_dependency_wait();
  constexpr int kWarps = kFinishWarps, kChunk = kFinishChunk;
  static_assert(Traits::kDqCols == kPanelCols && Traits::kBlockM * Traits::kHeadDim == kWarps * kChunk);
  __shared__ __align__(128) char buffer[kWarps][16 * kPanelBytes];
  const Problem& problem = args.fwd.problem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = (Traits::kSplitsQueries ? warp : warp % 4) * 16;
  const int first_col = Traits::kSplitsQueries ? 0 : warp / 4 * kPanelCols;
  const float scale = gradient_scale(problem);
  for (unsigned number = blockIdx.x; number < tiles; number += gridDim.x) {
    const unsigned index = dq_semaphore == nullptr ? tiles - 1 - number : number;
    if (dq_semaphore != nullptr) {
      const int m = static_cast<int>(index % m_blocks);
      wait_count(dq_semaphore + index, tile_ranges.last_keys_of(m) - tile_ranges.first_keys_of(m) + 1);
    }
    const QueryTile<Traits> tile(problem, args.fwd.sequences, m_blocks, index);
    if (!tile.exists) continue;
    const float4* const from =
        reinterpret_cast<const float4*>(dq_accum + (int64_t{index} * kWarps + warp) * kChunk) + lane;
    float4 c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = from[i * 32];
    store_dq<Traits>(args, tile, c, scale, buffer[warp], first_row, first_col);
  }
  if (dq_semaphore != nullptr) grid_dependency_wait();  // who waits for this kernel waits for the main one
}

// Of packed sequences in Persistence::kOrdered.
struct PackedFinish {
  const int64_t* tile_count;  // of keys
  const uint32_t* dq_semaphore;
  int lower, upper, diagonal_mask;  // as PackedBackwardParams has them
  int m_blocks, heads_q;
  int section;  // query heads that the main kernel works on at a time

  // The number of the `number`-th tile of queries: sequence by sequence for a section's heads.
  __device__ __forceinline__ unsigned find(unsigned number) const {
    const unsigned tiles = static_cast<unsigned>(section) * m_blocks, first_head = number / tiles * section;
    const unsigned heads = min(static_cast<unsigned>(section), heads_q - first_head), rest = number % tiles;
    return (first_head + rest % heads) * m_blocks + rest / heads;
  }
};

// The same for packed sequences whose dQ is added up in one order: blocks wait for turns as above. A tile of queries
// that meets no key has no dQ in memory; there are none that do where the list of keys is empty, whatever the lengths.
// Invariant: the list was there before the main kernel began, see kernel.cuh.
template <class Traits>
__global__ void __launch_bounds__(kRowThreads, kFinishBlocks)
    finish_in_order_kernel(const __grid_constant__ BackwardArgs args, const float* dq_accum, PackedFinish how) {
  constexpr int kWarps = kFinishWarps, kChunk = kFinishChunk;
  static_assert(Traits::kDqCols == kPanelCols && Traits::kBlockM * Traits::kHeadDim == kWarps * kChunk);
  __shared__ __align__(128) char buffer[kWarps][16 * kPanelBytes];
  const Problem& problem = args.fwd.problem;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = (Traits::kSplitsQueries ? warp : warp % 4) * 16;
  const int first_col = Traits::kSplitsQueries ? 0 : warp / 4 * kPanelCols;
  const float scale = gradient_scale(problem);
  const bool has_keys = *how.tile_count > 0;
  const unsigned tiles = static_cast<unsigned>(how.heads_q) * how.m_blocks;
  for (unsigned number = blockIdx.x; number < tiles; number += gridDim.x) {
    const unsigned index = how.find(number);
    const QueryTile<Traits> tile(problem, args.fwd.sequences, how.m_blocks, index);
    if (!tile.exists) continue;
    const Sequence& sequence = tile.sequence;
    const int diagonal = (sequence.len_k - sequence.len_q) & how.diagonal_mask;
    const TileRanges<Traits::kBlockM, Traits::kBlockN> ranges{how.lower + diagonal, how.upper + diagonal,
                                                              sequence.len_q, sequence.len_k};
    const int m = tile.first_query / Traits::kBlockM;
    float4 c[8] = {};
    if (has_keys && ranges.meets_keys(m)) {
      wait_count(how.dq_semaphore + index, ranges.last_keys_of(m) - ranges.first_keys_of(m) + 1);
      const float4* const from =
          reinterpret_cast<const float4*>(dq_accum + (int64_t{index} * kWarps + warp) * kChunk) + lane;
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i] = from[i * 32];
    }
    store_dq<Traits>(args, tile, c, scale, buffer[warp], first_row, first_col);
  }
  grid_dependency_wait();  // who waits for this kernel waits for the main one
}

}  // namespace flash_ext::sm90
