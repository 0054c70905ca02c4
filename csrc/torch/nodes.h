// The nodes of autograd's graph that attention and its backward leave behind. autograd.cpp makes them,
// QuantizeBackward quantize.cpp.
//
//   AttentionBackward        calls attention_backward
//   AttentionDoubleBackward  calls chunked::double_backward, whose operations are differentiable
//   QuantizeBackward         of quantize_fp8; attention's nodes go past it, to what was quantised (quantize.h)
//
// A node is its saved tensors, in one list, and numbers; what it computes is a function of these and of what flows in,
// so that compiled autograd can trace it with other tensors in their place (compiled_args and apply_with_saved).
// Invariant: the list of saved tensors and the list that `compute` reads have one order.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <bitset>
#include <string>
#include <vector>

#include "torch/fp8.h"
#include "torch/options.h"
#include "torch/torch_compat.h"

namespace flash_ext {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// What a node computes: of what flows in, the saved tensors in their order, the options and which results are wanted,
// behind which `wanted` says which of query, key and value are leaves of e4m3.
using Compute = variable_list (*)(const variable_list& grads, const variable_list& saved, const Options& options,
                                  const std::vector<bool>& wanted);

class SavingNode : public torch::autograd::Node {
 public:
  struct Kind {
    const char* name;
    Compute compute;
    variable_list (*packed)(const variable_list& grads, const std::vector<c10::IValue>& values);  // for a traced graph
    size_t saved, results;
  };

  std::string name() const override { return kind_.name; }
  void release_variables() override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override;

  // Appends a tensor to the list; `is_output` where it is a result that has this node as its grad_fn.
  void save(const Tensor& tensor, bool is_output = false);
  void save(const Inputs& in);

 protected:
  SavingNode(const Kind& kind, const Options& options, const fp8::Leaves& leaves);
  variable_list apply(variable_list&& grads) override;

 private:
  std::vector<bool> wanted() const;
  variable_list unpacked();

  const Kind& kind_;
  const Options options_;
  const fp8::Leaves leaves_;
  std::vector<SavedVariable> saved_;
  std::bitset<32> is_output_;
};

// Saves the inputs, out, lse and rng_state.
struct AttentionBackward final : SavingNode {
  AttentionBackward(const Options& options, const fp8::Leaves& leaves);
};

// Saves the inputs, grad_out, grad_lse and rng_state.
struct AttentionDoubleBackward final : SavingNode {
  AttentionDoubleBackward(const Options& options, const fp8::Leaves& leaves);
};

// Saves descale.
struct QuantizeBackward final : SavingNode {
  QuantizeBackward();
};

}  // namespace flash_ext
