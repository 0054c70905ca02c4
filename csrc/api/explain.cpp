// JSON by hand: numbers and our own names. flash_ext/explain.py turns it into a dataclass and a table.
#include "api/explain.h"

#include <torch/library.h>

#include <sstream>

#include "api/dispatch.h"
#include "api/problem.h"
#include "api/signatures.h"

namespace flash_ext {
namespace {

// Text is our own (names, reasons), without characters that JSON would escape but the quote.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

std::string json(const std::string& backend, const Plan& plan) {
  std::ostringstream out;
  out << "{\"backend\": " << quoted(backend) << ", \"kernel\": " << quoted(plan.kernel)
      << ", \"block_m\": " << plan.block_m << ", \"block_n\": " << plan.block_n << ", \"stages\": " << plan.stages
      << ", \"on_chip\": [";
  for (int i = 0; i < static_cast<int>(std::size(plan.on_chip)) && plan.on_chip[i].name != nullptr; ++i) {
    out << (i ? ", " : "") << "[" << quoted(plan.on_chip[i].name) << ", " << plan.on_chip[i].bytes << "]";
  }
  out << "], \"on_chip_limit\": " << plan.on_chip_limit << ", \"scratch_bytes\": " << plan.scratch_bytes
      << ", \"registers\": " << plan.registers << ", \"occupancy\": " << plan.occupancy << ", \"grid\": " << plan.grid
      << ", \"waves\": " << plan.waves << "}";
  return out.str();
}

c10::Device planned_device(const Tensor& query, std::string_view device) {
  if (!device.empty()) return c10::Device(std::string(device));
  return query.is_meta() ? c10::Device(c10::kCPU) : query.device();
}

}  // namespace

std::string explain(const Inputs& in, const Options& options, std::string_view device_name, const GradMask& grad_mask) {
  const auto shape = check_call<int64_t>(in, options);
  const DeviceInfo device = device_info(planned_device(in.query, device_name));
  const auto name = options.backend.has_value() ? options.backend : requested_backend();
  const GradMask wanted = existing(grad_mask, in);

  ForwardArgs args;
  ProblemBuilder builder(in, options, shape);
  add_inputs(builder, args, in, shape);
  Problem& problem = args.problem;
  const bool fits = builder.finish(problem);
  problem.wants_dq = wanted[0];
  problem.wants_dk = wanted[1];
  problem.wants_dv = wanted[2];
  problem.wants_dbias = wanted[3];
  problem.wants_dalibi = wanted[4];

  std::ostringstream plans, refused, copies;
  bool composite = false;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const char* pass_name = pass == Pass::kForward ? "forward" : "backward";
    const Backend* backend = fits ? select_backend(problem, pass, device, name) : nullptr;
    Plan plan;
    plan.kernel = "composite of torch operations over blocks of queries";
    if (backend != nullptr) plan = backend->plan(problem, pass, device);
    composite = composite || backend == nullptr;
    plans << quoted(pass_name) << ": " << json(backend ? backend->name : std::string(kChunked), plan) << ", ";
    std::vector<Refusal> reasons = refusals(problem, pass, device);
    if (!fits) reasons = {{"all kernels", "the leading dimensions do not merge into " + std::to_string(kMaxBatchDims)}};
    for (const Refusal& refusal : reasons) {
      refused << (refused.tellp() > 0 ? ", " : "") << "[" << quoted(refusal.backend) << ", " << quoted(pass_name)
              << ", " << quoted(refusal.reason) << "]";
    }
  }
  if (composite && in.query.element_size() == 2) {
    for (const auto& [argument, tensor] : {std::pair{"key", &in.key}, std::pair{"value", &in.value}}) {
      copies << (copies.tellp() > 0 ? ", " : "") << "[" << quoted(argument) << ", " << tensor->numel() * 4 << ", "
             << quoted("the composite computes in float32") << "]";
    }
  }
  return "{" + plans.str() + "\"refusals\": [" + refused.str() + "], \"copies\": [" + copies.str() + "]}";
}

namespace {

std::string explain_op(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                       const OptionalTensor& bias, const OptionalTensor& alibi_slopes, bool causal,
                       std::optional<int64_t> window_left, std::optional<int64_t> window_right, bool bottom_right,
                       double softcap, double dropout_p, std::optional<double> scale, bool gqa,
                       std::optional<bool> deterministic, std::optional<c10::string_view> backend,
                       c10::string_view device, GradMask grad_mask) {
  return explain(
      Inputs(query, key, value, mask, bias, alibi_slopes),
      {causal, window_left, window_right, bottom_right, softcap, dropout_p, scale, gqa, deterministic, backend}, device,
      grad_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) { m.impl("explain", explain_op); }

}  // namespace flash_ext
