// The two passes of the CPU backend for one compute type, each as a plan and a run.
//
// Implemented in forward.cpp and backward.cpp for ComputeF32, ComputeBf16 and ComputeF64; backend.cpp chooses the type
// and calls them. Invariant: run_* does what plan_* wrote down: the same cut, the same number of workers, no more
// scratch.
#pragma once

#include "core/backend.h"
#include "kernels/cpu/product.h"

namespace flash_ext::cpu {

// Fills tiles, uses, scratch and grid of a plan.
template <class Compute>
void plan_forward(const Problem& problem, int64_t threads, Plan& plan);
template <class Compute>
void plan_backward(const Problem& problem, int64_t threads, Plan& plan);

template <class Compute>
void run_forward(const ForwardArgs& args, const Plan& plan, Engine engine, void* workspace);
template <class Compute>
void run_backward(const BackwardArgs& args, const Plan& plan, Engine engine, void* workspace);

// Workers that a plan counted on: waves is items per worker.
inline int64_t threads_of(const Plan& plan) {
  return plan.waves > 0.0 ? static_cast<int64_t>(static_cast<double>(plan.grid) / plan.waves + 0.5) : 1;
}

}  // namespace flash_ext::cpu
