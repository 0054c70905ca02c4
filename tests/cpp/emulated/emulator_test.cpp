// What the emulator has of its own, because it is faster.
#include "emulator.h"

#include <gtest/gtest.h>

namespace flash_ext {
namespace {

TEST(Emulator, ToFloatIsWhatTheToolkitGives) {
  for (unsigned bits = 0; bits < 1u << 16; ++bits) {
    const __half x = __half_raw{static_cast<unsigned short>(bits)};
    const float ours = emulated::to_float(x), theirs = static_cast<float>(x);
    if (std::isnan(ours) && std::isnan(theirs)) continue;
    EXPECT_EQ(__float_as_uint(ours), __float_as_uint(theirs)) << bits;
  }
}

}  // namespace
}  // namespace flash_ext
