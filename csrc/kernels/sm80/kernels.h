// What the host side of this backend calls, without any CUDA syntax: one function a (pass, element, head dimension).
//
// Definitions lie in generated units (cmake/cuda_units.cmake writes one per instance from unit.cu.in of forward/ and
// backward/), so a missing instance is an undefined symbol, which the linker refuses. Called by rows.cpp only.
#pragma once

#include <type_traits>

#include "core/args.h"
#include "core/device.h"
#include "core/elements.h"
#include "core/plan.h"
#include "kernels/sm80/config.h"

namespace flash_ext::sm80 {

template <class Element, int kHeadDim>
Plan plan_forward(const Problem& problem, const DeviceInfo& device);
template <class Element, int kHeadDim>
void run_forward(const ForwardArgs& args, const Plan& plan, void* workspace);
template <class Element, int kHeadDim>
void inspect_forward(const Problem& problem, Plan& plan);

template <class Element, int kHeadDim>
Plan plan_backward(const Problem& problem, const DeviceInfo& device);
template <class Element, int kHeadDim>
void run_backward(const BackwardArgs& args, const Plan& plan, void* workspace);
template <class Element, int kHeadDim>
void inspect_backward(const Problem& problem, Plan& plan);

// Where one tile holds all queries and keys of a head (forward_single_tile/ and backward_single_tile/kernel.cuh): 16
// bits, kBlock is kOneTile or kLargeTile.
template <class Element, int kHeadDim, int kBlock>
constexpr bool kHasOneTile = (std::is_same_v<Element, Fp16> || std::is_same_v<Element, Bf16>)&&kHeadDim <=
                             one_tile_head_dim(kBlock);
template <class Element, int kHeadDim, int kBlock>
Plan plan_one_tile_forward(const Problem& problem, const DeviceInfo& device);
template <class Element, int kHeadDim, int kBlock>
void run_one_tile_forward(const ForwardArgs& args, const Plan& plan);
template <class Element, int kHeadDim, int kBlock>
void inspect_one_tile_forward(const Problem& problem, Plan& plan);
template <class Element, int kHeadDim, int kBlock>
Plan plan_one_tile_backward(const Problem& problem, const DeviceInfo& device);
template <class Element, int kHeadDim, int kBlock>
void run_one_tile_backward(const BackwardArgs& args, const Plan& plan, void* workspace);
template <class Element, int kHeadDim, int kBlock>
void inspect_one_tile_backward(const Problem& problem, Plan& plan);

// float64: correct and simple, without tensor cores (fp64/forward.cu, fp64/backward.cu).
Plan plan_fp64(const Problem& problem, Pass pass, const DeviceInfo& device);
void forward_fp64(const ForwardArgs& args);
void inspect_forward_fp64(Plan& plan);
void backward_fp64(const BackwardArgs& args, void* workspace);
void inspect_backward_fp64(Plan& plan);

}  // namespace flash_ext::sm80
