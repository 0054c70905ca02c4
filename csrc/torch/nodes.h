// The nodes of autograd's graph that attention and its backward leave behind. autograd.cpp makes them.
//
//   AttentionBackward        calls attention_backward
//   AttentionDoubleBackward  calls chunked::double_backward, whose operations are differentiable
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

#include "torch/options.h"
#include "torch/torch_compat.h"

namespace flash_ext {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// What a node computes: of what flows in, the saved tensors in their order, the options and which results are wanted.
using Compute = variable_list (*)(const variable_list& grads, const variable_list& saved, const Options& options,
                                  const std::vector<bool>& wanted);

class SavingNode : public torch::autograd::Node {
 public:
  std::string name() const override { return name_; }
  void release_variables() override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override;

  // Appends a tensor to the list; `is_output` where it is a result that has this node as its grad_fn.
  void save(const Tensor& tensor, bool is_output = false);
  void save(const Inputs& in);

 protected:
  SavingNode(const char* name, Compute compute, size_t results, const Options& options);
  variable_list apply(variable_list&& grads) override;

 private:
  std::vector<bool> wanted() const;
  variable_list unpacked();

  const char* const name_;
  const Compute compute_;
  const size_t results_;
  const Options options_;
  std::vector<SavedVariable> saved_;
  std::bitset<16> is_output_;
};

// Saves the inputs, out, lse and rng_state.
struct AttentionBackward final : SavingNode {
  explicit AttentionBackward(const Options& options);
};

// Saves the inputs, grad_out, grad_lse and rng_state.
struct AttentionDoubleBackward final : SavingNode {
  explicit AttentionDoubleBackward(const Options& options);
};

}  // namespace flash_ext
