// Backward of the CPU backend: one sweep over the tiles of S^T, five products each.
//
//   for each row block:  for each block of keys:  dV += P^T dO    dK += dS^T Q    dQ^T += K^T dS^T
//
// Queries are the outer loop: Q and dO of a row block are packed once, dQ^T stays in cache, and dK and dV accumulate in
// fp32 for all keys, over every query head that shares them. Where there are fewer groups than threads, several
// chunks of queries sum dK and dV into slots of their own, or several parts of the keys sum dQ into theirs, which a
// second pass adds up in order. Called through passes.h. Invariant: an item owns its slots, and its rows of dq or of dk
// and dv where those have no slots.
#include "kernels/cpu/backward_sums.h"
#include "kernels/cpu/passes.h"

namespace flash_ext::cpu {
namespace {

template <class Compute>
class BackwardWorker : BackwardTileWorker<Compute> {
 public:
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;
  using Tiles = BackwardTileWorker<Compute>;
  using Tiles::args_, Tiles::problem_, Tiles::product_, Tiles::kernels_, Tiles::band_, Tiles::type_;

  BackwardWorker(const BackwardArgs& args, const BackwardLayout<Compute>& layout, const BiasRoute& bias,
                 const Products<Compute>& product)
      : Tiles(args, layout.tiles, product, /*recalls=*/false), at_(layout), tiles_(layout.tiles), bias_(bias) {}

  // Of the units to come.
  void begin_bias(const BiasRoute::Sums<Acc>& sums) { bias_sums_ = sums; }

  void run(const Partition::Item& item) {
    const Partition& cut = at_.cut;
    const int64_t slot = (item.batch * cut.groups + item.group) * cut.chunks + item.chunk;
    dk_ = cut.chunks > 1 ? at_.dk_slots + slot * at_.keys * tiles_.cols : at_.dk;
    dv_ = cut.chunks > 1 ? at_.dv_slots + slot * at_.keys * tiles_.cols_v : at_.dv;
    summed_k_ = summed_v_ = -1;
    const int64_t blocks = at_.n_blocks * item.key_part;
    part_ = item.key_part;
    keys_ = {blocks / cut.key_parts * tiles_.block_n,
             std::min((blocks + at_.n_blocks) / cut.key_parts * tiles_.block_n, problem_.len_k)};
    if (bias_.kind == BiasRoute::kKeys) {
      key_sums_ = at_.key_sums + slot * cut.heads * at_.keys;
      std::fill_n(key_sums_, cut.heads * at_.keys, Acc(0));
    }
    for (int64_t i = item.row_blocks.first; i < item.row_blocks.last; ++i) {
      const int64_t head = item.group * cut.heads + i / cut.m_blocks;
      this->set_head(item.batch, head);
      change_heads(this->head_k_, this->head_v_);
      row_block(i % cut.m_blocks);
    }
    change_heads(-1, -1);
  }

  // dq of one row block, from what the parts of the keys gave.
  void join_parts(int64_t batch, int64_t head, int64_t m_block) {
    this->set_head(batch, head);
    Acc* sums = at_.dq_slot(batch * problem_.heads_q + head, m_block);
    for (int64_t part = 1; part < at_.cut.key_parts; ++part) {
      kernels_.add(sums, sums + part * at_.dq_size(), at_.dq_size());
    }
    const Range queries = queries_of(m_block);
    int index = 0;
    for (int64_t query = queries.first; query < queries.last; query += kPanel, ++index) {
      const Range rows{query, std::min(query + kPanel, queries.last)};
      store_queries({index, static_cast<int>(round_up(rows.size(), kPad)), rows, false}, sums);
    }
  }

 private:
  // Writes what was summed for the heads before, and starts those to come (-1: none).
  void change_heads(int64_t head_k, int64_t head_v) {
    const bool whole = at_.cut.chunks == 1 && !at_.streams;
    if (summed_k_ != head_k) {
      if (whole && summed_k_ >= 0) store_dk(summed_k_, keys_);
      if (problem_.wants_dk && head_k >= 0 && !at_.streams) fresh_k_ = start_sums(dk_, tiles_.cols);
      if (problem_.wants_dq && head_k >= 0 && !in_place()) pack_keys(head_k);
      summed_k_ = head_k;
    }
    if (summed_v_ != head_v) {
      if (whole && summed_v_ >= 0) store_dv(summed_v_, keys_);
      if (problem_.wants_dv && head_v >= 0 && !at_.streams) fresh_v_ = start_sums(dv_, tiles_.cols_v);
      summed_v_ = head_v;
    }
  }

