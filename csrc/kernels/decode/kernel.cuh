// Decode: few queries of each sequence attend to a long cache, read where it lies.
//
//   S = Q K^T     P = e^(S - m)     l += rowsum(P)     O += P V          out = O / l     lse = m + log l
//
// Rows of a tile are the queries of all heads that share a key head, so that a key is read once. Each group of warps
// has keys of its own and a softmax of its own; the groups merge at the end of a segment (merge.cuh), the blocks in a
// kernel behind (merge.cu). FlashDecoding's split (Dao et al. 2023), dealt as in stream-K (arXiv:2301.03598). Launched
// by run.cuh. Invariant: scores are in log2; hidden ones are -inf, and rows of the cache that no query sees are zeros.
#pragma once

#include <cmath>

#include "gpu/ptx/grid.cuh"
#include "gpu/shared_value.cuh"
#include "gpu/softmax.cuh"
#include "kernels/decode/merge.cuh"
#include "kernels/decode/products.cuh"
#include "kernels/decode/rows.cuh"

namespace flash_ext::decode {

constexpr int kGroupBarrier = 1;  // a named barrier; those of the other groups are behind it

// Until all threads of the group are here; what they wrote or copied is seen by all.
template <class Traits>
__device__ __forceinline__ void group_barrier() {
  if constexpr (Traits::kRowWarps == 1) {
    __syncwarp();
  } else {
    named_barrier_sync(kGroupBarrier + threadIdx.x / Traits::kGroupThreads, Traits::kGroupThreads);
  }
}

__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages == 4) return cp_async_wait<2>();
  if (stages == 3) return cp_async_wait<1>();
  cp_async_wait<0>();
}

// cap * tanh(s / cap) times log2(e), slopes, and what the band hides.
template <class Traits>
__device__ __forceinline__ void modify(const DecodeArgs& args, typename Products<Traits>::Scores& s, int row, int key,
                                       const RowTable<Traits>& table, const TileKeys& seen) {
  const float cap = args.softcap * kLog2eFloat, to_cap = cap > 0.f ? 2.f * kLog2eFloat / args.softcap : 0.f;
  const bool is_boundary = key < seen.all_first || key + Traits::kKeys > seen.all_last;
  key += 2 * lane_column();
  row += lane_row();
#pragma unroll
  for (int m = 0; m < Traits::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + 16 * m + 8 * half;
      const float factor = score_factor(args) * (Traits::kFp8 ? table.factor[at] : 1.f);
      const auto each = [&](const auto& fn) {
#pragma unroll
        for (int n = 0; n < Traits::kKeys / 8; ++n) {
          fn(s[m][n][2 * half], key + 8 * n);
          fn(s[m][n][2 * half + 1], key + 8 * n + 1);
        }
      };
      each([&](float& x, int) { x *= factor; });
      if (cap > 0.f) {  // 2e-7 of the cap, as ScoreMods::capped_score of sm80
        each([&](float& x, int) { x = fmaf(-2.f * cap, reciprocal_fast(1.f + exp2_fast(x * to_cap)), cap); });
      }
      if (args.alibi.data != nullptr) {
        const int position = table.position[at];
        const float slope = table.slope[at];
        each([&](float& x, int j) { x = fmaf(-slope, static_cast<float>(abs(position - j)), x); });
      }
      if (is_boundary) {
        const int first = first_key_at(args, table.position[at]);
        const int last = last_key_at(args, table.position[at], seen.rows);
        each([&](float& x, int j) { x = j >= first && j < last ? x : -INFINITY; });
      }
    }
  }
}

// The first row of a thread's warp.
template <class Traits>
__device__ __forceinline__ int first_row_of(int thread) {
  return thread / 32 % Traits::kRowWarps * 16 * Traits::kM;
}

