// What sinks need beside the kernels, which join them to out and lse: rows that no kernel looks at. Their gradient is
// an operator, sinks_gradient.
#pragma once

#include "torch/options.h"

namespace flash_ext::sinks {

// lse of a call in which no query meets a key: the sinks, and -inf in rows that belong to no sequence.
void fill_lse(const Tensor& lse, const Inputs& in, const Options& options);

}  // namespace flash_ext::sinks
