// How a problem is cut into work items, where scratch lies, and how items meet threads.
//
// A group is the smallest set of heads that shares nothing with others: gcd(heads_k, heads_v) groups a batch. Its query
// heads times their blocks of queries are row blocks; a chunk is a run of them, an item one chunk of one group, or a
// part of its keys. Called by plan(), forward and backward. Invariant: the cut depends on the problem and the thread
// count alone, and no two items write the same memory, so results are the same bits on every run.
#pragma once

#include <algorithm>
#include <atomic>
#include <numeric>

#include "core/band.h"
#include "core/library.h"
#include "kernels/cpu/config.h"
#include "kernels/cpu/product.h"

namespace flash_ext::cpu {

struct Partition {
  int64_t groups = 1;      // of one batch
  int64_t heads = 1;       // query heads of a group
  int block_m = kPad;      // queries of a row block
  int64_t m_blocks = 0;    // row blocks of a head
  int64_t row_blocks = 0;  // of a group
  int64_t chunks = 1;      // of a group
  int64_t key_parts = 1;   // of a chunk's keys, each an item
  int64_t units = 0;       // groups of all batches
  int64_t items = 0;

  struct Item {
    int64_t batch, group, chunk;
    Range row_blocks;
    int64_t key_part = 0;
  };
  // Later chunks first: under a causal band they are the longer ones.
  Item item(int64_t index) const {
    const int64_t unit = index % units;
    const int64_t chunk = chunks - 1 - index / units % chunks;
    const Range blocks{row_blocks * chunk / chunks, row_blocks * (chunk + 1) / chunks};
    return {unit / groups, unit % groups, chunk, blocks, index / (units * chunks)};
  }
};

// Floating-point operations, with those of the softmax as so much head dim, and a number of Q, K, V or out as so many.
inline double work_flops(const Problem& problem, int products) {
  constexpr double kSoftmaxDims = 32.0, kNumber = 8.0;
  const double heads = static_cast<double>(problem.batch * problem.heads_q),
               cols = static_cast<double>(problem.head_dim + problem.head_dim_v),
               len_q = static_cast<double>(problem.len_q), len_k = static_cast<double>(problem.len_k);
  return heads * products * (len_q * len_k * (cols + 2.0 * kSoftmaxDims) + kNumber / 2.0 * (len_q + len_k) * cols);
}

// max_rows: a chunk has fewer than twice as many rows. Chunks beyond that are made only where groups alone leave
// threads idle.
inline Partition make_partition(const Problem& problem, int tile_m, int64_t threads, bool may_split, int64_t max_rows) {
  Partition cut;
  cut.groups = std::gcd(problem.heads_k, problem.heads_v);
  if (cut.groups == 0) return cut;
  cut.heads = problem.heads_q / cut.groups;
  cut.block_m = static_cast<int>(std::max<int64_t>(std::min<int64_t>(tile_m, round_up(problem.len_q, kPad)), kPad));
  cut.m_blocks = (problem.len_q + cut.block_m - 1) / cut.block_m;
  cut.row_blocks = cut.heads * cut.m_blocks;
  cut.units = problem.batch * cut.groups;
  if (cut.row_blocks == 0 || cut.units == 0) return cut;
  if (may_split) {
    // Equal items that divide evenly need no finer cut; else the last item should cost at most a few percent.
    const bool even = cut.units % threads == 0 && (!problem.causal || cut.units >= threads);
    if (threads > 1 && !even && cut.units < 8 * threads) cut.chunks = (4 * threads + cut.units - 1) / cut.units;
    cut.chunks = std::max(cut.chunks, cut.row_blocks * cut.block_m / max_rows);
    cut.chunks = std::clamp<int64_t>(cut.chunks, 1, cut.row_blocks);
  }
  cut.items = cut.units * cut.chunks;
  return cut;
}

enum class Type : uint8_t { kF32, kBf16, kF64 };

// What a plan has chosen, for the run.
struct Choice {
  Type type = Type::kF32;
  Engine engine = Engine::kLoops;
  int64_t threads = 1;                             // workers
  int64_t scratch = 0;                             // bytes of the whole workspace
  int64_t block_m = 0, chunks = 1, key_parts = 1;  // of the cut
  int64_t items = 0;

  void set_cut(const Partition& cut) {
    block_m = cut.block_m, chunks = cut.chunks, key_parts = cut.key_parts, items = cut.items;
  }
  Partition cut(const Problem& problem) const {
    Partition cut = make_partition(problem, static_cast<int>(block_m), 1, /*may_split=*/false, 1);
    cut.chunks = chunks, cut.key_parts = key_parts, cut.items = items;
    return cut;
  }
};

// Hands out pieces of the workspace; without one it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// work(worker) for each worker.
template <class Work>
void in_parallel(int64_t workers, const Work& work) {
  cpu_host().parallel(
      workers, [](void* context, int64_t worker) { (*static_cast<const Work*>(context))(worker); },
      const_cast<Work*>(&work));
}

// body(item, worker) for every item, on up to `threads` workers, each with scratch of its own; then done() on each.
template <class Body, class Done>
void for_each_item(int64_t items, int64_t threads, const Body& body, const Done& done) {
  if (threads <= 1 || items <= 1) {
    for (int64_t item = 0; item < items; ++item) body(item, 0);
    done();
    return;
  }
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker) {
    for (int64_t item = next++; item < items; item = next++) body(item, worker);
    done();
  };
  in_parallel(threads, work);
}

inline Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Element::kFloat16;
    case DType::kBFloat16:
      return Element::kBFloat16;
    case DType::kFloat32:
      return Element::kFloat32;
    default:
      return Element::kFloat64;
  }
}

inline int64_t element_size(Element element) {
  constexpr int64_t kSizes[] = {2, 2, 4, 8, 1};
  return kSizes[static_cast<int>(element)];
}

// The tile of `view` that starts at (b, head, row, col).
inline Source source_at(const Problem& problem, const TensorView& view, Element type, int64_t b, int64_t head,
                        int64_t row, int64_t col) {
  const int64_t offset =
      batch_offset(problem, view, b) + head * view.head_stride + row * view.row_stride + col * view.col_stride;
  return {static_cast<const char*>(view.data) + offset * element_size(type), type, view.row_stride, view.col_stride};
}
inline Sink sink_at(const Problem& problem, const TensorView& view, Element type, int64_t b, int64_t head, int64_t row,
                    int64_t col) {
  const Source at = source_at(problem, view, type, b, head, row, col);
  return {const_cast<void*>(at.data), type, at.row_stride, at.col_stride};
}

inline int clamp_index(int64_t x) { return static_cast<int>(std::clamp(x, -kMostLength, kMostLength)); }

// The band of a tile of S at (query, key), with rows queries and cols keys inside the tensors.
inline TileDiagonals tile_band(const Band& band, int64_t query, int64_t key, int rows, int cols) {
  return {clamp_index(band.lower + query - key), clamp_index(band.upper + query - key + 1), rows, cols};
}
// The same of a tile of S^T: rows are keys.
inline TileDiagonals tile_band_transposed(const Band& band, int64_t query, int64_t key, int rows, int cols) {
  return {clamp_index(key - query - band.upper), clamp_index(key - query - band.lower + 1), rows, cols};
}

}  // namespace flash_ext::cpu