// What a warp has of a segment, to shared memory.
template <class Traits>
__device__ __forceinline__ void store_group(const typename Products<Traits>::Out& o,
                                            const SoftmaxRows<Traits::kM>& softmax, float* to, float2* sums) {
  const int thread = static_cast<int>(no_hoist(threadIdx.x));
  const int group = thread / Traits::kGroupThreads, row = first_row_of<Traits>(thread);
#pragma unroll
  for (int m = 0; m < Traits::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = group * Traits::kRows + row + 16 * m + 8 * half + lane_row();
      const float sum = softmax.total(m, half);
      if (lane_column() == 0) sums[at] = make_float2(softmax.row_max[m][half], sum);
      float* const line = to + at * Traits::kOutPitch;
      constexpr int kStep = Traits::kFp8 ? 2 : 1;
#pragma unroll
      for (int n = 0; n < Traits::kHeadDim / 8; n += kStep) {
        float* const columns = line + Products<Traits>::column_of(n, 0);
        if constexpr (Traits::kFp8) {
          *reinterpret_cast<float4*>(columns) =
              make_float4(o[m][n][2 * half], o[m][n + 1][2 * half], o[m][n][2 * half + 1], o[m][n + 1][2 * half + 1]);
        } else {
          *reinterpret_cast<float2*>(columns) = make_float2(o[m][n][2 * half], o[m][n][2 * half + 1]);
        }
      }
    }
  }
}

// The tiles of keys of a group in a segment, and the ring of `stages` places that they come to.
template <class Traits>
struct Tiles {
  KeyRows<Traits> rows;
  uint32_t ring;  // of this group
  int stages;
  int first_key = 0, count = 0;
  int next = 0, next_stage = 0;  // to be copied

  __device__ __forceinline__ int key(int t) const { return first_key + t * Traits::kTileKeys; }
  __device__ __forceinline__ uint32_t place(int stage) const { return ring + stage * Traits::kRingBytes; }

  __device__ __forceinline__ void copy_next() {
    if (next < count) {
      rows.copy(place(next_stage), place(next_stage) + Traits::kTileBytes, key(next));
      if (++next < count) rows.look_up(key(next));
      next_stage = next_stage + 1 == stages ? 0 : next_stage + 1;
    }
    cp_async_commit();
  }
  // The stages - 1 tiles that are under way before the walk: the first `places` of them, and what `meanwhile` asks for
  // behind the first one.
  __device__ __forceinline__ void begin(int key, int tiles, int places, const auto& meanwhile) {
    first_key = key;
    count = tiles;
    next = next_stage = 0;
    rows.look_up(first_key);
#pragma unroll 1
    for (int i = 0; i == 0 || i < places; ++i) {
      if (i < places) copy_next();
      if (i == 0) meanwhile();
    }
  }
  // The others.
  __device__ __forceinline__ void begin_rest(int places) {
#pragma unroll 1
    for (int i = places; i < stages - 1; ++i) copy_next();
  }
};

// A group's walk over its tiles:
//
//   wait        tile t is there for this thread's copies
//   barrier     ... and for the group's; nobody reads tile t - 1 any more
//   copy        tile t + stages - 1 to the place of tile t - 1, whose pages were looked up a turn ago;
//               look up the pages of the tile behind it
//   S = Q K^T, m, l, P, O += P V
template <class Traits>
__device__ __forceinline__ void attend(const DecodeArgs& args, Tiles<Traits>& tiles, Products<Traits>& products,
                                       typename Products<Traits>::Out& o, SoftmaxRows<Traits::kM>& softmax,
                                       const RowTable<Traits>& table, const TileKeys& seen) {
  constexpr float kGrowth = 8.f;  // of a maximum, in log2, before O follows it
  using KeyTile = typename Products<Traits>::KeyTile;
  int stage = 0;
  for (int t = 0; t < tiles.count; ++t) {
    wait_for_stage(tiles.stages);
    group_barrier<Traits>();
    tiles.copy_next();
    const uint32_t place = tiles.place(stage);
    stage = stage + 1 == tiles.stages ? 0 : stage + 1;
    typename Products<Traits>::Scores s;
    products.scores(s, KeyTile{place});
    modify<Traits>(args, s, products.row, tiles.key(t), table, seen);
    softmax.template rescale<false>(s, o, 1.f, kGrowth);
    softmax.template exponentials<false>(s, 1.f);
    products.add_values(o, s, KeyTile{place + Traits::kTileBytes});
  }
  cp_async_wait_all();
}

// A segment of a block, and what there is to know of it.
struct Turn {
  Segment segment;
  SequenceKeys keys;
  int2 place;           // what Walk::place says of it
  bool exists = false;  // else the block has come to its end

