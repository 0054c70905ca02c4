// Stands in for the generated list of the kernels that a build has.
#pragma once

#include <initializer_list>

#include "kernels/sm90/kernels.h"

namespace flash_ext::sm90 {

template <DType kDType, int kHeadDim>
constexpr Instance kInstance = {kDType, kHeadDim, run_forward<kDType, kHeadDim>,
                                backward_scratch_bytes<kDType, kHeadDim>, run_backward<kDType, kHeadDim>};

constexpr Instance kInstances[] = {
    kInstance<DType::kFloat16, 64>,   kInstance<DType::kFloat16, 128>,  kInstance<DType::kFloat16, 192>,
    kInstance<DType::kFloat16, 512>,  kInstance<DType::kBFloat16, 64>,  kInstance<DType::kBFloat16, 128>,
    kInstance<DType::kBFloat16, 192>, kInstance<DType::kBFloat16, 256>, kInstance<DType::kBFloat16, 384>,
    kInstance<DType::kBFloat16, 512>,
};
// sm90_fp8_test.cpp calls them itself.
constexpr std::initializer_list<Instance> kFp8Instances = {};

}  // namespace flash_ext::sm90
