// Decode from a cache of fp16, see run.cuh.
#include "kernels/decode/run.cuh"

namespace flash_ext::decode {

std::span<const Unit> fp16_units() { return units<__half>(DType::kFloat16); }

}  // namespace flash_ext::decode