  Turn() = default;
  __device__ __forceinline__ Turn(const DecodeArgs& args, const DecodePlan& plan, Walk& walk, int tile_keys)
      : keys(keys_of_sequence(args, walk.b())), place(walk.place()), exists(true) {
    segment = walk.next(args, plan, tiles_of(keys, tile_keys));
  }
};

// What a block keeps of its place while it attends. NOTE: in registers it made the kernels of 64 rows spill.
template <class Traits>
struct BlockState {
  RowTable<Traits> table;
  TileKeys seen;
  SharedValue<Walk> walk;  // thread 0's
  SharedValue<Segment> segment;
  SharedValue<Turn> next;
};

// A block's walk over its segments. Keys of the next one are copied while the groups merge what they have of this one,
// for which the last place of the ring and Q's have room, or where out is larger one place more:
//
//   shared memory   | stage 0 | ... | stage n - 1 | Q |
//                             | ... out of groups, sums |
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    decode_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ DecodePlan plan,
                  const __grid_constant__ Parts parts) {
#if __CUDA_ARCH__ >= 900
  if (plan.dependent) grid_dependency_launch();
#endif
  __shared__ BlockState<Traits> state;
  Walk walk(args, plan, Traits::kTileKeys);
  if (!walk.has_more()) return;
  char* const ring = dynamic_shared_128();
  char* const query = ring + plan.shared_bytes - Traits::kQueryBytes;
  const int group = static_cast<int>(threadIdx.x) / Traits::kGroupThreads;
  Products<Traits> products{{shared_address(query)}, first_row_of<Traits>(static_cast<int>(threadIdx.x))};
  Tiles<Traits> tiles{KeyRows<Traits>(args), shared_address(ring) + group * Traits::kStageBytes, plan.stages};
  TileKeys seen;
  QueryLoad<Traits> query_load;
  const auto begin = [&](const Turn& turn, int places) {
    const Segment& segment = turn.segment;
    seen = keys_of_tile<Traits>(args, plan, turn.keys, segment);
    tiles.rows.begin(segment.b, segment.head, seen.first, seen.last);
    tiles.begin(turn.keys.first + segment.tile * Traits::kTileKeys + group * Traits::kKeys, segment.tiles, places,
                [&] { query_load.begin(args, plan, segment); });
  };
  if (threadIdx.x == 0) {
    state.next.get() = Turn(args, plan, walk, Traits::kTileKeys);
    state.walk.get() = walk;
  }
  __syncthreads();  // the first turn is there
  const Turn& turn = state.next.get();
  begin(turn, plan.stages - 1);
  while (true) {
    if (threadIdx.x == 0) state.seen = seen;
    query_load.finish(args, plan, turn.keys, turn.segment, products.tile, state.table);
    __syncthreads();  // Q and the table are there
    if (threadIdx.x == 0) {
      const Segment segment = turn.segment;
      if (plan.tells_places && segment.tile == 0) {
        parts.places[(segment.b * args.heads_k + segment.head) * plan.row_tiles + segment.row_tile] = turn.place;
      }
      state.segment.get() = segment;
      Walk& ahead = state.walk.get();
      state.next.get() = ahead.has_more() ? Turn(args, plan, ahead, Traits::kTileKeys) : Turn();
    }
    products.load_query();
    typename Products<Traits>::Out o;
    clear(o);
    SoftmaxRows<Traits::kM> softmax;
    attend(args, tiles, products, o, softmax, state.table, state.seen);
    __syncthreads();  // nobody reads Q, or reads or copies to the ring any more; the next turn is there
    const int before_sums = no_hoist(static_cast<int>(plan.shared_bytes)) - Traits::kSumBytes;
    auto* const sums = reinterpret_cast<float2*>(ring + before_sums);
    auto* const merged = reinterpret_cast<float*>(ring + before_sums - Traits::kOutBytes);
    const int places = min((before_sums - Traits::kOutBytes) / Traits::kRingBytes, plan.stages - 1);
    store_group<Traits>(o, softmax, merged, sums);
    if (turn.exists) begin(turn, places);
    __syncthreads();  // what the groups have is there
    write_segment<Traits>(args, plan, state.segment.get(), merged, sums, parts);
    if (!turn.exists) return;
    __syncthreads();  // nobody reads that any more
    tiles.begin_rest(places);
  }
}

}  // namespace flash_ext::decode
