// The sm80 backend's entry, host code only: refuses, and picks the kernel's instance.
//
//   fp16, bf16, fp32   mma.sync on tiles (fwd.cuh, bwd.cuh), the first of HeadDimsOf >= max(head_dim, head_dim_v)
//   fp64               plain arithmetic (fp64_forward.cu, fp64_backward.cu), any head dimension up to the largest
//
// Serves compute capability 8.0 and above. Called by torch/dispatch.cpp. Invariant: what refuses() lets pass has an
// instance; the lists of instances come from cmake/cuda_units.cmake.
#include <algorithm>
#include <type_traits>

#include "kernels/sm80/kernels.h"
#include "kernels/sm80/shared_memory.h"
#include "sm80_instances.h"

namespace flash_ext::sm80 {
namespace {

constexpr DType dtype_of(Fp16) { return DType::kFloat16; }
constexpr DType dtype_of(Bf16) { return DType::kBFloat16; }
constexpr DType dtype_of(Fp32) { return DType::kFloat32; }
constexpr DType dtype_of(Tf32) { return DType::kFloat32; }

template <class Element>
constexpr bool kRounds = std::is_same_v<Element, Tf32>;

constexpr const char* name_of(DType dtype) {
  return dtype == DType::kFloat16 ? "fp16" : dtype == DType::kBFloat16 ? "bf16" : "fp32";
}

template <class... Element>
constexpr bool has_kernels(Types<Element...>, DType dtype) {
  return ((dtype_of(Element{}) == dtype) || ...);
}

template <class... Element>
constexpr bool has_tf32(Types<Element...>) {
  return (kRounds<Element> || ...);
}

template <int... kValues>
constexpr int largest(Values<kValues...>) {
  return std::max({kValues...});
}

// Calls function<Element, kHeadDim>() for the instance that serves the problem.
template <class Function>
auto with_instance(const Problem& problem, const Function& function) {
  const bool rounds = has_tf32(Elements{}) && problem.allow_tf32;
  const auto is_wanted = [&]<class Element>(Element element) {
    return dtype_of(element) == problem.dtype && kRounds<Element> == rounds;
  };
  return dispatch(Elements{}, is_wanted, [&]<class Element>() {
    return dispatch(typename HeadDimsOf<Element>::Type{}, std::max(problem.head_dim, problem.head_dim_v),
                    [&]<int kHeadDim>() { return function.template operator()<Element, kHeadDim>(); });
  });
}

std::string too_wide(const char* what, int64_t size) {
  return std::string(what) + " " + std::to_string(size) + " is more than " + std::to_string(largest(HeadDims{}));
}

std::string refuses(const Problem& problem, Pass pass, const DeviceInfo& device) {
  if (device.compute_capability < 80) {
    return "compute capability " + std::to_string(device.compute_capability / 10) + "." +
           std::to_string(device.compute_capability % 10) + " is less than 8.0";
  }
  if (problem.head_dim > largest(HeadDims{})) return too_wide("head_dim", problem.head_dim);
  if (problem.head_dim_v > largest(HeadDims{})) return too_wide("head_dim_v", problem.head_dim_v);
  if (problem.dtype != DType::kFloat64 && !has_kernels(Elements{}, problem.dtype)) {
    return std::string("this build has no kernels for ") + name_of(problem.dtype);
  }
  const std::string length = refuses_length(problem);
  if (!length.empty()) return length;
  // fp16 takes tanh with an error of 2e-7, of the cap; bf16 with 1e-5 of it on 9.0, and is refused with it.
  const bool is_16_bit = problem.dtype == DType::kFloat16 || problem.dtype == DType::kBFloat16;
  if (is_16_bit && problem.softcap > 4096) return "a softcap above 4096 is not supported in fp16 and bf16";
  if (problem.dtype == DType::kFloat64) return "";  // static and small
  return with_instance(
      problem, [&]<class Element, int kHeadDim>() { return refuses_shared_memory(problem, pass, kHeadDim, device); });
}

Plan plan(const Problem& problem, Pass pass, const DeviceInfo& device) {
  if (problem.dtype == DType::kFloat64) return plan_fp64(problem, pass, device);
  return with_instance(problem, [&]<class Element, int kHeadDim>() {
    return pass == Pass::kForward ? plan_forward<Element, kHeadDim>(problem, device)
                                  : plan_backward<Element, kHeadDim>(problem, device);
  });
}

void forward(const ForwardArgs& args, const Plan& plan, void*) {
  if (args.problem.dtype == DType::kFloat64) return forward_fp64(args);
  with_instance(args.problem, [&]<class Element, int kHeadDim>() { run_forward<Element, kHeadDim>(args, plan); });
}

void backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  if (args.fwd.problem.dtype == DType::kFloat64) return backward_fp64(args, workspace);
  with_instance(args.fwd.problem,
                [&]<class Element, int kHeadDim>() { run_backward<Element, kHeadDim>(args, plan, workspace); });
}

void inspect(const Problem& problem, Pass pass, Plan& plan) {
  if (problem.dtype == DType::kFloat64) {
    return pass == Pass::kForward ? inspect_forward_fp64(plan) : inspect_backward_fp64(plan);
  }
  with_instance(problem, [&]<class Element, int kHeadDim>() {
    pass == Pass::kForward ? inspect_forward<Element, kHeadDim>(problem, plan)
                           : inspect_backward<Element, kHeadDim>(problem, plan);
  });
}

}  // namespace
}  // namespace flash_ext::sm80

namespace flash_ext {

extern const Backend sm80_backend = {"sm80",        DeviceType::kCuda, sm80::refuses, sm80::plan,
                                     sm80::forward, sm80::backward,    sm80::inspect};

}  // namespace flash_ext
