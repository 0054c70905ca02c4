// The operators: schemas, and the kernels of CPU, CUDA and Meta.
// A kernel checks its arguments, allocates results, asks dispatch.h for a backend and hands it the problem;
// autograd.cpp stands above it, backends below.
#include <ATen/ExpandUtils.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>

#include "core/fold_heads.h"
#include "flash_ext_build_info.h"
#include "torch/allocation.h"
#include "torch/checks.h"
#include "torch/chunked.h"
#include "torch/cuda_runtime.h"
#include "torch/dispatch.h"
#include "torch/fp8.h"
#include "torch/grad_buffer.h"
#include "torch/nvtx.h"
#include "torch/packed.h"
#include "torch/problem.h"
#include "torch/schemas.h"
#include "torch/signatures.h"
#include "torch/sinks.h"

namespace flash_ext {
namespace {

// No query or no key: the results are known, and no backend has to think of it.
bool attends_to_nothing(const Shape<int64_t>& shape) {
  const bool no_pair = shape.heads_q == 0 || shape.len_q == 0 || shape.len_k == 0;
  const bool no_row = shape.packed && (shape.rows_q == 0 || shape.rows_k == 0);
  return no_pair || no_row || std::find(shape.batch.begin(), shape.batch.end(), 0) != shape.batch.end();
}

// ---- kernels --------------------------------------------------------------------------------------------------------

void warn_without_kernels(const Tensor& query) {
  if (!kWithCuda && !query.is_cpu()) {
    TORCH_WARN_ONCE("flash_ext has no kernels for ", query.device().type(),
                    " tensors in this build; it computes with the slower composite `chunked` instead.");
  }
}

// The device of a tensor is the current one while this lives; nothing on the CPU.
c10::OptionalDeviceGuard guard_device(const Tensor& query) {
  return query.is_cpu() ? c10::OptionalDeviceGuard() : c10::OptionalDeviceGuard(query.device());
}

void* current_stream(const Tensor& query) {
  if constexpr (kWithCuda) {
    if (query.is_cuda()) return current_cuda_stream(query.device());
  }
  return nullptr;
}

// `scratch_bytes` of a plan; an undefined tensor for none.
Tensor make_workspace(const Tensor& query, int64_t bytes) {
  return bytes > 0 ? allocate({bytes}, query, at::kByte) : Tensor();
}

// Writes out and, where it is defined, lse.
void compute(const Inputs& in, const Tensor& rng_state, const Options& options, const Shape<int64_t>& shape,
             const Tensor& out, const Tensor& lse, int64_t first_batch) {
  ForwardArgs args;
  ProblemBuilder builder(in, options, shape);
  const std::optional<Inputs> gathered = gather_columns(in);
  add_inputs(builder, args, gathered.has_value() ? *gathered : in, shape);
  builder.add_rows(args.out, out, shape.heads_q, shape.len_q, shape.head_dim_v);
  builder.finish(args.problem);
  if (!args.problem.fp8) fold_heads(args);  // which knows no descales
  args.dropout_place = dropout_place(options, shape.heads_q, first_batch);
  const DeviceInfo device = device_info(in.query.device());
  const auto name = options.backend.has_value() ? options.backend : requested_backend();
  const Kernel* const kernel = fp8::has(in) ? find_kernel(args, device, name) : choose_kernel(args, device, name);
  if (kernel != nullptr) {
    if (lse.defined()) args.lse = lse.mutable_data_ptr();
    if (options.dropout_p > 0) args.rng_state = rng_state.const_data_ptr<int64_t>();
    args.stream = current_stream(in.query);
    const Plan plan = kernel->plan(args.problem, device);
    const Tensor workspace = make_workspace(in.query, plan.scratch_bytes);
    return kernel->forward(args, plan, workspace.defined() ? workspace.mutable_data_ptr() : nullptr);
  }
  if (fp8::has(in)) {
    return compute(fp8::dequantised(in, options, true), rng_state, options, shape, out, lse, first_batch);
  }
  warn_without_kernels(in.query);
  if (options.batch_invariant && in.packed()) throw AttentionError("batch_invariant", packed::kNoInvariantComposite);
  const chunked::Forward whole = options.batch_invariant
                                     ? chunked::forward_alone(in, rng_state, options, shape, first_batch)
                                     : chunked::forward(in, rng_state, options);
  out.copy_(whole.out);
  if (lse.defined()) lse.copy_(whole.lse);
}

// Whether sequences are cut out one by one.
bool runs_one_by_one(const Inputs& in, const Options& options) {
  if (!in.packed() || !in.query.is_cpu()) return false;
  const auto name = options.backend.has_value() ? options.backend : requested_backend();
  return name != kChunked || options.batch_invariant;
}

void compute_one_by_one(const Inputs& in, const Tensor& rng_state, const Options& given, const Shape<int64_t>& shape,
                        const Tensor& out, const Tensor& lse) {
  if (fp8::has(in)) return compute_one_by_one(fp8::dequantised(in, given, true), rng_state, given, shape, out, lse);
  const Options options = packed::dense_options(given);
  const std::vector<Sequence> sequences = packed::sequences_of(in, shape);
  for (size_t b = 0; b < sequences.size(); ++b) {
    const Sequence& s = sequences[b];
    if (s.len_q == 0 || s.len_k == 0) {
      if (lse.defined() && in.sinks.defined()) packed::cut_lse(lse, s).copy_(in.sinks.unsqueeze(-1));
      continue;
    }
    const Inputs alone = packed::cut(in, static_cast<int64_t>(b), s);
    const auto own = check_call<int64_t>(alone, options);
    const Tensor own_lse = lse.defined() ? allocate(own.lse_sizes(), in.query, lse.scalar_type()) : Tensor();
    compute(alone, rng_state, options, own, packed::cut_rows(out, s.row_q, s.len_q), own_lse, static_cast<int64_t>(b));
    if (lse.defined()) packed::cut_lse(lse, s).copy_(own_lse);
  }
}

ForwardResult forward_with_rng_state(c10::DispatchKeySet, const Inputs& in, const Tensor& rng_state,
                                     const Options& options, bool return_lse) {
  const nvtx::Range range(nvtx::Op::kAttention, in, options);
  const auto guard = guard_device(in.query);
  const auto shape = check_call<int64_t>(in, options);
  const auto dtype = result_type(in, options);
  ForwardResult result;
  result.rng_state = rng_state;
  check_saved<int64_t>(shape, in, {}, {}, result, options);
  packed::check_entries(in, shape);
  result.out = empty_in_order_of(shape.out_sizes(), in.query, dtype);
  result.lse = return_lse ? allocate(shape.lse_sizes(), in.query, accumulate_type(dtype))
                          : allocate_absent(in.query, at::kFloat);

  const bool one_by_one = runs_one_by_one(in, options), nothing = attends_to_nothing(shape);
  if (nothing || one_by_one) {
    result.out.zero_();
    result.lse.fill_(-std::numeric_limits<double>::infinity());
  }
  if (nothing) {
    if (return_lse && in.sinks.defined()) sinks::fill_lse(result.lse, in, options);
    return result;
  }
  const Tensor lse = return_lse ? result.lse : Tensor();
  if (one_by_one) {
    compute_one_by_one(in, rng_state, options, shape, result.out, lse);
  } else {
    compute(in, rng_state, options, shape, result.out, lse, 0);
  }
  return result;
}

ForwardResult forward(c10::DispatchKeySet keys, const Inputs& in, const Options& options, bool return_lse) {
  const bool draws = options.dropout_p > 0;
  if (draws) check_call<int64_t>(in, options);  // a wrong call draws no random numbers
  const Tensor rng_state = draws ? call_draw_rng_state(in) : allocate_absent(in.query, at::kLong);
  return forward_with_rng_state(keys, in, rng_state, options, return_lse);
}

Gradients gradients(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in, const ForwardResult& saved,
                    const Options& options, const Shape<int64_t>& shape, const GradMask& asked, int64_t first_batch) {
  const auto zeros_for = [&](size_t i) {
    const Tensor& input = in.*kDifferentiable[i].tensor;
    return empty_in_order_of(Sizes<int64_t>(input.sizes()), input, input.scalar_type()).zero_();
  };
  // lse alone depends on no value: dV is 0, and not 0 times what may be NaN.
  GradMask wanted = asked;
  wanted[kDv] = asked[kDv] && grad_out.defined();
  if (attends_to_nothing(shape) || wanted == GradMask{}) {
    Gradients zeros;
    for (size_t i = 0; i < kGradients; ++i) {
      if (asked[i]) zeros[i] = zeros_for(i);
    }
    return zeros;
  }

  BackwardArgs args;
  ProblemBuilder builder(in, options, shape);
  const std::optional<Inputs> gathered = gather_columns(in);
  const Tensor d_out = gather_rows(grad_out);
  add_inputs(builder, args.fwd, gathered.has_value() ? *gathered : in, shape);
  builder.add_rows(args.fwd.out, saved.out, shape.heads_q, shape.len_q, shape.head_dim_v);
  builder.add_rows(args.d_out, d_out, shape.heads_q, shape.len_q, shape.head_dim_v);
  const Tensor* const inputs[] = {&in.query, &in.key, &in.value};
  const Sizes<int64_t> whole[] = {shape.of_queries(shape.head_dim), shape.of_keys(shape.heads_k, shape.head_dim),
                                  shape.of_keys(shape.heads_v, shape.head_dim_v)};
  TensorView* const views[] = {&args.dq, &args.dk, &args.dv};
  bool* const in_accum[] = {&args.dq_in_accum, &args.dk_in_accum, &args.dv_in_accum};
  GradBuffer buffers[3];
  for (int i = 0; i < 3; ++i) {
    if (!wanted[i]) continue;
    buffers[i] = GradBuffer::make(*inputs[i], whole[i]);
    *in_accum[i] = buffers[i].reduced;
    const int64_t heads = i == 0 ? shape.heads_q : (i == 1 ? shape.heads_k : shape.heads_v);
    builder.add_rows(*views[i], buffers[i].buffer, heads, i == 0 ? shape.len_q : shape.len_k,
                     i == 2 ? shape.head_dim_v : shape.head_dim);
  }
  const auto accumulate = accumulate_type(in.query.scalar_type());
  if (wanted[kDbias]) {
    builder.add(args.dbias, at::empty(in.bias.sizes(), in.bias.options().device(at::kMeta)), shape.heads_q, shape.len_q,
                shape.len_k);
  }
  Problem& problem = args.fwd.problem;
  builder.finish(problem);
  args.fwd.dropout_place = dropout_place(options, shape.heads_q, first_batch);
  set_wanted(problem, wanted, args.dbias);
  const DeviceInfo device = device_info(in.query.device());
  const Stages stages = choose_stages(args, device, options.backend);
  if (stages.empty()) {
    if (options.batch_invariant && in.packed()) throw AttentionError("batch_invariant", packed::kNoInvariantComposite);
    const Gradients whole_grads =
        options.batch_invariant
            ? chunked::backward_alone(grad_out, grad_lse, in, saved, options, asked, shape, first_batch)
            : chunked::backward(grad_out, grad_lse, in, saved, options, asked);
    Gradients result;
    for (size_t i = 0; i < kGradients; ++i) {
      if (asked[i]) result[i] = GradBuffer::cast_like(whole_grads[i], in.*kDifferentiable[i].tensor);
    }
    return result;
  }

  Tensor dbias, dalibi;
  if (wanted[kDslopes]) {
    dalibi = allocate(shape.heads_sizes(), in.query, accumulate);
    args.dalibi = dalibi.mutable_data_ptr();
  }
  const Tensor lse = saved.lse.contiguous();
  const Tensor d_lse = grad_lse.defined() ? grad_lse.contiguous() : Tensor();
  args.fwd.lse = const_cast<void*>(lse.const_data_ptr());
  if (d_lse.defined()) args.d_lse = d_lse.const_data_ptr();
  if (options.dropout_p > 0) args.fwd.rng_state = saved.rng_state.const_data_ptr<int64_t>();
  args.fwd.stream = current_stream(in.query);
  std::array<BackwardArgs, Stages::kMost> parts;
  std::array<Plan, Stages::kMost> plans;
  int64_t scratch_bytes = 0;
  for (int i = 0; i < stages.size(); ++i) {
    parts[i] = args;
    stages.narrow(i, parts[i]);
    plans[i] = stages[i].plan(parts[i].fwd.problem, device);
    scratch_bytes = std::max(scratch_bytes, plans[i].scratch_bytes);
    if (!parts[i].fwd.problem.wants_dbias) continue;
    dbias = allocate(in.bias.sizes(), in.query, plans[i].dbias_in_bias_dtype ? in.bias.scalar_type() : accumulate);
    parts[i].dbias.data = dbias.mutable_data_ptr();
    // What the longest sequence may have beyond the tensors' rows is no score of the problem's.
    const Problem& own = parts[i].fwd.problem;
    if (own.packed && dbias.numel() > own.batch * own.heads_q * own.len_q * own.len_k) dbias.zero_();
  }
  {
    // Given back before the sums and casts below: the stream orders who writes to its memory next, as it does for the
    // stages, which share it.
    const Tensor workspace = make_workspace(in.query, scratch_bytes);
    void* const scratch = workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
    for (int i = 0; i < stages.size(); ++i) stages[i].backward(parts[i], plans[i], scratch);
  }

  Gradients result;
  for (int i = 0; i < 3; ++i) {
    if (!wanted[i]) continue;
    result[i] = buffers[i].finish(*inputs[i]);
    buffers[i].buffer.reset();
  }
  if (wanted[kDbias]) result[kDbias] = GradBuffer::as_result(dbias, in.bias);
  if (wanted[kDslopes])
    result[kDslopes] = GradBuffer::cast_like(at::sum_to(dalibi, in.alibi_slopes.sizes()), in.alibi_slopes);
  if (asked[kDv] && !wanted[kDv]) result[kDv] = zeros_for(kDv);
  for (Tensor& grad : result) {
    if (!grad.defined()) grad = allocate_absent(in.query, in.query.scalar_type());
  }
  return result;
}

Gradients gradients_one_by_one(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                               const ForwardResult& saved, const Options& given, const Shape<int64_t>& shape,
                               const GradMask& asked) {
  const Options options = packed::dense_options(given);
  Inputs wide = in;  // a bias's gradient is summed in float, whatever its dtype
  if (in.bias.defined()) wide.bias = in.bias.to(accumulate_type(in.query.scalar_type()));
  Gradients sums;
  for (size_t i = 0; i < kGradients; ++i) {
    const Tensor& input = wide.*kDifferentiable[i].tensor;
    if (asked[i]) sums[i] = empty_in_order_of(Sizes<int64_t>(input.sizes()), input, input.scalar_type()).zero_();
  }
  const std::vector<Sequence> sequences = packed::sequences_of(in, shape);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& s = sequences[i];
    if (s.len_q == 0 || s.len_k == 0) continue;
    const auto b = static_cast<int64_t>(i);
    const Inputs alone = packed::cut(wide, b, s);
    const Gradients grads =
        gradients(packed::cut_rows(grad_out, s.row_q, s.len_q), packed::cut_lse(grad_lse, s), alone,
                  {packed::cut_rows(saved.out, s.row_q, s.len_q), packed::cut_lse(saved.lse, s), saved.rng_state},
                  options, check_call<int64_t>(alone, options), asked, b);
    if (asked[kDq]) packed::cut_rows(sums[kDq], s.row_q, s.len_q).copy_(grads[kDq]);
    if (asked[kDk]) packed::cut_rows(sums[kDk], s.row_k, s.len_k).copy_(grads[kDk]);
    if (asked[kDv]) packed::cut_rows(sums[kDv], s.row_k, s.len_k).copy_(grads[kDv]);
    // Copied where nobody else adds, because 0 + -0 is 0.
    const auto put = [&](const Tensor& to, const Tensor& given, int64_t rank, const Tensor& grad) {
      const bool is_own = sequences.size() == 1 || (given.dim() == rank && given.size(0) > 1);
      if (is_own) {
        to.copy_(grad);
      } else {
        to.add_(grad);
      }
    };
    if (asked[kDbias]) put(packed::cut_scores(sums[kDbias], b, s), in.bias, 4, grads[kDbias]);
    if (asked[kDslopes]) put(packed::cut_slopes(sums[kDslopes], b), in.alibi_slopes, 2, grads[kDslopes]);
  }
  if (asked[kDbias]) sums[kDbias] = GradBuffer::as_result(sums[kDbias], in.bias);
  return sums;
}

Gradients backward(c10::DispatchKeySet, const Tensor& grad_out, const Tensor& grad_lse, const Inputs& given,
                   const ForwardResult& saved, const Options& options, const GradMask& asked) {
  const nvtx::Range range(nvtx::Op::kAttentionBackward, given, options);
  const auto guard = guard_device(given.query);
  const auto shape = check_call<int64_t>(given, options);
  check_saved<int64_t>(shape, given, grad_out, grad_lse, saved, options);
  // NOTE: kernels take the sum of dS over a row's keys for dlse, which it is of all keys.
  if (options.constant_lse && (asked[kDbias] || asked[kDslopes])) {
    throw AttentionError("constant_lse", "is True beside the gradient of a bias or of alibi_slopes; it takes neither");
  }
  const std::optional<Inputs> read =
      fp8::has(given) ? std::optional(fp8::dequantised(given, options, true)) : std::nullopt;
  const Inputs& in = read.has_value() ? *read : given;
  if (runs_one_by_one(in, options)) {
    return gradients_one_by_one(grad_out, grad_lse, in, saved, options, shape, asked);
  }
  return gradients(grad_out, grad_lse, in, saved, options, shape, asked, 0);
}

// NOTE: drawn by a torch operator, so that the generator's lock is held, CUDA graphs record it and each replay draws
// anew.
Tensor draw_rng_state(const Tensor& query, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&) {
  const auto guard = guard_device(query);
  return at::empty({2}, query.options().dtype(at::kLong)).random_();
}

// ---- Meta -----------------------------------------------------------------------------------------------------------

ForwardResult forward_with_rng_state_meta(c10::DispatchKeySet, const Inputs& in, const Tensor& rng_state,
                                          const Options& options, bool return_lse) {
  const auto shape = check_call<c10::SymInt>(in, options);
  const auto dtype = result_type(in, options);
  const Tensor lse = return_lse ? at::empty_symint(shape.lse_sizes(), in.query.options().dtype(accumulate_type(dtype)))
                                : at::empty({0}, in.query.options().dtype(at::kFloat));
  return {empty_in_order_of(shape.out_sizes(), in.query, dtype), lse, rng_state};
}

ForwardResult forward_meta(c10::DispatchKeySet keys, const Inputs& in, const Options& options, bool return_lse) {
  const Tensor rng_state = at::empty({options.dropout_p > 0 ? 2 : 0}, in.query.options().dtype(at::kLong));
  return forward_with_rng_state_meta(keys, in, rng_state, options, return_lse);
}

Tensor draw_rng_state_meta(const Tensor& query, const Tensor&, const Tensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&) {
  return at::empty({2}, query.options().dtype(at::kLong));
}

Gradients backward_meta(c10::DispatchKeySet, const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                        const ForwardResult& saved, const Options& options, const GradMask& wanted) {
  const auto shape = check_call<c10::SymInt>(in, options);
  check_saved<c10::SymInt>(shape, in, grad_out, grad_lse, saved, options);
  Gradients grads;
  for (size_t i = 0; i < kGradients; ++i) {
    if (!wanted[i]) continue;
    const Tensor& input = in.*kDifferentiable[i].tensor;
    const bool is_fp8 = input.scalar_type() == at::kFloat8_e4m3fn;
    grads[i] = empty_in_order_of(Sizes<c10::SymInt>(input.sym_sizes()), input,
                                 is_fp8 ? result_type(in, options) : input.scalar_type());
  }
  return grads;
}

}  // namespace

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa) {
  check_drop_in(query, key, value, attn_mask, is_causal, enable_gqa);
  Inputs in;
  in.query = query;
  in.key = key;
  in.value = value;
  if (attn_mask.has_value() && attn_mask->defined()) {
    (attn_mask->scalar_type() == at::kBool ? in.mask : in.bias) = *attn_mask;
  }
  Options options;
  options.causal = is_causal;
  options.dropout_p = dropout_p;
  options.scale = scale;
  options.gqa = enable_gqa;
  try {
    return call_attention(in, options, false).out;
  } catch (const AttentionError& error) {
    // The drop-in's caller knows one attn_mask.
    if (error.argument() == "mask" || error.argument() == "bias") throw AttentionError("attn_mask", error.rest());
    throw;
  }
}

