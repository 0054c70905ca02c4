// What torch changed between 2.9 and 2.15 in what csrc/torch uses, and nothing else. Each entry says which version
// changed what; the code elsewhere knows no version.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <utility>

#define FLASH_EXT_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace flash_ext::compat {

using torch::autograd::Node;

// 2.13: nodes of autograd are held by c10::intrusive_ptr; before by std::shared_ptr with a deleter of torch's.
#if FLASH_EXT_TORCH_AT_LEAST(13)
template <class T>
using NodePtr = c10::intrusive_ptr<T>;

template <class T, class... Args>
NodePtr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}
#else
template <class T>
using NodePtr = std::shared_ptr<T>;

template <class T, class... Args>
NodePtr<T> make_node(Args&&... args) {
  return NodePtr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

// 2.14: torch.autograd.graph's hooks on the creation of nodes; who makes a node calls them when it is complete.
inline void node_is_complete([[maybe_unused]] const NodePtr<Node>& node) {
#if FLASH_EXT_TORCH_AT_LEAST(14)
  torch::autograd::fire_node_creation_hooks(node);
#endif
}

}  // namespace flash_ext::compat
