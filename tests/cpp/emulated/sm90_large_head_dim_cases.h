// Head dims above 256, whose columns of V and of a gradient are shared out. Part of sm90_kernels_test.cpp, which has
// the backend.
#pragma once

#include "call_case.h"

namespace flash_ext {
namespace {

constexpr int kLargest = 512;  // 384 and 512 in bf16, 512 alone in fp16

const Case kLargeHeadDims[] = {
    {.name = "plain_384", .head_dim = kLargest, .len_q = 150, .len_k = 170, .d = 384},
    {.name = "plain_512", .head_dim = kLargest, .len_q = 150, .len_k = 100, .d_lse = true},
    {.name = "causal_512",
     .head_dim = kLargest,
     .len_q = 140,
     .len_k = 140,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .multiprocessors = 3},
    {.name = "few_columns_of_the_second_half",
     .head_dim = kLargest,
     .len_q = 70,
     .len_k = 100,
     .d = 328,
     .d_v = 200,
     .causal = true,
     .bottom_right = true,
     .layout = Layout::kRowsFirst},
    {.name = "value_of_one_half", .head_dim = kLargest, .len_q = 70, .len_k = 100, .d_v = 64, .sinks = true},
    {.name = "query_of_one_half", .head_dim = kLargest, .len_q = 70, .len_k = 100, .d = 8, .d_v = 512, .window = 30},
    {.name = "some_gradients", .head_dim = kLargest, .len_q = 70, .len_k = 100, .d = 384, .no_dk = true},
    {.name = "far_lse_384",
     .head_dim = kLargest,
     .len_q = 100,
     .len_k = 90,
     .d = 384,
     .d_lse = true,
     .scale = 1,
     .equal = 256},
    {.name = "far_lse_512", .head_dim = kLargest, .len_q = 100, .len_k = 90, .d_lse = true, .scale = 1, .equal = 256},
    {.name = "bias_and_mask_384",
     .head_dim = kLargest,
     .len_q = 130,
     .len_k = 150,
     .d = 384,
     .bias = true,
     .mask = true,
     .float_bias = true,
     .dropout = 0.25,
     .forward_alone = true},
    {.name = "bias_and_mask_512",
     .head_dim = kLargest,
     .len_q = 130,
     .len_k = 150,
     .causal = true,
     .bias = true,
     .mask = true,
     .float_bias = true,
     .softcap = 5,
     .dropout = 0.25,
     .forward_alone = true},
};

}  // namespace
}  // namespace flash_ext
