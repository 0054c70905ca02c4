// From a number of the call to the template argument that serves it, without a macro:
//
//   dispatch(Values<32, 64>{}, head_dim, [&]<int kHeadDim>() { ... });        the first value >= head_dim
//   dispatch(Types<Fp16, Bf16>{}, is_wanted, [&]<class Element>() { ... });   the first type that is_wanted accepts
//
// Called by rows.cpp. Invariant: the last entry serves whatever the ones before did not, so the caller has refused
// what no entry serves; values ascend.
#pragma once

#include <cstdint>

namespace flash_ext::sm80 {

template <int... kValues>
struct Values {};

template <class... T>
struct Types {};

template <int kFirst, int... kRest, class Function>
auto dispatch(Values<kFirst, kRest...>, int64_t value, const Function& function) {
  if constexpr (sizeof...(kRest) > 0) {
    static_assert(((kFirst < kRest) && ...), "values ascend");
    if (value > kFirst) return dispatch(Values<kRest...>{}, value, function);
  }
  return function.template operator()<kFirst>();
}

template <class First, class... Rest, class Predicate, class Function>
auto dispatch(Types<First, Rest...>, const Predicate& is_wanted, const Function& function) {
  if constexpr (sizeof...(Rest) > 0) {
    if (!is_wanted(First{})) return dispatch(Types<Rest...>{}, is_wanted, function);
  }
  return function.template operator()<First>();
}

}  // namespace flash_ext::sm80
