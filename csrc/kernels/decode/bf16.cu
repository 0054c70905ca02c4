// Decode from a cache of bf16, see run.cuh.
#include "kernels/decode/run.cuh"

namespace flash_ext::decode {

std::span<const Unit> bf16_units() { return units<__nv_bfloat16>(DType::kBFloat16); }

}  // namespace flash_ext::decode
