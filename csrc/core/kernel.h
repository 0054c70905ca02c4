// A row of the table of kernels: what it is called, what it can do, what it takes, and how it is planned and launched.
//
// Forward and backward are chosen independently, so the hand-over between them is fixed: out (problem.dtype),
// lse (contiguous [b, h_q, s_q], natural log, no padding, no private form) and rng_state. A row knows no other one:
// what is refused, and who is chosen, follows from the table (select.h). A new kernel is a row in its backend's list; a
// new backend is a folder with a list, and a name in kernels/table.cpp.
#pragma once

#include <climits>
#include <limits>
#include <string>

#include "core/device.h"
#include "core/features.h"
#include "core/plan.h"

namespace flash_ext {

// The ends are included.
struct Limits {
  int least_compute_capability = 0, compute_capability = INT_MAX;  // 90 for 9.0
  // Of the larger head dimension, of query and key or of value; both must be multiples.
  int64_t least_head_dim = 1, head_dim = INT64_MAX, head_dim_multiple = 1;
  int64_t least_length = 1, length = INT64_MAX;  // of the longer sequence
  int64_t least_keys = 1;                        // that all queries together see
  double softcap = std::numeric_limits<double>::infinity();
  double dropout_p = 1.0;
  double least_scale = -std::numeric_limits<double>::infinity(), scale = std::numeric_limits<double>::infinity();
};

// Scratch comes from torch's allocator on the current stream; the caller of a kernel provides it. `workspace` holds
// plan().scratch_bytes bytes, aligned to 64.
struct Kernel {
  const char* name;  // e.g. "sm90.backward.scored"; Plan::kernel may add to it
  const char* backend;
  DeviceType device;
  Pass pass;
  Features supports;
  Limits limits = {};
  // Of which it needs at least one; empty: none.
  Features serves_only = {};
  Plan (*plan)(const Problem& problem, const DeviceInfo& device) = nullptr;
  // Forward's or, for Pass::kBackward and kBiasGradient, backward's.
  void (*forward)(const ForwardArgs& args, const Plan& plan, void* workspace) = nullptr;
  void (*backward)(const BackwardArgs& args, const Plan& plan, void* workspace) = nullptr;
  // Microseconds, roughly: of the rows that accept a call the cheapest one runs it. Null: nothing else serves its
  // calls.
  double (*cost)(const Problem& problem, const DeviceInfo& device) = nullptr;
  // Shared memory that a block takes with the smallest tiles, of a problem within the limits. Null: all cards have it.
  int64_t (*shared_bytes)(const Problem& problem, const DeviceInfo& device) = nullptr;
  // Asks the current device about the compiled kernel of a plan; null where there is nothing to ask.
  void (*inspect)(const Problem& problem, Plan& plan) = nullptr;
  // A clause about where a tensor lies, e.g. "query does not start at a multiple of 16 bytes"; asked last, with all
  // views set. `backward` is null in forward, and otherwise what backward will be given, `args` in it. Addresses of
  // explain count from the storage. Null: reads any strides.
  std::string (*refuses_views)(const ForwardArgs& args, const BackwardArgs* backward) = nullptr;
};

// Takes away what another stage makes, in place. NOTE: taken and returned by value, g++ 13.3 at -O3 merged the two
// where one of them was called by a condition in a loop, and gave the one the zeros of the other for strides of dq, dk
// and dv.
inline void drop_bias_gradient(BackwardArgs& args) {
  args.fwd.problem.wants_dbias = args.fwd.problem.whole_dbias = false;
  args.dbias = TensorView();
}

inline void keep_bias_gradient(BackwardArgs& args) {
  Problem& problem = args.fwd.problem;
  problem.wants_dq = problem.wants_dk = problem.wants_dv = problem.wants_dalibi = false;
  args.dq = args.dk = args.dv = TensorView();
  args.dalibi = nullptr;
}

// What runs a backward, in order: the main kernel, and behind it those that make what it leaves, today the gradient of
// a bias. Empty: no kernel serves the call.
class Stages {
 public:
  static constexpr int kMost = 2;

  Stages() = default;
  explicit Stages(const Kernel* main, const Kernel* bias_gradient = nullptr) : kernels_{main, bias_gradient} {}

  int size() const { return kernels_[0] == nullptr ? 0 : kernels_[1] == nullptr ? 1 : 2; }
  bool empty() const { return size() == 0; }
  const Kernel& operator[](int stage) const { return *kernels_[stage]; }
  const Kernel* main() const { return kernels_[0]; }
  // Leaves of a call's arguments what the stage is given: the gradients that are its own.
  void narrow(int stage, BackwardArgs& args) const {
    if (kernels_[stage]->pass == Pass::kBiasGradient) {
      keep_bias_gradient(args);
    } else if (size() > 1) {
      drop_bias_gradient(args);
    }
  }

 private:
  const Kernel* kernels_[kMost] = {};
};

}  // namespace flash_ext
