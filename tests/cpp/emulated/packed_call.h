// A packed call for the tests of emulated kernels: sequences behind each other with rows of nobody before, between and
// behind them, which are NaN, as is what a bias holds beyond a sequence.
#pragma once

#include "attention_call.h"

namespace flash_ext {

struct PackedLengths {
  int64_t q, k;
  int64_t unused_q = 0, unused_k = 0;  // rows behind it that are not its own
};

struct PackedCase {
  Case options;  // len_q and len_k are of the longest sequence
  std::vector<PackedLengths> sequences;
};

inline void PrintTo(const PackedCase& c, std::ostream* out) { *out << c.options.name; }

template <class T>
class PackedCall {
 public:
  static constexpr int64_t kBefore = 3;  // rows before the first sequence

  explicit PackedCall(const PackedCase& packed) : c_(packed.options), sequences_(packed.sequences) {
    cu_q_ = cu_k_ = {kBefore};
    for (const PackedLengths& x : sequences_) {
      used_q_.push_back(static_cast<int32_t>(x.q));
      used_k_.push_back(static_cast<int32_t>(x.k));
      cu_q_.push_back(static_cast<int32_t>(cu_q_.back() + x.q + x.unused_q));
      cu_k_.push_back(static_cast<int32_t>(cu_k_.back() + x.k + x.unused_k));
      max_q_ = std::max(max_q_, x.q);
      max_k_ = std::max(max_k_, x.k);
    }
    rows_q_ = cu_q_.back() + 5;
    rows_k_ = cu_k_.back() + 2;
    d_ = c_.d > 0 ? c_.d : c_.head_dim;
    d_v_ = c_.d_v > 0 ? c_.d_v : c_.head_dim;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<T>& x, int64_t rows, int64_t row_size) {
      x.resize(rows * row_size);
      for (T& value : x) value = T(normal(random));
    };
    fill(q_, rows_q_, c_.heads_q * d_);
    fill(k_, rows_k_, c_.heads_k * d_);
    fill(v_, rows_k_, c_.heads_v * d_v_);
    fill(d_out_, rows_q_, c_.heads_q * d_v_);
    d_lse_.resize(c_.heads_q * rows_q_);
    for (float& x : d_lse_) x = normal(random);
    slopes_.resize(batch() * c_.heads_q);
    for (size_t i = 0; i < slopes_.size(); ++i) slopes_[i] = 0.1f + 0.05f * static_cast<float>(i % 5);
    const int64_t scores = batch() * c_.heads_q * max_q_ * max_k_;
    bias_.assign(scores, T(NAN));
    mask_.assign(scores, 1);
    for (int64_t b = 0; b < batch(); ++b) {
      for (int64_t h = 0; h < c_.heads_q; ++h) {
        for (int64_t i = 0; i < sequences_[b].q; ++i) {
          for (int64_t j = 0; j < sequences_[b].k; ++j) {
            const int64_t at = ((b * c_.heads_q + h) * max_q_ + i) * max_k_ + j;
            bias_[at] = T(normal(random));
            mask_[at] = random() % 4 != 0;
          }
        }
      }
    }
  }

  int64_t batch() const { return static_cast<int64_t>(sequences_.size()); }
  const PackedLengths& lengths(int64_t b) const { return sequences_[b]; }
  std::vector<int32_t>& cu_q() { return cu_q_; }
  std::vector<int32_t>& cu_k() { return cu_k_; }

  // With what cu_q and cu_k were made to be.
  void run_garbage(Table table) {
    ForwardArgs args = packed_args(used_q_, used_k_);
    args.q = view(q_, c_.heads_q, d_);
    args.k = view(k_, c_.heads_k, d_);
    args.v = view(v_, c_.heads_v, d_v_);
    call(table, args, d_out_, 1, rows_q_, rows_k_);
  }

