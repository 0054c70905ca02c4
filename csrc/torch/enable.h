// flash_ext.enable(): aten::scaled_dot_product_attention of every caller, Python or C++, runs here.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flash_ext {

// Which calls run here.
enum class Enabled : uint8_t {
  kNone,
  kUnchosen,  // those for which its user chose none of PyTorch's own kernels
  kFlash,     // and those for which flash attention may be taken: we are what PyTorch means by that
};
// Process-wide.
void set_enabled(bool on, bool as_flash);

// What decides who computes attention in this thread, the arguments aside.
struct Choice {
  std::optional<Enabled> enabled;           // goes before the process's; none: the process's
  std::optional<std::string_view> backend;  // use_backend(name)
  std::array<bool, 5> kernels;              // PyTorch's: flash, memory-efficient, math, cuDNN, overrideable
};
// As it stands now, so that set_choice brings it back wherever that is called.
Choice current_choice();
// Sets it for this thread (PyTorch's kernels: for the process, as PyTorch has it) and returns what to set to undo that.
Choice set_choice(const Choice& choice);
// Text that differs where the choice does: whether calls are computed here, as far as the tensors do not decide, and by
// which backend. Compiled code is valid for one.
std::string choice_text();

// Whether a call with nested tensors of the jagged layout is computed here; counts it among those below.
bool takes_nested_call();
// The same of torch's varlen_attn, with arguments that flash_ext serves or does not.
bool takes_varlen_call(bool is_served);
// Calls that came through it so far and were computed here.
int64_t enabled_calls();
// Calls that came through it and went to PyTorch: each reason with its number of calls, those that happened.
std::vector<std::pair<std::string, int64_t>> calls_left();

}  // namespace flash_ext
