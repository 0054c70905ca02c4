// Scores that rise from tile to tile, because keys are walked from the last one: by what P of a tile may be relative to
// the maximum before, by more, and by more than float holds. Their gradients are ill-conditioned, so forward alone.
#pragma once

#include "call_case.h"

namespace flash_ext {

const Case kRisingCases[] = {
    {.name = "by_40", .len_q = 160, .len_k = 330, .forward_alone = true, .rise = 40},
    {.name = "by_120", .len_q = 160, .len_k = 330, .forward_alone = true, .rise = 120},
    {.name = "by_600", .len_q = 160, .len_k = 330, .forward_alone = true, .rise = 600},
    {.name = "causal_96_by_120",
     .head_dim = 96,
     .len_q = 280,
     .len_k = 280,
     .causal = true,
     .forward_alone = true,
     .rise = 120},
    {.name = "causal_80_by_600",
     .len_q = 280,
     .len_k = 280,
     .d = 80,
     .causal = true,
     .forward_alone = true,
     .rise = 600},
    {.name = "window_by_900",
     .len_q = 300,
     .len_k = 300,
     .causal = true,
     .window = 150,
     .forward_alone = true,
     .rise = 900},
    {.name = "narrow_values_by_600",
     .head_dim = 192,
     .len_q = 160,
     .len_k = 330,
     .d_v = 128,
     .forward_alone = true,
     .rise = 600},
    {.name = "head_dim_128_by_600", .head_dim = 128, .len_q = 160, .len_k = 330, .forward_alone = true, .rise = 600},
};

}  // namespace flash_ext
