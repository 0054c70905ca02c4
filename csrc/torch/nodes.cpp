// Saving, unpacking and tracing of the nodes, and what each computes; see nodes.h.
#include "torch/nodes.h"

#include <algorithm>
#include <mutex>

#include "torch/checks.h"
#include "torch/chunked.h"
#include "torch/dispatch.h"
#include "torch/fp8.h"
#include "torch/nvtx.h"

namespace flash_ext {
namespace {

using c10::IValue;

constexpr size_t kInputCount = std::size(kInputs);
constexpr size_t kSaved = kInputCount + 3;  // of attention and its backward
constexpr size_t kResults = kGradients + 1, kDoubleResults = 2 + kResults;

bool any_defined(const variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) { return tensor.defined(); });
}

Inputs inputs_of(const variable_list& saved) {
  Inputs in;
  for (size_t i = 0; i < kInputCount; ++i) in.*kInputs[i].tensor = saved[i];
  return in;
}

// Of leaves of e4m3 the gradient, which so far is of what they mean.
void times_descales(variable_list& grads, size_t first, const Inputs& in, const std::vector<bool>& wanted,
                    size_t results) {
  for (size_t i = 0; i < std::size(fp8::kParts); ++i) {
    Tensor& grad = grads[first + i];
    if (!wanted[results + i] || !grad.defined()) continue;
    const Tensor descale = fp8::factor(in, fp8::kParts[i]);
    if (descale.defined()) grad = grad.to(at::kFloat).mul(descale).to(grad.scalar_type());
  }
}

variable_list attention_backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                 const std::vector<bool>& wanted) {
  GradMask grad_mask;
  std::copy_n(wanted.begin(), kGradients, grad_mask.begin());
  const ForwardResult result{saved[kInputCount], saved[kInputCount + 1], saved[kInputCount + 2]};
  const Tensor grad_lse = grads.size() > 1 ? grads[1] : Tensor();  // lse may be no output
  const Gradients gradients = call_attention_backward(grads[0], grad_lse, inputs_of(saved), result, options, grad_mask);
  variable_list results(gradients.begin(), gradients.end());
  results.push_back(wanted[kGradients] ? call_sinks_gradient(grads[0], grad_lse, inputs_of(saved), result) : Tensor());
  times_descales(results, 0, inputs_of(saved), wanted, kResults);
  return results;
}

variable_list attention_double_backward(const variable_list& cotangents, const variable_list& saved,
                                        const Options& options, const std::vector<bool>& wanted) {
  if (options.constant_lse) {
    throw AttentionError("constant_lse", "is True, and a backward of a constant lse has no derivative");
  }
  const Inputs given = inputs_of(saved);
  const nvtx::Range range(nvtx::Op::kAttentionDoubleBackward, given, options);
  if (fp8::has(given)) fp8::check_not_recorded(given, "a third derivative");
  const Inputs in = fp8::has(given) ? fp8::dequantised(given, options) : given;
  const Tensor &g = saved[kInputCount], &g_lse = saved[kInputCount + 1];
  Gradients of_gradients;
  std::copy(cotangents.begin(), cotangents.end(), of_gradients.begin());
  const chunked::DoubleBackward grads =
      chunked::double_backward(of_gradients, g, g_lse, in, saved[kInputCount + 2], options);
  std::array<std::pair<const Tensor*, const Tensor*>, 3 + kGradients> all{
      {{&grads.grad_out, &g}, {&grads.grad_lse, &g_lse}}};
  for (size_t i = 0; i < kGradients; ++i) all[2 + i] = {&grads.inputs[i], &(in.*kDifferentiable[i].tensor)};
  all.back() = {&grads.sinks, &in.sinks};
  variable_list result(std::size(all));
  for (size_t i = 0; i < result.size(); ++i) {
    const auto& [grad, like] = all[i];
    if (like->defined() && grad->defined() && wanted[i]) result[i] = grad->to(like->scalar_type());
  }
  times_descales(result, 2, given, wanted, kDoubleResults);
  return result;
}

// What others than attention make of the quantised tensor, whose gradient torch has rounded to its dtype by now.
variable_list quantize_backward(const variable_list& grads, const variable_list& saved, const Options&,
                                const std::vector<bool>&) {
  return {grads[0].to(at::kFloat).div(saved[0])};
}

// ---- options as values that a traced graph can hold -----------------------------------------------------------------

template <class T>
IValue as_value(const T& value) {
  return value;
}
IValue as_value(const std::optional<std::string_view>& name) {
  return name.has_value() ? IValue(std::string(*name)) : IValue();
}

void from_value(const IValue& value, bool& to) { to = value.toBool(); }
void from_value(const IValue& value, double& to) { to = value.toDouble(); }
void from_value(const IValue& value, c10::SymInt& to) { to = value.toSymInt(); }
template <class T>
void from_value(const IValue& value, std::optional<T>& to) {
  to = value.toOptional<T>();
}
void from_value(const IValue& value, std::optional<std::string_view>& to) {
  if (!value.isNone()) to = stored_name(value.toStringView());
}