  void store_dk(int64_t head_k, Range keys) const {
    if (!problem_.wants_dk) return;
    store_keys<Compute>(problem_, args_.dk, args_.dk_in_accum, this->batch_, head_k, keys,
                        dk_ + sums_at(keys) * tiles_.cols, tiles_.cols, problem_.head_dim, problem_.scale);
  }
  void store_dv(int64_t head_v, Range keys) const {
    if (!problem_.wants_dv) return;
    store_keys<Compute>(problem_, args_.dv, args_.dv_in_accum, this->batch_, head_v, keys,
                        dv_ + sums_at(keys) * tiles_.cols_v, tiles_.cols_v, problem_.head_dim_v, 1.0);
  }

  // Where the sums of keys lie.
  int64_t sums_at(Range keys) const { return at_.streams ? 0 : keys.first; }

  // Zeros; or true where the first panel of queries sees all keys, so that its products may store instead of adding.
  bool start_sums(Acc* sums, int cols) const {
    const Range first = band_.keys({0, 1}, problem_.len_k),
                last = band_.keys({problem_.len_q - 1, problem_.len_q}, problem_.len_k);
    if (first.size() == problem_.len_k && last.size() == problem_.len_k) return true;
    std::fill_n(sums + keys_.first * cols, (round_up(keys_.last, tiles_.block_n) - keys_.first) * cols, Acc(0));
    return false;
  }

  // K^T as the left operand of dQ^T += K^T dS^T.
  void pack_keys(int64_t head_k) {
    const int d = static_cast<int>(problem_.head_dim);
    for (int64_t key = keys_.first; key < keys_.last; key += tiles_.block_n) {
      for (int64_t part = key; part < std::min(key + tiles_.block_n, keys_.last); part += kPanel) {
        const int rows = static_cast<int>(std::min({int64_t{kPanel}, keys_.last - part, key + tiles_.block_n - part}));
        const Source src = source_at(problem_, args_.fwd.k, type_, this->batch_, head_k, part, 0);
        const Left<Compute> k = staged_rows<Compute>(kernels_, src, rows, d, tiles_.staged);
        kernels_.left_transposed(k.data, static_cast<int>(k.ld), rows, d,
                                 at_.k_transposed + key * tiles_.cols + part - key, tiles_.block_n,
                                 static_cast<int>(round_up(rows, kPad)), tiles_.cols);
      }
    }
  }

  Range queries_of(int64_t m_block) const {
    const int64_t first = m_block * at_.cut.block_m;
    return {first, std::min(first + at_.cut.block_m, problem_.len_q)};
  }

  void row_block(int64_t m_block) {
    const Range queries = queries_of(m_block);
    Panel panels[cpu::Tiles<Compute>::kBackwardM / kPanel];
    int count = 0;
    for (int64_t query = queries.first; query < queries.last; query += kPanel, ++count) {
      panels[count] = this->prepare(count, {query, std::min(query + kPanel, queries.last)});
    }
    const bool joins = at_.cut.key_parts > 1;  // join_parts() writes dq
    if (problem_.wants_dq) {
      dq_ = at_.dq_transposed;
      if (joins) dq_ = at_.dq_slot(this->batch_ * problem_.heads_q + this->head_, m_block) + part_ * at_.dq_size();
      const int64_t before = (int64_t{count} - 1) * tiles_.cols * kPanel;
      std::fill_n(dq_, joins ? at_.dq_size() : before + tiles_.cols * panels[count - 1].width, Acc(0));
    }
    if (problem_.wants_dalibi) std::fill_n(at_.slope, int64_t{count} * kSlopeRows * kPanel, Acc(0));
    const Range seen = band_.keys(queries, problem_.len_k);
    // Tiles outside the band are zeros of dbias; where dk and dv stream, nobody else writes theirs.
    const bool all_bias = bias_.kind == BiasRoute::kTiles, all = all_bias || at_.streams;
    const int64_t first = std::max(keys_.first, all ? 0 : seen.first / tiles_.block_n * tiles_.block_n);
    const int64_t last = all ? keys_.last : std::min(keys_.last, seen.last);
    for (int64_t key = first; key < last; key += tiles_.block_n) {
      const Range keys{key, std::min(key + tiles_.block_n, problem_.len_k)};
      for (int i = 0; i < count; ++i) {
        const Range of_panel = band_.keys(panels[i].queries, problem_.len_k);
        if (of_panel.first < keys.last && keys.first < of_panel.last) {
          // NOTE: only the keys that the panel sees: -10% at 4x12x512x64 causal. Multiples of 32 bound the shapes.
          const Range seen_here{std::max(keys.first, of_panel.first / 32 * 32),
                                std::min(keys.last, round_up(of_panel.last, 32))};
          start_block(keys, all_bias ? keys : seen_here);
          step(panels[i], all_bias ? keys : seen_here);
        } else {
          start_block(keys, {0, 0});
          if (all_bias) {
            std::fill_n(at_.bias_tile, tiles_.block_n * kPanel, Acc(0));
            store_bias(panels[i], keys);
          }
        }
      }
      if (at_.streams) {
        store_dk(this->head_k_, keys);
        store_dv(this->head_v_, keys);
      }
    }
    fresh_k_ = fresh_v_ = false;
    for (int i = 0; problem_.wants_dq && !joins && i < count; ++i) store_queries(panels[i], dq_);
    if (problem_.wants_dalibi) {
      double sum = 0.0;
      for (int i = 0; i < count; ++i) sum += slope_gradient(panels[i]);
      at_.slope_sums[(this->batch_ * problem_.heads_q + this->head_) * at_.cut.m_blocks + m_block] = sum;
    }
  }

