// The Python module _C: a typed entry for eager calls, which saves what torch.ops spends on parsing a schema, and the
// functions that have no tensor argument. Everything else is reached through torch.ops, with or without _C.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/enable.h"
#include "torch/explain.h"
#include "torch/nvtx.h"
#include "torch/options.h"

namespace flash_ext {
namespace {

namespace py = pybind11;

PyObject* attention_error = PyExc_RuntimeError;  // flash_ext.AttentionError once Python has set it

// Thrown to leave for torch.ops, which knows __torch_function__.
struct Overridden {};

// Whether the object's class decides itself what operators do with it.
bool is_overridden(py::handle object) {
  if (THPVariable_CheckExact(object.ptr())) return false;
  if (at::impl::PythonTorchFunctionTLS::get_disabled_state() != at::impl::TorchFunctionDisabledState::ENABLED)
    return false;
  static const PyObject* const disabled = py::module_::import("torch._C").attr("_disabled_torch_function_impl").ptr();
  const py::object decide = py::getattr(py::type::of(object), "__torch_function__", py::none());
  return !decide.is_none() && decide.ptr() != disabled;
}

OptionalTensor optional_tensor(py::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  if (is_overridden(object)) throw Overridden();
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error(std::string(name) + " is of type " + Py_TYPE(object.ptr())->tp_name +
                         "; it must be a torch.Tensor");
  }
  return THPVariable_Unpack(object.ptr());
}

Tensor tensor(py::handle object, const char* name) {
  OptionalTensor result = optional_tensor(object, name);
  if (!result.has_value()) throw py::type_error(std::string(name) + " is None; it must be a torch.Tensor");
  return *std::move(result);
}

// As PyTorch: a 0-d tensor is a number where it wants no gradient, which it would not get.
void check_number(const Tensor& tensor, const char* name) {
  const auto fail = [&](const std::string& rest) { throw py::type_error(std::string(name) + " is a tensor " + rest); };
  if (tensor.requires_grad() || torch::autograd::isFwGradDefined(tensor)) {
    const bool is_scale = std::string_view(name) == "scale";
    fail("that wants a gradient, which a number does not get; " +
         (is_scale ? std::string("multiply the query by it instead") : concat("pass ", name, ".item()")));
  }
  if (tensor.dim() != 0) fail(concat("of ", tensor.dim(), " dimensions; it must be a number"));
  if (!tensor.is_cpu() && !tensor.is_meta()) {
    TORCH_WARN_ONCE(name, " is a tensor on ", tensor.device(), "; reading it waits for the device (pass a number)");
  }
}

double number(py::handle object, const char* name) {
  if (!PyFloat_Check(object.ptr()) && THPVariable_Check(object.ptr()))
    check_number(THPVariable_Unpack(object.ptr()), name);
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    throw py::type_error(std::string(name) + " is of type " + Py_TYPE(object.ptr())->tp_name + "; it must be a number");
  }
  return value;
}

bool flag(py::handle object, const char* name) {
  if (object.ptr() == Py_True || object.ptr() == Py_False) return object.ptr() == Py_True;
  throw py::type_error(std::string(name) + " is of type " + Py_TYPE(object.ptr())->tp_name + "; it must be a bool");
}

template <class T, class Convert>
std::optional<T> optional_value(py::handle object, const Convert& convert) {
  if (object.is_none()) return std::nullopt;
  return convert(object);
}

// Runs `call` with the GIL released; errors become Python's, one sentence each.
template <class Call>
py::object guarded(const Call& call) {
  try {
    torch::PyWarningHandler warnings;  // a warning of C++ becomes one of Python, which may be an error
    try {
      return call();
    } catch (...) {
      warnings.set_in_exception();
      throw;
    }
  } catch (const Overridden&) {
    return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  } catch (const AttentionError& error) {
    PyErr_SetString(attention_error, error.what_without_backtrace());
    throw py::error_already_set();
  } catch (const py::builtin_exception&) {
    throw;
  } catch (py::error_already_set&) {
    throw;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    throw py::error_already_set();
  }
}

