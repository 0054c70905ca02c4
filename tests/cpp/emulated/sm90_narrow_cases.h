// Values of fewer columns than keys, which have tiles of their own. Part of sm90_kernels_test.cpp, which has the
// backend.
#pragma once

#include "call_case.h"

namespace flash_ext {
namespace {

const Case kNarrowValues[] = {
    {.name = "plain", .head_dim = 192, .len_q = 140, .len_k = 420, .d_v = 128, .d_lse = true},
    {.name = "causal",
     .head_dim = 192,
     .len_q = 200,
     .len_k = 330,
     .d = 136,
     .d_v = 40,
     .heads_q = 4,
     .heads_k = 2,
     .heads_v = 2,
     .causal = true,
     .bottom_right = true,
     .multiprocessors = 2},
    {.name = "more_queries_than_stages", .head_dim = 192, .len_q = 470, .len_k = 130, .d_v = 104},
    {.name = "fewer_keys", .head_dim = 192, .len_q = 200, .len_k = 150, .d_v = 128, .causal = true, .d_lse = true},
};

}  // namespace
}  // namespace flash_ext
