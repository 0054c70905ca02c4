// Gradient of a bias of any broadcast shape, in a pass of its own.
//
//   dbias[b', h', i', j'] = sum of dS over every (b, h, i, j) that broadcasting maps to it;  over all j: of dlse
//
// An item owns a tile of the *gradient* and walks over all that maps to it in a fixed order, recomputing S and dP: two
// products more than a sweep that scatters, but no scratch of L x S, no atomics, the same bits on every run.
// Called by run_backward after the other gradients. Invariant: every element of dbias is written exactly once.
#include <vector>

#include "kernels/cpu/backward_tiles.h"

namespace flash_ext::cpu {
namespace {

// Keys of one tile of the gradient: several blocks, so that packing Q and dO is worth it.
constexpr int64_t kTileKeys = 512;

// Sizes of the gradient's dimensions: 1 where it is summed.
struct BiasShape {
  int64_t heads, row_tiles, col_tiles;
  bool sums_rows, sums_cols;

  explicit BiasShape(const Problem& problem, const TensorView& dbias) {
    heads = dbias.head_stride == 0 ? 1 : problem.heads_q;
    sums_rows = dbias.row_stride == 0;
    sums_cols = dbias.col_stride == 0;
    row_tiles = sums_rows ? 1 : (problem.len_q + kPanel - 1) / kPanel;
    col_tiles = sums_cols ? 1 : (problem.len_k + kTileKeys - 1) / kTileKeys;
  }
};

template <class Compute>
struct BiasScratch {
  BackwardTiles<Compute> tiles;
  typename Compute::Acc* sums = nullptr;        // [kTileKeys, kPanel]
  typename Compute::Acc* transposed = nullptr;  // the other way round

  explicit BiasScratch(const Problem& problem) : tiles(problem, kPanel) {}

  int64_t carve(const Problem& problem, void* base) {
    Arena arena(base);
    tiles.carve(arena, problem);
    sums = arena.take<typename Compute::Acc>(sum_keys(problem) * kPanel);
    transposed = arena.take<typename Compute::Acc>(sum_keys(problem) * kPanel);
    return arena.used();
  }
  static int64_t sum_keys(const Problem& problem) {
    return std::min<int64_t>(kTileKeys, std::max<int64_t>(round_up(problem.len_k, kPad), kPad));
  }
};

template <class Compute>
class BiasWorker : BackwardTileWorker<Compute> {
 public:
  using Acc = typename Compute::Acc;
  using Tiles = BackwardTileWorker<Compute>;
  using Tiles::args_, Tiles::problem_, Tiles::kernels_, Tiles::band_;

  BiasWorker(const BackwardArgs& args, const BiasScratch<Compute>& scratch, const Products<Compute>& product)
      : Tiles(args, scratch.tiles, product, /*recalls=*/true), at_(scratch), shape_(args.fwd.problem, args.dbias) {}

  // `owner` is the first batch index of those that share the gradient's memory.
  void run(int64_t owner, int64_t head, int64_t row_tile, int64_t col_tile) {
    std::fill_n(at_.sums, BiasScratch<Compute>::sum_keys(problem_) * kPanel, Acc(0));
    const Range rows = shape_.sums_rows ? Range{0, problem_.len_q} : tile_of(row_tile, kPanel, problem_.len_q);
    const Range cols = shape_.sums_cols ? Range{0, problem_.len_k} : tile_of(col_tile, kTileKeys, problem_.len_k);
    double column[kPanel] = {};
    const int64_t place = batch_offset(problem_, args_.dbias, owner);
    for (int64_t b = owner; b < problem_.batch; ++b) {
      if (batch_offset(problem_, args_.dbias, b) != place) continue;
      const int64_t first_head = args_.dbias.head_stride == 0 ? 0 : head;
      const int64_t last_head = args_.dbias.head_stride == 0 ? problem_.heads_q : head + 1;
      for (int64_t h = first_head; h < last_head; ++h) {
        this->set_head(b, h);
        for (int64_t query = rows.first; query < rows.last; query += kPanel) {
          const Range queries{query, std::min(query + kPanel, rows.last)};
          if (shape_.sums_cols) {
            add_d_lse(b, h, queries, column);
          } else {
            add_panel(queries, cols);
          }
        }
      }
    }
    if (shape_.sums_cols) {
      for (int c = 0; c < kPanel; ++c) at_.sums[c] = static_cast<Acc>(column[c]);
    }
    write(owner, head, rows, cols);
  }

 private:
  static Range tile_of(int64_t tile, int64_t size, int64_t length) {
    return {tile * size, std::min((tile + 1) * size, length)};
  }

  void add_panel(Range queries, Range cols) {
    const Range seen = band_.keys(queries, problem_.len_k);
    if (seen.first >= cols.last || cols.first >= seen.last) return;
    const Panel panel = this->prepare(0, queries);
    for (int64_t key = cols.first; key < cols.last; key += at_.tiles.block_n) {
      const Range keys{key, std::min(key + at_.tiles.block_n, cols.last)};
      if (seen.first >= keys.last || keys.first >= seen.last) continue;
      Acc* sums = at_.sums + (key - cols.first) * kPanel;
      this->evaluate(panel, keys, /*d_scores=*/true, sums, nullptr);
    }
  }

