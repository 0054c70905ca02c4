// The equations, per block of queries (rows i) and all keys that it sees (columns j); o is the elementwise product:
//   A = scale q k^T      C = c tanh(A / c)      S = C + bias + slope R, R = -|i + offset - j|      P = softmax(S)
//   out = (P o Z) v      Z = keep / (1 - p)     lse = log sum exp S
// A sink is one more column of S, of a key whose value is 0.
// backward, with G = grad_out:
//   dP = (G v^T) o Z     delta = rowsum(P o dP) - grad_lse     dS = P o (dP - delta)     dA = dS o C'(A)
//   dq = scale dA k      dk = scale dA^T q      dv = (P o Z)^T G      dbias = dS      dslope = sum dS o R
// The derivative of backward is derived the same way, see double_backward.
#include "torch/chunked.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/band.h"
#include "torch/checks.h"
#include "torch/packed.h"
#include "torch/problem.h"

namespace flash_ext::chunked {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Scores of one block, over all heads: 64 MiB in float32.
constexpr int64_t kBlockElements = int64_t{1} << 24;

int64_t to_int(const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); }

// A part of [.., rows, cols] along one dimension; a broadcast dimension stays as it is.
Tensor part(const Tensor& tensor, int64_t dim, Range range) {
  if (!tensor.defined() || tensor.dim() < -dim || tensor.sym_size(dim) == 1) return tensor;
  return tensor.narrow_symint(dim, range.first, range.size());
}

// Adds to a sum that may not have begun.
void accumulate(Tensor& sum, const Tensor& term) { sum = sum.defined() ? sum + term : term; }

// What one block of queries computes on the way to its probabilities.
struct Block {
  Range rows, cols;
  Tensor q;            // (.., Hq, l, E)
  Tensor tanh;         // softcap only: tanh(A / c)
  Tensor distance;     // ALiBi only: R
  Tensor probability;  // P
  Tensor lse;          // (.., Hq, l, 1)
  Tensor of_sink;      // sinks only: P of the sink, (.., Hq, l, 1)
  Tensor kept;         // dropout only: Z
  Tensor hidden;       // pairs that the band or the mask removes, and rows without keys
};

// Of rows that see no key, what to_bias asks for.
Block without_keys(Range rows, int64_t len_k) {
  Block block;
  block.rows = rows;
  block.cols = {0, len_k};
  return block;
}