  // Where dk and dv stream: the products store, so only what they leave out has to be zeros.
  void start_block(Range keys, Range stored) {
    if (!at_.streams) return;
    fresh_k_ = fresh_v_ = true;
    if (stored.first <= keys.first && stored.last >= keys.last) return;
    if (problem_.wants_dk) std::fill_n(dk_, int64_t{tiles_.block_n} * tiles_.cols, Acc(0));
    if (problem_.wants_dv) std::fill_n(dv_, int64_t{tiles_.block_n} * tiles_.cols_v, Acc(0));
  }

  void step(const Panel& panel, Range keys) {
    const bool takes_bias = bias_.kind == BiasRoute::kTiles || bias_.kind == BiasRoute::kKeys;
    const bool d_scores = problem_.wants_dq || problem_.wants_dk || problem_.wants_dalibi || takes_bias;
    const SlopeSums<Acc> slope = slope_sums(panel);
    Acc* bias_tile = takes_bias ? at_.bias_tile : nullptr;
    const BiasSink sink = takes_bias ? bias_sink(panel, keys) : BiasSink{};
    const int rows = this->evaluate(panel, keys, d_scores, bias_tile, problem_.wants_dalibi ? &slope : nullptr, &sink);
    if (bias_tile != nullptr) store_bias(panel, keys);
    const int width = panel.width;
    const int64_t row = int64_t{panel.index} * kPanel;
    const int64_t in_block = keys.first % tiles_.block_n, key = at_.streams ? in_block : keys.first;
    const int queries = key_rows<Compute>(panel.queries.size());
    if (problem_.wants_dv) {
      add_keys(rows, tiles_.cols_v, queries, tiles_.probs, width, tiles_.d_out_rows + row * tiles_.cols_v,
               dv_ + key * tiles_.cols_v, /*add=*/!(fresh_v_ && panel.index == 0));
    }
    if (problem_.wants_dk) {
      add_keys(rows, tiles_.cols, queries, tiles_.d_scores, width, tiles_.q_rows + row * tiles_.cols,
               dk_ + key * tiles_.cols, /*add=*/!(fresh_k_ && panel.index == 0));
    }
    Acc* dq = dq_ + row * tiles_.cols;
    if (problem_.wants_dq && in_place()) {
      const Source k = source_at(problem_, args_.fwd.k, type_, this->batch_, this->head_k_, keys.first, 0);
      const FewWeights<Operand> weights{tiles_.d_scores_right, 1, width};
      kernels_.few_outputs(weights, static_cast<int>(panel.queries.size()), k, static_cast<int>(keys.size()),
                           static_cast<int>(problem_.head_dim), dq, tiles_.cols, /*add=*/true);
    } else if (problem_.wants_dq) {
      const Operand* k_transposed = at_.k_transposed + (keys.first - in_block) * tiles_.cols + in_block;
      product_(tiles_.cols, width, rows, k_transposed, tiles_.block_n, tiles_.d_scores_right, width, dq, width,
               /*add=*/true);
    }
  }

