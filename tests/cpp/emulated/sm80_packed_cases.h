// Packed calls for the tests of emulated kernels.
#pragma once

#include "packed_call.h"

namespace flash_ext {

inline const std::vector<PackedLengths> kRagged = {{0, 20}, {1, 1}, {70, 90, 4, 3}, {130, 140}, {5, 0, 2, 0}};
inline const std::vector<PackedLengths> kShort = {{12, 7}, {1, 30, 0, 6}, {40, 61}, {9, 0, 1, 1}, {3, 3}};

const PackedCase kPackedCases[] = {
    {{.name = "plain"}, kRagged},
    {{.name = "grouped_and_deterministic",
      .heads_q = 2,
      .heads_k = 1,
      .heads_v = 1,
      .causal = true,
      .deterministic = true},
     kRagged},
    {{.name = "window_bottom_right",
      .heads_q = 2,
      .heads_k = 2,
      .heads_v = 1,
      .causal = true,
      .bottom_right = true,
      .window = 50},
     kRagged},
    {{.name = "one_tile_of_keys", .d = 40, .d_v = 56, .bottom_right = true, .window = 20}, kShort},
    {{.name = "dropout", .heads_q = 2, .heads_k = 1, .heads_v = 1, .dropout = 0.3, .d_lse = true}, kRagged},
    {{.name = "mask_and_softcap", .d = 48, .mask = true, .softcap = 2.0, .deterministic = true, .d_lse = true},
     kRagged},
    {{.name = "bias",
      .heads_q = 2,
      .heads_k = 2,
      .heads_v = 2,
      .causal = true,
      .bias = true,
      .bias_gradient = true,
      .d_lse = true},
     kShort},
    {{.name = "bias_of_long", .bottom_right = true, .window = 60, .bias = true}, kRagged},
    {{.name = "slopes",
      .heads_q = 2,
      .heads_k = 1,
      .heads_v = 1,
      .causal = true,
      .bottom_right = true,
      .alibi = true,
      .deterministic = true,
      .slope_gradient = true,
      .d_lse = true},
     kRagged},
    {{.name = "everything",
      .d_v = 40,
      .heads_q = 2,
      .heads_k = 2,
      .heads_v = 1,
      .causal = true,
      .bias = true,
      .mask = true,
      .alibi = true,
      .softcap = 5.0,
      .dropout = 0.2,
      .deterministic = true,
      .bias_gradient = true,
      .slope_gradient = true,
      .d_lse = true},
     kShort},
    {{.name = "small_tiles", .causal = true, .mask = true, .deterministic = true, .shared_limit = 64 * 1024}, kRagged},
    {{.name = "renorm_rows", .causal = true, .deterministic = true, .scale = 300, .rounding = 1e-2}, kShort},
    {{.name = "value_gradient_alone", .dropout = 0.1, .no_dq = true, .no_dk = true}, kShort},
};

}  // namespace flash_ext
