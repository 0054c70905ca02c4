// The decode kernels that there are, one list a type of cache; each is a unit of its own (bf16.cu, fp16.cu, fp8.cu),
// made of run.cuh. Read by merge.cu, which chooses and plans.
#pragma once

#include <cstdint>
#include <span>

#include "core/decode.h"

namespace flash_ext::decode {

struct Parts;

struct Unit {
  DType dtype;  // of q and of the cache, unless it is of e4m3
  bool fp8;
  int head_dim, tile_rows, tile_keys;
  int most_blocks;  // of a multiprocessor, by their registers
  int64_t static_bytes;
  int64_t (*shared_bytes)(int stages);
  void (*run)(const DecodeArgs& args, const DecodePlan& plan, const Parts& parts);
};

std::span<const Unit> bf16_units();
std::span<const Unit> fp16_units();
std::span<const Unit> fp8_units();

}  // namespace flash_ext::decode