std::string build_info() { return kBuildInfo; }

TORCH_LIBRARY(flash_ext, m) {
  m.def(torch::schema(schemas::kDrawRngState.c_str()), {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kAttention.c_str()), {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kAttentionWithRngState.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kAttentionBackward.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kSinksGradient.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kDropoutMask.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kScaledDotProductAttention.c_str()), {at::Tag::pt2_compliant_tag});
  m.impl("scaled_dot_product_attention",
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(scaled_dot_product_attention)));
  m.def(torch::schema(schemas::kAttentionWithCache.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kGatherPages.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kExplain.c_str()));
  m.def(torch::schema(schemas::kQuantizeFp8.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(torch::schema(schemas::kDescaleFp8.c_str()), {at::Tag::pt2_compliant_tag});
  m.def(schemas::kBuildInfo.c_str(), build_info);
}

TORCH_LIBRARY_IMPL(flash_ext, CPU, m) {
  m.impl("draw_rng_state", TORCH_FN(draw_rng_state));
  m.impl("attention", TORCH_FN((AttentionSignature::run<attention_op<forward>>)));
  m.impl("attention_with_rng_state",
         TORCH_FN((AttentionWithRngStateSignature::run<attention_with_rng_state_op<forward_with_rng_state>>)));
  m.impl("attention_backward", TORCH_FN((AttentionBackwardSignature::run<attention_backward_op<backward>>)));
}

// In a build without CUDA dispatch.h finds that every backend refuses, and `chunked` computes.
TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("draw_rng_state", TORCH_FN(draw_rng_state));
  m.impl("attention", TORCH_FN((AttentionSignature::run<attention_op<forward>>)));
  m.impl("attention_with_rng_state",
         TORCH_FN((AttentionWithRngStateSignature::run<attention_with_rng_state_op<forward_with_rng_state>>)));
  m.impl("attention_backward", TORCH_FN((AttentionBackwardSignature::run<attention_backward_op<backward>>)));
}

TORCH_LIBRARY_IMPL(flash_ext, Meta, m) {
  m.impl("draw_rng_state", TORCH_FN(draw_rng_state_meta));
  m.impl("attention", TORCH_FN((AttentionSignature::run<attention_op<forward_meta>>)));
  m.impl("attention_with_rng_state",
         TORCH_FN((AttentionWithRngStateSignature::run<attention_with_rng_state_op<forward_with_rng_state_meta>>)));
  m.impl("attention_backward", TORCH_FN((AttentionBackwardSignature::run<attention_backward_op<backward_meta>>)));
}

}  // namespace flash_ext
