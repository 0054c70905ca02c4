// See allocation.h: what at::empty_strided ends in, for the two devices that have kernels.
#include "torch/allocation.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include "torch/cuda_runtime.h"

namespace flash_ext {
namespace {

// Null: this build knows none of the device, and the dispatcher must be asked.
c10::Allocator* allocator_of(const Tensor& like) {
  if (like.is_cpu()) return c10::GetCPUAllocator();
  if constexpr (kWithCuda) {
    if (like.is_cuda()) return cuda_allocator();
  }
  return nullptr;
}

c10::DispatchKeySet keys_of(const Tensor& like) {
  return c10::DispatchKeySet(like.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
}

}  // namespace

Tensor allocate_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, const Tensor& like, at::ScalarType dtype) {
  c10::Allocator* const allocator = allocator_of(like);
  if (allocator == nullptr) return at::empty_strided(sizes, strides, like.options().dtype(dtype));
  return Tensor(at::detail::empty_strided_generic(sizes, strides, allocator, keys_of(like), dtype));
}

Tensor allocate(c10::IntArrayRef sizes, const Tensor& like, at::ScalarType dtype) {
  c10::Allocator* const allocator = allocator_of(like);
  if (allocator == nullptr) return at::empty(sizes, like.options().dtype(dtype));
  return Tensor(at::detail::empty_generic(sizes, allocator, keys_of(like), dtype, std::nullopt));
}

Tensor allocate_absent(const Tensor& like, at::ScalarType dtype) {
  c10::Allocator* const allocator = allocator_of(like);
  if (allocator == nullptr) return at::empty({0}, like.options().dtype(dtype));
  // The allocator is for a later resize_; the device need not be the current one, so it is not asked.
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, like.device()), allocator, /*resizable=*/true);
  return at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), keys_of(like),
                                                  c10::scalarTypeToTypeMeta(dtype));
}

}  // namespace flash_ext
