// Forward on Hopper: one producer warp brings tiles of Q, K and V by TMA, two or three consumer warpgroups of 64
// queries each multiply them by wgmma.
//
//   S = Q K^T     P = e^(S - m)     l += rowsum(P)     O += P V          out = O / l     lse = m + log l
//
// FlashAttention-3 (arXiv:2407.08608), algorithms 1 and 2: K and V go through rings of their own, P stays in registers,
// softmax of the next tile runs under O += P V of this one. Keys are walked from the last tile to the first, so that
// the diagonal and the tail, which are masked, come first. A block walks tiles blockIdx.x, blockIdx.x + gridDim.x, ...:
// whether it is persistent is the grid's size. Called by run_fwd.cuh.
// Invariant: a ring's full barrier is completed by TMA, its empty barrier by one arrival of each warp of its consumers,
// after the wait that proves their wgmma finished; out goes through the rows of Q that its warp alone owns, so Q's
// stage is handed back when that store has read it.
#pragma once

#include <algorithm>

#include "attention/args.h"
#include "attention/tile_schedule.h"
#include "cuda/launch.h"
#include "sm90/config.h"
#include "sm90/pipeline.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tensor_map.h"
#include "sm90/wgmma.cuh"

namespace flash_ext::sm90 {

struct ForwardParams {
  TensorMap q, k, v, out;
  TileSchedule schedule;
  TileBand band;
  int tiles;
  int len_q;
  int group_k, group_v;  // query heads of a key head, of a value head
  int heads_q;
  int inner_batch;  // size of the last batch dimension
  float scale, to_log2;
  float* lse;  // null: not wanted
};

// One tile of the grid: 64 * consumers queries of one head, and the tiles of keys they see.
struct Work {
  int head, b0, b1;
  int first_query;
  int first_n, last_n;  // of keys; equal where there is none
  int lse_row;          // flat (batch, head)

  template <int kBlockM, int kBlockN>
  static __device__ __forceinline__ Work at(const ForwardParams& params, uint32_t linear) {
    const Tile tile = params.schedule.at<uint32_t>(linear);
    const int b = static_cast<int>(tile.b);
    Work work;
    work.head = static_cast<int>(tile.head);
    work.b1 = b / params.inner_batch;
    work.b0 = b - work.b1 * params.inner_batch;
    work.first_query = static_cast<int>(tile.block) * kBlockM;
    work.lse_row = b * params.heads_q + work.head;
    const int last_query = min(work.first_query + kBlockM, params.len_q) - 1;
    const int first_key = max(work.first_query + params.band.lower, 0);
    const int last_key = min(last_query + params.band.upper + 1, params.band.len_k);
    work.first_n = first_key / kBlockN;
    work.last_n = last_key > first_key ? (last_key + kBlockN - 1) / kBlockN : work.first_n;
    return work;
  }

  __device__ __forceinline__ BoxStart box(const BoxSteps& steps, int box_head, int row) const {
    return {0, row, box_head * steps.head, b0 * steps.b0, b1 * steps.b1};
  }
};

template <class T_, int kHeadDim_, ForwardShape kShape_>
struct ForwardTraits {
  using T = T_;
  static constexpr ForwardShape kShape = kShape_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kShape.block_m(), kBlockN = kShape.block_n;
  static constexpr int kPanels = panels(kHeadDim);
  static constexpr ForwardSmem kSmem = forward_smem(kShape, kHeadDim);
  static constexpr int kQBytes = tile_bytes(kBlockM, kHeadDim), kKvBytes = tile_bytes(kBlockN, kHeadDim);
  static constexpr int kWarps = kShape.consumers * 4;
  using QPlace = RingPlace<kShape.q_stages>;
  using KvPlace = RingPlace<kShape.stages>;

