// What both backward passes are made of: operands of a panel of queries, and S^T, dP^T -> P^T, dS^T of one tile.
//
//   S^T = K Q^T    dP^T = V dO^T    P^T = e^(scale S^T - lse)    dS^T = P^T (dP^T - delta)
//   delta = rowsum(dO O) - dlse, or rowsum(P dP) - dlse where renormalise() finds that O and lse lost too much
//
// Tiles hold keys as rows and queries as columns, so lse and delta lie along the vectors, and so dV += P^T dO,
// dK += dS^T Q and dQ^T += K^T dS^T read what was written without a transpose. Called by backward.cpp and
// bias_gradient.cpp. Invariant: a query without keys has lse = +inf, delta = 0 and zero rows of Q and dO, so it
// contributes exactly nothing; keys and queries of the padding likewise.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/online_softmax.h"
#include "kernels/cpu/backward_layout.h"
#include "kernels/cpu/product.h"

namespace flash_ext::cpu {

// One panel: queries [first, last) and their padded number. exact: all keys that it sees lie in one block.
struct Panel {
  int index;
  int width;
  Range queries;
  bool exact;
};

// Where a tile of the gradient of a bias goes, [queries, keys], and whether it is added there.
struct BiasSink {
  Sink to{nullptr, Element::kFloat32, 0, 0};
  bool adds = false;
};

template <class Compute>
class BackwardTileWorker {
 public:
  using Operand = typename Compute::Operand;
  using Acc = typename Compute::Acc;

  BackwardTileWorker(const BackwardArgs& args, const BackwardTiles<Compute>& tiles, const Products<Compute>& product,
                     bool recalls)
      : args_(args),
        problem_(args.fwd.problem),
        at_(tiles),
        product_(product),
        kernels_(vector_table().get<Compute>()),
        band_(make_band(args.fwd.problem)),
        type_(element_of(args.fwd.problem.dtype)),
        general_(ScoreInputLoader<Compute>::needed(args.fwd.problem)),
        recalls_(recalls),
        few_(few_queries<Compute>(args.fwd)),
        few_keys_(!few_ && !Compute::kPairs && few_keys(args.fwd)) {
    if (problem_.dropout_p > 0.0) {
      dropout_ = make_dropout(args.fwd.rng_state[0], args.fwd.rng_state[1], problem_.dropout_p);
    }
  }

  void set_head(int64_t batch, int64_t head) {
    batch_ = batch;
    head_ = head;
    head_k_ = head / (problem_.heads_q / problem_.heads_k);
    head_v_ = head / (problem_.heads_q / problem_.heads_v);
  }