  // Where dQ += dS K has K in place and rows of queries, and S^T and dP^T are made of dot products.
  bool in_place() const { return this->few_ || this->few_keys_; }

  // dV += P^T dO or dK += dS^T Q, of `cols` columns. NOTE: where either are few, a call of brgemm costs what it saves.
  void add_keys(int keys, int cols, int queries, const Operand* left, int ld, const Operand* right, Acc* sums,
                bool add) const {
    if constexpr (!Compute::kPairs) {
      if (in_place()) return kernels_.product(keys, cols, queries, left, ld, right, cols, sums, cols, add);
    }
    product_(keys, cols, queries, left, ld, right, cols, sums, cols, add);
  }

  // Of a tile; sums over queries have none.
  BiasSink bias_sink(const Panel& panel, Range keys) const {
    if (bias_.kind != BiasRoute::kTiles) return {};
    const int64_t first_head = bias_sums_.group * at_.cut.heads;
    const bool is_first = this->batch_ == bias_sums_.batch && (!bias_.sums_heads || this->head_ == first_head);
    const bool adds = bias_.shared() && !is_first;
    const int64_t query = panel.queries.first, key = keys.first;
    if (bias_sums_.tables == nullptr) {
      return {sink_at(problem_, args_.dbias, kAccElement<Acc>, this->batch_, this->head_, query, key), adds};
    }
    const int64_t table = this->head_ % bias_.heads_of_owner(at_.cut);
    Acc* const to = bias_sums_.tables + (table * problem_.len_q + query) * problem_.len_k + key;
    return {{to, kAccElement<Acc>, problem_.len_k, 1}, adds};
  }

  // dS^T of one tile, in bias_tile.
  void store_bias(const Panel& panel, Range keys) {
    if (bias_.kind == BiasRoute::kKeys) {
      kernels_.add_row_sums(at_.bias_tile, kPanel, static_cast<int>(keys.size()), panel.width,
                            key_sums_ + this->head_ % at_.cut.heads * at_.keys + keys.first);
    } else {
      const BiasSink sink = bias_sink(panel, keys);
      kernels_.store_transposed(at_.bias_tile, kPanel, static_cast<int>(keys.size()),
                                static_cast<int>(panel.queries.size()), static_cast<Acc*>(sink.to.data),
                                sink.to.row_stride, sink.adds);
    }
  }

  SlopeSums<Acc> slope_sums(const Panel& panel) const {
    Acc* sums = at_.slope + int64_t{panel.index} * kSlopeRows * kPanel;
    return {sums, sums + kPanel, sums + 4 * kPanel, sums + 5 * kPanel, 2 * kPanel};
  }

  // Sum of -distance * dS over a panel. The sum of dS over all keys is dlse by definition, and with a sink, of
  // probability p, dlse + p (delta - dlse); what was found instead came from the rounding of delta, which put that much
  // times P into dS, so it is taken out. NOTE: 4x less error.
  double slope_gradient(const Panel& panel) const {
    const SlopeSums<Acc> sums = slope_sums(panel);
    const Acc* d_lse = static_cast<const Acc*>(args_.d_lse);
    const int64_t first = (this->batch_ * problem_.heads_q + this->head_) * problem_.len_q + panel.queries.first;
    const int64_t at = int64_t{panel.index} * kPanel;
    const auto sink = static_cast<double>(sink_of<Acc>(args_.fwd, this->batch_, this->head_, 0));
    double total = 0.0;
    for (int r = 0; r < static_cast<int>(panel.queries.size()); ++r) {
      if (sums.prob[r] == Acc(0)) continue;
      const double d_score = double{sums.d_score[r]} + double{sums.d_score[r + sums.lost]};
      const double gradient = double{sums.gradient[r]} + double{sums.gradient[r + sums.lost]};
      double expected = d_lse != nullptr ? double{d_lse[first + r]} : 0.0;
      if (problem_.has_sinks) {
        const double renorm = tiles_.renormalised[panel.index] ? double{tiles_.renorm[at + r]} : 1.0;
        expected += std::exp(sink - double{tiles_.lse[at + r]}) * renorm * (double{tiles_.delta[at + r]} - expected);
      }
      const double excess = d_score - expected;
      total += gradient + excess * double{sums.distance[r]} / double{sums.prob[r]};
    }
    return total;
  }

