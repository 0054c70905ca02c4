// JSON by hand: numbers and our own names. flash_ext/explain.py turns it into a dataclass and a table.
#include "torch/explain.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "core/fold_heads.h"
#include "torch/cuda_runtime.h"
#include "torch/dispatch.h"
#include "torch/problem.h"
#include "torch/signatures.h"

namespace flash_ext {
namespace {

// Text is our own (names, reasons), without characters that JSON would escape but the quote.
std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

// Comma-separated, so that a first element needs no care.
void append(std::string& list, const std::string& element) { list += (list.empty() ? "" : ", ") + element; }

std::string json(const std::string& backend, const std::string& kernel, const Plan& plan) {
  const auto field = [](const char* name, auto value) {
    return ", " + json_string(name) + ": " + std::to_string(value);
  };
  std::string uses;
  for (const Plan::Use& use : plan.on_chip) {
    if (use.name == nullptr) break;
    append(uses, "[" + json_string(use.name) + ", " + std::to_string(use.bytes) + "]");
  }
  return "{\"backend\": " + json_string(backend) + ", \"kernel\": " + json_string(kernel) +
         ", \"schedule\": " + json_string(plan.schedule) + field("block_m", plan.block_m) +
         field("block_n", plan.block_n) + field("stages", plan.stages) + ", \"on_chip\": [" + uses + "]" +
         field("on_chip_limit", plan.on_chip_limit) + field("scratch_bytes", plan.scratch_bytes) +
         field("grid", plan.grid) + field("waves", plan.waves) + field("registers", plan.registers) +
         field("producer_registers", plan.producer_registers) + field("local_bytes", plan.local_bytes) +
         field("static_bytes", plan.static_bytes) + field("resident_blocks", plan.resident_blocks) +
         field("occupancy", plan.occupancy) + field("l2_section", plan.l2_section) + field("splits", plan.splits) +
         field("split_keys", plan.split_keys) + "}";
}

c10::Device planned_device(const Tensor& query, std::string_view device) {
  if (!device.empty()) return c10::Device(std::string(device));
  return query.is_meta() ? c10::Device(c10::kCPU) : query.device();
}

// What the compiled kernel is like, where the device that it is planned for is there and in use.
void inspect(const Backend& backend, const Problem& problem, Pass pass, const c10::Device& device,
             const DeviceInfo& info, Plan& plan) {
  if constexpr (kWithCuda) {
    if (backend.inspect == nullptr || !is_in_use(device)) return;
    const c10::OptionalDeviceGuard guard(device.has_index() ? std::optional(device) : std::nullopt);
    backend.inspect(problem, pass, plan);
    const int64_t at_once = int64_t{info.multiprocessors} * plan.resident_blocks;
    if (at_once > 0) plan.waves = static_cast<double>(plan.grid) / static_cast<double>(at_once);
  }
}

c10::TensorOptions nowhere(const Tensor& like) { return like.options().device(at::kMeta); }

// A tensor in the order of another one, with an address that is aligned and not null, though nothing lies there.
Tensor planned_tensor(const Sizes<int64_t>& sizes, const Tensor& like) {
  Sizes<int64_t> two_sizes{2}, two_strides{64};
  two_sizes.append(sizes);
  two_strides.append(strides_in_order_of<int64_t>(sizes, like));
  return at::empty_strided(two_sizes, two_strides, nowhere(like)).select(0, 1);
}

// The inputs as ops.cpp hands them over: on a GPU scattered columns are gathered.
Inputs planned_inputs(const Inputs& in, const DeviceInfo& device) {
  Inputs planned = in;
  if (device.type != DeviceType::kCuda) return planned;
  for (Tensor* tensor : {&planned.query, &planned.key, &planned.value, &planned.mask, &planned.bias}) {
    if (!has_scattered_columns(*tensor)) continue;
    const Tensor whole = without_broadcasts(*tensor, tensor->dim());
    *tensor = planned_tensor(Sizes<int64_t>(whole.sizes()), whole).expand(tensor->sizes());
  }
  return planned;
}

// What ops.cpp would hand over. grad_out is taken to lie as out does.
BackwardArgs planned_backward(const Inputs& in, const Inputs& handed_over, const Options& options,
                              const Shape<int64_t>& shape, const GradMask& wanted) {
  BackwardArgs args;
  ProblemBuilder builder(in, options, shape);
  add_inputs(builder, args.fwd, handed_over, shape);
  const Tensor out = planned_tensor(shape.out_sizes(), in.query);
  builder.add(args.fwd.out, out, shape.heads_q, shape.len_q, shape.head_dim_v);
  builder.add(args.d_out, out, shape.heads_q, shape.len_q, shape.head_dim_v);
  const auto add = [&](TensorView& view, bool& in_accum, const Tensor& input, int64_t heads, int64_t rows,
                       int64_t cols) {
    const Sizes<int64_t> whole = shape.sizes(heads, rows, cols);
    in_accum = input.sizes() != c10::IntArrayRef(whole);
    builder.add(view, in_accum ? at::empty(whole, nowhere(input)) : planned_tensor(whole, input), heads, rows, cols);
  };
  if (wanted[kDq]) add(args.dq, args.dq_in_accum, in.query, shape.heads_q, shape.len_q, shape.head_dim);
  if (wanted[kDk]) add(args.dk, args.dk_in_accum, in.key, shape.heads_k, shape.len_k, shape.head_dim);
  if (wanted[kDv]) add(args.dv, args.dv_in_accum, in.value, shape.heads_v, shape.len_k, shape.head_dim_v);
  if (wanted[kDbias])
    builder.add(args.dbias, at::empty(in.bias.sizes(), nowhere(in.bias)), shape.heads_q, shape.len_q, shape.len_k);
  builder.finish(args.fwd.problem);
  set_wanted(args.fwd.problem, wanted);
  return args;
}

}  // namespace

std::string explain(const Inputs& in, const Options& options, std::string_view device_name, const GradMask& grad_mask) {
  const auto shape = check_call<int64_t>(in, options);
  const c10::Device planned = planned_device(in.query, device_name);
  const DeviceInfo device = device_info(planned);
  const auto name = options.backend.has_value() ? options.backend : requested_backend();
  const GradMask wanted = existing(grad_mask, in);

  const Inputs handed_over = planned_inputs(in, device);
  ForwardArgs forward;
  ProblemBuilder builder(in, options, shape);
  add_inputs(builder, forward, handed_over, shape);
  builder.finish(forward.problem);
  fold_heads(forward);
  const BackwardArgs backward = planned_backward(in, handed_over, options, shape, wanted);

  std::string plans, refused, copies;
  bool composite = false, kernels = false;
  const auto add_pass = [&](Pass pass, const char* pass_name, const auto& args, const Problem& problem) {
    const std::vector<Refusal> reasons = refusals(args, device, name);
    for (const Refusal& refusal : reasons) {
      append(refused, "[" + json_string(refusal.backend) + ", " + json_string(pass_name) + ", " +
                          json_string(refusal.reason) + ", " + (refusal.yields ? "true" : "false") + "]");
    }
    const auto add_plan = [&](std::string_view backend, const Plan& plan, const std::string& kernel) {
      plans += json_string(pass_name) + ": " + json(std::string(backend), kernel, plan) + ", ";
    };
    Plan plan;
    // A call that needs no backward is not wrong where only that is refused.
    const auto is_named = [&](const Refusal& refusal) { return refusal.backend == name; };
    if (pass == Pass::kBackward && std::any_of(reasons.begin(), reasons.end(), is_named)) {
      return add_plan("none", plan, "none: the backend that is asked for refuses");
    }
    const Backend* backend = select_backend(args, device, name);
    std::string kernel = "composite of torch operations over blocks of queries";
    if (backend != nullptr) {
      plan = backend->plan(problem, pass, device);
      kernel = plan.kernel;
      inspect(*backend, problem, pass, planned, device, plan);
      if constexpr (std::is_same_v<std::decay_t<decltype(args)>, BackwardArgs>) {
        if (const auto step = bias_gradient_step(*backend, args, device)) {
          kernel += std::string(", ") + step->backend->name + ".bias_gradient";
          plan.scratch_bytes = std::max(plan.scratch_bytes, step->plan.scratch_bytes);
        }
      }
    }
    composite = composite || backend == nullptr;
    kernels = kernels || backend != nullptr;
    add_plan(backend != nullptr ? backend->name : kChunked, plan, kernel);
  };
  add_pass(Pass::kForward, "forward", forward, forward.problem);
  add_pass(Pass::kBackward, "backward", backward, backward.fwd.problem);
  const auto add_copy = [&](const char* argument, int64_t bytes, const char* reason) {
    append(copies, "[" + json_string(argument) + ", " + std::to_string(bytes) + ", " + json_string(reason) + "]");
  };
  if (kernels && device.type == DeviceType::kCuda) {
    for (const auto& [argument, tensor] :
         {std::pair{"query", &in.query}, std::pair{"key", &in.key}, std::pair{"value", &in.value},
          std::pair{"mask", &in.mask}, std::pair{"bias", &in.bias}}) {
      if (!has_scattered_columns(*tensor)) continue;
      add_copy(argument, bytes_of_copy(*tensor), "its last dimension is not contiguous");
    }
  }
  if (composite && in.query.element_size() == 2) {
    for (const auto& [argument, tensor] : {std::pair{"key", &in.key}, std::pair{"value", &in.value}}) {
      add_copy(argument, tensor->numel() * 4, "the composite computes in float32");
    }
  }
  return "{" + plans + "\"refusals\": [" + refused + "], \"copies\": [" + copies + "]}";
}

namespace {

std::string explain_op(c10::DispatchKeySet, const Inputs& in, const Options& options, c10::string_view device,
                       const GradMask& grad_mask) {
  return explain(in, options, device, grad_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
  m.impl("explain", TORCH_FN(ExplainSignature::run<explain_op>));
}

}  // namespace flash_ext
