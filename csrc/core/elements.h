// What the tensor cores multiply, as types that templates are instantiated with; accumulators are float.
//
// Called by gpu/fragments.cuh, and by the host side of sm80, which names its instances by them.
#pragma once

namespace flash_ext {

struct Fp16 {};
struct Bf16 {};
struct Fp32 {};  // three TF32 products a product: float accuracy
struct Tf32 {};  // floats rounded to TF32, one product: where the problem allows it

}  // namespace flash_ext