  void store_queries(const Panel& panel, const Acc* sums) {
    const Element type = args_.dq_in_accum ? (type_ == Element::kFloat64 ? type_ : Element::kFloat32) : type_;
    const Acc* dq = sums + int64_t{panel.index} * kPanel * tiles_.cols;
    if (!in_place()) {
      kernels_.transpose_acc(dq, panel.width, tiles_.cols, panel.width, at_.dq_rows, tiles_.cols);
      dq = at_.dq_rows;
    }
    kernels_.store(dq, tiles_.cols, static_cast<int>(panel.queries.size()), static_cast<int>(problem_.head_dim),
                   static_cast<Acc>(problem_.scale), nullptr,
                   sink_at(problem_, args_.dq, type, this->batch_, this->head_, panel.queries.first, 0));
  }

  const BackwardLayout<Compute>& at_;
  const BackwardTiles<Compute>& tiles_;
  const BiasRoute& bias_;
  BiasRoute::Sums<Acc> bias_sums_;
  Acc* key_sums_ = nullptr;
  Acc* dk_ = nullptr;
  Acc* dv_ = nullptr;
  Acc* dq_ = nullptr;
  Range keys_{0, 0};  // of the item's part
  int64_t part_ = 0;
  int64_t summed_k_ = -1;
  int64_t summed_v_ = -1;
  bool fresh_k_ = false;  // nothing is in dk_ yet, not even zeros
  bool fresh_v_ = false;
};

// Fewer heads than threads are cut finer: parts of the keys, which share K and V, or shorter blocks of queries. Sums of
// dQ, dK and dV then have another order, so that a batch-invariant call has one item for each group of heads.
template <class Compute>
Partition cut_sweep(const Problem& problem, int64_t threads) {
  const bool may_split = problem.heads_k == problem.heads_v && !problem.batch_invariant;
  const int64_t heads = std::max<int64_t>(problem.batch * problem.heads_q, 1), parts = (threads + heads - 1) / heads;
  int64_t tile_m = Tiles<Compute>::kBackwardM, tile_n = Tiles<Compute>::kBackwardN;
  const bool sums_keys = problem.wants_dbias || problem.wants_dalibi;
  const bool many_keys = problem.len_k > tile_n && (problem.len_q <= kPanel || !problem.causal);
  if (may_split && parts > 1 && many_keys && problem.len_k >= problem.len_q && !sums_keys) {
    Partition cut = make_partition(problem, static_cast<int>(tile_m), 1, /*may_split=*/false, 1);
    cut.key_parts = std::min(parts, (problem.len_k + tile_n - 1) / tile_n);
    cut.items *= cut.key_parts;
    return cut;
  }
  if (may_split && parts > 1) {
    const int64_t blocks = problem.causal ? 2 * parts : parts;
    tile_m = std::min(tile_m, round_up((problem.len_q + blocks - 1) / blocks, kPad));
  }
  return make_partition(problem, static_cast<int>(tile_m), threads, may_split, int64_t{1} << 40);
}

}  // namespace

template <class Compute>
void plan_backward(const Problem& problem, int64_t threads, Choice choice, Plan& plan) {
  if (work_flops(problem, 5) < kSerialFlops) threads = 1;
  BackwardLayout<Compute> layout(problem, cut_sweep<Compute>(problem, threads));
  if (!problem.wants_dbias) threads = std::clamp<int64_t>(layout.cut.items, 1, threads);
  layout.tables = bias_tables<typename Compute::Acc>(problem, threads);
  constexpr int64_t kOperand = sizeof(typename Compute::Operand), kAcc = sizeof(typename Compute::Acc);
  const BackwardTiles<Compute>& tiles = layout.tiles;
  plan.block_m = layout.cut.block_m;
  plan.block_n = tiles.block_n;
  plan.use("s, dp", 2 * plan.block_n * kPanel * kAcc);
  plan.use("p, ds", Compute::kPairs ? 3 * plan.block_n * kPanel * kOperand : 0);
  plan.use("k, v", plan.block_n * (2 * tiles.depth + tiles.depth_v) * kOperand);
  plan.use("q, do", 2 * plan.block_m * (tiles.cols + tiles.cols_v) * kOperand);
  plan.use("dq", plan.block_m * tiles.cols * kAcc);
  plan.use("dk, dv", plan.block_n * (tiles.cols + tiles.cols_v) * kAcc);
  plan.on_chip_limit = kCacheBytes;
  int64_t worker = layout.carve_worker(problem, nullptr);
  if (problem.wants_dbias) worker = std::max(worker, bias_gradient_scratch<Compute>(problem));
  plan.scratch_bytes = threads * worker + layout.carve_shared(problem, nullptr);
  plan.grid = layout.cut.items;
  if (layout.cut.key_parts > 1) {
    plan.splits = static_cast<int>(layout.cut.key_parts);
    plan.split_keys = (layout.n_blocks + plan.splits - 1) / plan.splits * plan.block_n;
  }
  plan.waves = static_cast<double>(plan.grid) / static_cast<double>(threads);
  choice.threads = threads;
  choice.scratch = plan.scratch_bytes;
  choice.set_cut(layout.cut);
  plan.choose(choice);
}

template <class Compute>
void run_backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  const Problem& problem = args.fwd.problem;
  const auto choice = plan.chosen<Choice>();
  const int64_t threads = choice.threads;
  BackwardLayout<Compute> layout(problem, choice.cut(problem));
  layout.tables = bias_tables<typename Compute::Acc>(problem, threads);
  const int64_t shared = layout.carve_shared(problem, workspace);
  const int64_t worker_bytes = (choice.scratch - shared) / threads;
  char* worker_base = static_cast<char*>(workspace) + shared;
  const Products<Compute> product(choice.engine, vector_table().get<Compute>());
  const auto done = [&] { product.release(); };