  struct Rings {
    Ring<kQBytes> q;
    Ring<kKvBytes> k, v;
  };
  static __device__ __forceinline__ Rings rings(uint32_t base) {
    const uint32_t q = base + kSmem.barriers, k = q + kShape.q_stages * 16, v = k + kShape.stages * 16;
    return {{base, q}, {base + kSmem.k, k}, {base + kSmem.v, v}};
  }
};

// ---- producer -------------------------------------------------------------------------------------------------------

// One tile of `rows` rows into a stage, panel by panel.
template <int kRows, int kPanels, int kBytes>
__device__ __forceinline__ void load_tile(const Ring<kBytes>& ring, int stage, uint32_t phase, const TensorMap& map,
                                          BoxStart at) {
  barrier_wait(ring.empty(stage), phase ^ 1);
  barrier_expect(ring.full(stage), kBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load(ring.tile(stage) + panel * panel_size(kRows), &map.map, ring.full(stage), at);
    at.col += kPanelCols;
  }
}

// Order: K of the last tile, Q, then K of the next tile before V of this one, as the consumers ask for them.
template <class Traits>
__device__ __forceinline__ void produce(const ForwardParams& params, const typename Traits::Rings& rings) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  typename Traits::QPlace q;
  typename Traits::KvPlace k, v;
  for (uint32_t linear = blockIdx.x; linear < params.tiles; linear += gridDim.x) {
    const Work work = Work::at<kBlockM, kBlockN>(params, linear);
    const int head_k = work.head / params.group_k, head_v = work.head / params.group_v;
    const auto load_k = [&](int n) {
      load_tile<kBlockN, Traits::kPanels>(rings.k, k.stage, k.phase, params.k,
                                          work.box(params.k.steps, head_k, n * kBlockN));
      k.advance();
    };
    if (work.last_n > work.first_n) load_k(work.last_n - 1);
    load_tile<kBlockM, Traits::kPanels>(rings.q, q.stage, q.phase, params.q,
                                        work.box(params.q.steps, work.head, work.first_query));
    q.advance();
    for (int n = work.last_n - 1; n >= work.first_n; --n) {
      if (n > work.first_n) load_k(n - 1);
      load_tile<kBlockN, Traits::kPanels>(rings.v, v.stage, v.phase, params.v,
                                          work.box(params.v.steps, head_v, n * kBlockN));
      v.advance();
    }
  }
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// Named barriers: 1 + w is the turn of consumer warpgroup w, 1 + consumers + w is its own.
constexpr int kTurnBarrier = 1;

template <int kConsumers>
__device__ __forceinline__ void take_turn(int consumer) {
  named_barrier_sync(kTurnBarrier + consumer, 256);
}
// Lets the next warpgroup go.
template <int kConsumers>
__device__ __forceinline__ void pass_turn(int consumer) {
  named_barrier_arrive(kTurnBarrier + (consumer + 1 == kConsumers ? 0 : consumer + 1), 256);
}

// S = Q K^T, not waited for.
template <class Traits>
__device__ __forceinline__ void issue_s(float (&s_acc)[Traits::kBlockN / 2], uint64_t q_desc, uint32_t k_tile) {
  const uint64_t k_desc = k_major(k_tile);
#pragma unroll
  for (int k = 0; k < Traits::kHeadDim / 16; ++k) {
    Wgmma<typename Traits::T, Traits::kBlockN>::ss(s_acc, q_desc + k_major_step(Traits::kBlockM, k),
                                                   k_desc + k_major_step(Traits::kBlockN, k), k > 0);
  }
  wgmma_commit();
}

// O += P V, not waited for.
template <class Traits>
__device__ __forceinline__ void issue_o(float (&o_acc)[Traits::kHeadDim / 2],
                                        const uint32_t (&p_frag)[Traits::kBlockN / 4], uint32_t v_tile) {
  const uint64_t v_desc = mn_major(v_tile, Traits::kBlockN);
#pragma unroll
  for (int k = 0; k < Traits::kBlockN / 16; ++k) {
    Wgmma<typename Traits::T, Traits::kHeadDim>::rs(o_acc, p_frag + 4 * k, v_desc + mn_major_step(k), 1);
  }
  wgmma_commit();
}

// out of one warp: 16 rows through the warp's own rows of Q's stage, then by TMA, which leaves out what is outside.
template <class Traits>
__device__ __forceinline__ void store_out(const float (&o_acc)[Traits::kHeadDim / 2], uint32_t q_tile, int warp_row,
                                          const ForwardParams& params, const Work& work) {
  using T = typename Traits::T;
  const int lane = threadIdx.x % 32;
  const int row = warp_row + lane % 16;
#pragma unroll
  for (int k = 0; k < Traits::kHeadDim / 16; ++k) {
    const float* c = o_acc + 8 * k;
    stmatrix_x4(q_tile + tile_offset(Traits::kBlockM, row, 16 * k + lane / 16 * 8), pack(c[0], c[1], T()),
                pack(c[2], c[3], T()), pack(c[4], c[5], T()), pack(c[6], c[7], T()));
  }
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
    BoxStart at = work.box(params.out.steps, work.head, work.first_query + warp_row);
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      tma_store(&params.out.map, q_tile + panel * panel_size(Traits::kBlockM) + warp_row * kPanelBytes, at);
      at.col += kPanelCols;
    }
    tma_store_commit();
    tma_store_wait_read();
  }
  __syncwarp();
}

