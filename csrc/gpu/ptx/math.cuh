// What a number, or the two of a register, take where PTX has a form that C++ has not.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_ext {

// ex2.approx.ftz.f32: 2^x, relative error 2^-22; 2^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// rcp.approx.ftz.f32: relative error 2^-23; of infinity 0.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// tanh.approx.f32: relative error 2^-11 by its manual, 1e-5 as measured on 9.0; 1 from 8 on.
__device__ __forceinline__ float tanh_fast(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// max.NaN.f32, min.NaN.f32: NaN where one of them is, which fmaxf and fminf lose.
__device__ __forceinline__ float maximum(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
__device__ __forceinline__ float minimum(float x, float y) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// max.NaN.f16x2, max.NaN.bf16x2: of each half of x and 0. The last parameter: their type.
__device__ __forceinline__ uint32_t at_least_zero(uint32_t x, __half) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(0));
  return result;
}
__device__ __forceinline__ uint32_t at_least_zero(uint32_t x, __nv_bfloat16) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(0));
  return result;
}

// Two products of bf16, each rounded.
__device__ __forceinline__ uint32_t multiply_bf16(uint32_t x, uint32_t y) {
  const __nv_bfloat162 product =
      __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(x), reinterpret_cast<const __nv_bfloat162&>(y));
  return reinterpret_cast<const uint32_t&>(product);
}

// prmt.b32: bits 15 and 31, each repeated over its half.
__device__ __forceinline__ uint32_t spread_high_bits(uint32_t x) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(result) : "r"(x));
  return result;
}

// prmt.b32: the high bit of byte kByte of x repeated over the low half, that of y over the high half.
template <int kByte>
__device__ __forceinline__ uint32_t spread_byte_signs(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "n"((8 + kByte) * 0x11 + (12 + kByte) * 0x1100));
  return result;
}

// cvt.rna.tf32.f32
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}

// add.cc, addc: flags * 2 + (word + not_below carries), which with not_below = 2^32 - t says word >= t.
__device__ __forceinline__ void append_carry(uint32_t& flags, uint32_t word, uint32_t not_below) {
  asm("{\n\t.reg .u32 sum;\n\tadd.cc.u32 sum, %1, %2;\n\taddc.u32 %0, %0, %0;\n\t}"
      : "+r"(flags)
      : "r"(word), "r"(not_below));
}

// cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32: two numbers of one register, x in the low half.
__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(y), "f"(x));
  return result;
}
__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(y), "f"(x));
  return result;
}
// cvt.rn.satfinite.e4m3x2.f32: four numbers of one register, the first in the lowest byte. What is beyond 448 is 448.
__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t result;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(result)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return result;
}
// The two numbers of a register.
__device__ __forceinline__ void unpack(uint32_t packed, float& x, float& y, __half) {
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(packed));
  x = pair.x;
  y = pair.y;
}
__device__ __forceinline__ void unpack(uint32_t packed, float& x, float& y, __nv_bfloat16) {
  x = __uint_as_float(packed << 16);
  y = __uint_as_float(packed & 0xFFFF0000U);
}

}  // namespace flash_ext
