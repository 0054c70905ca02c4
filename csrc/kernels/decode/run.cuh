// The units of one type of cache: every head dimension, few rows and many. Included by bf16.cu, fp16.cu and fp8.cu.
#pragma once

#include "gpu/host/launch.h"
#include "kernels/decode/kernel.cuh"
#include "kernels/decode/units.h"

namespace flash_ext::decode {

template <class Traits>
void run(const DecodeArgs& args, const DecodePlan& plan, const Parts& parts) {
  cuda::launch(decode_kernel<Traits>, cuda::grid_of(plan.grid), Traits::kThreads, plan.shared_bytes, args.stream, args,
               plan, parts);
}

template <class Traits>
constexpr Unit unit(DType dtype) {
  return {.dtype = dtype,
          .fp8 = Traits::kFp8,
          .head_dim = Traits::kHeadDim,
          .tile_rows = Traits::kRows,
          .tile_keys = Traits::kTileKeys,
          .most_blocks = Traits::kMinBlocks,
          .static_bytes = sizeof(BlockState<Traits>),
          .shared_bytes = Traits::shared_bytes,
          .run = run<Traits>};
}

template <class Cache>
std::span<const Unit> units(DType dtype) {
  static const Unit all[] = {unit<Traits<Cache, 64, kFewRows>>(dtype),  unit<Traits<Cache, 64, kManyRows>>(dtype),
                             unit<Traits<Cache, 128, kFewRows>>(dtype), unit<Traits<Cache, 128, kManyRows>>(dtype),
                             unit<Traits<Cache, 256, kFewRows>>(dtype), unit<Traits<Cache, 256, kManyRows>>(dtype)};
  return all;
}

}  // namespace flash_ext::decode