  // only >= 0: all other sequences have no rows in use.
  Results run(Table table, int64_t only = -1) {
    std::vector<int32_t> used_q = used_q_, used_k = used_k_;
    for (int64_t b = 0; b < batch() && only >= 0; ++b) {
      if (b != only) used_q[b] = used_k[b] = 0;
    }
    ForwardArgs args = packed_args(used_q, used_k);
    std::vector<T> q = q_, k = k_, v = v_, d_out = d_out_;
    for (int64_t row = 0; row < rows_q_; ++row) {
      if (owner(cu_q_, used_q, row) >= 0) continue;
      poison(q, row, c_.heads_q * d_);
      poison(d_out, row, c_.heads_q * d_v_);
    }
    for (int64_t row = 0; row < rows_k_; ++row) {
      if (owner(cu_k_, used_k, row) >= 0) continue;
      poison(k, row, c_.heads_k * d_);
      poison(v, row, c_.heads_v * d_v_);
    }
    args.q = view(q, c_.heads_q, d_);
    args.k = view(k, c_.heads_k, d_);
    args.v = view(v, c_.heads_v, d_v_);
    const Results results = call(table, args, d_out, 1, rows_q_, rows_k_);
    for (int64_t row = 0; row < rows_q_; ++row) {
      if (owner(cu_q_, used_q, row) >= 0) continue;
      for (int64_t h = 0; h < c_.heads_q; ++h) EXPECT_EQ(results.lse[h * rows_q_ + row], -INFINITY) << row;
      expect_zeros(results.out, row, c_.heads_q * d_v_, "out");
      if (!c_.no_dq) expect_zeros(results.dq, row, c_.heads_q * d_, "dq");
    }
    for (int64_t row = 0; row < rows_k_; ++row) {
      if (owner(cu_k_, used_k, row) >= 0) continue;
      if (!c_.no_dk) expect_zeros(results.dk, row, c_.heads_k * d_, "dk");
      if (!c_.no_dv) expect_zeros(results.dv, row, c_.heads_v * d_v_, "dv");
    }
    return results;
  }

  // Sequence b by a call that is not packed: with dropout the last of b + 1 elements, so that the same is dropped.
  Results run_alone(Table table, int64_t b) {
    const PackedLengths& x = sequences_[b];
    ForwardArgs args;
    args.problem = problem(x.q, x.k);
    args.problem.batch_size[0] = args.problem.batch = elements_alone(b);
    args.q = view(q_, c_.heads_q, d_, cu_q_[b]);
    args.k = view(k_, c_.heads_k, d_, cu_k_[b]);
    args.v = view(v_, c_.heads_v, d_v_, cu_k_[b]);
    const std::vector<T> d_out(d_out_.begin() + cu_q_[b] * c_.heads_q * d_v_, d_out_.end());
    return call(table, args, d_out, elements_alone(b), x.q, x.k, b);
  }

  // Results of sequence b of a packed run, and of run_alone.
  Results part(const Results& all, int64_t b) const {
    return {rows(all.out, cu_q_[b], sequences_[b].q, c_.heads_q * d_v_),
            lse_rows(all.lse, cu_q_[b], sequences_[b].q, rows_q_),
            rows(all.dq, cu_q_[b], sequences_[b].q, c_.heads_q * d_),
            rows(all.dk, cu_k_[b], sequences_[b].k, c_.heads_k * d_),
            rows(all.dv, cu_k_[b], sequences_[b].k, c_.heads_v * d_v_),
            dbias_of(all.dbias, b, max_q_, max_k_),
            rows(all.dalibi, b, 1, c_.heads_q)};
  }
  Results part_alone(const Results& all, int64_t b) const {
    const auto [q, k, unused_q, unused_k] = sequences_[b];
    const int64_t element = elements_alone(b) - 1;
    return {rows(all.out, element * q, q, c_.heads_q * d_v_),
            lse_rows(all.lse, element * c_.heads_q * q, q, q),
            rows(all.dq, element * q, q, c_.heads_q * d_),
            rows(all.dk, element * k, k, c_.heads_k * d_),
            rows(all.dv, element * k, k, c_.heads_v * d_v_),
            dbias_of(all.dbias, b, max_q_, max_k_),
            rows(all.dalibi, b, 1, c_.heads_q)};
  }

 private:
  static constexpr int kGuard = 16;

  template <class U>
  struct Guarded {
    explicit Guarded(int64_t size) : data(size + 2 * kGuard, U(-77.f)) {}
    std::vector<U> data;
    U* begin() { return data.data() + kGuard; }
    std::vector<float> values() const {
      for (int i = 0; i < kGuard; ++i) {
        EXPECT_TRUE(static_cast<float>(data[i]) == -77.f && static_cast<float>(data[data.size() - 1 - i]) == -77.f)
            << "something beside a result was written";
      }
      std::vector<float> all;
      for (size_t i = kGuard; i + kGuard < data.size(); ++i) all.push_back(static_cast<float>(data[i]));
      return all;
    }
  };