class Composite {
 public:
  // padding: of packed sequences, whose call padded is `in`; else null.
  Composite(const Inputs& in, const Tensor& rng_state, const Options& options, const packed::Padding* padding,
            int64_t first_batch = 0)
      : options_(options),
        first_batch_(first_batch),
        rng_state_(rng_state),
        in_(in),
        padding_(padding),
        shape_(check_call<c10::SymInt>(in, options)) {
    dtype_ = accumulate_type(in.query.scalar_type());
    len_q = to_int(shape_.len_q);
    len_k = to_int(shape_.len_k);
    heads_q_ = to_int(shape_.heads_q);
    heads_k = to_int(shape_.heads_k);
    heads_v = to_int(shape_.heads_v);
    scale = scale_of(options, to_int(shape_.head_dim));
    Problem problem;
    problem.len_q = len_q;
    problem.len_k = len_k;
    problem.causal = options.causal;
    problem.bottom_right = options.bottom_right && padding == nullptr;
    problem.window_left = options.window_left.value_or(kUnbounded);
    problem.window_right = options.window_right.value_or(kUnbounded);
    band_ = make_band(problem);
    offset_ = problem.bottom_right ? len_k - len_q : 0;
    int64_t rows_of_heads = heads_q_;
    for (const auto& size : shape_.batch) rows_of_heads *= to_int(size);
    flat_heads_ = rows_of_heads;
    block_ = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, rows_of_heads * len_k));

    k = with_heads(in.key).to(dtype_);
    v = with_heads(in.value).to(dtype_);
  }

  std::vector<Range> row_blocks() const {
    std::vector<Range> blocks;
    for (int64_t i = 0; i < len_q; i += block_) blocks.push_back({i, std::min(i + block_, len_q)});
    return blocks;
  }

  // Keys that the rows see; empty: the rows attend to nothing.
  Range columns(Range rows) const {
    const bool every = padding_ != nullptr && options_.bottom_right;  // the diagonal lies elsewhere in each sequence
    return every ? Range{0, len_k} : band_.keys(rows, len_k);
  }

  // constant_lse: of all rows, which takes the place of the log of a row's own sum.
  Block block(Range rows, Range cols, const Tensor& constant_lse = {}) const {
    Block b;
    b.rows = rows;
    b.cols = cols;
    b.q = rows_of(in_.query, rows);
    Tensor scores = times_transposed(b.q, keys(cols), heads_k) * scale;
    if (options_.softcap > 0) {
      b.tanh = (scores / options_.softcap).tanh();
      scores = b.tanh * options_.softcap;
    }
    if (in_.bias.defined()) scores = scores + part(part(in_.bias, -2, rows), -1, cols).to(dtype_);
    const auto index = in_.query.options().dtype(at::kLong).requires_grad(false);
    const Tensor i = at::arange(rows.first, rows.last, index).unsqueeze(-1);
    const Tensor j = at::arange(cols.first, cols.last, index);
    if (in_.alibi_slopes.defined()) {
      b.distance = -(from_diagonal(i, j) - offset_).abs().to(dtype_);
      scores = scores + in_.alibi_slopes.to(dtype_).unsqueeze(-1).unsqueeze(-1) * b.distance;
    }
    // The place where masks are applied: the band, then the bool mask.
    const auto hide = [&](const Tensor& pairs) {
      scores = scores.masked_fill(pairs, -kInfinity);
      b.hidden = b.hidden.defined() ? b.hidden.logical_or(pairs) : pairs;
    };
    if (!band_.unbounded()) {
      const Tensor distance = from_diagonal(i, j);
      hide((distance < band_.lower).logical_or(distance > band_.upper));
    }
    if (padding_ != nullptr) hide(padding_->hidden(i, j));
    if (in_.mask.defined()) hide(part(part(in_.mask, -2, rows), -1, cols).logical_not());
    // The row maximum is a constant: the result does not depend on it. A row without keys subtracts 0.
    Tensor row_max = scores.detach().amax(-1, true);
    const Tensor sink = sinks();
    if (sink.defined()) row_max = at::maximum(row_max, sink.detach());
    const Tensor empty = row_max == -kInfinity;
    const Tensor shift = row_max.masked_fill(empty, 0.0);
    const Tensor exponential = (scores - shift).exp();
    Tensor row_sum = exponential.sum(-1, true);
    const Tensor exponential_of_sink = sink.defined() ? (sink - shift).exp() : Tensor();
    if (sink.defined()) row_sum = row_sum + exponential_of_sink;
    row_sum = row_sum.masked_fill(empty, 1.0);
    if (sink.defined()) b.of_sink = exponential_of_sink / row_sum;
    b.hidden = b.hidden.defined() ? b.hidden.logical_or(empty) : empty;
    b.probability = only_visible(b, exponential / row_sum);
    b.lse = (shift + row_sum.log()).masked_fill(empty, -kInfinity);
    if (constant_lse.defined()) {
      // NOTE: not e^(S - lse), in which the rounding of lse is an error of all of a row. Where lse is that of these
      // keys, from this code, the factor is 1.
      const Tensor lse = rows_of(constant_lse.unsqueeze(-1), rows);
      const Tensor factor = (b.lse - lse).exp();
      b.probability = only_visible(b, at::where(lse.abs() <= 4096, b.probability * factor, b.probability));
    }
    if (options_.dropout_p > 0) {
      const Tensor keep = keeps(rows, cols);
      const double factor = options_.dropout_p < 1 ? 1 / (1 - options_.dropout_p) : 0.0;
      b.kept = keep.view_symint(sizes_of_rows(rows, cols.size())).to(dtype_) * factor;
    }
    return b;
  }

  // 0 where a query does not see a key, and not NaN, whatever was computed there.
  static Tensor only_visible(const Block& b, const Tensor& x) { return x.masked_fill(b.hidden, 0.0); }
  // x o Z
  static Tensor drop(const Block& b, const Tensor& x) { return b.kept.defined() ? x * b.kept : x; }
  // x o C'(A)
  static Tensor through_softcap(const Block& b, const Tensor& x) {
    return b.tanh.defined() ? x * (1 - b.tanh * b.tanh) : x;
  }

  // (.., Hq, 1, 1), or undefined.
  Tensor sinks() const { return in_.sinks.defined() ? per_row(in_.sinks) : Tensor(); }
  Tensor per_row(const Tensor& of_heads) const { return of_heads.to(dtype_).unsqueeze(-1).unsqueeze(-1); }
  // Of rows without keys.
  Tensor lse_without_keys(Range rows) const {
    const Tensor none = zero_rows(rows, 1);
    return in_.sinks.defined() ? none + sinks() : none - kInfinity;
  }
  // Sum over rows of a (.., Hq, l, 1) tensor, for each head; in double, because large terms of both signs cancel.
  static Tensor to_sinks(const Tensor& x) { return x.sum({-1, -2}, false, at::kDouble).to(x.scalar_type()); }

  Tensor keys(Range cols) const { return part(k, -2, cols); }
  Tensor values(Range cols) const { return part(v, -2, cols); }
  // (.., Hq, l, n) = x (.., Hq, l, e) times y (.., heads, n, e) transposed; query heads of a group share rows of y.
  Tensor times_transposed(const Tensor& x, const Tensor& y, int64_t heads) const {
    return unfold(fold(x, heads).matmul(y.transpose(-1, -2)));
  }
  // (.., Hq, l, e) = x (.., Hq, l, n) times y (.., heads, n, e)
  Tensor times(const Tensor& x, const Tensor& y, int64_t heads) const { return unfold(fold(x, heads).matmul(y)); }
  // (.., heads, n, e) = x (.., Hq, l, n) transposed times y (.., Hq, l, e), summed over a group, padded to all keys.
  // NOTE: one sum a query head, as eager attention has; in one long sum over the group float32 had 1.1 of what the
  // error rule allows.
  Tensor transposed_times(const Tensor& x, const Tensor& y, int64_t heads, Range cols) const {
    Tensor product = x.transpose(-1, -2).matmul(y);
    if (heads != heads_q_) product = product.unflatten_symint(-3, {heads, heads_q_ / heads}).sum(-3);
    return at::constant_pad_nd(product, {0, 0, cols.first, len_k - cols.last}, 0);
  }
  // A (.., Hq, l, n) gradient summed to the block's part of bias and padded to all of bias's columns.
  Tensor to_bias(const Tensor& x, const Block& b) const {
    const Tensor sum = at::sum_to(x, part(part(in_.bias, -2, b.rows), -1, b.cols).sym_sizes());
    if (in_.bias.sym_size(-1) == 1) return sum;
    return at::constant_pad_nd(sum, {b.cols.first, len_k - b.cols.last}, 0);
  }
  // Sum over rows and columns of x o R, for each head; in double, because large terms of both signs cancel.
  static Tensor to_slopes(const Tensor& x, const Block& b) {
    return (x * b.distance).sum({-1, -2}, false, at::kDouble).to(x.scalar_type());
  }
  // Rows of a (.., Hq, L, *) tensor, or of one that is broadcast over heads as query may be, in the accumulate dtype.
  Tensor rows_of(const Tensor& tensor, Range rows) const {
    const Tensor all = with_heads(tensor);
    auto sizes = all.sym_sizes().vec();
    sizes[sizes.size() - 3] = heads_q_;
    return all.expand_symint(sizes).narrow(-2, rows.first, rows.size()).to(dtype_);
  }
  Tensor columns_of(const Tensor& tensor, Range cols) const { return part(with_heads(tensor), -2, cols).to(dtype_); }
  Sizes<c10::SymInt> sizes_of_rows(Range rows, const c10::SymInt& cols) const {
    Sizes<c10::SymInt> sizes = shape_.batch;
    sizes.append({c10::SymInt(heads_q_), c10::SymInt(rows.size()), cols});
    return sizes;
  }
  Tensor zero_rows(Range rows, const c10::SymInt& cols) const {
    return at::zeros_symint(sizes_of_rows(rows, cols), in_.query.options().dtype(dtype_).requires_grad(false));
  }

  // Whole results from blocks of rows: (.., [Hq,] L, cols), and the part of it that a broadcast input stands for.
  Tensor join(std::vector<Tensor>& blocks, const c10::SymInt& cols) const {
    if (blocks.empty()) blocks.push_back(zero_rows({}, cols));
    const Tensor all = at::cat(blocks, -2).expand_symint(sizes_of_rows({0, len_q}, cols));
    return shape_.rank > 2 ? all : all.squeeze(0);
  }
  Tensor join_bias(const std::vector<Tensor>& blocks) const {
    if (blocks.empty()) return zeros_like(in_.bias);
    if (in_.bias.dim() >= 2 && in_.bias.sym_size(-2) != 1) return at::cat(blocks, -2);
    Tensor sum;
    for (const Tensor& block : blocks) accumulate(sum, block);
    return sum;
  }
  Tensor sum_like(const Tensor& sum, const Tensor& input) const {
    return sum.defined() ? at::sum_to(sum, input.sym_sizes()) : zeros_like(input);
  }

  const Shape<c10::SymInt>& shape() const { return shape_; }

  double scale = 1.0;
  int64_t len_q = 0, len_k = 0, heads_k = 1, heads_v = 1;
  Tensor k, v;

 private:
  // Whether dropout keeps each of these scores.
  Tensor keeps(Range rows, Range cols) const {
    const DropoutPlace place = dropout_place(options_, heads_q_, first_batch_);
    const int64_t row = place.query(rows.first), col = place.key(cols.first);
    const auto window = [&](int64_t batch, int64_t heads) {
      return call_dropout_mask(rng_state_, options_.dropout_p, heads, rows.size(), cols.size(), row, col,
                               place.bh(batch, batch * heads_q_));
    };
    if (place.other_heads == 0) return window(0, flat_heads_);
    std::vector<Tensor> elements;  // whose heads do not follow each other there
    for (int64_t b = 0; b * heads_q_ < flat_heads_; ++b) elements.push_back(window(b, heads_q_));
    return at::cat(elements);
  }

  // j - i, without the offset of the diagonal where each sequence has its own.
  Tensor from_diagonal(const Tensor& i, const Tensor& j) const {
    return padding_ != nullptr ? j - i - padding_->offset() : j - i;
  }
  Tensor with_heads(const Tensor& tensor) const { return tensor.dim() < 3 ? tensor.unsqueeze(0) : tensor; }
  Tensor zeros_like(const Tensor& input) const {
    return at::zeros_symint(input.sym_sizes(), input.options().dtype(dtype_).requires_grad(false));
  }

  // (.., heads * group, l, e) -> (.., heads, group * l, e)
  Tensor fold(const Tensor& x, int64_t heads) const {
    if (heads == heads_q_) return x;
    auto sizes = x.sym_sizes().vec();
    const size_t rank = sizes.size();
    sizes[rank - 2] = sizes[rank - 2] * (heads_q_ / heads);
    sizes[rank - 3] = heads;
    return x.reshape_symint(sizes);
  }
  Tensor unfold(const Tensor& x) const {
    auto sizes = x.sym_sizes().vec();
    const size_t rank = sizes.size();
    if (sizes[rank - 3] == heads_q_) return x;
    sizes[rank - 2] = sizes[rank - 2] * sizes[rank - 3] / heads_q_;
    sizes[rank - 3] = heads_q_;
    return x.reshape_symint(sizes);
  }

  Options options_;
  int64_t first_batch_;
  Tensor rng_state_;
  Inputs in_;
  const packed::Padding* padding_;
  Shape<c10::SymInt> shape_;
  at::ScalarType dtype_ = at::kFloat;
  Band band_;
  int64_t offset_ = 0, block_ = 1, heads_q_ = 1, flat_heads_ = 1;
};

}  // namespace

