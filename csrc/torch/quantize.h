// The operator quantize_fp8, x / descale in e4m3, and how gradients get past it.
//
// torch casts a gradient to the dtype of the tensor that it belongs to, and in e4m3 nothing of it would be left. So
// attention's nodes hand the gradient of what they attended to, query * q_descale, straight to x, which it stands for.
#pragma once

#include <torch/csrc/autograd/function.h>

#include "torch/fp8.h"

namespace flash_ext::fp8 {

// Of the edges of a node from `first` on, which are those of query, key and value: past the nodes of quantize_fp8.
// Throws AttentionError for a tensor that wants a gradient and is neither a result of quantize_fp8 nor a leaf.
Leaves go_past_quantize(torch::autograd::edge_list& edges, size_t first, const Inputs& in);

}  // namespace flash_ext::fp8