template <class Traits>
__device__ __forceinline__ void consume(const ForwardParams& params, const typename Traits::Rings& rings,
                                        int consumer) {
  using T = typename Traits::T;
  constexpr ForwardShape kShape = Traits::kShape;
  constexpr Schedule kSchedule = kShape.schedule;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kConsumers = kShape.consumers;
  constexpr bool kTurns = kSchedule == Schedule::kPingPong || kSchedule == Schedule::kExpMutex;
  const int lane = threadIdx.x % 32;
  const int warp_row = consumer * 64 + threadIdx.x / 32 % 4 * 16;
  typename Traits::QPlace q;
  typename Traits::KvPlace k, v;
  if (kTurns && consumer == kConsumers - 1) pass_turn<kConsumers>(consumer);

  for (uint32_t linear = blockIdx.x; linear < params.tiles; linear += gridDim.x) {
    const Work work = Work::at<kBlockM, kBlockN>(params, linear);
    const int row = work.first_query + warp_row + lane / 4;
    const uint32_t q_tile = rings.q.tile(q.stage);
    const uint64_t q_desc = k_major(q_tile + consumer * 64 * kPanelBytes);
    float o_acc[kHeadDim / 2], s_acc[kBlockN / 2];
    uint32_t p_frag[kBlockN / 4];
    RowSoftmax<kShape.lazy_limit> softmax(params.to_log2);
#pragma unroll
    for (float& x : o_acc) x = 0.f;

    const auto release = [&](auto& ring, auto& place) {
      if (lane == 0) barrier_arrive(ring.empty(place.stage));
      place.advance();
    };
    const auto mask = [&](int n) {
      if (params.band.is_boundary(work.first_query + consumer * 64, 64, n * kBlockN, kBlockN)) {
        mask_band(s_acc, params.band, row, n * kBlockN);
      }
    };
    const auto pack_p = [&] {
#pragma unroll
      for (int i = 0; i < kBlockN / 4; ++i) p_frag[i] = pack(s_acc[2 * i], s_acc[2 * i + 1], T());
    };
    const auto fence = [&] {
      hold(s_acc);
      hold(p_frag);
      hold(o_acc);
      wgmma_fence();
    };

    barrier_wait(rings.q.full(q.stage), q.phase);
    if (work.last_n > work.first_n) {
      int n = work.last_n - 1;
      barrier_wait(rings.k.full(k.stage), k.phase);
      wgmma_fence();
      issue_s<Traits>(s_acc, q_desc, rings.k.tile(k.stage));
      wgmma_wait<0>();
      hold(s_acc);
      release(rings.k, k);
      mask(n);
      softmax.step(s_acc);
      pack_p();
      for (--n; n >= work.first_n; --n) {
        barrier_wait(rings.k.full(k.stage), k.phase);
        if constexpr (kSchedule == Schedule::kSerial || kSchedule == Schedule::kExpMutex) {
          barrier_wait(rings.v.full(v.stage), v.phase);
          fence();
          issue_o<Traits>(o_acc, p_frag, rings.v.tile(v.stage));
          if constexpr (kSchedule == Schedule::kSerial) {
            wgmma_wait<0>();
            hold(o_acc);
            hold(p_frag);
            release(rings.v, v);
            fence();
          }
          issue_s<Traits>(s_acc, q_desc, rings.k.tile(k.stage));
          wgmma_wait<0>();
          hold(s_acc);
          hold(o_acc);
          hold(p_frag);
          if constexpr (kSchedule == Schedule::kExpMutex) release(rings.v, v);
          release(rings.k, k);
          if constexpr (kTurns) take_turn<kConsumers>(consumer);
          mask(n);
          if (softmax.step(s_acc)) scale_rows(o_acc, softmax.factor);
          pack_p();
          if constexpr (kTurns) pass_turn<kConsumers>(consumer);
        } else {
          if constexpr (kTurns) take_turn<kConsumers>(consumer);
          fence();
          issue_s<Traits>(s_acc, q_desc, rings.k.tile(k.stage));
          barrier_wait(rings.v.full(v.stage), v.phase);
          wgmma_fence();  // NOTE: after a loop ptxas injects one if there is none (C7519)
          issue_o<Traits>(o_acc, p_frag, rings.v.tile(v.stage));
          if constexpr (kTurns) pass_turn<kConsumers>(consumer);
          wgmma_wait<1>();
          hold(s_acc);
          release(rings.k, k);
          mask(n);
          const bool rescale = softmax.step(s_acc);
          hold(s_acc);
          // NOTE: two waits, because ptxas moves one to before the exponentials, which have to run under O's product;
          // it does not move it out of a branch.
          if (rescale) {
            wgmma_wait<0>();
            hold(o_acc);
            scale_rows(o_acc, softmax.factor);
          } else {
            wgmma_wait<0>();
            hold(o_acc);
          }
          hold(p_frag);
          release(rings.v, v);
          pack_p();
        }
      }
      barrier_wait(rings.v.full(v.stage), v.phase);
      fence();
      issue_o<Traits>(o_acc, p_frag, rings.v.tile(v.stage));
      wgmma_wait<0>();
      hold(o_acc);
      release(rings.v, v);
    }

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.total(half);
      const int query = row + 8 * half;
      inverse[half] = sum == 0.f ? 0.f : 1.f / sum;
      if (params.lse != nullptr && lane % 4 == 0 && query < params.len_q) {
        const float lse = sum == 0.f ? kMinusInf : softmax.row_max[half] * params.scale + logf(sum);
        params.lse[static_cast<int64_t>(work.lse_row) * params.len_q + query] = lse;
      }
    }
    scale_rows(o_acc, inverse);
    // All four warps have finished with Q; its stage belongs to out now.
    named_barrier_sync(kTurnBarrier + kConsumers + consumer, 128);
    store_out<Traits>(o_acc, q_tile, warp_row, params, work);
    release(rings.q, q);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kShape.threads(), 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  constexpr ForwardShape kShape = Traits::kShape;
  extern __shared__ char smem[];
  const uint32_t base = (shared_address(smem) + kTileAlign - 1) & ~(kTileAlign - 1);
  const typename Traits::Rings rings = Traits::rings(base);
  if (threadIdx.x == 0) {
    const auto init = [](const auto& ring, int stages) {
      for (int stage = 0; stage < stages; ++stage) {
        barrier_init(ring.full(stage), 1);
        barrier_init(ring.empty(stage), Traits::kWarps);
      }
    };
    init(rings.q, kShape.q_stages);
    init(rings.k, kShape.stages);
    init(rings.v, kShape.stages);
    fence_barrier_init();
    for (const TensorMap* map : {&params.q, &params.k, &params.v, &params.out}) prefetch_map(&map->map);
  }
  __syncthreads();
  // The same in all lanes, and the compiler knows.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    fewer_registers<kShape.producer_registers()>();
    if (threadIdx.x < 32 && elect_one()) produce<Traits>(params, rings);
  } else {
    more_registers<kShape.consumer_registers()>();
    consume<Traits>(params, rings, warpgroup - 1);
  }
}