  // Q and dO as right operands both ways, lse and delta.
  Panel prepare(int index, Range queries) {
    const int rows = static_cast<int>(queries.size());
    const Range seen = band_.keys(queries, problem_.len_k);
    const bool one_block = !seen.empty() && seen.first / at_.block_n == (seen.last - 1) / at_.block_n;
    const Panel panel{index, static_cast<int>(round_up(rows, kPad)), queries, one_block};
    const int d = static_cast<int>(problem_.head_dim), d_v = static_cast<int>(problem_.head_dim_v);
    Acc* lse = at_.lse + index * kPanel;
    Acc* delta = at_.delta + index * kPanel;
    const int64_t first = first_row(panel);
    bool any_empty = false, any_lossy = false;
    for (int r = 0; r < panel.width; ++r) {
      lse[r] = r < rows ? static_cast<const Acc*>(args_.fwd.lse)[first + r] : OnlineSoftmax<Acc>::kEmpty;
      any_empty |= r < rows && lse[r] == OnlineSoftmax<Acc>::kEmpty;
      any_lossy |= problem_.constant_lse ? renormalises_constant(lse[r]) : lse_is_lossy(lse[r]);
      if (lse[r] == OnlineSoftmax<Acc>::kEmpty) lse[r] = std::numeric_limits<Acc>::infinity();
    }
    const int64_t panel_row = int64_t{index} * kPanel;
    load_right(args_.fwd.q, panel, d, any_empty, at_.q_transposed + panel_row * at_.depth,
               at_.q_rows + panel_row * at_.cols, at_.cols, at_.few_q);
    Operand* d_out_rows = at_.d_out_rows + panel_row * at_.cols_v;
    load_right(args_.d_out, panel, d_v, any_empty, at_.d_out_transposed + panel_row * at_.depth_v, d_out_rows,
               at_.cols_v, at_.few_d_out);
    if (panel.exact) {
      std::fill_n(delta, panel.width, Acc(0));  // normalise() finds it
      at_.renormalised[index] = false;
      return panel;
    }
    if (args_.d_out && !problem_.constant_lse) {
      load_rows_acc(args_.fwd.out, panel, at_.out_acc);
      if constexpr (Compute::kPairs) {
        load_rows_acc(args_.d_out, panel, at_.d_out_acc);
        kernels_.dot_rows(at_.d_out_acc, at_.out_acc, at_.cols_v, rows, at_.cols_v, delta);
      } else {
        kernels_.dot_rows(d_out_rows, at_.out_acc, at_.cols_v, rows, at_.cols_v, delta);
      }
      any_lossy |= cancels(panel);
    } else {  // what out (and, without dO, V) holds takes no part
      std::fill_n(delta, rows, Acc(0));
    }
    for (int r = 0; r < panel.width; ++r) {
      if (r >= rows || is_empty(lse[r])) delta[r] = Acc(0);
    }
    at_.renormalised[index] = any_lossy;
    if (at_.renormalised[index]) {
      if (recalls_) {
        recall(panel);
      } else {
        renormalise(panel);
      }
    }
    return panel;
  }

  // P^T (at_.probs) and, with d_scores, dS^T (at_.d_scores, d_scores_right) of keys x panel; leading dimension
  // panel.width. Only the keys of one block. Returns the number of keys, padded by key_rows().
  // The gradient of the bias is added to d_bias, or goes to `sink` if that is there and can take it at once: d_bias
  // becomes null then. Else d_bias is only stored, for the caller.
  int evaluate(const Panel& panel, Range keys, bool d_scores, Acc*& d_bias, const SlopeSums<Acc>* slope,
               const BiasSink* sink = nullptr) {
    ScoreInputs<Acc> inputs;
    TileDiagonals band;
    const bool in_place =
        has_bias_in_place(panel, keys) && (d_bias == nullptr || (sink != nullptr && sink->to.col_stride == 1));
    GradientTile<Compute> tile = score_tile(panel, keys, inputs, band, in_place);
    if (in_place && d_bias != nullptr) {
      tile.bias_sink = sink->to;
      tile.adds_d_bias = sink->adds;
      d_bias = nullptr;
    }
    if (at_.renormalised[panel.index]) tile.renorm = at_.renorm + panel.index * kPanel;
    if (d_scores) {
      d_prob_tile(panel, keys, tile);
      tile.d_scores = at_.d_scores;
      tile.d_scores_right = at_.d_scores_right;
      tile.d_bias = d_bias;
      tile.ld_d_bias = kPanel;
      if (d_bias != nullptr) tile.adds_d_bias = sink == nullptr;
      tile.slope = slope;
    }
    keep_tile(panel, keys, tile);
    if (panel.exact) normalise(panel, tile);
    tile.probs = at_.probs;
    kernels_.gradient(tile);
    return tile.rows;
  }

 protected:
  static bool is_empty(Acc lse) { return lse == std::numeric_limits<Acc>::infinity(); }

  Source panel_of(const TensorView& view, const Panel& panel) const {
    return source_at(problem_, view, type_, batch_, head_, panel.queries.first, 0);
  }