  ForwardArgs packed_args(const std::vector<int32_t>& used_q, const std::vector<int32_t>& used_k) const {
    ForwardArgs args;
    args.problem = problem(max_q_, max_k_);
    args.problem.packed = true;
    args.problem.rows_q = rows_q_;
    args.problem.rows_k = rows_k_;
    args.sequences = {cu_q_.data(), cu_k_.data(), used_q.data(), used_k.data()};
    return args;
  }
  static int64_t owner(const std::vector<int32_t>& cu, const std::vector<int32_t>& used, int64_t row) {
    for (size_t b = 0; b < used.size(); ++b) {
      if (row >= cu[b] && row < std::min<int64_t>(cu[b + 1], int64_t{cu[b]} + used[b])) return static_cast<int64_t>(b);
    }
    return -1;
  }
  static void poison(std::vector<T>& x, int64_t row, int64_t size) {
    std::fill(x.begin() + row * size, x.begin() + (row + 1) * size, T(NAN));
  }
  static void expect_zeros(const std::vector<float>& x, int64_t row, int64_t size, const char* name) {
    for (int64_t i = row * size; i < (row + 1) * size && !x.empty(); ++i)
      ASSERT_EQ(x[i], 0.f) << name << " row " << row;
  }
  static std::vector<float> rows(const std::vector<float>& x, int64_t first, int64_t count, int64_t size) {
    if (x.empty()) return {};
    return {x.begin() + first * size, x.begin() + (first + count) * size};
  }
  std::vector<float> lse_rows(const std::vector<float>& x, int64_t first, int64_t count, int64_t stride) const {
    std::vector<float> result;
    for (int64_t h = 0; h < c_.heads_q; ++h) {
      result.insert(result.end(), x.begin() + first + h * stride, x.begin() + first + h * stride + count);
    }
    return result;
  }
  std::vector<float> dbias_of(const std::vector<float>& x, int64_t b, int64_t max_q, int64_t max_k) const {
    std::vector<float> result;
    for (int64_t h = 0; h < c_.heads_q && !x.empty(); ++h) {
      for (int64_t i = 0; i < sequences_[b].q; ++i) {
        const auto row = x.begin() + ((b * c_.heads_q + h) * max_q + i) * max_k;
        result.insert(result.end(), row, row + sequences_[b].k);
      }
    }
    return result;
  }

  template <class U>
  static TensorView view(const std::vector<U>& x, int64_t heads, int64_t cols, int64_t first_row = 0) {
    return view(const_cast<U*>(x.data()), heads, cols, first_row);
  }
  template <class U>
  static TensorView view(U* data, int64_t heads, int64_t cols, int64_t first_row = 0) {
    TensorView view;
    view.data = data + first_row * heads * cols;
    view.head_stride = cols;
    view.row_stride = heads * cols;
    view.col_stride = 1;
    return view;
  }

  Problem problem(int64_t len_q, int64_t len_k) const {
    Problem problem;
    problem.dtype = kDType<T>;
    problem.batch_rank = 1;
    problem.batch_size[0] = problem.batch = batch();
    problem.heads_q = c_.heads_q;
    problem.heads_k = c_.heads_k;
    problem.heads_v = c_.heads_v;
    problem.len_q = len_q;
    problem.len_k = len_k;
    problem.head_dim = d_;
    problem.head_dim_v = d_v_;
    problem.scale = c_.scale != 0 ? c_.scale : 1.0 / std::sqrt(static_cast<double>(d_));
    problem.softcap = c_.softcap;
    problem.causal = c_.causal;
    problem.bottom_right = c_.bottom_right;
    problem.window_left = c_.window;
    problem.dropout_p = c_.dropout;
    problem.deterministic = c_.deterministic;
    problem.has_bias = c_.bias;
    problem.has_mask = c_.mask;
    problem.has_alibi = c_.alibi;
    problem.bias_dtype = problem.dtype;
    return problem;
  }

  int64_t elements_alone(int64_t b) const { return c_.dropout > 0 ? b + 1 : 1; }