// ---- host -----------------------------------------------------------------------------------------------------------

// grid: blocks; those beyond one a tile are left out.
template <class Traits>
void launch_forward(const ForwardArgs& args, int grid) {
  constexpr int kFar = 1 << 30;  // backend.cpp refuses lengths beyond half of it
  const Problem& problem = args.problem;
  const Band band = make_band(problem);
  const auto clamp = [](int64_t x) { return static_cast<int>(std::clamp<int64_t>(x, -kFar, kFar)); };
  ForwardParams params;
  params.q = make_tensor_map(problem, args.q, problem.heads_q, problem.len_q, problem.head_dim, Traits::kBlockM);
  params.k = make_tensor_map(problem, args.k, problem.heads_k, problem.len_k, problem.head_dim, Traits::kBlockN);
  params.v = make_tensor_map(problem, args.v, problem.heads_v, problem.len_k, problem.head_dim_v, Traits::kBlockN);
  params.out = make_tensor_map(problem, args.out, problem.heads_q, problem.len_q, problem.head_dim_v, 16);
  params.schedule = forward_schedule(problem, Traits::kBlockM);
  params.band = {clamp(band.lower), clamp(band.upper), static_cast<int>(problem.len_k)};
  const dim3 all = cuda::grid_of(params.schedule.size());
  params.tiles = static_cast<int>(all.x);
  params.len_q = static_cast<int>(problem.len_q);
  params.group_k = static_cast<int>(problem.heads_q / problem.heads_k);
  params.group_v = static_cast<int>(problem.heads_q / problem.heads_v);
  params.heads_q = static_cast<int>(problem.heads_q);
  params.inner_batch = problem.batch_rank > 0 ? static_cast<int>(problem.batch_size[problem.batch_rank - 1]) : 1;
  params.scale = static_cast<float>(problem.scale);
  params.to_log2 = static_cast<float>(problem.scale * 1.4426950408889634);
  params.lse = static_cast<float*>(args.lse);
  const dim3 blocks(std::min<unsigned>(all.x, grid));
  cuda::launch(forward_kernel<Traits>, blocks, Traits::kShape.threads(), Traits::kSmem.total, args.stream, params);
}

}  // namespace flash_ext::sm90
