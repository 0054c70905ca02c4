// flash_ext.enable(): aten::scaled_dot_product_attention of every caller, Python or C++, runs here.
#pragma once

#include <cstdint>

namespace flash_ext {

// Process-wide. Returns whether it was on before.
bool set_enabled(bool on);
// Calls that came through it so far and were computed here.
int64_t enabled_calls();

}  // namespace flash_ext