  // elements: of results, `len_q` rows each; b: the sequence that is called alone.
  Results call(Table table, ForwardArgs args, const std::vector<T>& d_out, int64_t elements, int64_t len_q,
               int64_t len_k, int64_t b = 0) {
    cuda::emulated_seed = 1;
    const bool packed = args.problem.packed;
    const int64_t first = elements == 1 && !packed ? b : 0;  // of what has a batch
    DeviceInfo device;
    device.type = DeviceType::kCuda;
    device.compute_capability = 90;
    device.multiprocessors = c_.multiprocessors;
    device.shared_memory_per_block = c_.shared_limit;
    device.shared_memory_per_multiprocessor = c_.shared_limit + 1024;
    std::vector<float> workspace;
    int64_t bytes = 0;
    const auto allocate = [&](const Plan& plan) {
      bytes = plan.scratch_bytes;
      workspace.assign(plan.scratch_bytes / 4 + 64, std::nanf(""));
      return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 127) / 128 * 128);
    };
    const auto expect_room = [&] {
      for (size_t i = bytes / 4 + 32; i < workspace.size(); ++i) EXPECT_TRUE(std::isnan(workspace[i])) << "scratch";
    };
    const auto scores = [&](auto& x) {
      TensorView view;
      view.data = x.data() + first * c_.heads_q * max_q_ * max_k_;
      view.batch_stride[0] = c_.heads_q * max_q_ * max_k_;
      view.head_stride = max_q_ * max_k_;
      view.row_stride = max_k_;
      view.col_stride = 1;
      return view;
    };
    const auto of_element = [&](TensorView view, int64_t rows) {
      if (!packed) view.batch_stride[0] = rows * view.row_stride;
      return view;
    };
    if (c_.bias) args.bias = scores(bias_);
    if (c_.mask) args.mask = scores(mask_);
    if (c_.alibi) {
      args.alibi.data = slopes_.data() + first * c_.heads_q;
      args.alibi.batch_stride[0] = c_.heads_q;
      args.alibi.head_stride = 1;
    }
    args.rng_state = rng_state_;
    args.dropout_place = kPartOfDropout;
    Guarded<T> out(elements * len_q * c_.heads_q * d_v_);
    Guarded<float> lse(elements * len_q * c_.heads_q);
    args.out = of_element(view(out.begin(), c_.heads_q, d_v_), len_q);
    args.lse = lse.begin();
    const Kernel* const forward = select_forward(table, args, device, "");
    if (forward == nullptr) throw std::runtime_error(why(consider(table, Pass::kForward, {args}, device)));
    const Plan forward_plan = forward->plan(args.problem, device);
    forward->forward(args, forward_plan, allocate(forward_plan));
    expect_room();
    if (c_.forward_alone) return {out.values(), lse.values(), {}, {}, {}, {}, {}};

    BackwardArgs back;
    back.fwd = args;
    Problem& problem = back.fwd.problem;
    problem.wants_dq = !c_.no_dq;
    problem.wants_dk = !c_.no_dk;
    problem.wants_dv = !c_.no_dv;
    problem.wants_dbias = c_.bias_gradient;
    problem.wants_dalibi = c_.slope_gradient;
    back.d_out = view(d_out, c_.heads_q, d_v_);
    std::vector<float> d_lse = d_lse_;
    if (!packed) {  // the same rows in every element
      d_lse.resize(elements * c_.heads_q * len_q);
      for (int64_t i = 0; i < static_cast<int64_t>(d_lse.size()); ++i) {
        d_lse[i] = d_lse_[i / len_q % c_.heads_q * rows_q_ + cu_q_[b] + i % len_q];
      }
    }
    if (c_.d_lse) back.d_lse = d_lse.data();
    Guarded<T> dq(elements * len_q * c_.heads_q * d_), dk(elements * len_k * c_.heads_k * d_),
        dv(elements * len_k * c_.heads_v * d_v_);
    Guarded<float> dbias(batch() * c_.heads_q * max_q_ * max_k_), dalibi(batch() * c_.heads_q);
    back.dq = of_element(view(dq.begin(), c_.heads_q, d_), len_q);
    back.dk = of_element(view(dk.begin(), c_.heads_k, d_), len_k);
    back.dv = of_element(view(dv.begin(), c_.heads_v, d_v_), len_k);
    if (c_.no_dq) back.dq = {};
    if (c_.no_dk) back.dk = {};
    if (c_.no_dv) back.dv = {};
    if (c_.bias_gradient) back.dbias = scores(dbias.data);
    back.dbias.data = dbias.begin() + first * c_.heads_q * max_q_ * max_k_;
    back.dalibi = dalibi.begin() + first * c_.heads_q;
    problem.whole_dbias = c_.bias_gradient;
    const Stages stages = select_backward(table, back, device, "");
    const Kernel* const main = stages.main();
    if (main == nullptr) throw std::runtime_error(why(consider(table, Pass::kBackward, {back.fwd, &back}, device)));
    EXPECT_EQ(stages.size(), 1);
    const Plan plan = main->plan(problem, device);
    main->backward(back, plan, allocate(plan));
    expect_room();
    return {out.values(),
            lse.values(),
            c_.no_dq ? std::vector<float>() : dq.values(),
            c_.no_dk ? std::vector<float>() : dk.values(),
            c_.no_dv ? std::vector<float>() : dv.values(),
            c_.bias_gradient ? dbias.values() : std::vector<float>(),
            c_.slope_gradient ? dalibi.values() : std::vector<float>()};
  }

  static std::string why(const std::vector<Considered>& rows) {
    std::string text;
    for (const Considered& row : rows) text += std::string(row.kernel->name) + ": " + row.reason + "\n";
    return text;
  }

  Case c_;
  std::vector<PackedLengths> sequences_;
  std::vector<int32_t> cu_q_, cu_k_, used_q_, used_k_;
  int64_t max_q_ = 0, max_k_ = 0, rows_q_ = 0, rows_k_ = 0, d_ = 0, d_v_ = 0;
  std::vector<T> q_, k_, v_, d_out_, bias_;
  std::vector<uint8_t> mask_;
  std::vector<float> slopes_, d_lse_;
  int64_t rng_state_[2] = {1234, 56};
};