Forward forward_of(const Inputs& in, const Tensor& rng_state, const Options& options, const packed::Padding* padding,
                   int64_t first_batch) {
  const Composite c(in, rng_state, options, padding, first_batch);
  std::vector<Tensor> out, lse;
  for (const Range rows : c.row_blocks()) {
    const Range cols = c.columns(rows);
    if (cols.empty()) {
      out.push_back(c.zero_rows(rows, c.shape().head_dim_v));
      lse.push_back(c.lse_without_keys(rows));
      continue;
    }
    const Block b = c.block(rows, cols);
    out.push_back(c.times(c.drop(b, b.probability), c.values(cols), c.heads_v));
    lse.push_back(b.lse);
  }
  return {c.join(out, c.shape().head_dim_v), c.join(lse, 1).squeeze(-1)};
}

Gradients backward_of(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in, const ForwardResult& saved,
                      const Options& options, const GradMask& grad_mask, const packed::Padding* padding,
                      int64_t first_batch) {
  const Composite c(in, saved.rng_state, options, padding, first_batch);
  std::vector<Tensor> dq, dbias;
  Tensor dk, dv, dslopes;
  for (const Range rows : c.row_blocks()) {
    const Range cols = c.columns(rows);
    if (cols.empty()) {
      dq.push_back(c.zero_rows(rows, c.shape().head_dim));
      if (grad_mask[kDbias]) dbias.push_back(c.to_bias(c.zero_rows(rows, c.len_k), without_keys(rows, c.len_k)));
      continue;
    }
    const Block b = c.block(rows, cols, options.constant_lse ? saved.lse : Tensor());
    const Tensor& p = b.probability;
    Tensor ds;  // dS = P o (dP - rowsum(P o dP) + grad_lse), of a constant lse P o (dP + grad_lse)
    if (grad_out.defined()) {
      const Tensor g = c.rows_of(grad_out, rows);
      const Tensor dp = c.only_visible(b, c.drop(b, c.times_transposed(g, c.values(cols), c.heads_v)));
      ds = options.constant_lse ? dp : dp - (p * dp).sum(-1, true);
      if (grad_mask[kDv]) accumulate(dv, c.transposed_times(c.drop(b, p), g, c.heads_v, cols));
    }
    if (grad_lse.defined()) accumulate(ds, c.rows_of(grad_lse.unsqueeze(-1), rows));
    ds = ds.defined() ? c.only_visible(b, p * ds) : at::zeros_like(p);
    const Tensor da = c.through_softcap(b, ds) * c.scale;
    if (grad_mask[kDq]) dq.push_back(c.times(da, c.keys(cols), c.heads_k));
    if (grad_mask[kDk]) accumulate(dk, c.transposed_times(da, b.q, c.heads_k, cols));
    if (grad_mask[kDbias]) dbias.push_back(c.to_bias(ds, b));
    if (grad_mask[kDslopes]) accumulate(dslopes, c.to_slopes(ds, b));
  }
  return {grad_mask[kDq] ? c.sum_like(c.join(dq, c.shape().head_dim), in.query) : Tensor(),
          grad_mask[kDk] ? c.sum_like(dk, in.key) : Tensor(), grad_mask[kDv] ? c.sum_like(dv, in.value) : Tensor(),
          grad_mask[kDbias] ? c.join_bias(dbias) : Tensor(),
          grad_mask[kDslopes] ? c.sum_like(dslopes, in.alibi_slopes) : Tensor()};
}

