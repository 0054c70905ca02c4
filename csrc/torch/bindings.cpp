// The Python module _C: a typed entry for eager calls, which saves what torch.ops spends on parsing a schema, and the
// functions that have no tensor argument. Everything else is reached through torch.ops, with or without _C.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/cache.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/enable.h"
#include "torch/explain.h"
#include "torch/nvtx.h"
#include "torch/options.h"
#include "torch/signatures.h"

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

// An option from Python, by its type.
void convert(py::handle object, const char* name, bool& to) { to = flag(object, name); }
void convert(py::handle object, const char* name, double& to) { to = number(object, name); }
void convert(py::handle object, const char* name, int64_t& to) {
  to = PyLong_Check(object.ptr()) ? PyLong_AsLongLong(object.ptr()) : -1;
  if (!PyLong_Check(object.ptr()) || (to == -1 && PyErr_Occurred())) {
    PyErr_Clear();
    throw py::type_error(std::string(name) + " is of type " + Py_TYPE(object.ptr())->tp_name +
                         "; it must be an int of 64 bits");
  }
}
void convert(py::handle object, const char* name, c10::SymInt& to) {
  int64_t number = 0;
  convert(object, name, number);
  to = number;
}
void convert(py::handle object, const char* name, at::ScalarType& to) {
  if (!THPDtype_Check(object.ptr())) {
    throw py::type_error(std::string(name) + " is of type " + Py_TYPE(object.ptr())->tp_name +
                         "; it must be a torch.dtype");
  }
  to = reinterpret_cast<THPDtype*>(object.ptr())->scalar_type;
}
void convert(py::handle object, const char*, std::string_view& to) { to = py::cast<std::string_view>(object); }
template <class T>
void convert(py::handle object, const char* name, std::optional<T>& to) {
  if (object.is_none()) return to.reset();
  convert(object, name, to.emplace());
}

// Runs `call`; errors become Python's, one sentence each.
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
    std::optional<double> s;
    convert(scale, "scale", s);
    const bool causal = flag(is_causal, "is_causal"), gqa = flag(enable_gqa, "enable_gqa");
    Tensor out;
    {
      py::gil_scoped_release release;
      out = flash_ext::scaled_dot_product_attention(q, k, v, mask, p, causal, s, gqa);
    }
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(out)));
  });
}

// The calls that take all inputs and options, in the order of the schemas.
using CallOptions = decltype(joined(Indices<0, kFirstPartOption>(), Indices<kLastPartOption + 1, kOptionCount>()));

template <class = std::make_index_sequence<std::size(kInputs)>, class = CallOptions>
struct Call;

template <size_t... kInput, size_t... kOption>
struct Call<std::index_sequence<kInput...>, std::index_sequence<kOption...>> {
  template <size_t>
  using Argument = py::handle;

  static void convert_inputs(Inputs& in, Argument<kInput>... tensors) {
    const auto set = [&](const Input& input, py::handle object) {
      in.*input.tensor =
          input.required ? tensor(object, input.name) : optional_tensor(object, input.name).value_or(Tensor());
    };
    (set(kInputs[kInput], tensors), ...);
  }

  static void convert_options(Options& options, Argument<kOption>... values) {
    size_t next = 0;
    const auto set = [&](const auto& option, py::handle object) {
      convert(object, option_names()[next++].c_str(), options.*option.field);
    };
    (set(std::get<kOption>(kOptions), values), ...);
  }

  static py::object attention(Argument<kInput>... tensors, Argument<kOption>... values, py::handle return_lse) {
    return guarded([&]() -> py::object {
      if (at::impl::torch_function_mode_enabled()) throw Overridden();
      Inputs in;
      convert_inputs(in, tensors...);
      Options options;
      convert_options(options, values...);
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

  static py::object explained(Argument<kInput>... tensors, Argument<kOption>... values, const std::string& device,
                              const GradMask& grad_mask) {
    return guarded([&]() -> py::object {
      Inputs in;
      convert_inputs(in, tensors...);
      Options options;
      convert_options(options, values...);
      return py::str(explain(in, options, device, grad_mask));
    });
  }

 private:
  static const std::array<std::string, sizeof...(kOption)>& option_names() {
    static const std::array<std::string, sizeof...(kOption)> names{std::string(std::get<kOption>(kOptions).name())...};
    return names;
  }
};

py::object wrapped(Tensor tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor))); }

constexpr auto kCacheArguments = static_cast<int64_t>(std::size(kCacheInputs) + 8);

