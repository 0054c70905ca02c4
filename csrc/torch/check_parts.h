// What checks are made of: the texts of sizes and dtypes, and comparisons of sizes that may be symbolic.
//
// A symbolic size may be unbacked: nobody knows it before the program runs (rows that a mask keeps). Such a size is
// never guarded on. As in torch: it is taken not to be 0 or 1 by chance, and what must be equal is checked when it is
// known. Included by checks.cpp and cache_checks.cpp.
#pragma once

#include <algorithm>

#include "torch/checks.h"

namespace flash_ext {

template <class... Parts>
[[noreturn]] void fail(const char* argument, const Parts&... parts) {
  throw AttentionError(argument, concat(parts...));
}

template <class Int>
std::string shape_text(c10::ArrayRef<Int> sizes) {
  std::string result = "(";
  for (size_t i = 0; i < sizes.size(); ++i) result += (i ? ", " : "") + text(sizes[i]);
  return result + (sizes.size() == 1 ? ",)" : ")");
}

template <class Int>
std::string shape_text(const Tensor& tensor) {
  return shape_text<Int>(sizes_of<Int>(tensor));
}

template <class Int>
c10::ArrayRef<Int> strides_of(const Tensor& tensor) {
  if constexpr (std::is_same_v<Int, c10::SymInt>) {
    return tensor.sym_strides();
  } else {
    return tensor.strides();
  }
}

inline bool expect(bool condition) { return condition; }
inline bool expect(const c10::SymBool& condition) { return condition.expect_true(__FILE__, __LINE__); }

inline bool known(bool condition) { return condition; }
inline bool known(const c10::SymBool& condition) { return condition.guard_or_false(__FILE__, __LINE__); }

// Whether two sizes are equal, as far as that is known now.
template <class Int>
bool known_equal(const Int& a, const Int& b) {
  return known(c10::sym_eq(a, b));
}

// The same, where anything else is an error; of sizes that are not known yet it is checked when the program runs.
template <class Int>
bool must_equal(const Int& a, const Int& b) {
  return known_equal(a, b) || expect(c10::sym_eq(a, b));
}

// A size of a tensor that is broadcast to `target`.
template <class Int>
bool broadcasts_to(const Int& size, const Int& target) {
  return known_equal(size, target) || known_equal(size, Int(1)) || expect(c10::sym_eq(size, target));
}

// Whether stride a is the larger one. Of products of unknown sizes a multiple is, as in torch's elementwise operators.
inline bool is_outside(int64_t a, int64_t b) { return a > b; }
inline bool is_outside(const c10::SymInt& a, const c10::SymInt& b) {
  if (known(a.sym_gt(b))) return true;
  if (known(a.sym_lt(b)) || known_equal(a, b)) return false;
  return known_equal<c10::SymInt>(a % b, 0);
}

inline int64_t at_least_one(int64_t size) { return std::max<int64_t>(size, 1); }
inline c10::SymInt at_least_one(const c10::SymInt& size) { return known(size.sym_ne(0)) ? size : size.max(1); }

inline bool is_supported(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

// torch.float32 rather than Float.
inline std::string dtype_text(at::ScalarType type) { return concat("torch.", at::getDtypeNames(type).first); }

// Size of dimension `from_right` (1 = last), 1 where the tensor has fewer dimensions.
template <class Int>
Int size_from_right(const Tensor& tensor, int64_t from_right) {
  const auto sizes = sizes_of<Int>(tensor);
  const auto rank = static_cast<int64_t>(sizes.size());
  return from_right <= rank ? sizes[rank - from_right] : Int(1);
}

}  // namespace flash_ext