  // Both right operands of a panel of `view`, or its rows alone where few_ holds; absent: zeros.
  void load_right(const TensorView& view, const Panel& panel, int d, bool any_empty, Operand* transposed,
                  Operand* rows_out, int cols, Operand* few) {
    const int rows = static_cast<int>(panel.queries.size());
    const int valid = view ? rows : 0;
    const Source src = view ? panel_of(view, panel) : Source{};
    const auto clear_empty = [&](Operand* tile, int ld) {
      for (int r = 0; any_empty && r < rows; ++r) {
        if (is_empty(at_.lse[panel.index * kPanel + r])) std::fill_n(tile + int64_t{r} * ld, d, Operand(0));
      }
    };
    if constexpr (Compute::kPairs) {
      Left<Compute> tile{at_.staged, staged_ld(d)};
      if (few_ || any_empty || !view) {
        if (few_) tile.data = few;
        Operand* to = few_ ? few : at_.staged;
        kernels_.load(src, valid, d, to, staged_ld(d), rows, staged_ld(d));
        clear_empty(to, staged_ld(d));
      } else {
        tile = staged_rows<Compute>(kernels_, src, rows, d, at_.staged);
      }
      const int ld = static_cast<int>(tile.ld);
      if (!few_) kernels_.right_transposed(tile.data, ld, rows, d, transposed, panel.width, panel.width);
      kernels_.right_operand(tile.data, ld, rows, cols, rows_out, panel.width);
    } else {
      kernels_.load(src, valid, d, rows_out, cols, round_rows(rows), cols);
      clear_empty(rows_out, cols);
      if (!few_ && !few_keys_) kernels_.right_transposed(rows_out, cols, rows, d, transposed, panel.width, panel.width);
    }
  }

  // Rows of out or d_out.
  void load_rows_acc(const TensorView& view, const Panel& panel, Acc* dst) {
    const int rows = static_cast<int>(panel.queries.size()), d_v = static_cast<int>(problem_.head_dim_v);
    kernels_.load_acc(view ? panel_of(view, panel) : Source{}, view ? rows : 0, d_v, dst, at_.cols_v, rows, at_.cols_v);
  }

  // Rows of K or V times a panel of Q^T or dO^T.
  void product_with(int rows, int depth, const Left<Compute>& left, const Operand* right, const Panel& panel, Acc* to) {
    right += int64_t{panel.index} * kPanel * depth;
    if (sums_by_tree<Compute>(problem_)) {
      product_.by_tree(rows, panel.width, depth, left.data, left.ld, right, panel.width, to, panel.width);
    } else {
      product_.by_parts(rows, panel.width, depth, left.data, left.ld, right, panel.width, to, panel.width);
    }
  }

  // The same where few_ or few_keys_ holds, with `rows_of` the panel of Q or dO, [queries][ld]: what is few is read as
  // a small matrix, and the other lies where it is.
  void few_product(const Operand* rows_of, int ld, const Source& keys, int valid, int d, const Panel& panel,
                   Operand* scratch, Acc* to) {
    const int queries = static_cast<int>(panel.queries.size());
    if (few_) {
      kernels_.few_scores(rows_of, ld, queries, keys, valid, d, to, panel.width, /*transposed=*/true);
      return;
    }
    const int ld_keys = staged_ld(d);
    kernels_.load(keys, valid, d, scratch, ld_keys, valid, ld_keys);
    rows_of += int64_t{panel.index} * kPanel * ld;
    kernels_.few_scores(scratch, ld_keys, valid, {rows_of, kNative<Compute>, ld, 1}, queries, d, to, panel.width,
                        /*transposed=*/false);
    // Queries of the padding: P is 0 whatever they hold, but not if that is a NaN.
    for (int key = 0; key < valid; ++key)
      std::fill(to + key * panel.width + queries, to + (key + 1) * panel.width, Acc(0));
  }