// The inputs in the order of the schema, then its options but for the backend.
py::object attention_with_cache(PyObject* const* args) {
  return guarded([&]() -> py::object {
    if (at::impl::torch_function_mode_enabled()) throw Overridden();
    CacheInputs in;
    size_t next = 0;
    for (const CacheInput& input : kCacheInputs) {
      const py::handle given = args[next];
      in.*input.tensor = next++ < kRequiredCacheInputs ? tensor(given, input.name)
                                                       : optional_tensor(given, input.name).value_or(Tensor());
    }
    CacheOptions options;
    const auto take = [&](const char* name, auto& to) { convert(args[next++], name, to); };
    bool return_lse = false;
    take("rotary_interleaved", options.rotary_interleaved);
    take("causal", options.attention.causal);
    take("window_left", options.attention.window_left);
    take("window_right", options.attention.window_right);
    take("softcap", options.attention.softcap);
    take("scale", options.attention.scale);
    take("return_lse", return_lse);
    take("batch_invariant", options.attention.batch_invariant);
    std::tuple<Tensor, Tensor> result;
    {
      py::gil_scoped_release release;
      result = call_attention_with_cache(in, options, return_lse);
    }
    if (!return_lse) return wrapped(std::move(std::get<0>(result)));
    return py::make_tuple(wrapped(std::move(std::get<0>(result))), wrapped(std::move(std::get<1>(result))));
  });
}

// NOTE: by CPython's own call. With it, and arguments handed on as they are (cache.cpp), a call of no queries on a CPU
// took 2.5 us instead of 3.6.
PyObject* attention_with_cache_method(PyObject*, PyObject* const* args, Py_ssize_t count) {
  try {
    if (count != kCacheArguments) {
      throw py::type_error(concat("attention_with_cache got ", count, " arguments; it takes ", kCacheArguments));
    }
    return attention_with_cache(args).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  }
  return nullptr;
}

PyMethodDef cache_method = {"attention_with_cache",
                            reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attention_with_cache_method)),
                            METH_FASTCALL, "NotImplemented where __torch_function__ must decide."};

py::object gather_pages(py::handle query, py::handle key, py::handle value, py::handle block_table,
                        py::handle seqused_k) {
  return guarded([&]() -> py::object {
    if (at::impl::torch_function_mode_enabled()) throw Overridden();
    const Tensor q = tensor(query, "query"), k = tensor(key, "key"), v = tensor(value, "value");
    const Tensor table = tensor(block_table, "block_table"), used = tensor(seqused_k, "seqused_k");
    const auto [key_rows, value_rows, cu] = call_gather_pages(q, k, v, table, used);
    return py::make_tuple(wrapped(key_rows), wrapped(value_rows), wrapped(cu));
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

std::optional<std::string> backend_here() {
  const auto name = requested_backend();
  return name.has_value() ? std::optional<std::string>(*name) : std::nullopt;
}

// Who would see a range that starts now: 1 an NVTX tool, 2 torch's profiler or its memory history.
int listeners() { return (nvtx::listening() ? 1 : 0) | (at::hasCallbacks() && at::isRecordFunctionEnabled() ? 2 : 0); }

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(_C, m) {
  using namespace flash_ext;
  m.def("scaled_dot_product_attention", &sdpa, "NotImplemented where __torch_function__ must decide.");
  m.def("attention", &Call<>::attention, "NotImplemented where __torch_function__ must decide.");
  m.attr("attention_with_cache") = py::reinterpret_steal<py::object>(PyCFunction_New(&cache_method, nullptr));
  m.def("gather_pages", &gather_pages, "NotImplemented where __torch_function__ must decide.");
  m.def("explain", &Call<>::explained, "JSON, see flash_ext/explain.py.");
  m.def("set_backend", &set_backend, "Sets this thread's backend (None: any) and returns the one before.");
  m.def("requested_backend", &backend_here, "That of this thread or else of the process; None: any.");
  m.def("set_enabled", &set_enabled);
  py::class_<Choice>(m, "Choice", py::module_local());
  m.def("current_choice", &current_choice);
  m.def("set_choice", &set_choice, "Returns what undoes it.");
  m.def("choice_text", &choice_text);
  m.def("enabled_calls", &enabled_calls);
  m.def("takes_nested_call", &takes_nested_call, "For flash_ext/nested.py.");
  m.def("takes_varlen_call", &takes_varlen_call, "For flash_ext/pytorch_varlen.py.");
  m.def("calls_left", &calls_left);
  m.def("listeners", &listeners, "For flash_ext.profiling.range, as are the next two.");
  m.def("nvtx_push", &nvtx::push);
  m.def("nvtx_pop", &nvtx::pop);
  m.def("set_error_class", [](py::handle type) { attention_error = type.inc_ref().ptr(); });
}
