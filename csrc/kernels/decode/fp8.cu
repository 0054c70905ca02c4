// Decode from a cache of e4m3, for queries of fp16 and bf16, see run.cuh.
#include "kernels/decode/run.cuh"

namespace flash_ext::decode {

std::span<const Unit> fp8_units() { return units<Fp8>(DType::kFloat16); }

}  // namespace flash_ext::decode
