// Which backend runs a call: the first in the list that accepts and does not yield to one behind it, or the one that is
// named, which must accept. Forward and backward are chosen independently. `chunked` (chunked.h) stands behind the list
// and refuses nothing.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "torch/checks.h"

namespace flash_ext {

inline constexpr std::string_view kChunked = "chunked";

// use_backend(name) of this thread, else FLASH_EXT_BACKEND, else none. The view stays valid for the process.
std::optional<std::string_view> requested_backend();
// Sets this thread's choice (none: no choice) and returns the one before it. Throws for an unknown name.
std::optional<std::string_view> set_requested_backend(std::optional<std::string_view> name);
// Throws AttentionError for a name that no backend has.
void check_backend_name(std::string_view name);
// The same name as a view into a string literal or Backend::name, which outlives every graph that holds it; throws
// alike.
std::string_view stored_name(std::string_view name);

DeviceInfo device_info(const c10::Device& device);

// The backend that will run the pass whose arguments these are, or nullptr for `chunked`. Throws AttentionError where
// the named one refuses, which every one does where the leading dimensions did not merge.
const Backend* select_backend(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name);
const Backend* select_backend(const BackwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name);

// What makes the gradient of a bias that `backend` leaves: a backend, the arguments for it and its plan. None where it
// leaves nothing.
struct BiasGradientStep {
  const Backend* backend;
  BackwardArgs args;
  Plan plan;
};
std::optional<BiasGradientStep> bias_gradient_step(const Backend& backend, const BackwardArgs& args,
                                                   const DeviceInfo& device);

struct Refusal {
  std::string backend, reason;
  bool yields;  // it accepts, and was passed over for a faster one
};
// Every backend's refusal of a pass, for explain; and who was passed over, which a named backend never is.
std::vector<Refusal> refusals(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name);
std::vector<Refusal> refusals(const BackwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name);

}  // namespace flash_ext
