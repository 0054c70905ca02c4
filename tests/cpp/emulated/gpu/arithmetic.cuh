// Stands in for csrc/gpu/arithmetic.cuh: the same names.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "warp.h"

namespace flash_ext::cuda {

inline float exp2_fast(float x) { return x < -126.f ? 0.f : exp2f(x); }
inline float reciprocal_fast(float x) { return 1.f / x; }
inline float tanh_fast(float x) { return tanhf(x) * (1.f + 0x1p-12f); }

inline float maximum(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
inline float minimum(float x, float y) { return x != x || y != y ? NAN : fminf(x, y); }

template <class T>
uint32_t at_least_zero(uint32_t x, T) {
  const auto larger = [&](int shift) -> uint32_t {
    const uint16_t bits = static_cast<uint16_t>(x >> shift);
    const T result(maximum(static_cast<float>(reinterpret_cast<const T&>(bits)), 0.f));
    return reinterpret_cast<const uint16_t&>(result);
  };
  return larger(0) | larger(16) << 16;
}

inline uint32_t multiply_bf16(uint32_t x, uint32_t y) {
  const auto product = [&](int shift) -> uint32_t {
    const __nv_bfloat16 rounded(__uint_as_float(x >> shift << 16) * __uint_as_float(y >> shift << 16));
    return reinterpret_cast<const uint16_t&>(rounded);
  };
  return product(0) | product(16) << 16;
}

inline uint32_t spread_high_bits(uint32_t x) { return (x >> 15 & 1) * 0xFFFFu | (x >> 31) * 0xFFFF0000u; }
template <int kByte>
uint32_t spread_byte_signs(uint32_t x, uint32_t y) {
  return (x >> (8 * kByte + 7) & 1) * 0xFFFFu | (y >> (8 * kByte + 7) & 1) * 0xFFFF0000u;
}

}  // namespace flash_ext::cuda
