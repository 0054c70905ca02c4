// Forward of the CPU backend: exact attention by blocks of keys (FlashAttention, arXiv:2205.14135, algorithm 1).
//
//   for each block of keys:  for each row block:  S = Q K^T    P = e^(scale S - m)    O = O e^(m - m') + P V
//
// Keys are the outer loop: a block of K^T and V is packed once, stays in the L2 cache and serves every row block of
// every query head that shares it, while O streams by (less traffic, as a block has more keys than a row block rows).
// Called through passes.h. Invariant: an item owns its rows of out and lse, and packs its own keys.
#include <limits>

#include "core/online_softmax.h"
#include "kernels/cpu/operands.h"
#include "kernels/cpu/passes.h"

namespace flash_ext::cpu {
namespace {

template <class Compute>
int tile_m(const Problem& problem, int64_t threads) {
  const int64_t tile = problem.causal ? Tiles<Compute>::kForwardCausalM : Tiles<Compute>::kForwardM;
  // Fewer heads than threads have shorter tiles, though each packs K and V for itself; not where bits may not depend on
  // the batch.
  if (problem.batch_invariant) threads = 1;
  const int64_t heads = std::max<int64_t>(problem.batch * problem.heads_q, 1), tiles = (threads + heads - 1) / heads;
  return static_cast<int>(std::min(tile, round_up((problem.len_q + tiles - 1) / tiles, kPad)));
}

template <class Compute>
struct ForwardLayout {
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;

  Partition cut;
  int block_n = kPad;
  int depth = 0;         // inner dimension of S = Q K^T
  int out_cols = 0;      // d_v, padded
  int64_t max_rows = 0;  // of a chunk, in row blocks
  bool general = false;

  // One worker's scratch.
  Operand* q = nullptr;         // [block_m, staged_ld(d)]
  Operand* staged = nullptr;    // [kPanel, staged_ld(max(d, d_v))]
  Operand* k_panels = nullptr;  // [block_n / kPanel][depth][kPanel]
  Operand* v_block = nullptr;   // [block_n][out_cols]
  Acc* scores = nullptr;        // [block_m, block_n]
  Operand* probs = nullptr;     // [block_m, block_n]; scores itself where the types agree
  uint8_t* keep = nullptr;      // [block_m, block_n]
  Acc* out = nullptr;           // [max_rows, block_m, out_cols]
  Acc* row_max = nullptr;       // [max_rows, block_m]
  Acc* row_sum = nullptr;       // [max_rows, block_m]
  ScoreInputLoader<Compute> inputs;

  ForwardLayout(const Problem& problem, const Partition& partition) : cut(partition) {
    block_n = static_cast<int>(
        std::min<int64_t>(Tiles<Compute>::kForwardN, std::max<int64_t>(round_up(problem.len_k, kPad), kPad)));
    depth = depth_of<Compute>(problem.head_dim);
    out_cols = static_cast<int>(round_up(problem.head_dim_v, kPad));
    max_rows = (cut.row_blocks + cut.chunks - 1) / cut.chunks;
    // A removed score is -inf before it is scaled, so the plain path needs scale > 0.
    general = ScoreInputLoader<Compute>::needed(problem) || !(problem.scale > 0.0);
  }

  int64_t carve(const Problem& problem, void* base) {
    Arena arena(base);
    const int64_t tile = int64_t{cut.block_m} * block_n;
    q = arena.take<Operand>(int64_t{cut.block_m} * staged_ld(problem.head_dim));
    staged = arena.take<Operand>(int64_t{kPanel} * staged_ld(std::max(problem.head_dim, problem.head_dim_v)));
    k_panels = arena.take<Operand>(int64_t{depth} * block_n);
    v_block = arena.take<Operand>(int64_t{block_n} * out_cols);
    scores = arena.take<Acc>(tile);
    if constexpr (std::is_same_v<Operand, Acc>) {
      probs = scores;
    } else {
      probs = arena.take<Operand>(tile);
    }
    if (problem.dropout_p > 0.0) keep = arena.take<uint8_t>(tile);
    out = arena.take<Acc>(max_rows * cut.block_m * out_cols);
    row_max = arena.take<Acc>(max_rows * cut.block_m);
    row_sum = arena.take<Acc>(max_rows * cut.block_m);
    inputs.carve(arena, problem, cut.block_m, block_n, /*transposed=*/false);
    return arena.used();
  }
};

template <class Compute>
class ForwardWorker {
 public:
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;