  // S^T of a tile in at_.scores, and all that turns it into probabilities.
  GradientTile<Compute> score_tile(const Panel& panel, Range keys, ScoreInputs<Acc>& inputs, TileDiagonals& band,
                                   bool bias_in_place = false) {
    const int valid = static_cast<int>(keys.size());
    const bool in_place = few_ || few_keys_;
    const int rows = in_place && !Compute::kPairs ? valid : key_rows<Compute>(valid);
    const int d = static_cast<int>(problem_.head_dim);
    const Source k = source_at(problem_, args_.fwd.k, type_, batch_, head_k_, keys.first, 0);
    if (in_place) {
      few_product(Compute::kPairs ? at_.few_q : at_.q_rows, Compute::kPairs ? staged_ld(d) : at_.cols, k, valid, d,
                  panel, at_.k_left, at_.scores);
    } else {
      const int read = product_rows<Compute>(valid);
      product_with(read, at_.depth, left_rows<Compute>(kernels_, k, valid, read, d, at_.k_left), at_.q_transposed,
                   panel, at_.scores);
    }
    GradientTile<Compute> tile;
    tile.scores = at_.scores;
    tile.ld = tile.cols = panel.width;
    tile.rows = rows;
    tile.scale = static_cast<Acc>(problem_.scale);
    tile.lse = at_.lse + panel.index * kPanel;
    tile.delta = at_.delta + panel.index * kPanel;
    tile.has_empty = std::any_of(tile.lse, tile.lse + panel.width, is_empty);
    if (valid < rows || band_.is_boundary(panel.queries, keys)) {
      band = tile_band_transposed(band_, panel.queries.first, keys.first, valid, panel.width);
      tile.band = &band;
    }
    if (bias_in_place) {
      tile.bias = bias_at(panel, keys);
    } else if (general_) {
      inputs = at_.inputs.load(kernels_, args_.fwd, batch_, head_, panel.queries, keys, /*transposed=*/true);
      tile.inputs = &inputs;
    }
    return tile;
  }

  Source bias_at(const Panel& panel, Range keys) const {
    const Element type = element_of(problem_.bias_dtype);
    return source_at(problem_, args_.fwd.bias, type, batch_, head_, panel.queries.first, keys.first);
  }

  // Whether the tile's scores are changed by a bias alone, which the kernel can read as it lies.
  bool has_bias_in_place(const Panel& panel, Range keys) const {
    const bool is_alone = problem_.has_bias && !problem_.has_mask && !problem_.has_alibi && problem_.softcap == 0.0 &&
                          problem_.dropout_p == 0.0;
    if (!is_alone || panel.exact || at_.renormalised[panel.index] || few_ || few_keys_) return false;
    const TensorView& bias = args_.fwd.bias;
    const bool is_double = problem_.dtype == DType::kFloat64;
    return bias.col_stride == 1 && bias.row_stride != 0 && (problem_.bias_dtype == DType::kFloat64) == is_double &&
           panel.width == panel.queries.size() && keys.size() % kPad == 0;
  }

  // dP^T of a tile in at_.d_probs, before dropout.
  void d_prob_tile(const Panel& panel, Range keys, GradientTile<Compute>& tile) {
    const int valid = static_cast<int>(keys.size()), d_v = static_cast<int>(problem_.head_dim_v);
    const Source v = source_at(problem_, args_.fwd.v, type_, batch_, head_v_, keys.first, 0);
    if (!args_.d_out) {  // what V holds takes no part
      std::fill_n(at_.d_probs, int64_t{tile.rows} * panel.width, Acc(0));
    } else if (few_ || few_keys_) {
      few_product(Compute::kPairs ? at_.few_d_out : at_.d_out_rows, Compute::kPairs ? staged_ld(d_v) : at_.cols_v, v,
                  valid, d_v, panel, at_.v_left, at_.d_probs);
    } else {
      const int read = product_rows<Compute>(valid);
      product_with(read, at_.depth_v, left_rows<Compute>(kernels_, v, valid, read, d_v, at_.v_left),
                   at_.d_out_transposed, panel, at_.d_probs);
    }
    tile.d_probs = at_.d_probs;
    if (args_.d_lse != nullptr) tile.d_lse = d_lse_of(panel);
  }

