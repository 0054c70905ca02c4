// Which backend runs a call: the first in the list that accepts, or the one that is named. Forward and backward are
// chosen independently. `chunked` (chunked.h) stands behind the list and refuses nothing. A named backend that has no
// backward pass at all leaves backward to the list, because nobody else's name was given for it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/backend.h"
#include "api/checks.h"

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

// The backend that will run, or nullptr for `chunked`. Throws AttentionError where the named one refuses, which every
// one does where the leading dimensions did not merge.
const Backend* select_backend(const ForwardArgs& args, Pass pass, const DeviceInfo& device,
                              std::optional<std::string_view> name);

struct Refusal {
  std::string backend, reason;
};
// Every backend's refusal of a problem, for explain.
std::vector<Refusal> refusals(const ForwardArgs& args, Pass pass, const DeviceInfo& device);

}  // namespace flash_ext
