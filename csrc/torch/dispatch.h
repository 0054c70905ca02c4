// Which kernel runs a call: of those that accept the one of least cost (core/select.h), or one of those that are named.
// Forward and backward are chosen independently. `chunked` (chunked.h) stands behind the table and refuses nothing.
#pragma once

#include <optional>
#include <string_view>

#include "core/select.h"
#include "torch/checks.h"

namespace flash_ext {

inline constexpr std::string_view kChunked = "chunked";

// use_backend(name) of this thread, else FLASH_EXT_BACKEND, else none. The view stays valid for the process.
std::optional<std::string_view> requested_backend();
// Sets this thread's choice (none: no choice) and returns the one before it. Throws for an unknown name.
std::optional<std::string_view> set_requested_backend(std::optional<std::string_view> name);
// Throws AttentionError for a name that no backend and no kernel has.
void check_backend_name(std::string_view name);
// The same name as a view into a string literal, which outlives every graph that holds it; throws alike.
std::string_view stored_name(std::string_view name);

DeviceInfo device_info(const c10::Device& device);

// The kernel that will run a forward, or nullptr for `chunked`. Throws AttentionError where the named one refuses,
// which every one does where the leading dimensions did not merge.
const Kernel* choose_kernel(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name);
// The same, where a refusal is no error: nullptr. For e4m3 inputs, which can be dequantised.
const Kernel* find_kernel(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name);
// Those of a backward; empty: `chunked`. Throws alike.
Stages choose_stages(const BackwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name);

}  // namespace flash_ext