  ForwardWorker(const ForwardArgs& args, const ForwardLayout<Compute>& layout, const Products<Compute>& product,
                const Dropout& dropout)
      : args_(args),
        problem_(args.problem),
        at_(layout),
        product_(product),
        kernels_(vector_table().get<Compute>()),
        dropout_(dropout),
        band_(make_band(args.problem)),
        type_(element_of(args.problem.dtype)),
        few_(few_queries<Compute>(args)),
        few_keys_(!few_ && few_keys(args)) {}

  void run(const Partition::Item& item) {
    const Partition& cut = at_.cut;
    std::fill_n(at_.row_max, at_.max_rows * cut.block_m, OnlineSoftmax<Acc>::kEmpty);
    std::fill_n(at_.row_sum, at_.max_rows * cut.block_m, Acc(0));
    batch_ = item.batch;
    for (int64_t key = 0; key < problem_.len_k; key += at_.block_n) {
      const Range block{key, std::min(key + at_.block_n, problem_.len_k)};
      packed_k_ = packed_v_ = -1;
      for (int64_t i = item.row_blocks.first; i < item.row_blocks.last; ++i) {
        const Range queries = queries_of(i);
        const Range seen = band_.keys(queries, problem_.len_k);
        const Range keys{std::max(seen.first, block.first), std::min(seen.last, block.last)};
        if (keys.empty()) continue;
        step(item.group * cut.heads + i / cut.m_blocks, queries, keys, block, i - item.row_blocks.first,
             /*first=*/seen.first >= block.first);
      }
    }
    for (int64_t i = item.row_blocks.first; i < item.row_blocks.last; ++i) {
      finish(item.group * cut.heads + i / cut.m_blocks, queries_of(i), i - item.row_blocks.first);
    }
  }

 private:
  Range queries_of(int64_t row_block) const {
    const int64_t first = row_block % at_.cut.m_blocks * at_.cut.block_m;
    return {first, std::min(first + at_.cut.block_m, problem_.len_q)};
  }

  // O and the statistics of row block `slot` with the keys of one block that it sees.
  void step(int64_t head, Range queries, Range keys, Range block, int64_t slot, bool first) {
    const int first_col = static_cast<int>((keys.first - block.first) / kPanel * kPanel);
    const int cols = static_cast<int>(round_up(keys.last - block.first, kPad)) - first_col;
    const int64_t key = block.first + first_col;
    const int valid_cols = static_cast<int>(std::min<int64_t>(cols, block.last - key));
    const int rows = static_cast<int>(queries.size());
    const int rows_padded = round_rows(rows);
    const int d = static_cast<int>(problem_.head_dim);
    const Source q_tile = source_at(problem_, args_.q, type_, batch_, head, queries.first, 0);
    if (few_) {
      const int ld = staged_ld(d);
      kernels_.load(q_tile, rows, d, at_.q, ld, rows, ld);
      kernels_.few_scores(at_.q, ld, rows, keys_at(args_.k, head / (problem_.heads_q / problem_.heads_k), key),
                          valid_cols, d, at_.scores, at_.block_n, /*transposed=*/false);
    } else if (few_keys_) {  // key is 0
      const int ld = staged_ld(d);
      kernels_.load(keys_at(args_.k, head / (problem_.heads_q / problem_.heads_k), key), valid_cols, d, at_.staged, ld,
                    valid_cols, ld);
      kernels_.few_scores(at_.staged, ld, valid_cols, q_tile, rows, d, at_.scores, at_.block_n, /*transposed=*/true);
    } else {
      pack(head, block);
      const Left<Compute> q = left_rows<Compute>(kernels_, q_tile, rows, rows_padded, d, at_.q);
      for (int c = 0; c < cols; c += kPanel) {  // S = Q K^T
        const int panel = first_col + c;
        const int packed = std::min<int>(kPanel, static_cast<int>(round_up(block.size(), kPad)) - panel);
        const int width = std::min(packed, cols - c);
        const Operand* k = at_.k_panels + int64_t{panel} * at_.depth;
        if (sums_by_tree<Compute>(problem_)) {
          product_.by_tree(rows_padded, width, at_.depth, q.data, q.ld, k, packed, at_.scores + c, at_.block_n);
        } else {
          product_.by_parts(rows_padded, width, at_.depth, q.data, q.ld, k, packed, at_.scores + c, at_.block_n);
        }
      }
    }

    SoftmaxTile<Compute> tile;
    tile.scores = at_.scores;
    tile.probs = at_.probs;
    tile.ld_scores = tile.ld_probs = tile.ld_keep = at_.block_n;
    tile.rows = rows;
    tile.cols = cols;
    tile.scale = static_cast<Acc>(problem_.scale);
    const Range tile_keys{key, key + valid_cols};
    if (at_.general) {
      kernels_.modify_scores(at_.scores, at_.block_n, rows, cols, tile.scale,
                             at_.inputs.load(kernels_, args_, batch_, head, queries, tile_keys, /*transposed=*/false));
      tile.scale = Acc(1);
    }
    const TileDiagonals band = tile_band(band_, queries.first, key, rows, valid_cols);
    if (valid_cols < cols || band_.is_boundary(queries, tile_keys)) tile.band = &band;
    if (at_.keep != nullptr) {
      const DropoutPlace& place = args_.dropout_place;
      kernels_.keep_tile(dropout_, place.bh(batch_, batch_ * problem_.heads_q + head), place.query(queries.first),
                         place.key(key), static_cast<int>(round_up(rows, kPad)), cols,
                         /*transposed=*/false, at_.keep, at_.block_n);
      tile.keep = at_.keep;
      tile.keep_scale = static_cast<Acc>(dropout_.scale);
    }
    tile.row_max = at_.row_max + slot * at_.cut.block_m;
    tile.row_sum = at_.row_sum + slot * at_.cut.block_m;
    Acc* out = at_.out + slot * at_.cut.block_m * at_.out_cols;
    if (!first) tile.out = out;
    tile.ld_out = tile.out_cols = at_.out_cols;
    kernels_.softmax(tile);

    if (few_ || few_keys_) {
      const FewWeights<Operand> weights{at_.probs, Compute::kPairs ? at_.block_n / 2 : at_.block_n, 1};
      kernels_.few_outputs(weights, rows, keys_at(args_.v, head / (problem_.heads_q / problem_.heads_v), key),
                           valid_cols, static_cast<int>(problem_.head_dim_v), out, at_.out_cols, /*add=*/!first);
      return;
    }
    product_(rows_padded, at_.out_cols, cols, at_.probs, at_.block_n, at_.v_block + int64_t{first_col} * at_.out_cols,
             at_.out_cols, out, at_.out_cols, /*add=*/!first);  // O += P V
  }