// With cotangents Gq, Gk, Gv, Gb, Gs, the sum  <Gq, dq> + <Gk, dk> + <Gv, dv> + <Gb, dbias> + <Gs, dslope>  is
//   f = sum dS o W + sum P o U      M = scale (Gq k^T + q Gk^T)      W = C' o M + Gb + Gs R      U = (G Gv^T) o Z
// so that, with w = rowsum(P o W):
//   df/d grad_lse = w
//   df/dG = (T o Z) v + (P o Z) Gv                      T = P o (W - w)
//   df/dv = (T o Z)^T G
//   df/dS = X = P o (Y - rowsum(P o Y))                 Y = dP o (W - w) - delta o W + U
//   df/dA = X o C' + dS o M o C''                       C'' = -2 t (1 - t^2) / c
//   df/dq = scale (df/dA k + dA Gk)     df/dk = scale (df/dA^T q + dA^T Gq)     df/dbias = X     df/dslope = sum X o R
// The column of the sink has dP = W = U = 0, so that its Y is 0 and df/dsink is the sum of -P rowsum(P o Y).
DoubleBackward double_backward_of(const Gradients& cotangents, const Tensor& grad_out, const Tensor& grad_lse,
                                  const Inputs& in, const Tensor& rng_state, const Options& options,
                                  const packed::Padding* padding) {
  const Composite c(in, rng_state, options, padding);
  const Tensor &gq = cotangents[kDq], &gk = cotangents[kDk], &gv = cotangents[kDv], &gb = cotangents[kDbias],
               &gs = cotangents[kDslopes];
  std::vector<Tensor> d_grad_out, d_grad_lse, dq, dbias;
  Tensor dk, dv, dslopes, dsinks;
  for (const Range rows : c.row_blocks()) {
    const Range cols = c.columns(rows);
    if (cols.empty()) {
      d_grad_out.push_back(c.zero_rows(rows, c.shape().head_dim_v));
      d_grad_lse.push_back(c.zero_rows(rows, 1));
      dq.push_back(c.zero_rows(rows, c.shape().head_dim));
      if (in.bias.defined()) dbias.push_back(c.to_bias(c.zero_rows(rows, c.len_k), without_keys(rows, c.len_k)));
      continue;
    }
    const Block b = c.block(rows, cols);
    const Tensor& p = b.probability;
    const Tensor k = c.keys(cols), v = c.values(cols);
    const Tensor g = grad_out.defined() ? c.rows_of(grad_out, rows) : c.zero_rows(rows, c.shape().head_dim_v);
    const Tensor dp = c.drop(b, c.times_transposed(g, v, c.heads_v));
    Tensor delta = (p * dp).sum(-1, true);
    if (grad_lse.defined()) delta = delta - c.rows_of(grad_lse.unsqueeze(-1), rows);
    const Tensor ds = p * (dp - delta);
    const Tensor da = c.through_softcap(b, ds) * c.scale;

    const Tensor gq_rows = gq.defined() ? c.rows_of(gq, rows) : Tensor();
    const Tensor gk_cols = gk.defined() ? c.columns_of(gk, cols) : Tensor();
    const Tensor gv_cols = gv.defined() ? c.columns_of(gv, cols) : Tensor();
    Tensor m;
    if (gq.defined()) accumulate(m, c.times_transposed(gq_rows, k, c.heads_k) * c.scale);
    if (gk.defined()) accumulate(m, c.times_transposed(b.q, gk_cols, c.heads_k) * c.scale);
    Tensor w = m.defined() ? c.through_softcap(b, m) : at::zeros_like(p);
    if (gb.defined()) w = w + part(part(gb, -2, rows), -1, cols).to(p.scalar_type());
    if (gs.defined()) w = w + gs.to(p.scalar_type()).unsqueeze(-1).unsqueeze(-1) * b.distance;
    const Tensor row_w = (p * w).sum(-1, true);
    const Tensor centred = w - row_w;
    const Tensor t = c.drop(b, p * centred);
    Tensor y = dp * centred - delta * w;
    Tensor d_g = c.times(t, v, c.heads_v);
    if (gv.defined()) {
      y = y + c.drop(b, c.times_transposed(g, gv_cols, c.heads_v));
      d_g = d_g + c.times(c.drop(b, p), gv_cols, c.heads_v);
    }
    const Tensor row_y = (p * y).sum(-1, true);
    const Tensor x = p * (y - row_y);
    if (in.sinks.defined()) accumulate(dsinks, c.to_sinks(-b.of_sink * row_y));
    Tensor d_a = c.through_softcap(b, x);
    if (b.tanh.defined() && m.defined()) d_a = d_a - ds * m * (b.tanh * (1 - b.tanh * b.tanh) * (2 / options.softcap));
    d_a = d_a * c.scale;

    d_grad_out.push_back(d_g);
    d_grad_lse.push_back(row_w);
    dq.push_back(c.times(d_a, k, c.heads_k));
    accumulate(dk, c.transposed_times(d_a, b.q, c.heads_k, cols));
    accumulate(dv, c.transposed_times(t, g, c.heads_v, cols));
    if (gk.defined()) dq.back() = dq.back() + c.times(da, gk_cols, c.heads_k);
    if (gq.defined()) accumulate(dk, c.transposed_times(da, gq_rows, c.heads_k, cols));
    if (in.bias.defined()) dbias.push_back(c.to_bias(x, b));
    if (in.alibi_slopes.defined()) accumulate(dslopes, c.to_slopes(x, b));
  }
  return {c.join(d_grad_out, c.shape().head_dim_v),
          c.join(d_grad_lse, 1).squeeze(-1),
          {c.sum_like(c.join(dq, c.shape().head_dim), in.query), c.sum_like(dk, in.key), c.sum_like(dv, in.value),
           in.bias.defined() ? c.join_bias(dbias) : Tensor(),
           in.alibi_slopes.defined() ? c.sum_like(dslopes, in.alibi_slopes) : Tensor()},
          in.sinks.defined() ? c.sum_like(dsinks, in.sinks) : Tensor()};
}

}  // namespace flash_ext::chunked
