// The gradient of a bias on Hopper, broadcast or not, as a pass of its own behind the backward of q, k and v:
//
//   dbias[tile] = sum over items of dS = P o (dO V^T - delta)
//
// A block owns a tile of the gradient, 128 queries by 128 keys, and walks over everything that shares it (batch
// elements, heads, tiles of queries or keys), in a fixed order, with the sum in registers;
// core/bias_gradient_plan.h has the order, and where parts share a tile a second kernel adds their sums up. One
// producer thread finds the items and brings, by TMA, the pairs of operands (Q, K) and (dO, V) in one ring; two
// consumer warpgroups own 64 queries each. Scores are not transposed here: nothing but their sum is wanted. What is
// shared by the items of a tile is its bias: each thread reads that of its scores once and keeps it in shared memory.
//
// Called by backward/run.cuh, behind prepare_kernel, whose stats it reads. Invariant: each element of the gradient is
// written exactly once; a ring's barriers as in pipeline.cuh.
#pragma once

#include "kernels/sm90/bias_gradient/parts.cuh"

namespace flash_ext::sm90 {

// ---- producer -------------------------------------------------------------------------------------------------------

template <class Traits>
__device__ __forceinline__ void produce_items(const BiasGradientParams& params, const typename Traits::Tiles& tiles) {
  constexpr int kBlock = Traits::kBlock;
  const Problem& problem = params.args.fwd.problem;
  const BiasGradientPlan& plan = params.plan;
  const int len_q = static_cast<int>(problem.len_q);
  const auto entries = tiles.entries();
  const auto operands = tiles.operands();
  RingState<kItemStages> item_place;
  RingState<Traits::kStages> place;
  const uint32_t first_unit = blockIdx.x * plan.run, end_unit = min(first_unit + plan.run, plan.units());
#pragma unroll 1
  for (uint32_t unit = first_unit; unit < end_unit; ++unit) {
    const uint32_t count = plan.items_of(unit);
#pragma unroll 1
    for (uint32_t index = 0; index < count; ++index) {
      const BiasGradientItem item = plan.at(problem, unit, index);
      const auto offset = [&](const TensorView& view) {
        int64_t at = item.head * view.head_stride;
#pragma unroll
        for (int i = 0; i < kMaxBatchDims; ++i) at += item.batch[i] * view.batch_stride[i];
        return at;
      };
      BiasGradientEntry entry;
      entry.first_query = static_cast<int>(item.m_block) * kBlock;
      entry.first_key = static_cast<int>(item.n_block) * kBlock;
      const int end_query = min(entry.first_query + kBlock, len_q);
      const int first_key = max(entry.first_key, entry.first_query + params.band.lower);
      const int end_key = min(min(entry.first_key + kBlock, params.band.len_k), end_query + params.band.upper);
      entry.visible = first_key < end_key;
      entry.last = item.last;
      if (!entry.visible && !item.last) continue;
      const auto corner = [&](const TensorView& view) {
        return offset(view) + entry.first_query * view.row_stride + entry.first_key * view.col_stride;
      };
      entry.bias = corner(params.args.fwd.bias);
      entry.to = corner(params.args.dbias) + item.part * plan.part_elements;
      entry.stats = (int64_t{item.b} * problem.heads_q + item.head) * params.padded * kQueryStats +
                    int64_t{kQueryStats} * entry.first_query;
      barrier_wait(entries.empty(item_place.stage), item_place.phase ^ 1);
      store_shared(entries.tile(item_place.stage), entry);
      barrier_arrive(entries.full(item_place.stage));
      item_place.advance();
      if (!entry.visible) continue;
      const int b1 = static_cast<int>(item.b) / params.inner_batch;
      const int b0 = static_cast<int>(item.b) - b1 * params.inner_batch;
      const auto load = [&](const TensorMap& queries, const TensorMap& keys) {
        const uint32_t barrier = operands.full(place.stage), tile = operands.tile(place.stage);
        barrier_wait(operands.empty(place.stage), place.phase ^ 1);
        barrier_expect(barrier, Traits::kPair);
        const auto box = [&](const BoxSteps& steps, int head, int first) -> BoxStart {
          return {0, first, head * steps.head, b0 * steps.b0, b1 * steps.b1};
        };
        const int head = static_cast<int>(item.head);
        load_panels<kBlock, Traits::kPanels>(tile, barrier, queries, box(queries.steps, head, entry.first_query));
        load_panels<kBlock, Traits::kPanels>(tile + Traits::kTile, barrier, keys,
                                             box(keys.steps, head / params.group, entry.first_key));
        place.advance();
      };
      load(params.q, params.k);
      load(params.d_out, params.v);
    }
  }
  BiasGradientEntry end = {};
  end.last = kEnd;
  barrier_wait(entries.empty(item_place.stage), item_place.phase ^ 1);
  store_shared(entries.tile(item_place.stage), end);
  barrier_arrive(entries.full(item_place.stage));
}

// ---- consumers ------------------------------------------------------------------------------------------------------

// What an item goes through. Both consumer warpgroups do the same, each for its 64 queries:
//
//   wait                      the item
//   wait for Q and K, issue   S = Q K^T
//   under it                  the bias of this thread's scores to shared memory, once a unit
//   wait for dO and V, issue  dP = dO V^T
//   wait S                    each warp arrives at the empty barrier of Q and K
//   under dP                  P = e^(S + bias - lse)
//   wait dP                   each warp arrives at the empty barrier of dO and V; sum += P o (dP - delta)
//                             each warp hands the item back; behind the last of a unit the sum leaves
//
// Shared memory: pairs of operands in a ring, the bias of each warp's scores, items in a ring of two.
// NOTE: the steps in a structure of their own had the same instructions in other registers, and were not timed.
template <class Traits>
__device__ __forceinline__ void consume_items(const BiasGradientParams& params, const typename Traits::Tiles& tiles,
                                              int consumer) {
  using T = typename Traits::T;
  constexpr int kBlock = Traits::kBlock;
  const Problem& problem = params.args.fwd.problem;
  const int lane = threadIdx.x % 32, warp_row = consumer * 64 + threadIdx.x / 32 % 4 * 16;
  const int row = warp_row + lane / 4;
  const auto entries = tiles.entries();
  const auto operands = tiles.operands();
  const uint32_t kept = tiles.bias(warp_row / 16) + lane * 16;
  RingState<kItemStages> item_place;
  RingState<Traits::kStages> place;
  bool keeps = false;  // the bias of this unit
  float sum[64];
#pragma unroll
  for (float& x : sum) x = 0.f;
  const auto release = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(operands.empty(place.stage));
    place.advance();
  };
  while (true) {
    barrier_wait(entries.full(item_place.stage), item_place.phase);
    BiasGradientEntry entry;
    load_shared(entry, entries.tile(item_place.stage));
    if (entry.last == kEnd) break;
    const int rows = static_cast<int>(problem.len_q) - entry.first_query, cols = params.band.len_k - entry.first_key;
    if (entry.visible && rows <= consumer * 64) {  // no query is this warpgroup's
      barrier_wait(operands.full(place.stage), place.phase);
      release();
      barrier_wait(operands.full(place.stage), place.phase);
      release();
    } else if (entry.visible) {
      // What a query beyond the sequence has does not count.
      const auto number = [&](int which, int half, float beyond) {
        const int of = row + 8 * half;
        return of < rows ? __ldg(params.stats + entry.stats + Traits::stat(which, of)) : beyond;
      };
      const float needs_renorm = __ldg(params.stats + entry.stats + Traits::stat(kRenormStat, consumer * 64));
      const float minus_lse[2] = {number(kLseStat, 0, kMinusInf), number(kLseStat, 1, kMinusInf)};
      const bool emptied = minus_lse[0] == kMinusInf || minus_lse[1] == kMinusInf;
      const float delta[2] = {number(kDeltaStat, 0, 0.f), number(kDeltaStat, 1, 0.f)};
      float s_acc[64], dp_acc[64];
      const auto issue = [&](float(&c)[64], const auto& at) {
        barrier_wait(operands.full(at.stage), at.phase);
        const uint32_t tile = operands.tile(at.stage);
        fence_registers(c);
        wgmma_fence();
        issue_scores<T, kBlock, kBlock, Traits::kHeadDim>(c, k_major(tile + consumer * 64 * kPanelBytes),
                                                          tile + Traits::kTile);
      };
      issue(s_acc, place);
      if (!keeps) {
        const TensorView& bias = params.args.fwd.bias;
        keep_bias(kept, static_cast<const T*>(bias.data) + entry.bias, bias, params.reads_chunks, row, rows, cols);
        keeps = true;
      }
      auto next = place;
      next.advance();
      issue(dp_acc, next);
      wgmma_wait<1>();
      fence_registers(s_acc);
      release();
      if (needs_renorm == kNoRenorm) {
        with_bias<T>(s_acc, kept, [&](float& x, float of_pair, int) { x = fmaf(of_pair, params.inverse_scale, x); });
      } else {
        const float renorm[2] = {number(kRenormStat, 0, 0.f), number(kRenormStat, 1, 0.f)};
        with_bias<T>(s_acc, kept, [&](float& x, float of_pair, int half) {
          x = fminf(fmaf(x, params.scale, of_pair) + renorm[half], 0.f) * params.inverse_scale;
        });
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) s_acc[i] = exp2_fast(fmaf(s_acc[i], params.to_log2, minus_lse[i / 2 % 2]));
      wgmma_wait<0>();
      fence_registers(dp_acc);
      release();
#pragma unroll
      for (int i = 0; i < 64; ++i) dp_acc[i] -= delta[i / 2 % 2];
      // Queries without keys, which a bias of -inf leaves, and those beyond the sequence.
      if (emptied || params.band.is_boundary(entry.first_query + consumer * 64, 64, entry.first_key, kBlock)) {
        auto kept = KeptColumns::of_queries(params.band, entry.first_query + row, entry.first_key);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (number(kLseStat, half, kMinusInf) == kMinusInf) kept.low[half] = kBlock;
        }
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          if (!kept.has(i / 2 % 2, i / 4 * 8 + i % 2)) s_acc[i] = dp_acc[i] = 0.f;
        }
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = fmaf(s_acc[i], dp_acc[i], sum[i]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(entries.empty(item_place.stage));
    item_place.advance();
    if (entry.last != 0) {
      if (params.plan.partial != nullptr) {
        store_sums<Traits>(sum, params, params.plan.partial + entry.to, tiles, warp_row, rows, cols);
      } else {
        T* const gradient = static_cast<T*>(params.args.dbias.data);
        store_sums<Traits>(sum, params, gradient + entry.to, tiles, warp_row, rows, cols);
      }
#pragma unroll
      for (float& x : sum) x = 0.f;
      keeps = false;
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bias_gradient_kernel(const __grid_constant__ BiasGradientParams params) {
  const typename Traits::Tiles tiles{tile_base()};
  if (threadIdx.x == 0) {
    init_ring(tiles.operands(), Traits::kStages, Traits::kWarps);
    init_ring(tiles.entries(), kItemStages, Traits::kWarps);
    fence_barrier_init();
    for (const TensorMap* map : {&params.q, &params.k, &params.v, &params.d_out}) prefetch_map(&map->map);
  }
  __syncthreads();
  const int warpgroup = enter_warpgroup<Traits::kProducerRegisters, Traits::kConsumerRegisters>();
  if (warpgroup == 0) {
    if (threadIdx.x < 32 && elect_one()) produce_items<Traits>(params, tiles);
  } else {
    const int consumer = warpgroup - 1;
    consume_items<Traits>(params, tiles, consumer);
  }
}

}  // namespace flash_ext::sm90
