// JSON by hand: numbers and our own names. flash_ext/explain.py turns it into a dataclass and a table.
#include "torch/explain.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <concepts>

#include "core/fold_heads.h"
#include "core/library.h"
#include "torch/cuda_runtime.h"
#include "torch/dispatch.h"
#include "torch/fp8.h"
#include "torch/packed.h"
#include "torch/problem.h"
#include "torch/signatures.h"

namespace flash_ext {
namespace {

// A value as JSON. Text is our own (names, reasons), without characters that JSON would escape but the quote.
std::string json(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}
std::string json(const char* text) { return json(std::string_view(text)); }
std::string json(bool value) { return value ? "true" : "false"; }
std::string json(double number) { return number_text(number); }
template <std::integral Number>
std::string json(Number number) {
  return std::to_string(number);
}

// Comma-separated, so that a first element needs no care.
void append(std::string& list, const std::string& element) { list += (list.empty() ? "" : ", ") + element; }

template <class... T>
std::string json_list(const T&... elements) {
  std::string list;
  (append(list, json(elements)), ...);
  return "[" + list + "]";
}

template <size_t kCount>
std::string json(const Plan::Use (&uses)[kCount]) {
  std::string list;
  for (const Plan::Use& use : uses) {
    if (use.name == nullptr) break;
    append(list, json_list(use.name, use.bytes));
  }
  return "[" + list + "]";
}

std::string json(std::string_view backend, std::string_view kernel, const Plan& plan) {
  std::string fields;
  const auto field = [&](const char* name, const auto& value) { append(fields, json(name) + ": " + json(value)); };
  field("backend", backend);
  field("kernel", kernel);
  plan.visit(field);
  return "{" + fields + "}";
}

c10::Device planned_device(const Tensor& query, std::string_view device) {
  if (!device.empty()) return c10::Device(std::string(device));
  return query.is_meta() ? c10::Device(c10::kCPU) : query.device();
}

// What the compiled kernel is like, where the device that it is planned for is there and in use.
void inspect(const Kernel& kernel, const Problem& problem, const c10::Device& device, const DeviceInfo& info,
             Plan& plan) {
  if constexpr (kWithCuda) {
    if (kernel.inspect == nullptr || !is_in_use(device)) return;
    const c10::OptionalDeviceGuard guard(device.has_index() ? std::optional(device) : std::nullopt);
    kernel.inspect(problem, plan);
    const int64_t at_once = int64_t{info.multiprocessors} * plan.resident_blocks;
    if (at_once > 0) plan.waves = static_cast<double>(plan.grid) / static_cast<double>(at_once);
  }
}

c10::TensorOptions nowhere(const Tensor& like) { return like.options().device(at::kMeta); }

// A tensor in the order of another one, with an address that is aligned and not null, though nothing lies there.
Tensor planned_tensor(const Sizes<int64_t>& sizes, const Tensor& like, at::ScalarType dtype) {
  Sizes<int64_t> two_sizes{2}, two_strides{64};
  two_sizes.append(sizes);
  two_strides.append(strides_in_order_of<int64_t>(sizes, like));
  return at::empty_strided(two_sizes, two_strides, nowhere(like).dtype(dtype)).select(0, 1);
}
Tensor planned_tensor(const Sizes<int64_t>& sizes, const Tensor& like) {
  return planned_tensor(sizes, like, like.scalar_type());
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

// As ops.cpp dequantises e4m3.
Inputs planned_dequantised(const Inputs& in, const Options& options) {
  if (!fp8::has(in)) return in;
  Inputs read = in;
  for (const fp8::Part& part : fp8::kParts) {
    const Tensor& tensor = in.*part.tensor;
    read.*part.tensor = planned_tensor(Sizes<int64_t>(tensor.sizes()), tensor, result_type(in, options));
    read.*part.descale = Tensor();
  }
  return read;
}

ForwardArgs planned_forward(const Inputs& in, const Options& options, const Shape<int64_t>& shape,
                            const DeviceInfo& device) {
  ForwardArgs args;
  ProblemBuilder builder(in, options, shape);
  add_inputs(builder, args, planned_inputs(in, device), shape);
  builder.finish(args.problem);
  if (!args.problem.fp8) fold_heads(args);
  return args;
}

// What ops.cpp would hand over. grad_out is taken to lie as out does.
BackwardArgs planned_backward(const Inputs& in, const Inputs& handed_over, const Options& options,
                              const Shape<int64_t>& shape, const GradMask& wanted) {
  BackwardArgs args;
  ProblemBuilder builder(in, options, shape);
  add_inputs(builder, args.fwd, handed_over, shape);
  const Tensor out = planned_tensor(shape.out_sizes(), in.query);
  builder.add_rows(args.fwd.out, out, shape.heads_q, shape.len_q, shape.head_dim_v);
  builder.add_rows(args.d_out, out, shape.heads_q, shape.len_q, shape.head_dim_v);
  const auto add = [&](TensorView& view, bool& in_accum, const Tensor& input, const Sizes<int64_t>& whole,
                       int64_t heads, int64_t rows, int64_t cols) {
    in_accum = input.sizes() != c10::IntArrayRef(whole);
    builder.add_rows(view, in_accum ? at::empty(whole, nowhere(input)) : planned_tensor(whole, input), heads, rows,
                     cols);
  };
  const auto dim = shape.head_dim, dim_v = shape.head_dim_v;
  if (wanted[kDq]) add(args.dq, args.dq_in_accum, in.query, shape.of_queries(dim), shape.heads_q, shape.len_q, dim);
  if (wanted[kDk]) {
    add(args.dk, args.dk_in_accum, in.key, shape.of_keys(shape.heads_k, dim), shape.heads_k, shape.len_k, dim);
  }
  if (wanted[kDv]) {
    add(args.dv, args.dv_in_accum, in.value, shape.of_keys(shape.heads_v, dim_v), shape.heads_v, shape.len_k, dim_v);
  }
  if (wanted[kDbias])
    builder.add(args.dbias, at::empty(in.bias.sizes(), nowhere(in.bias)), shape.heads_q, shape.len_q, shape.len_k);
  builder.finish(args.fwd.problem);
  set_wanted(args.fwd.problem, wanted, args.dbias);
  return args;
}

// The longest of packed sequences alone, as the CPU will compute it.
Inputs longest_alone(const Inputs& in, const Shape<int64_t>& shape) {
  Inputs alone;
  const auto rows = [](const Tensor& like, int64_t heads, int64_t len, int64_t cols) {
    return at::empty({1, heads, len, cols}, nowhere(like));
  };
  alone.query = rows(in.query, shape.heads_q, shape.len_q, shape.head_dim);
  alone.key = rows(in.key, shape.heads_k, shape.len_k, shape.head_dim);
  alone.value = rows(in.value, shape.heads_v, shape.len_k, shape.head_dim_v);
  const auto first = [](const Tensor& tensor, int64_t rank) {
    return tensor.defined() && tensor.dim() == rank ? tensor.narrow(0, 0, 1) : tensor;
  };
  alone.mask = first(in.mask, 4);
  alone.bias = first(in.bias, 4);
  alone.alibi_slopes = first(in.alibi_slopes, 2);
  alone.sinks = in.sinks;
  return alone;
}

}  // namespace

std::string explain(const Inputs& given, const Options& options, std::string_view device_name,
                    const GradMask& grad_mask) {
  const auto shape = check_call<int64_t>(given, options);
  const c10::Device planned = planned_device(given.query, device_name);
  const Inputs in = planned_dequantised(given, options);
  const DeviceInfo device = device_info(planned);
  const auto name = options.backend.has_value() ? options.backend : requested_backend();
  const bool one_by_one = name != kChunked || options.batch_invariant;
  if (in.packed() && planned.is_cpu() && one_by_one && shape.batch[0] > 0) {
    return explain(longest_alone(in, shape), packed::dense_options(options), "cpu", grad_mask);
  }
  const GradMask wanted = existing(grad_mask, in);

  ForwardArgs forward = planned_forward(given, options, shape, device);
  const bool reads_fp8 = fp8::has(given) && find_kernel(forward, device, name) != nullptr;
  if (fp8::has(given) && !reads_fp8) forward = planned_forward(in, options, shape, device);
  const BackwardArgs backward = planned_backward(in, planned_inputs(in, device), options, shape, wanted);

  std::string plans, considered, copies;
  bool composite = false, kernels_run = false;
  const auto add_pass = [&](Pass pass, const char* pass_name, const Asked& asked) {
    const std::vector<Considered> rows = consider(kernels(), pass, asked, device);
    // A call that needs no backward is not wrong where only that is refused.
    const bool is_named = pass == Pass::kBackward && name.has_value() && name != kChunked;
    const Considered* const refused = is_named ? nearest(kernels(), pass, *name, rows) : nullptr;
    Stages chosen;
    if (pass == Pass::kForward) {
      chosen = Stages(choose_kernel(asked.forward, device, name));
    } else if (refused == nullptr) {
      chosen = choose_stages(*asked.backward, device, name);
    }
    for (const Considered& row : rows) {
      append(considered, json_list(row.kernel->name, row.kernel->backend, pass_name, std::string_view(row.reason),
                                   row.cost, row.left != nullptr ? row.left->name : "", row.kernel == chosen.main()));
    }
    const auto add_plan = [&](std::string_view backend, const Plan& plan, const std::string& kernel) {
      plans += json(pass_name) + ": " + json(backend, kernel, plan) + ", ";
    };
    Plan plan;
    if (refused != nullptr) return add_plan("none", plan, concat("none: ", *name, " refuses: ", refused->reason));
    if (chosen.empty() && in.packed() && options.batch_invariant) {
      const AttentionError error("batch_invariant", packed::kNoInvariantComposite);
      if (pass == Pass::kForward) throw error;
      return add_plan("none", plan, std::string("none: batch_invariant ") + packed::kNoInvariantComposite);
    }
    composite = composite || chosen.empty();
    kernels_run = kernels_run || !chosen.empty();
    if (chosen.empty()) {
      return add_plan(kChunked, plan, "composite of torch operations over blocks of queries");
    }
    const auto problem_of = [&](int stage) {
      if (pass == Pass::kForward) return asked.problem();
      BackwardArgs part = *asked.backward;
      chosen.narrow(stage, part);
      return part.fwd.problem;
    };
    plan = chosen[0].plan(problem_of(0), device);
    std::string kernel = plan.kernel;
    inspect(chosen[0], problem_of(0), planned, device, plan);
    for (int stage = 1; stage < chosen.size(); ++stage) {
      kernel += std::string(", ") + chosen[stage].name;
      plan.scratch_bytes = std::max(plan.scratch_bytes, chosen[stage].plan(problem_of(stage), device).scratch_bytes);
    }
    add_plan(chosen[0].backend, plan, kernel);
  };
  add_pass(Pass::kForward, "forward", {forward});
  add_pass(Pass::kBackward, "backward", {backward.fwd, &backward});
  const auto add_copy = [&](const char* argument, int64_t bytes, const char* reason) {
    append(copies, json_list(argument, bytes, reason));
  };
  for (const fp8::Part& part : fp8::kParts) {
    if (!fp8::has(given)) break;
    add_copy(part.name, bytes_of_copy(in.*part.tensor),
             reads_fp8 ? "backward reads it dequantised" : "it is dequantised");
  }
  if (kernels_run && device.type == DeviceType::kCuda) {
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
  return "{" + plans + "\"considered\": [" + considered + "], \"copies\": [" + copies + "]}";
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