py::object sdpa(py::handle query, py::handle key, py::handle value, py::handle attn_mask, py::handle dropout_p,
                py::handle is_causal, py::handle scale, py::handle enable_gqa) {
  return guarded([&] {
    if (at::impl::torch_function_mode_enabled()) throw Overridden();
    const Tensor q = tensor(query, "query"), k = tensor(key, "key"), v = tensor(value, "value");
    const OptionalTensor mask = optional_tensor(attn_mask, "attn_mask");
    const double p = number(dropout_p, "dropout_p");
    const auto s = optional_value<double>(scale, [](py::handle x) { return number(x, "scale"); });
    const bool causal = flag(is_causal, "is_causal"), gqa = flag(enable_gqa, "enable_gqa");
    Tensor out;
    {
      py::gil_scoped_release release;
      out = flash_ext::scaled_dot_product_attention(q, k, v, mask, p, causal, s, gqa);
    }
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(out)));
  });
}

py::object attention(py::handle query, py::handle key, py::handle value, py::handle mask, py::handle bias,
                     py::handle alibi_slopes, py::handle causal, std::optional<int64_t> window_left,
                     std::optional<int64_t> window_right, bool bottom_right, py::handle softcap, py::handle dropout_p,
                     py::handle scale, py::handle deterministic, py::handle return_lse) {
  return guarded([&]() -> py::object {
    if (at::impl::torch_function_mode_enabled()) throw Overridden();
    const Inputs in(tensor(query, "query"), tensor(key, "key"), tensor(value, "value"), optional_tensor(mask, "mask"),
                    optional_tensor(bias, "bias"), optional_tensor(alibi_slopes, "alibi_slopes"));
    Options options;
    options.causal = flag(causal, "causal");
    options.window_left = window_left;
    options.window_right = window_right;
    options.bottom_right = bottom_right;
    options.softcap = number(softcap, "softcap");
    options.dropout_p = number(dropout_p, "dropout_p");
    options.scale = optional_value<double>(scale, [](py::handle x) { return number(x, "scale"); });
    options.gqa = true;
    options.deterministic = optional_value<bool>(deterministic, [](py::handle x) { return flag(x, "deterministic"); });
    const bool with_lse = flag(return_lse, "return_lse");
    ForwardResult result;
    {
      py::gil_scoped_release release;
      result = call_attention(in, options, with_lse);
    }
    py::object out = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(result.out)));
    if (!with_lse) return out;
    return py::make_tuple(out, py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(result.lse))));
  });
}

py::object explained(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                     const OptionalTensor& bias, const OptionalTensor& alibi_slopes, bool causal,
                     std::optional<int64_t> window_left, std::optional<int64_t> window_right, bool bottom_right,
                     double softcap, double dropout_p, std::optional<double> scale, bool gqa,
                     std::optional<bool> deterministic, const std::string& device, const GradMask& grad_mask) {
  return guarded([&]() -> py::object {
    const Options options{causal,    window_left, window_right, bottom_right,  softcap,
                          dropout_p, scale,       gqa,          deterministic, std::nullopt};
    return py::str(explain(Inputs(query, key, value, mask, bias, alibi_slopes), options, device, grad_mask));
  });
}

std::optional<std::string> set_backend(const std::optional<std::string>& name) {
  try {
    const auto before = set_requested_backend(name);
    return before.has_value() ? std::optional<std::string>(*before) : std::nullopt;
  } catch (const AttentionError& error) {
    PyErr_SetString(attention_error, error.what_without_backtrace());
    throw py::error_already_set();
  }
}

// Who would see a range that starts now: 1 an NVTX tool, 2 torch's profiler or its memory history.
int listeners() { return (nvtx::listening() ? 1 : 0) | (at::hasCallbacks() && at::isRecordFunctionEnabled() ? 2 : 0); }

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(_C, m) {
  using namespace flash_ext;
  m.def("scaled_dot_product_attention", &sdpa, "NotImplemented where __torch_function__ must decide.");
  m.def("attention", &attention, "NotImplemented where __torch_function__ must decide.");
  m.def("explain", &explained, "JSON, see flash_ext/explain.py.");
  m.def("set_backend", &set_backend, "Sets this thread's backend (None: any) and returns the one before.");
  m.def("set_enabled", &set_enabled);
  py::class_<Choice>(m, "Choice", py::module_local());
  m.def("current_choice", &current_choice);
  m.def("set_choice", &set_choice, "Returns what undoes it.");
  m.def("choice_text", &choice_text);
  m.def("enabled_calls", &enabled_calls);
  m.def("calls_left", &calls_left);
  m.def("listeners", &listeners, "For flash_ext.profiling.range, as are the next two.");
  m.def("nvtx_push", &nvtx::push);
  m.def("nvtx_pop", &nvtx::pop);
  m.def("set_error_class", [](py::handle type) { attention_error = type.inc_ref().ptr(); });
}
