// Attention in double, what a call of emulated kernels is compared with, and how.
#pragma once

#include <cstdint>
#include <vector>

#include "call_case.h"
#include "core/dropout.h"

namespace flash_ext {

// [batch x head][row][column]; what the batch shares has no batch.
struct Inputs {
  std::vector<double> q, k, v, d_out, bias;
  std::vector<uint8_t> mask;
  std::vector<float> slopes, sinks, d_lse;
  Dropout dropout;
};

// multiplies_hidden: as eager attention, which multiplies what belongs to hidden pairs by 0; else sums leave them
// out. In either dS of such a pair is 0.
Results reference(const Case& c, const Problem& problem, const Inputs& in, bool multiplies_hidden);

// Root of the mean square of the error, over that of the reference. Infinities must agree.
double error(const std::vector<float>& result, const std::vector<float>& reference);

// How many elements are of a kind (number, NaN, inf, -inf) that neither reference has. of_gradient: NaN may stand for
// an infinity.
int misplaced(const std::vector<float>& result, const std::vector<float>& reference, const std::vector<float>& eager,
              bool of_gradient);

}  // namespace flash_ext
