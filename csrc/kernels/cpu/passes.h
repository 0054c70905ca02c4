// The two passes of the CPU backend for one compute type, each as a plan and a run.
//
// Implemented in forward.cpp and backward.cpp for ComputeF32, ComputeBf16 and ComputeF64; rows.cpp chooses the type
// and calls them. Invariant: run_* does what plan_* wrote down: the same cut, the same number of workers, no more
// scratch.
#pragma once

#include "core/kernel.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/work.h"

namespace flash_ext::cpu {

// Fills all of a plan but its kernel's name. threads: the most; choice comes with type and engine.
template <class Compute>
void plan_forward(const Problem& problem, int64_t threads, Choice choice, Plan& plan);
template <class Compute>
void plan_backward(const Problem& problem, int64_t threads, Choice choice, Plan& plan);

template <class Compute>
void run_forward(const ForwardArgs& args, const Plan& plan, void* workspace);
template <class Compute>
void run_backward(const BackwardArgs& args, const Plan& plan, void* workspace);

}  // namespace flash_ext::cpu