  Source keys_at(const TensorView& view, int64_t head, int64_t key) const {
    return source_at(problem_, view, type_, batch_, head, key, 0);
  }

  // K^T in panels and V of the heads that `head` reads, unless they are there already.
  void pack(int64_t head, Range block) {
    const int64_t head_k = head / (problem_.heads_q / problem_.heads_k);
    const int64_t head_v = head / (problem_.heads_q / problem_.heads_v);
    if (packed_k_ != head_k) {
      packed_k_ = head_k;
      for (int64_t key = block.first; key < block.last; key += kPanel) {
        const int rows = static_cast<int>(std::min<int64_t>(kPanel, block.last - key));
        const int width = static_cast<int>(round_up(rows, kPad));
        const Left<Compute> k = staged_rows<Compute>(kernels_, keys_at(args_.k, head_k, key), rows,
                                                     static_cast<int>(problem_.head_dim), at_.staged);
        kernels_.right_transposed(k.data, static_cast<int>(k.ld), rows, static_cast<int>(problem_.head_dim),
                                  at_.k_panels + (key - block.first) * at_.depth, width, width);
      }
    }
    if (packed_v_ != head_v) {
      packed_v_ = head_v;
      for (int64_t key = block.first; key < block.last; key += kPanel) {
        const int rows = static_cast<int>(std::min<int64_t>(kPanel, block.last - key));
        const int rows_padded = static_cast<int>(round_up(rows, kPad));
        const Source src = keys_at(args_.v, head_v, key);
        Operand* to = at_.v_block + (key - block.first) * at_.out_cols;
        const int d_v = static_cast<int>(problem_.head_dim_v);
        if constexpr (Compute::kPairs) {
          const Left<Compute> v = staged_rows<Compute>(kernels_, src, rows, d_v, at_.staged);
          kernels_.right_operand(v.data, static_cast<int>(v.ld), rows, at_.out_cols, to, rows_padded);
        } else {
          kernels_.load(src, rows, d_v, to, at_.out_cols, rows_padded, at_.out_cols);
        }
      }
    }
  }