  const BiasRoute bias(args, layout.cut, threads, layout.tables);

  for_each_item(
      bias.items(layout.cut), threads,
      [&](int64_t item, int64_t worker) {
        BackwardLayout<Compute> own = layout;
        own.carve_worker(problem, worker_base + worker * worker_bytes);
        BackwardWorker<Compute> backward(args, own, bias, product);
        backward.begin_bias(bias.sums_of(problem, layout.cut, item, layout.bias_sums));
        bias.for_each_unit(layout.cut, item, [&](const Partition::Item& unit) { backward.run(unit); });
      },
      done);
  const Partition& cut = layout.cut;
  if (cut.chunks > 1) {
    const int64_t pieces = cut.units < threads ? std::min(threads, layout.n_blocks) : 1;
    const int64_t size = cut.items * layout.keys * (layout.tiles.cols + layout.tiles.cols_v);
    for_each_item(
        cut.units * pieces, size < kSerialSums ? 1 : threads,
        [&](int64_t item, int64_t) {
          const int64_t piece = item % pieces;
          reduce_unit<Compute>(args, layout, item / pieces,
                               {problem.len_k * piece / pieces, problem.len_k * (piece + 1) / pieces});
        },
        [] {});
  }
  if (cut.key_parts > 1 && problem.wants_dq) {
    const int64_t blocks = problem.batch * problem.heads_q * cut.m_blocks;
    for_each_item(
        blocks, blocks * cut.key_parts * layout.dq_size() < kSerialSums ? 1 : threads,
        [&](int64_t block, int64_t worker) {
          BackwardLayout<Compute> own = layout;
          own.carve_worker(problem, worker_base + worker * worker_bytes);
          const int64_t head = block / cut.m_blocks;
          BackwardWorker<Compute>(args, own, bias, product)
              .join_parts(head / problem.heads_q, head % problem.heads_q, block % cut.m_blocks);
        },
        [] {});
  }
  for (int64_t i = 0; problem.wants_dalibi && i < problem.batch * problem.heads_q; ++i) {
    double sum = 0.0;
    for (int64_t m = 0; m < layout.cut.m_blocks; ++m) sum += layout.slope_sums[i * layout.cut.m_blocks + m];
    static_cast<typename Compute::Acc*>(args.dalibi)[i] = static_cast<typename Compute::Acc>(sum);
  }
  if (bias.parts > 1) add_bias_tables<Compute>(args, layout, bias);
  if (bias.kind == BiasRoute::kKeys) reduce_key_sums<Compute>(args, layout, bias);
  if (bias.kind == BiasRoute::kPass) run_bias_gradient<Compute>(args, layout.tiles, product, threads, worker_base);
}

template void plan_backward<ComputeF32>(const Problem&, int64_t, Choice, Plan&);
template void plan_backward<ComputeBf16>(const Problem&, int64_t, Choice, Plan&);
template void plan_backward<ComputeF64>(const Problem&, int64_t, Choice, Plan&);
template void run_backward<ComputeF32>(const BackwardArgs&, const Plan&, void*);
template void run_backward<ComputeBf16>(const BackwardArgs&, const Plan&, void*);
template void run_backward<ComputeF64>(const BackwardArgs&, const Plan&, void*);

}  // namespace flash_ext::cpu
