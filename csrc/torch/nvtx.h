// NVTX ranges for profilers (Nsight Systems, Nsight Compute): domain "flash_ext", registered strings, one range per
// operator with its shapes as payload, and ranges that Python names. Called by ops.cpp, autograd.cpp, nodes.cpp,
// dropout_mask.cpp, cache.cpp and bindings.cpp.
//
// Invariant: where no tool listens nothing is formatted, registered or allocated; a range is one test of a pointer. The
// same holds in a build without NVTX's headers (cmake/nvtx.cmake), where no tool ever listens.
// NOTE: 1.3 ns a range with an Intel Xeon and no tool, in a loop of 20 million.
#pragma once

#include <string>

#include "torch/options.h"

namespace flash_ext::nvtx {

// Whether a tool was injected into this process. The first call asks NVTX, which loads the tool.
bool listening();

// The ranges of operators: `attention` is forward.
enum class Op { kAttention, kAttentionBackward, kAttentionDoubleBackward, kDropoutMask, kAttentionWithCache };

class Range {
 public:
  Range(Op op, const Inputs& in, const Options& options) : open_(listening()) {
    if (open_) push(op, in, options);
  }
  explicit Range(Op op) : open_(listening()) {
    if (open_) push(op);
  }
  ~Range() {
    if (open_) pop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  static void push(Op op, const Inputs& in, const Options& options);
  static void push(Op op);
  static void pop();

  const bool open_;
};

// For Python, which pairs them itself; only while listening().
void push(const std::string& name);
void pop();

}  // namespace flash_ext::nvtx