  void finish(int64_t head, Range queries, int64_t slot) {
    const int rows = static_cast<int>(queries.size());
    const Acc* row_max = at_.row_max + slot * at_.cut.block_m;
    Acc* row_sum = at_.row_sum + slot * at_.cut.block_m;
    Acc* lse = args_.lse == nullptr
                   ? nullptr
                   : static_cast<Acc*>(args_.lse) + (batch_ * problem_.heads_q + head) * problem_.len_q + queries.first;
    for (int r = 0; r < rows; ++r) {
      const auto joined = with_sink(row_max[r], row_sum[r], sink_of<Acc>(args_, batch_, head, queries.first + r));
      if (lse != nullptr) lse[r] = OnlineSoftmax<Acc>{joined.max, joined.sum}.finish().lse;
      if (!problem_.has_sinks || row_sum[r] == Acc(0)) continue;
      // What O is divided by; where the keys have no weight left, O itself is 0.
      row_sum[r] = joined.sum / joined.factor;
      if (!std::isinf(row_sum[r])) continue;
      row_sum[r] = Acc(1);
      std::fill_n(at_.out + (slot * at_.cut.block_m + r) * at_.out_cols, at_.out_cols, Acc(0));
    }
    kernels_.store(at_.out + slot * at_.cut.block_m * at_.out_cols, at_.out_cols, rows,
                   static_cast<int>(problem_.head_dim_v), Acc(1), row_sum,
                   sink_at(problem_, args_.out, type_, batch_, head, queries.first, 0));
  }

  const ForwardArgs& args_;
  const Problem& problem_;
  const ForwardLayout<Compute>& at_;
  const Products<Compute>& product_;
  const VectorKernels<Compute>& kernels_;
  const Dropout& dropout_;
  const Band band_;
  const Element type_;
  const bool few_;
  const bool few_keys_;
  int64_t batch_ = 0;
  int64_t packed_k_ = -1;
  int64_t packed_v_ = -1;
};

}  // namespace

template <class Compute>
void plan_forward(const Problem& problem, int64_t threads, Choice choice, Plan& plan) {
  if (work_flops(problem, 2) < kSerialFlops) threads = 1;
  ForwardLayout<Compute> layout(
      problem, make_partition(problem, tile_m<Compute>(problem, threads), threads, /*may_split=*/true, kMaxChunkRows));
  threads = std::clamp<int64_t>(layout.cut.items, 1, threads);
  constexpr int64_t kOperand = sizeof(typename Compute::Operand), kAcc = sizeof(typename Compute::Acc);
  plan.block_m = layout.cut.block_m;
  plan.block_n = layout.block_n;
  plan.use("s", plan.block_m * plan.block_n * kAcc);
  plan.use("p", std::is_same_v<Compute, ComputeBf16> ? plan.block_m * plan.block_n * kOperand : 0);
  plan.use("k", plan.block_n * layout.depth * kOperand);
  plan.use("v", plan.block_n * layout.out_cols * kOperand);
  plan.use("q", plan.block_m * layout.depth * kOperand);
  plan.use("o", plan.block_m * layout.out_cols * kAcc);
  plan.on_chip_limit = kCacheBytes;
  plan.scratch_bytes = threads * layout.carve(problem, nullptr);
  plan.grid = layout.cut.items;
  plan.waves = static_cast<double>(plan.grid) / static_cast<double>(threads);
  choice.threads = threads;
  choice.scratch = plan.scratch_bytes;
  choice.set_cut(layout.cut);
  plan.choose(choice);
}

template <class Compute>
void run_forward(const ForwardArgs& args, const Plan& plan, void* workspace) {
  const auto choice = plan.chosen<Choice>();
  const int64_t threads = choice.threads;
  const ForwardLayout<Compute> layout(args.problem, choice.cut(args.problem));
  const int64_t scratch = choice.scratch / threads;
  const Products<Compute> product(choice.engine, vector_table().get<Compute>());
  Dropout dropout;
  if (args.problem.dropout_p > 0.0) {
    dropout = make_dropout(args.rng_state[0], args.rng_state[1], args.problem.dropout_p);
  }
  for_each_item(
      layout.cut.items, threads,
      [&](int64_t item, int64_t worker) {
        ForwardLayout<Compute> own = layout;
        own.carve(args.problem, static_cast<char*>(workspace) + worker * scratch);
        ForwardWorker<Compute>(args, own, product, dropout).run(layout.cut.item(item));
      },
      [&] { product.release(); });
}

template void plan_forward<ComputeF32>(const Problem&, int64_t, Choice, Plan&);
template void plan_forward<ComputeBf16>(const Problem&, int64_t, Choice, Plan&);
template void plan_forward<ComputeF64>(const Problem&, int64_t, Choice, Plan&);
template void run_forward<ComputeF32>(const ForwardArgs&, const Plan&, void*);
template void run_forward<ComputeBf16>(const ForwardArgs&, const Plan&, void*);
template void run_forward<ComputeF64>(const ForwardArgs&, const Plan&, void*);

}  // namespace flash_ext::cpu
