// Inputs of torch.float8_e4m3fn (e4m3): what is attended to is query * q_descale, and so on. A descale is float32 and
// has a number for each head, or for each row of each head; an absent one is 1.
//
//   dense    per head: broadcasts to (..., heads); per row: as many dimensions as (..., heads, length), to which it
//            broadcasts
//   packed   per head: broadcasts to (sequences, heads); per row: to (1, heads, rows)
//
// Where no kernel reads e4m3, `dequantised` inputs of out's dtype are computed with. Backward always takes them: the
// gradients of attention_backward are of what was attended to, in out's dtype.
#pragma once

#include "torch/checks.h"

namespace flash_ext::fp8 {

struct Part {
  const char* name;
  Tensor Inputs::*tensor;
  const char* descale_name;
  Tensor Inputs::*descale;
};

inline constexpr Part kParts[] = {
    {"query", &Inputs::query, "q_descale", &Inputs::q_descale},
    {"key", &Inputs::key, "k_descale", &Inputs::k_descale},
    {"value", &Inputs::value, "v_descale", &Inputs::v_descale},
};

// Which of query, key and value are leaves of autograd's graph with a descale, by which their gradients are multiplied.
using Leaves = std::array<bool, std::size(kParts)>;

inline bool has(const Inputs& in) { return in.query.scalar_type() == at::kFloat8_e4m3fn; }
// Even where dtypes differ, which is an error.
bool has_any(const Inputs& in);
bool is_per_row(const Inputs& in, const Part& part);
bool has_row_descales(const Inputs& in);

// Dtypes of descales and of out; of a call whose query, key and value have one dtype.
void check_dtypes(const Inputs& in, const Options& options);
template <class Int>
void check_descales(const Inputs& in, const Shape<Int>& shape);
// A descale is a constant of the call.
void check_no_gradient(const Inputs& in);
// Where dequantised inputs are recorded, a gradient of e4m3 would be rounded to it. beside: what it is that records.
void check_not_recorded(const Inputs& in, const char* beside);

// The descale as it broadcasts to its tensor; undefined: 1.
Tensor factor(const Inputs& in, const Part& part);
// The 16-bit inputs of a call that has been checked. Made of differentiable operations; in_place: where nothing is
// recorded or mapped.
Inputs dequantised(const Inputs& in, const Options& options, bool in_place = false);

}  // namespace flash_ext::fp8
