// A problem for the tests of emulated kernels: its tensors, its results by a backend, and by the formulas in double.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "call_case.h"
#include "core/args.h"
#include "core/band.h"
#include "core/dropout.h"
#include "core/select.h"
#include "gpu/host/launch.h"
#include "reference.h"

namespace flash_ext {

template <class T>
constexpr DType kDType = std::is_same_v<T, __half>          ? DType::kFloat16
                         : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                                                            : DType::kFloat32;

template <class T>
class Call {
 public:
  explicit Call(const Case& c)
      : c_(c),
        d_(c.d > 0 ? c.d : c.head_dim),
        d_v_(c.d_v > 0 ? c.d_v : c.head_dim),
        rows_(c.one_row ? 1 : c.len_q),
        bias_heads_(c.one_head ? 1 : c.heads_q),
        q_(c.batch * c.heads_q, c.len_q, d_, c.layout),
        k_(c.batch * c.heads_k, c.len_k, d_, c.layout),
        v_(c.batch * c.heads_v, c.len_k, d_v_, c.layout),
        d_out_(c.batch * c.heads_q, c.len_q, d_v_, c.layout),
        bias_(bias_heads_, rows_, c.len_k, c.layout),
        float_bias_(bias_heads_, rows_, c.len_k, c.layout),
        mask_(bias_heads_ * rows_ * c.len_k, 1),
        slopes_(c.heads_q) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (Matrices<T>* x : {&q_, &k_, &v_, &d_out_}) x->fill([&] { return normal(random); });
    if (c.equal != 0) {
      q_.fill([&] { return c.equal; });
      k_.fill([&] { return c.opposite ? -c.equal : c.equal; });
    }
    const auto integer = [&] { return static_cast<float>(random() % 9) - 4; };
    if (c.integers) {
      q_.fill(integer);
      k_.fill(integer);
    }
    const auto first_column = [&](Matrices<T>& x, int heads, int64_t rows, const auto& number) {
      for (int64_t i = 0; i < c.batch * heads * rows && c.rise != 0; ++i)
        x.at(i / rows, i % rows, 0) = T(number(i % rows));
    };
    const double unit = 8 * (c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(d_)));
    first_column(q_, c.heads_q, c.len_q, [](int64_t) { return 8.f; });
    first_column(k_, c.heads_k, c.len_k, [&](int64_t j) {
      return static_cast<float>(c.rise / unit * static_cast<double>(c.len_k - 1 - j) / static_cast<double>(c.len_k));
    });
    for (int64_t row = 0; row < c.len_q && c.large_row >= 0; ++row) {
      for (int64_t i = 0; i < c.batch * c.heads_q * d_ && row != c.large_row; ++i) {
        T& x = q_.at(i / d_, row, i % d_);
        x = T(static_cast<float>(x) * 0x1p-20f);
      }
    }
    std::vector<float> numbers(bias_heads_ * rows_ * c.len_k);
    for (float& x : numbers) x = static_cast<float>(T(normal(random) + c.bias_offset));
    if (c.integers && c.float_bias) {
      for (float& x : numbers) x = integer() * static_cast<float>(c.scale);
    }
    if (c.lowest_bias) std::fill(numbers.begin(), numbers.end(), lowest(c.float_bias));
    for (size_t j = c.lowest; j < numbers.size() && c.lowest >= 0; j += c.len_k) numbers[j] = lowest(c.float_bias);
    for (int64_t j = 0; j < bias_heads_ * c.len_k && c.emptied >= 0; ++j) {
      numbers[(j / c.len_k * rows_ + c.emptied) * c.len_k + j % c.len_k] = -INFINITY;
    }
    size_t i = 0;
    bias_.fill([&] { return numbers[i++]; });
    i = 0;
    float_bias_.fill([&] { return numbers[i++]; });
    const auto put = [&](auto& matrices, int64_t cols) {
      for (int64_t col = 0; col < cols; ++col) {
        if (c.whole_row || col == std::min<int64_t>(2, cols - 1)) matrices.at(0, c.special_row, col) = c.special_value;
      }
    };
    if (c.special == Operand::kQuery) put(q_, d_);
    if (c.special == Operand::kKey) put(k_, d_);
    if (c.special == Operand::kValue) put(v_, d_v_);
    if (c.special == Operand::kGrad) put(d_out_, d_v_);
    if (c.special == Operand::kBias) put(bias_, c.len_k);
    if (c.special == Operand::kBias) put(float_bias_, c.len_k);
    for (size_t j = 0; j < mask_.size(); ++j) mask_[j] = random() % 4 != 0 ? 1 + random() % 255 : 0;
    for (size_t j = 0; c.documents > 0 && j < mask_.size(); ++j) {
      const int64_t of_query = static_cast<int64_t>(j) / c.len_k % rows_ * c.documents / rows_;
      const int64_t of_key = static_cast<int64_t>(j) % c.len_k * c.documents / c.len_k;
      if ((rows_ > 1 && of_query != of_key) || of_key == c.documents - 1) mask_[j] = 0;
    }
    // Every other one negative, and then so large that e^score is inf a tile away. Not with their gradient, which such
    // rows of one key that counts make of rounding alone.
    for (size_t h = 0; h < slopes_.size(); ++h) {
      slopes_[h] = 0.05f + static_cast<float>(random() % 8) / 16;
      if (h % 2 == 1 && !c.slope_gradient) slopes_[h] = -4 * slopes_[h];
    }
    for (size_t h = 0; h < slopes_.size() && c.slope != 0; ++h) slopes_[h] = c.slope * static_cast<float>(h + 1);
    // One that takes most of a row's weight, one that takes none, one of each batch element and head.
    constexpr float kSinks[] = {1.5f, -INFINITY, 6, -3};
    for (int i = 0; i < c.batch * c.heads_q; ++i) sinks_.push_back(kSinks[i % 4]);
    d_lse_.resize(c.batch * c.heads_q * c.len_q);
    for (float& x : d_lse_) x = normal(random);