std::vector<IValue> as_values(const Options& options) {
  std::vector<IValue> values;
  for_each_option([&](const auto& option) { values.push_back(as_value(options.*option.field)); });
  return values;
}

Options unpacked_options(const IValue* values) {
  Options options;
  for_each_option([&](const auto& option) { from_value(*values++, options.*option.field); });
  return options;
}

// What the traced graph calls: `values` are the saved tensors, the options and the wanted results, one by one.
template <Compute compute, size_t kCount>
variable_list compute_packed(const variable_list& grads, const std::vector<IValue>& values) {
  variable_list saved(kCount);
  for (size_t i = 0; i < kCount; ++i) saved[i] = values[i].toTensor();
  std::vector<bool> wanted;
  for (size_t i = kCount + kOptionCount; i < values.size(); ++i) wanted.push_back(values[i].toBool());
  return compute(grads, saved, unpacked_options(&values[kCount]), wanted);
}

}  // namespace

SavingNode::SavingNode(const Kind& kind, const Options& options, const fp8::Leaves& leaves)
    : kind_(kind), options_(options), leaves_(leaves) {
  saved_.reserve(kind.saved);
}

void SavingNode::save(const Tensor& tensor, bool is_output) {
  is_output_[saved_.size()] = is_output;
  saved_.emplace_back(tensor, is_output);
}

void SavingNode::save(const Inputs& in) {
  for (const Input& input : kInputs) save(in.*input.tensor);
}

std::vector<bool> SavingNode::wanted() const {
  std::vector<bool> result(kind_.results);
  for (size_t i = 0; i < kind_.results; ++i) result[i] = task_should_compute_output(i);
  result.insert(result.end(), leaves_.begin(), leaves_.end());
  return result;
}

variable_list SavingNode::unpacked() {
  variable_list tensors;
  tensors.reserve(saved_.size());
  for (size_t i = 0; i < saved_.size(); ++i) {
    tensors.push_back(is_output_[i] ? saved_[i].unpack(getptr()) : saved_[i].unpack());
  }
  return tensors;
}

variable_list SavingNode::apply(variable_list&& grads) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!any_defined(grads)) return variable_list(kind_.results);
  return kind_.compute(grads, unpacked(), options_, wanted());
}

void SavingNode::release_variables() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (SavedVariable& saved : saved_) saved.reset_data();
}

// Everything that the traced graph depends on and that is not a tensor enters the key of compiled autograd's cache.
void SavingNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  args.collect(std::string(kind_.name));
  for (size_t i = 0; i < saved_.size(); ++i) args.collect(saved_[i], is_output_[i]);
  for (const IValue& value : as_values(options_)) {
    // NOTE: as text, because a number would become an input of the graph, and backends choose by these.
    args.collect(value.isDouble() ? c10::str("double ", std::hexfloat, value.toDouble()) : c10::str(value));
  }
  args.collect(wanted());
}

variable_list SavingNode::apply_with_saved(const variable_list& grads,
                                           torch::dynamo::autograd::SwapSavedVariables& saved) {
  const auto wanted_now = wanted();
  for (SavedVariable& variable : saved_) saved.before(variable);
  std::vector<IValue> values;
  std::vector<at::TypePtr> types;
  for (Tensor& tensor : unpacked()) {
    values.emplace_back(std::move(tensor));
    types.push_back(at::TensorType::get());
  }
  for (IValue& value : as_values(options_)) {
    types.push_back(value.type());
    values.push_back(std::move(value));
  }
  for (const bool is_wanted : wanted_now) {
    values.emplace_back(is_wanted);
    types.push_back(at::BoolType::get());
  }
  namespace compiled = torch::dynamo::autograd;
  const auto& python = compiled::getPyCompilerInterface();
  const auto metadata = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
      compiled::get_input_metadata(next_edges()));
  const std::string function =
      python->bind_function(saved.get_py_compiler(), std::string("flash_ext_") + kind_.name, kind_.packed, types,
                            /*is_custom_function=*/true, /*is_traceable=*/true);
  variable_list results =
      python->call_function(saved.get_py_compiler(), "apply_functional", function, grads, values, metadata);
  for (SavedVariable& variable : saved_) saved.after(variable);
  return results;
}

namespace {

template <Compute compute, size_t kCount>
constexpr SavingNode::Kind kind_of(const char* name, size_t results) {
  return {name, compute, compute_packed<compute, kCount>, kCount, results};
}

constexpr auto kAttention = kind_of<attention_backward, kSaved>("AttentionBackward", kResults);
constexpr auto kBackward = kind_of<attention_double_backward, kSaved>("AttentionDoubleBackward", kDoubleResults);
constexpr auto kQuantize = kind_of<quantize_backward, 1>("QuantizeBackward", 1);

}  // namespace

AttentionBackward::AttentionBackward(const Options& options, const fp8::Leaves& leaves)
    : SavingNode(kAttention, options, leaves) {}

AttentionDoubleBackward::AttentionDoubleBackward(const Options& options, const fp8::Leaves& leaves)
    : SavingNode(kBackward, options, leaves) {}

QuantizeBackward::QuantizeBackward() : SavingNode(kQuantize, {}, {}) {}

}  // namespace flash_ext
