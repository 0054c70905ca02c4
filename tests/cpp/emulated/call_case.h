// What a test of emulated kernels says of a call, tensors with guards around them, and a call's results.
#pragma once

#include <cmath>
#include <ostream>
#include <span>
#include <vector>

#include "core/kernel.h"
#include "emulator.h"

namespace flash_ext {

enum class Operand { kNone, kQuery, kKey, kValue, kGrad, kBias };
enum class Layout { kHeadsFirst, kRowsFirst, kOdd };  // [h, s, d], [s, h, d], and the first behind one element

struct Case {
  const char* name;
  int head_dim = 64;  // of the instance that serves it
  int64_t len_q = 0, len_k = 0;
  int64_t d = 0, d_v = 0;  // 0: head_dim
  int heads_q = 1, heads_k = 1, heads_v = 1;
  int batch = 1;  // elements, which share bias and mask
  bool causal = false, bottom_right = false;
  int64_t window = kUnbounded;
  bool bias = false, mask = false, alibi = false, sinks = false;
  bool float_bias = false, one_row = false;  // of bias and mask: [h, 1, k]
  bool one_head = false;                     // of bias and mask: [1, q, k]
  int64_t documents = 0;                     // a mask hides the pairs of different ones, and all keys of the last
  double softcap = 0, dropout = 0;
  // In the place of the softcap, of a score and i + offset - j: score_functions.h.
  double (*value)(double, double) = nullptr;
  double (*slope_of_value)(double, double) = nullptr;
  bool deterministic = false, bias_gradient = false, slope_gradient = false, d_lse = false;
  bool forward_alone = false;
  bool no_dq = false, no_dk = false, no_dv = false;  // gradients that nobody wants
  float bias_offset = 0;                             // added to all of a bias
  bool lowest_bias = false;                          // all of a bias is the lowest finite number of its type
  int64_t emptied = -1;                              // a row of a bias that is -inf
  int64_t lowest = -1;                               // a column of it that is the lowest finite number
  double scale = 0;                                  // 0: 1 / sqrt(d)
  // Scores that every dtype has exactly, so that no size of scale makes a rounding of them matter: all elements of
  // query are `equal` and all of key too, or its negative; or query, key and a float bias over scale are integers.
  float equal = 0;
  bool opposite = false, integers = false;
  double rise = 0;                   // what scores of the first key have more than those of the last
  int64_t large_row = -1;            // query, the others are 2^-20 times it; -1: all
  float slope = 0;                   // a multiple of it, where not 0
  double rounding = 0;               // of the largest scores, which is more than what their dtype is allowed
  Operand special = Operand::kNone;  // in whose first head this number stands, which is infinite or NaN:
  float special_value = NAN;
  int64_t special_row = 0;
  bool whole_row = false;  // else in the third column alone
  Layout layout = Layout::kHeadsFirst;
  int64_t shared_limit = 227 * 1024;
  int multiprocessors = 1;  // 0: not known, and ranges of a mask are looked for however small the call
};

inline void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// The table of a backend alone.
class Rows {
 public:
  explicit Rows(std::span<const Kernel> kernels) {
    for (const Kernel& kernel : kernels) table_.push_back(&kernel);
  }
  operator std::span<const Kernel* const>() const { return table_; }

 private:
  std::vector<const Kernel*> table_;
};

template <class T>
class Matrices {
 public:
  static constexpr int kGuard = 16;

  Matrices(int heads, int64_t rows, int64_t cols, Layout layout)
      : heads_(heads),
        rows_(rows),
        cols_(cols),
        odd_(layout == Layout::kOdd),
        rows_first_(layout == Layout::kRowsFirst) {
    data_.assign(heads * rows * cols + 2 * kGuard + odd_, T(-77.f));
  }
  TensorView view() {
    TensorView view;
    view.data = data_.data() + kGuard + odd_;
    view.head_stride = rows_first_ ? cols_ : rows_ * cols_;
    view.row_stride = rows_first_ ? heads_ * cols_ : cols_;
    view.col_stride = 1;
    return view;
  }
  T& at(int64_t head, int64_t row, int64_t col) {
    const TensorView v = view();
    return static_cast<T*>(v.data)[head * v.head_stride + row * v.row_stride + col];
  }
  template <class Fn>
  void fill(const Fn& fn) {
    for (int64_t i = 0; i < heads_ * rows_ * cols_; ++i) data_[kGuard + odd_ + i] = T(static_cast<float>(fn()));
  }
  bool guards_hold() const {
    bool hold = true;
    for (int i = 0; i < kGuard; ++i) {
      hold = hold && static_cast<float>(data_[i]) == -77.f && static_cast<float>(data_[data_.size() - 1 - i]) == -77.f;
    }
    return hold;
  }
  std::vector<float> values() {
    const TensorView v = view();
    std::vector<float> all;
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t r = 0; r < rows_; ++r) {
        const T* row = static_cast<const T*>(v.data) + h * v.head_stride + r * v.row_stride;
        for (int64_t c = 0; c < cols_; ++c) all.push_back(emulated::to_float(row[c]));
      }
    }
    return all;
  }

 private:
  std::vector<T> data_;
  int heads_;
  int64_t rows_, cols_;
  int odd_;
  bool rows_first_;
};

// Calls with dropout are parts of a larger one, with other rows, keys and heads before their own, and more heads.
constexpr DropoutPlace kPartOfDropout = {.first = {.bh = 7, .q16 = 3, .k16 = 5}, .other_heads = 2};

struct Results {
  std::vector<float> out, lse, dq, dk, dv, dbias, dalibi;
};

}  // namespace flash_ext