    problem_.dtype = kDType<T>;
    problem_.batch_rank = c.batch > 1 ? 1 : 0;
    problem_.batch_size[0] = problem_.batch = c.batch;
    problem_.heads_q = c.heads_q;
    problem_.heads_k = c.heads_k;
    problem_.heads_v = c.heads_v;
    problem_.len_q = c.len_q;
    problem_.len_k = c.len_k;
    problem_.head_dim = d_;
    problem_.head_dim_v = d_v_;
    problem_.scale = c.scale != 0 ? c.scale : 1.0 / std::sqrt(static_cast<double>(d_));
    problem_.softcap = c.softcap;
    problem_.causal = c.causal;
    problem_.bottom_right = c.bottom_right;
    problem_.window_left = c.window;
    problem_.dropout_p = c.dropout;
    problem_.deterministic = c.deterministic;
    problem_.has_bias = c.bias;
    problem_.has_mask = c.mask;
    problem_.has_alibi = c.alibi;
    problem_.has_sinks = c.sinks;
    problem_.bias_dtype = c.float_bias ? DType::kFloat32 : problem_.dtype;
  }

  Results run(Table table, unsigned seed) {
    cuda::emulated_seed = seed;
    DeviceInfo device;
    device.type = DeviceType::kCuda;
    device.compute_capability = 90;
    device.multiprocessors = c_.multiprocessors;
    device.shared_memory_per_block = c_.shared_limit;
    device.shared_memory_per_multiprocessor = c_.shared_limit + 1024;
    std::vector<float> workspace;
    const auto allocate = [&](const Plan& plan) {
      workspace.assign(plan.scratch_bytes / 4 + 64, std::nanf(""));
      return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 127) / 128 * 128);
    };
    ForwardArgs args;
    args.problem = problem_;
    // Heads of all batch elements lie one behind the other.
    const auto batched = [&](TensorView view, int heads) {
      view.batch_stride[0] = heads * view.head_stride;
      return view;
    };
    args.q = batched(q_.view(), c_.heads_q);
    args.k = batched(k_.view(), c_.heads_k);
    args.v = batched(v_.view(), c_.heads_v);
    if (c_.bias) args.bias = c_.float_bias ? float_bias_.view() : bias_.view();
    if (c_.mask) args.mask.data = mask_.data();
    args.mask.head_stride = rows_ * c_.len_k;
    args.mask.row_stride = c_.len_k;
    args.mask.col_stride = 1;
    if (c_.one_row) args.bias.row_stride = args.mask.row_stride = 0;
    if (c_.one_head) args.bias.head_stride = args.mask.head_stride = 0;
    if (c_.alibi) args.alibi.data = slopes_.data();
    args.alibi.head_stride = 1;
    if (c_.sinks) args.sinks.data = sinks_.data();
    args.sinks.head_stride = 1;
    args.sinks.batch_stride[0] = c_.heads_q;
    args.rng_state = rng_state_;
    args.dropout_place = kPartOfDropout;
    const int heads_q = c_.batch * c_.heads_q, heads_k = c_.batch * c_.heads_k, heads_v = c_.batch * c_.heads_v;
    Matrices<T> out(heads_q, c_.len_q, d_v_, c_.layout);
    Matrices<float> lse(heads_q, c_.len_q, 1, Layout::kHeadsFirst);
    args.out = batched(out.view(), c_.heads_q);
    args.lse = lse.view().data;
    const Kernel* const forward = select_forward(table, args, device, "");
    if (forward == nullptr) throw std::runtime_error(why(consider(table, Pass::kForward, {args}, device)));
    const Plan forward_plan = forward->plan(problem_, device);
    forward->forward(args, forward_plan, allocate(forward_plan));
    if (c_.forward_alone) {
      EXPECT_TRUE(out.guards_hold() && lse.guards_hold()) << "something beside a result was written";
      return {out.values(), lse.values(), {}, {}, {}, {}, {}};
    }

    // Large scores may come from a forward of another backend, whose lse is rounded otherwise.
    for (int64_t i = 0; i < heads_q * c_.len_q && (c_.equal != 0 || c_.integers); ++i) {
      float& x = lse.at(i / c_.len_q, i % c_.len_q, 0);
      for (int ulp = 0; ulp < 2 && std::isfinite(x); ++ulp) x = std::nextafter(x, i % 2 == 0 ? INFINITY : -INFINITY);
    }

    BackwardArgs back;
    back.fwd = args;
    Problem& problem = back.fwd.problem;
    problem.wants_dq = !c_.no_dq;
    problem.wants_dk = !c_.no_dk;
    problem.wants_dv = !c_.no_dv;
    problem.wants_dbias = c_.bias_gradient;
    problem.wants_dalibi = c_.slope_gradient;
    back.d_out = batched(d_out_.view(), c_.heads_q);
    if (c_.d_lse) back.d_lse = d_lse_.data();
    Matrices<T> dq(heads_q, c_.len_q, d_, c_.layout), dk(heads_k, c_.len_k, d_, c_.layout),
        dv(heads_v, c_.len_k, d_v_, c_.layout);
    Matrices<float> dbias(bias_heads_, rows_, c_.len_k, Layout::kHeadsFirst),
        dalibi(c_.heads_q, 1, 1, Layout::kHeadsFirst);
    Matrices<T> dbias_of_dtype(bias_heads_, rows_, c_.len_k, Layout::kHeadsFirst);
    // Gradients of a large scale do not fit fp16.
    const bool wide = std::is_same_v<T, __half> && std::abs(c_.scale) > 16;
    Matrices<float> wide_dq(heads_q, c_.len_q, d_, c_.layout), wide_dk(heads_k, c_.len_k, d_, c_.layout);
    back.dq_in_accum = back.dk_in_accum = wide;
    back.dq = batched(wide ? wide_dq.view() : dq.view(), c_.heads_q);
    back.dk = batched(wide ? wide_dk.view() : dk.view(), c_.heads_k);
    back.dv = batched(dv.view(), c_.heads_v);
    if (c_.no_dq) back.dq = {};
    if (c_.no_dk) back.dk = {};
    if (c_.no_dv) back.dv = {};
    back.dbias = dbias.view();
    if (c_.one_row) back.dbias.row_stride = 0;
    if (c_.one_head) back.dbias.head_stride = 0;
    back.dalibi = dalibi.view().data;
    problem.whole_dbias = c_.bias_gradient && is_whole(problem, back.dbias);
    const Stages stages = select_backward(table, back, device, "");
    const Kernel* const main = stages.main();
    if (main == nullptr) throw std::runtime_error(why(consider(table, Pass::kBackward, {back.fwd, &back}, device)));
    EXPECT_EQ(stages.size(), 1);
    const Plan plan = main->plan(problem, device);
    if (plan.dbias_in_bias_dtype) {
      const TensorView wide = back.dbias;
      back.dbias = dbias_of_dtype.view();
      back.dbias.row_stride = wide.row_stride;
      back.dbias.head_stride = wide.head_stride;
    }
    main->backward(back, plan, allocate(plan));
    for (const bool holds : {out.guards_hold(), lse.guards_hold(), dq.guards_hold(), dk.guards_hold(), dv.guards_hold(),
                             wide_dq.guards_hold(), wide_dk.guards_hold(), dbias.guards_hold(),
                             dbias_of_dtype.guards_hold(), dalibi.guards_hold()}) {
      EXPECT_TRUE(holds) << "something beside a result was written";
    }
    return {out.values(),
            lse.values(),
            wide ? wide_dq.values() : dq.values(),
            wide ? wide_dk.values() : dk.values(),
            dv.values(),
            plan.dbias_in_bias_dtype ? dbias_of_dtype.values() : dbias.values(),
            dalibi.values()};
  }

  Results reference(bool multiplies_hidden = false) {
    const std::vector<float> bias = c_.float_bias ? float_bias_.values() : bias_.values();
    return flash_ext::reference(
        c_, problem_,
        {doubles(q_.values()), doubles(k_.values()), doubles(v_.values()), doubles(d_out_.values()), doubles(bias),
         mask_, slopes_, sinks_, d_lse_, make_dropout(rng_state_[0], rng_state_[1], c_.dropout)},
        multiplies_hidden);
  }

 private:
  static std::vector<double> doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }

  static std::string why(const std::vector<Considered>& rows) {
    std::string text;
    for (const Considered& row : rows) text += std::string(row.kernel->name) + ": " + row.reason + "\n";
    return text;
  }

  static float lowest(bool of_float) {
    if (of_float || std::is_same_v<T, float>) return -std::numeric_limits<float>::max();
    return std::is_same_v<T, __half> ? -65504.f : -0x1.FEp127f;
  }

  Case c_;
  int64_t d_, d_v_, rows_, bias_heads_;
  Matrices<T> q_, k_, v_, d_out_, bias_;
  Matrices<float> float_bias_;
  std::vector<uint8_t> mask_;
  std::vector<float> slopes_, sinks_, d_lse_;
  int64_t rng_state_[2] = {1234, 56};
  Problem problem_;
};