  // A bias that is the same for all keys moves lse and nothing else: the sum of dS over the keys is dlse, exactly, and
  // with a sink, of probability p, dlse + p (rowsum(dO O) - dlse). It is NaN where lse is, and where delta is NaN or
  // infinite.
  void add_d_lse(int64_t b, int64_t h, Range queries, double (&column)[kPanel]) {
    const int64_t first = (b * problem_.heads_q + h) * problem_.len_q;
    const Acc* lse = static_cast<const Acc*>(args_.fwd.lse) + first;
    const Acc* d_lse = static_cast<const Acc*>(args_.d_lse) + first;
    Acc delta[kPanel] = {};
    if (args_.d_out) {
      const Panel panel{0, kPanel, queries, false};
      Acc* d_out = nullptr;
      if constexpr (Compute::kPairs) {
        d_out = at_.tiles.d_out_acc;
      } else {
        d_out = at_.tiles.d_out_rows;
      }
      this->load_rows_acc(args_.fwd.out, panel, at_.tiles.out_acc);
      this->load_rows_acc(args_.d_out, panel, d_out);
      kernels_.dot_rows(d_out, at_.tiles.out_acc, at_.tiles.cols_v, static_cast<int>(queries.size()), at_.tiles.cols_v,
                        delta);
    }
    for (int64_t i = queries.first; i < queries.last; ++i) {
      if (lse[i] == OnlineSoftmax<Acc>::kEmpty) continue;
      const double poison = 0.0 * static_cast<double>(lse[i]) + 0.0 * static_cast<double>(delta[i - queries.first]);
      const double of_lse = args_.d_lse != nullptr ? static_cast<double>(d_lse[i]) : 0.0;
      const double of_sink = static_cast<double>(probability(sink_of<Acc>(args_.fwd, b, h, i), lse[i]));
      column[i - queries.first] +=
          poison + of_lse + (of_sink > 0.0 ? of_sink * (static_cast<double>(delta[i - queries.first]) - of_lse) : 0.0);
    }
  }

  // Sums what is left to sum inside the tile.
  void write(int64_t owner, int64_t head, Range rows, Range cols) {
    const Element type = problem_.dtype == DType::kFloat64 ? Element::kFloat64 : Element::kFloat32;
    const int keys = static_cast<int>(shape_.sums_cols ? kPad : round_up(cols.size(), kPad));
    const int keys_out = static_cast<int>(shape_.sums_cols ? 1 : cols.size());
    int queries_out = static_cast<int>(rows.size());
    if (shape_.sums_rows) {
      for (int r = 0; r < keys_out; ++r) {
        double sum = 0.0;
        for (int c = 0; c < kPanel; ++c) sum += at_.sums[r * kPanel + c];
        at_.sums[r * kPanel] = static_cast<Acc>(sum);
      }
      queries_out = 1;
    }
    kernels_.transpose_acc(at_.sums, kPanel, keys, kPanel, at_.transposed, keys);
    kernels_.store(at_.transposed, keys, queries_out, keys_out, Acc(1), nullptr,
                   sink_at(problem_, args_.dbias, type, owner, head, shape_.sums_rows ? 0 : rows.first,
                           shape_.sums_cols ? 0 : cols.first));
  }

  const BiasScratch<Compute>& at_;
  const BiasShape shape_;
};

}  // namespace

template <class Compute>
int64_t bias_gradient_scratch(const Problem& problem) {
  return BiasScratch<Compute>(problem).carve(problem, nullptr);
}

template <class Compute>
void run_bias_gradient(const BackwardArgs& args, const BackwardTiles<Compute>& sweep, const Products<Compute>& product,
                       int64_t threads, void* workspace) {
  const Problem& problem = args.fwd.problem;
  const BiasShape shape(problem, args.dbias);
  std::vector<int64_t> owners, places;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const int64_t place = batch_offset(problem, args.dbias, b);
    if (std::find(places.begin(), places.end(), place) != places.end()) continue;
    owners.push_back(b);
    places.push_back(place);
  }
  const int64_t worker_bytes = bias_gradient_scratch<Compute>(problem);
  for_each_item(
      static_cast<int64_t>(owners.size()) * shape.heads * shape.row_tiles * shape.col_tiles, threads,
      [&](int64_t item, int64_t worker) {
        BiasScratch<Compute> scratch(problem);
        scratch.carve(problem, static_cast<char*>(workspace) + worker * worker_bytes);
        scratch.tiles.all_delta = sweep.all_delta;
        scratch.tiles.all_renorm = sweep.all_renorm;
        const int64_t col_tile = item % shape.col_tiles;
        const int64_t row_tile = item / shape.col_tiles % shape.row_tiles;
        const int64_t head = item / shape.col_tiles / shape.row_tiles % shape.heads;
        const int64_t owner = item / shape.col_tiles / shape.row_tiles / shape.heads;
        BiasWorker<Compute>(args, scratch, product).run(owners[owner], head, row_tile, col_tile);
      },
      [&] { product.release(); });
}

template int64_t bias_gradient_scratch<ComputeF32>(const Problem&);
template int64_t bias_gradient_scratch<ComputeBf16>(const Problem&);
template int64_t bias_gradient_scratch<ComputeF64>(const Problem&);
template void run_bias_gradient<ComputeF32>(const BackwardArgs&, const BackwardTiles<ComputeF32>&,
                                            const Products<ComputeF32>&, int64_t, void*);
template void run_bias_gradient<ComputeBf16>(const BackwardArgs&, const BackwardTiles<ComputeBf16>&,
                                             const Products<ComputeBf16>&, int64_t, void*);
template void run_bias_gradient<ComputeF64>(const BackwardArgs&, const BackwardTiles<ComputeF64>&,
                                            const Products<ComputeF64>&, int64_t, void*);

}  // namespace flash_ext::cpu