  void keep_tile(const Panel& panel, Range keys, GradientTile<Compute>& tile) {
    if (at_.keep == nullptr) return;
    const DropoutPlace& place = args_.fwd.dropout_place;
    kernels_.keep_tile(dropout_, place.bh(batch_, batch_ * problem_.heads_q + head_), place.query(panel.queries.first),
                       place.key(keys.first), panel.width, static_cast<int>(round_up(tile.rows, kPad)),
                       /*transposed=*/true, at_.keep, panel.width);
    tile.keep = at_.keep;
    tile.keep_scale = static_cast<Acc>(dropout_.scale);
  }

  // Whether what lse lost to rounding is a visible factor of P: over 1e-6 of a fp32 result, or all of log(sum).
  bool lse_is_lossy(Acc lse) const {
    if (type_ < Element::kFloat32) return needs_renormalisation(lse);
    return std::abs(lse) > Acc(16) && lse != OnlineSoftmax<Acc>::kEmpty;
  }

  // Whether O of some query is nearly as long as the rows of V: its P is concentrated on a few keys, or V is mostly its
  // mean. Then dP hardly differs from delta, and dS = P (dP - delta) is what their independent roundings leave.
  bool cancels(const Panel& panel) {
    Acc out_squared[kPanel];
    const int rows = static_cast<int>(panel.queries.size());
    kernels_.dot_rows(at_.out_acc, at_.out_acc, at_.cols_v, rows, at_.cols_v, out_squared);
    if (batch_ != renormalised_batch_ || head_v_ != renormalised_head_) {
      renormalised_batch_ = batch_;
      renormalised_head_ = head_v_;
      value_squared_ = mean_value_squared();
    }
    return *std::max_element(out_squared, out_squared + rows) > Acc(0.2) * value_squared_;
  }

  // The mean squared length of V's rows, from up to 256 of them. out_acc serves as scratch.
  Acc mean_value_squared() {
    const int64_t step = (problem_.len_k + 255) / 256;
    const int count = static_cast<int>((problem_.len_k + step - 1) / step);
    Source src = source_at(problem_, args_.fwd.v, type_, batch_, head_v_, 0, 0);
    src.row_stride *= step;
    Acc sum = 0;
    for (int first = 0; first < count; first += kPanel) {
      const int rows = std::min(kPanel, count - first);
      Acc squared[kPanel];
      kernels_.load_acc(src, rows, static_cast<int>(problem_.head_dim_v), at_.out_acc, at_.cols_v, rows, at_.cols_v);
      kernels_.dot_rows(at_.out_acc, at_.out_acc, at_.cols_v, rows, at_.cols_v, squared);
      for (int r = 0; r < rows; ++r) sum += squared[r];
      src.data = static_cast<const char*>(src.data) + kPanel * src.row_stride * element_size(type_);
    }
    return sum / static_cast<Acc>(count);
  }

  // P is divided by its own sum and delta is rowsum(P dP), as eager attention has them, from one tile that holds all
  // keys of its queries. NOTE: without it, a query that sees one key or two gets dS as the difference of two
  // independent roundings: 4x the error of eager fp32 attention.
  void normalise(const Panel& panel, GradientTile<Compute>& tile) {
    Acc sums[4][kPanel] = {};
    if (problem_.softcap == 0.0 && tile.slope == nullptr) tile.raw_probs = at_.scores;
    kernels_.sum_probs(tile, sums[0]);
    finish_renormalise(panel, sums);
    tile.renorm = at_.renorm + panel.index * kPanel;
  }

  // The same over all blocks of keys, for two products more. NOTE: inputs of mean 8 had 6x the error of eager fp32
  // attention without it, steep ALiBi slopes 2.3x; a half row that sees one key has dS = 0 with it, as eager has.
  void renormalise(const Panel& panel) {
    Acc sums[4][kPanel] = {};
    const Range seen = band_.keys(panel.queries, problem_.len_k);
    for (int64_t key = seen.first / at_.block_n * at_.block_n; key < seen.last; key += at_.block_n) {
      const Range keys{key, std::min(key + at_.block_n, problem_.len_k)};
      ScoreInputs<Acc> inputs;
      TileDiagonals band;
      GradientTile<Compute> tile = score_tile(panel, keys, inputs, band);
      d_prob_tile(panel, keys, tile);
      keep_tile(panel, keys, tile);
      kernels_.sum_probs(tile, sums[0]);
    }
    finish_renormalise(panel, sums);
  }