// The error of numbers; of the others that they stand where a reference has them.
inline void check_special(const Case& c, const Results& result, const Results& reference, const Results& eager,
                          double allowed) {
  const auto check = [&](const char* name, std::vector<float> Results::*member, bool of_gradient) {
    std::vector<float> x = result.*member, y = reference.*member;
    EXPECT_EQ(misplaced(x, y, eager.*member, of_gradient), 0) << name;
    for (size_t i = 0; i < x.size(); ++i) {
      if (!std::isfinite(x[i]) || !std::isfinite(y[i])) x[i] = y[i] = 0;
    }
    EXPECT_LT(error(x, y), allowed) << name;
  };
  check("out", &Results::out, false);
  check("lse", &Results::lse, false);
  if (result.dq.empty()) return;
  if (!c.no_dq) check("dq", &Results::dq, true);
  if (!c.no_dk) check("dk", &Results::dk, true);
  if (!c.no_dv) check("dv", &Results::dv, true);
}

template <class T>
void check(Table table, const Case& c) {
  Call<T> call(c);
  const Results result = call.run(table, 1), reference = call.reference();
  const double allowed = c.rounding + (std::is_same_v<T, float> ? 2e-5 : (std::is_same_v<T, __half> ? 2e-3 : 1e-2));
  if (c.special != Operand::kNone) {
    const Results eager = call.reference(true);
    check_special(c, result, reference, eager, allowed);
    if (c.bias_gradient) {
      EXPECT_EQ(misplaced(result.dbias, reference.dbias, eager.dbias, true), 0) << "dbias";
    }
    if (c.slope_gradient) {
      EXPECT_EQ(misplaced(result.dalibi, reference.dalibi, eager.dalibi, true), 0) << "dalibi";
    }
    return;
  }
  EXPECT_LT(error(result.out, reference.out), allowed) << "out";
  EXPECT_LT(error(result.lse, reference.lse), allowed / 10) << "lse";
  if (c.forward_alone) return;
  if (!c.no_dq) EXPECT_LT(error(result.dq, reference.dq), allowed) << "dq";
  if (!c.no_dk) EXPECT_LT(error(result.dk, reference.dk), allowed) << "dk";
  if (!c.no_dv) EXPECT_LT(error(result.dv, reference.dv), allowed) << "dv";
  if (c.bias_gradient) {
    EXPECT_LT(error(result.dbias, reference.dbias), allowed) << "dbias";
  }
  if (c.slope_gradient) {
    EXPECT_LT(error(result.dalibi, reference.dalibi), 3 * allowed) << "dalibi";
  }
  if (!c.deterministic) return;
  const Results again = call.run(table, 2);
  EXPECT_EQ(again.out, result.out);
  EXPECT_EQ(again.dq, result.dq);
  EXPECT_EQ(again.dk, result.dk);
  EXPECT_EQ(again.dv, result.dv);
  EXPECT_EQ(again.dbias, result.dbias);
}

}  // namespace flash_ext
