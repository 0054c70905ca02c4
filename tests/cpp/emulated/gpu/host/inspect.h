// Stands in for csrc/gpu/host/inspect.h: nothing was compiled for a device.
#pragma once

#include "core/plan.h"
#include "gpu/host/launch.h"

namespace flash_ext::cuda {

template <class... Params>
void inspect_beside(void (*)(Params...), Plan&) {}
template <class... Params>
void inspect(void (*)(Params...), int, int64_t, Plan&) {}
template <class... Params>
void inspect_static(void (*)(Params...), int, Plan&) {}

}  // namespace flash_ext::cuda