// Each sequence of a packed call has what it has where no other one is in use, bit for bit, and what a call of its own
// has, nearly, because that may take other tiles.
template <class T>
void check_packed(Table table, const PackedCase& c) {
  PackedCall<T> call(c);
  const Results all = call.run(table);
  const double allowed =
      c.options.rounding + (std::is_same_v<T, float> ? 2e-5 : (std::is_same_v<T, __half> ? 2e-3 : 1e-2));
  for (int64_t b = 0; b < call.batch(); ++b) {
    SCOPED_TRACE("sequence " + std::to_string(b));
    const Results own = call.part(all, b), only = call.part(call.run(table, b), b);
    const bool exact = c.options.deterministic;
    EXPECT_EQ(own.out, only.out);
    EXPECT_EQ(own.lse, only.lse);
    if (exact) EXPECT_EQ(own.dq, only.dq);
    EXPECT_EQ(own.dk, only.dk);
    EXPECT_EQ(own.dv, only.dv);
    EXPECT_EQ(own.dbias, only.dbias);
    EXPECT_EQ(own.dalibi, only.dalibi);
    const auto [q, k, unused_q, unused_k] = call.lengths(b);
    if (q == 0 || k == 0) {
      for (const std::vector<float>* x : {&own.out, &own.dq, &own.dk, &own.dv}) {
        for (const float value : *x) EXPECT_EQ(value, 0.f);
      }
      for (const float value : own.lse) EXPECT_EQ(value, -INFINITY);
      for (const float value : own.dalibi) EXPECT_EQ(value, 0.f);
      continue;
    }
    const Results alone = call.part_alone(call.run_alone(table, b), b);
    EXPECT_LT(error(own.out, alone.out), allowed) << "out";
    EXPECT_LT(error(own.lse, alone.lse), allowed / 10) << "lse";
    // dS of one key is 0 but for roundings.
    const double scale = k == 1 ? 10 : 1;
    EXPECT_LT(error(own.dq, alone.dq), allowed * scale) << "dq";
    EXPECT_LT(error(own.dk, alone.dk), allowed * scale) << "dk";
    EXPECT_LT(error(own.dv, alone.dv), allowed) << "dv";
    EXPECT_LT(error(own.dbias, alone.dbias), allowed) << "dbias";
    EXPECT_LT(error(own.dalibi, alone.dalibi), 3 * allowed) << "dalibi";
  }
}

}  // namespace flash_ext
