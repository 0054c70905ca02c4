// Calls with sinks, which both backends serve: grouped heads, rows without keys, heads that share tiles, split keys.
#pragma once

#include "call_case.h"

namespace flash_ext {

inline const Case kSinkCases[] = {
    {.name = "groups",
     .len_q = 160,
     .len_k = 330,
     .heads_q = 4,
     .heads_k = 2,
     .heads_v = 2,
     .sinks = true,
     .d_lse = true},
    {.name = "without_keys",
     .len_q = 150,
     .len_k = 70,
     .heads_q = 3,
     .heads_k = 3,
     .heads_v = 3,
     .batch = 2,
     .causal = true,
     .bottom_right = true,
     .sinks = true},
    {.name = "few_queries", .len_q = 4, .len_k = 600, .heads_q = 4, .sinks = true, .multiprocessors = 16},
    {.name = "split_keys",
     .head_dim = 128,
     .len_q = 60,
     .len_k = 900,
     .heads_q = 4,
     .sinks = true,
     .multiprocessors = 40},
    {.name = "mask_and_dropout", .len_q = 130, .len_k = 144, .heads_q = 4, .mask = true, .sinks = true, .dropout = 0.3},
};

}  // namespace flash_ext