  // sums: P and P dP of each query, and what each lost to rounding.
  void finish_renormalise(const Panel& panel, const Acc (&sums)[4][kPanel]) {
    Acc* renorm = at_.renorm + panel.index * kPanel;
    Acc* delta = at_.delta + panel.index * kPanel;
    const Acc* lse = at_.lse + panel.index * kPanel;
    const int64_t first = first_row(panel);
    const Acc sink = sink_of<Acc>(args_.fwd, batch_, head_, 0);
    for (int r = 0; r < panel.width; ++r) {
      const Acc of_sink = problem_.has_sinks ? std::exp(sink - lse[r]) : Acc(0);
      const Acc sum = sums[0][r] + sums[2][r] + of_sink;
      const bool keeps_sum = problem_.constant_lse && !renormalises_constant(lse[r]);
      renorm[r] = is_empty(lse[r]) || keeps_sum ? Acc(1) : Acc(1) / sum;
      if (is_empty(lse[r]) || problem_.constant_lse) continue;
      // With the remainder of the division it is rounded once, and of one key it is its dP, bit for bit.
      delta[r] = sums[1][r] / sum;
      if (std::isfinite(delta[r])) delta[r] += (std::fma(-delta[r], sum, sums[1][r]) + sums[3][r]) / sum;
    }
    if (at_.all_delta == nullptr) return;
    std::copy_n(renorm, panel.queries.size(), at_.all_renorm + first);
    std::copy_n(delta, panel.queries.size(), at_.all_delta + first);
  }

  // What the sweep measured, for the pass after it.
  void recall(const Panel& panel) {
    std::copy_n(at_.all_renorm + first_row(panel), panel.queries.size(), at_.renorm + panel.index * kPanel);
    std::copy_n(at_.all_delta + first_row(panel), panel.queries.size(), at_.delta + panel.index * kPanel);
  }

  // Of the panel, zeros in the padding.
  const Acc* d_lse_of(const Panel& panel) {
    const Acc* from = static_cast<const Acc*>(args_.d_lse) + first_row(panel);
    std::fill(std::copy_n(from, panel.queries.size(), d_lse_), d_lse_ + kPanel, Acc(0));
    return d_lse_;
  }

  // Of the panel, in [batch, heads_q, len_q].
  int64_t first_row(const Panel& panel) const {
    return (batch_ * problem_.heads_q + head_) * problem_.len_q + panel.queries.first;
  }

  const BackwardArgs& args_;
  const Problem& problem_;
  const BackwardTiles<Compute>& at_;
  const Products<Compute>& product_;
  const VectorKernels<Compute>& kernels_;
  const Band band_;
  const Element type_;
  const bool general_;
  const bool recalls_;
  const bool few_;
  const bool few_keys_;
  Dropout dropout_;
  int64_t batch_ = 0;
  int64_t head_ = 0;
  int64_t head_k_ = 0;
  int64_t head_v_ = 0;
  int64_t renormalised_batch_ = -1;
  int64_t renormalised_head_ = -1;
  Acc value_squared_ = 0;
  Acc d_lse_[kPanel];
};

// The bias gradient's own pass (bias_gradient.cpp); `workspace` holds bias_gradient_scratch() bytes a worker.
template <class Compute>
int64_t bias_gradient_scratch(const Problem& problem);
template <class Compute>
void run_bias_gradient(const BackwardArgs& args, const BackwardTiles<Compute>& sweep, const Products<Compute>& product,
                       int64_t threads, void* workspace);

}  // namespace flash_ext::cpu
