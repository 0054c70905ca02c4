// The rows of sm80, host code only: what each serves, what it takes, and which instance it picks.
//
//   fp16, bf16, fp32   mma.sync on tiles (forward/kernel.cuh, backward/kernel.cuh), the first of HeadDimsOf that fits
//
//   16 bits, one tile  mma.sync, heads of up to 64 or 144 queries and keys (forward_single_tile/kernel.cuh,
//                      backward_single_tile/kernel.cuh)
//
//   fp64               plain arithmetic (fp64/forward.cu, fp64/backward.cu), any head dimension up to the largest
//
// Serves compute capability 8.0 and above. Called through kernels/table.cpp. Invariant: what the limits let pass has an
// instance; the lists of instances come from cmake/cuda_units.cmake.
#include <algorithm>
#include <span>
#include <type_traits>

#include "kernels/sm80/choose_tiles.h"
#include "kernels/sm80/cost.h"
#include "kernels/sm80/kernels.h"
#include "sm80_instances.h"

namespace flash_ext::sm80 {
namespace {

constexpr DType dtype_of(Fp16) { return DType::kFloat16; }
constexpr DType dtype_of(Bf16) { return DType::kBFloat16; }
constexpr DType dtype_of(Fp32) { return DType::kFloat32; }
constexpr DType dtype_of(Tf32) { return DType::kFloat32; }

template <class Element>
constexpr bool kRounds = std::is_same_v<Element, Tf32>;

template <class... Element>
constexpr Features dtypes(Types<Element...>, bool is_float) {
  Features features;
  const auto add = [&](DType dtype) { features.add(feature_of(dtype), (dtype == DType::kFloat32) == is_float); };
  (add(dtype_of(Element{})), ...);
  return features;
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

// ---- 16 bits and float32 -------------------------------------------------------------------------------------------

template <Pass kPass>
Plan plan(const Problem& problem, const DeviceInfo& device) {
  return with_instance(problem, [&]<class Element, int kHeadDim>() {
    return kPass == Pass::kForward ? plan_forward<Element, kHeadDim>(problem, device)
                                   : plan_backward<Element, kHeadDim>(problem, device);
  });
}

void forward(const ForwardArgs& args, const Plan& plan, void* workspace) {
  with_instance(args.problem,
                [&]<class Element, int kHeadDim>() { run_forward<Element, kHeadDim>(args, plan, workspace); });
}

void backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  with_instance(args.fwd.problem,
                [&]<class Element, int kHeadDim>() { run_backward<Element, kHeadDim>(args, plan, workspace); });
}

template <Pass kPass>
void inspect(const Problem& problem, Plan& plan) {
  with_instance(problem, [&]<class Element, int kHeadDim>() {
    kPass == Pass::kForward ? inspect_forward<Element, kHeadDim>(problem, plan)
                            : inspect_backward<Element, kHeadDim>(problem, plan);
  });
}

// The pass of its own that sums over broadcast dimensions of a bias knows no packed sequences.
std::string refuses_shared_bias(const ForwardArgs& args, const BackwardArgs* backward) {
  const Problem& problem = args.problem;
  if (!problem.packed || !problem.wants_dbias || is_whole(problem, backward->dbias)) return "";
  return "the bias of packed sequences is broadcast and its gradient is wanted";
}

template <Pass kPass>
int64_t least_shared_bytes(const Problem& problem, const DeviceInfo& device) {
  return with_instance(problem, [&]<class, int kHeadDim>() {
    return shared_bytes(problem, kPass == Pass::kForward ? Pass::kForward : Pass::kBackward, kHeadDim, true, device);
  });
}

// ---- one tile ------------------------------------------------------------------------------------------------------

template <int kBlock, class Function>
auto with_one_tile(const Problem& problem, const Function& function) {
  return with_instance(problem, [&]<class Element, int kHeadDim>() {
    if constexpr (kHasOneTile<Element, kHeadDim, kBlock>) return function.template operator()<Element, kHeadDim>();
    return decltype(function.template operator()<Bf16, 32>())();  // the limits leave no such call
  });
}

template <Pass kPass, int kBlock>
Plan plan_one_tile(const Problem& problem, const DeviceInfo& device) {
  return with_one_tile<kBlock>(problem, [&]<class Element, int kHeadDim>() {
    return kPass == Pass::kForward ? plan_one_tile_forward<Element, kHeadDim, kBlock>(problem, device)
                                   : plan_one_tile_backward<Element, kHeadDim, kBlock>(problem, device);
  });
}

template <int kBlock>
void one_tile_forward(const ForwardArgs& args, const Plan& plan, void*) {
  with_one_tile<kBlock>(args.problem, [&]<class Element, int kHeadDim>() {
    run_one_tile_forward<Element, kHeadDim, kBlock>(args, plan);
  });
}

template <int kBlock>
void one_tile_backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  with_one_tile<kBlock>(args.fwd.problem, [&]<class Element, int kHeadDim>() {
    run_one_tile_backward<Element, kHeadDim, kBlock>(args, plan, workspace);
  });
}

template <Pass kPass, int kBlock>
void inspect_one_tile(const Problem& problem, Plan& plan) {
  with_one_tile<kBlock>(problem, [&]<class Element, int kHeadDim>() {
    kPass == Pass::kForward ? inspect_one_tile_forward<Element, kHeadDim, kBlock>(problem, plan)
                            : inspect_one_tile_backward<Element, kHeadDim, kBlock>(problem, plan);
  });
}

template <Pass kPass, int kBlock>
int64_t one_tile_bytes(const Problem& problem, const DeviceInfo&) {
  return with_instance(problem, [&]<class, int kHeadDim>() {
    const int bias_bytes = bias_bytes_of(problem);
    return kStaticSharedBytes + (kPass == Pass::kForward
                                     ? one_tile_forward_smem(kHeadDim, kBlock, bias_bytes, problem.has_mask).total
                                     : one_tile_backward_smem(kHeadDim, kBlock, bias_bytes, problem.has_mask).total);
  });
}

// ---- float64 -------------------------------------------------------------------------------------------------------

template <Pass kPass>
Plan plan_double(const Problem& problem, const DeviceInfo& device) {
  return plan_fp64(problem, kPass, device);
}

// ---- rows ----------------------------------------------------------------------------------------------------------

constexpr Limits kLimits = {.least_compute_capability = 80, .head_dim = largest(HeadDims{}), .length = kMaxLength};

// fp16 takes tanh with an error of 2e-7, of the cap; bf16 with 1e-5 of it on 9.0, and is refused with it.
constexpr Limits k16Bit = [] {
  Limits limits = kLimits;
  limits.softcap = 4096;
  return limits;
}();

// The largest of which there is an instance with one tile, or 0.
template <int kBlock, int... kValues>
constexpr int one_tile_head_dim_of(Values<kValues...>) {
  return std::max({0, (kHasOneTile<Bf16, kValues, kBlock> ? kValues : 0)...});
}

constexpr Limits one_tile_limits(int head_dim, int block) {
  Limits limits = k16Bit;
  limits.head_dim = head_dim;
  limits.length = block;
  return limits;
}

// All but dtypes, which are each row's.
constexpr Features kSupported =
    kAllFeatures.without(kQuantized)
        .without({Feature::kFloat16, Feature::kBFloat16, Feature::kFloat32, Feature::kFloat64});
static_assert(static_cast<int>(Feature::kCount) == 26, "say here whether these kernels have the new feature");

constexpr Kernel row(const char* name, Pass pass, Features supports, const Limits& limits) {
  return {.name = name,
          .backend = "sm80",
          .device = DeviceType::kCuda,
          .pass = pass,
          .supports = supports,
          .limits = limits};
}

constexpr Kernel main_row(const char* name, Pass pass, bool is_float) {
  const Features features = kSupported.with(dtypes(Elements{}, is_float));
  Kernel kernel = row(name, pass, features, is_float ? kLimits : k16Bit);
  if (pass == Pass::kForward) {
    kernel.plan = plan<Pass::kForward>;
    kernel.forward = forward;
    kernel.shared_bytes = least_shared_bytes<Pass::kForward>;
    kernel.inspect = inspect<Pass::kForward>;
    if (!is_float) kernel.cost = forward_cost;
  } else {
    kernel.plan = plan<Pass::kBackward>;
    kernel.backward = backward;
    kernel.shared_bytes = least_shared_bytes<Pass::kBackward>;
    kernel.inspect = inspect<Pass::kBackward>;
    kernel.refuses_views = refuses_shared_bias;
    if (!is_float) kernel.cost = pass == Pass::kBackward ? backward_cost : bias_gradient_cost;
  }
  return kernel;
}

template <Pass kPass, int kBlock>
constexpr Kernel one_tile_row(const char* name, const Features& left_out) {
  const Features features = kSupported.with(dtypes(Elements{}, false)).without(left_out);
  Kernel kernel = row(name, kPass, features, one_tile_limits(one_tile_head_dim_of<kBlock>(HeadDims{}), kBlock));
  kernel.plan = plan_one_tile<kPass, kBlock>;
  kernel.shared_bytes = one_tile_bytes<kPass, kBlock>;
  kernel.inspect = inspect_one_tile<kPass, kBlock>;
  return kernel;
}

template <int kBlock>
constexpr Kernel one_tile_forward_row(const char* name) {
  Kernel kernel =
      one_tile_row<Pass::kForward, kBlock>(name, {Feature::kDropout, Feature::kPacked, Feature::kBatchInvariant});
  kernel.forward = one_tile_forward<kBlock>;
  kernel.cost = one_tile_forward_cost<kBlock>;
  return kernel;
}

template <int kBlock>
constexpr Kernel one_tile_backward_row(const char* name) {
  Kernel kernel = one_tile_row<Pass::kBackward, kBlock>(
      name, {Feature::kGroupedHeads, Feature::kValueHeads, Feature::kSoftcap, Feature::kDropout, Feature::kPacked,
             Feature::kAlibiGradient, Feature::kBatchInvariant, Feature::kSinks, Feature::kConstantLse});
  kernel.backward = one_tile_backward<kBlock>;
  kernel.cost = one_tile_backward_cost<kBlock>;
  return kernel;
}

constexpr Kernel double_row(const char* name, Pass pass) {
  Kernel kernel = row(name, pass, kSupported.without({Feature::kPacked}).with({Feature::kFloat64}), kLimits);
  if (pass == Pass::kForward) {
    kernel.plan = plan_double<Pass::kForward>;
    kernel.forward = [](const ForwardArgs& args, const Plan&, void*) { forward_fp64(args); };
    kernel.inspect = [](const Problem&, Plan& plan) { inspect_forward_fp64(plan); };
  } else {
    kernel.plan = plan_double<Pass::kBackward>;
    kernel.backward = [](const BackwardArgs& args, const Plan&, void* workspace) { backward_fp64(args, workspace); };
    kernel.inspect = [](const Problem&, Plan& plan) { inspect_backward_fp64(plan); };
  }
  return kernel;
}

// What a main kernel leaves: a bias that several scores share. One that they do not is the main kernel's own.
constexpr Kernel bias_gradient_row() {
  Kernel kernel = main_row("sm80.bias_gradient", Pass::kBiasGradient, false);
  kernel.supports = kernel.supports.without({Feature::kWholeBiasGradient, Feature::kPacked});
  return kernel;
}

constexpr Kernel kKernels[] = {
    one_tile_forward_row<kOneTile>("sm80.forward.one_tile"),
    one_tile_forward_row<kLargeTile>("sm80.forward.one_tile_144"),
    main_row("sm80.forward", Pass::kForward, false),
    main_row("sm80.forward.fp32", Pass::kForward, true),
    double_row("sm80.forward.fp64", Pass::kForward),
    one_tile_backward_row<kOneTile>("sm80.backward.one_tile"),
    one_tile_backward_row<kLargeTile>("sm80.backward.one_tile_144"),
    main_row("sm80.backward", Pass::kBackward, false),
    main_row("sm80.backward.fp32", Pass::kBackward, true),
    double_row("sm80.backward.fp64", Pass::kBackward),
    bias_gradient_row(),
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

}  // namespace flash_ext::sm80
