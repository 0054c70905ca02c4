// What an operator would do and why, as JSON: the very plan that it executes.
#pragma once

#include <string>
#include <string_view>

#include "torch/options.h"

namespace flash_ext {

// Launches nothing, draws nothing, reads no element, so that meta tensors do. `device` ("" = the tensors' own, the CPU
// for meta tensors) plans for one that is not there.
std::string explain(const Inputs& in, const Options& options, std::string_view device, const GradMask& grad_mask);

}  // namespace flash_ext
