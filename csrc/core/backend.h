// What a backend is to the rest of the library: a name, a reason to refuse, and two functions.
//
// Forward and backward are chosen independently, so the hand-over between them is fixed: out (problem.dtype),
// lse (contiguous [b, h_q, s_q], natural log, no padding, no private form) and rng_state. A backend may serve fewer
// problems backward than forward: the gradients are then another backend's.
// A new backend is a folder with one `extern const Backend` and one name in kernels/backends.cpp's list.
#pragma once

#include <string>

#include "core/args.h"
#include "core/device.h"
#include "core/plan.h"

namespace flash_ext {

// Scratch comes from torch's allocator on the current stream; the caller of a backend provides it.
// `workspace` holds plan().scratch_bytes bytes, aligned to 64.
struct Backend {
  const char* name;
  DeviceType device;
  // Empty string: accepts. Otherwise one clause, e.g. "head_dim 300 is more than 256".
  std::string (*refuses)(const Problem& problem, Pass pass, const DeviceInfo& device);
  Plan (*plan)(const Problem& problem, Pass pass, const DeviceInfo& device);
  void (*forward)(const ForwardArgs& args, const Plan& plan, void* workspace);
  void (*backward)(const BackwardArgs& args, const Plan& plan, void* workspace);
  // Asks the current device about the kernel of a plan; null where there is nothing to ask.
  void (*inspect)(const Problem& problem, Pass pass, Plan& plan) = nullptr;
  // A clause about where a tensor lies, e.g. "query does not start at a multiple of 16 bytes"; asked after refuses()
  // has accepted, with all views set. `backward` is null in forward, and otherwise what backward will be given, `args`
  // in it. Addresses of explain count from the storage. Null: reads any strides.
  std::string (*refuses_views)(const ForwardArgs& args, const BackwardArgs* backward) = nullptr;
  // Empty, or a clause about which backend behind it in the list is faster at a pass that this one accepts, too. Asked
  // only where no backend is named, and heeded where another one accepts. Null: it is the fastest at all it accepts.
  std::string (*yields)(const Problem& problem, Pass pass) = nullptr;
  // Whether backward leaves the gradient of the bias to another backend, which then makes it alone. Null: never.
  bool (*leaves_bias_gradient)(const Problem& problem) = nullptr;
};

}  // namespace flash_ext
