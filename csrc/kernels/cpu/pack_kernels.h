// Between the caller's tensors and the operands of the products: conversion, padding, transposition.
//
// Included by vector_kernels.cpp alone, once per instruction set. Whatever strides a tensor has, it is read and
// written here; where it lies as a product wants it, the product reads it in place, few_rows_kernels.h reads K and V
// so, and softmax_kernels.h a bias. A right operand with kPairs is [k / 2][n][2]: what dot-product instructions
// (vdpbf16ps, tdpbf16ps) read, so that one 32-bit transpose of pairs makes K^T of it.
#pragma once

#include <utility>

#include "kernels/cpu/vec.h"
#include "kernels/cpu/vector_kernels.h"

namespace flash_ext::cpu::FLASH_CPU_VARIANT {
namespace {

template <class Acc>
Acc element_as(const void* data, Element type, int64_t index) {
  switch (type) {
    case Element::kFloat16: {
      HalfRaw raw{};
      raw[0] = static_cast<const uint16_t*>(data)[index];
      return static_cast<Acc>(from_fp16(raw).raw[0]);
    }
    case Element::kBFloat16:
      return static_cast<Acc>(bit_cast<float>(uint32_t{static_cast<const uint16_t*>(data)[index]} << 16));
    case Element::kFloat32:
      return static_cast<Acc>(static_cast<const float*>(data)[index]);
    case Element::kFloat64:
      return static_cast<Acc>(static_cast<const double*>(data)[index]);
    case Element::kBool:
      return static_cast<Acc>(static_cast<const uint8_t*>(data)[index] != 0);
  }
  return Acc(0);
}

// One contiguous row of any type; the bulk by vectors.
template <class Acc>
void load_row(const void* data, Element type, int64_t first, int cols, Acc* dst) {
  int c = 0;
  if constexpr (sizeof(Acc) == 4) {
    constexpr int kLanes = F32::kLanes;
    if (type == Element::kFloat32) {  // NOTE: a call of memcpy takes longer than a row of 32
      const float* from = static_cast<const float*>(data) + first;
      for (; c + kLanes <= cols; c += kLanes) F32::load(from + c).store(dst + c);
    }
    if (type == Element::kFloat16 || type == Element::kBFloat16) {
      const uint16_t* from = static_cast<const uint16_t*>(data) + first;
      if (type == Element::kBFloat16) {
        for (; c + kLanes <= cols; c += kLanes) from_bf16(load_half(from + c)).store(dst + c);
      } else {
        for (; c + kLanes <= cols; c += kLanes) from_fp16(load_half(from + c)).store(dst + c);
      }
    }
  } else if (type == Element::kFloat64) {
    std::memcpy(dst, static_cast<const double*>(data) + first, cols * sizeof(double));
    return;
  }
  if (type == Element::kBool) {
    const uint8_t* from = static_cast<const uint8_t*>(data) + first;
    for (; c < cols; ++c) dst[c] = static_cast<Acc>(from[c] != 0);
  }
  for (; c < cols; ++c) dst[c] = element_as<Acc>(data, type, first + c);
}

template <class Acc>
void load_acc(const Source& src, int rows, int cols, Acc* dst, int ld, int rows_padded, int cols_padded) {
  for (int r = 0; r < rows; ++r) {
    Acc* to = dst + int64_t{r} * ld;
    const int64_t first = r * src.row_stride;
    if (src.col_stride == 1) {
      load_row(src.data, src.type, first, cols, to);
    } else if (src.col_stride == 0) {
      const Acc value = element_as<Acc>(src.data, src.type, first);
      for (int c = 0; c < cols; ++c) to[c] = value;
    } else {
      for (int c = 0; c < cols; ++c) to[c] = element_as<Acc>(src.data, src.type, first + c * src.col_stride);
    }
    for (int c = cols; c < cols_padded; ++c) to[c] = Acc(0);
  }
  for (int r = rows; r < rows_padded; ++r) std::memset(dst + int64_t{r} * ld, 0, cols_padded * sizeof(Acc));
}

// bf16 operands are only ever made of bf16 tensors: a copy.
void load_bits(const Source& src, int rows, int cols, uint16_t* dst, int ld, int rows_padded, int cols_padded) {
  for (int r = 0; r < rows; ++r) {
    uint16_t* to = dst + int64_t{r} * ld;
    const uint16_t* from = static_cast<const uint16_t*>(src.data) + r * src.row_stride;
    if (src.col_stride == 1) {
      std::memcpy(to, from, cols * sizeof(uint16_t));
    } else {
      for (int c = 0; c < cols; ++c) to[c] = from[c * src.col_stride];
    }
    for (int c = cols; c < cols_padded; ++c) to[c] = 0;
  }
  for (int r = rows; r < rows_padded; ++r) std::memset(dst + int64_t{r} * ld, 0, cols_padded * sizeof(uint16_t));
}

// Exchanges the off-diagonal halves of rows i and i + kStep, lanes in blocks of kStep: one step of a transpose.
template <int kStep, class V, size_t... kLane>
[[gnu::always_inline]] inline void exchange(V& a, V& b, std::index_sequence<kLane...>) {
  constexpr int kLanes = V::kLanes;
  const V upper(__builtin_shufflevector(a.raw, b.raw, ((kLane & kStep) ? kLanes + (kLane ^ kStep) : kLane)...));
  const V lower(__builtin_shufflevector(a.raw, b.raw, ((kLane & kStep) ? kLanes + kLane : (kLane ^ kStep))...));
  a = upper;
  b = lower;
}

template <int kStep, class V>
[[gnu::always_inline]] inline void transpose_steps(V (&rows)[V::kLanes]) {
  if constexpr (kStep < V::kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < V::kLanes; ++i) {
      if ((i & kStep) == 0) exchange<kStep>(rows[i], rows[i + kStep], std::make_index_sequence<V::kLanes>{});
    }
    transpose_steps<kStep * 2>(rows);
  }
}

// dst[c][r] = src[r][c] for c < cols; rows beyond `rows`, up to rows_padded, count as zeros.
template <class T>
void transpose(const T* src, int ld_src, int rows, int cols, T* dst, int ld_dst, int rows_padded) {
  using V = Vec<T>;
  constexpr int kLanes = V::kLanes;
  for (int c0 = 0; c0 < cols; c0 += kLanes) {
    for (int r0 = 0; r0 < rows_padded; r0 += kLanes) {
      V block[kLanes];
      if (r0 + kLanes <= rows) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = V::load(src + int64_t{r0 + i} * ld_src + c0);
      } else {
#pragma GCC unroll 16  // or the block lies in memory
        for (int i = 0; i < kLanes; ++i) {
          block[i] = r0 + i < rows ? V::load(src + int64_t{r0 + i} * ld_src + c0) : V(T(0));
        }
      }
      transpose_steps<1>(block);
      if (c0 + kLanes <= cols) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i].store(dst + int64_t{c0 + i} * ld_dst + r0);
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          if (c0 + i < cols) block[i].store(dst + int64_t{c0 + i} * ld_dst + r0);
        }
      }
    }
  }
}

template <class T>
void right_rows(const T* src, int ld_src, int rows, int cols, T* dst, int rows_padded) {
  for (int r = 0; r < rows; ++r) std::memcpy(dst + int64_t{r} * cols, src + int64_t{r} * ld_src, cols * sizeof(T));
  std::memset(dst + int64_t{rows} * cols, 0, int64_t{rows_padded - rows} * cols * sizeof(T));
}

// Two rows of 16-bit numbers become one row of pairs.
[[gnu::always_inline]] inline U32 pairs_of(HalfRaw even, HalfRaw odd) {
  return U32(__builtin_convertvector(even, U32::Raw) | (__builtin_convertvector(odd, U32::Raw) << 16));
}

void right_pairs(const uint16_t* src, int ld_src, int rows, int cols, uint16_t* dst, int rows_padded) {
  uint32_t* pairs = reinterpret_cast<uint32_t*>(dst);
  for (int r = 0; r < rows_padded; r += 2) {
    const uint16_t* even = src + int64_t{r} * ld_src;
    const uint16_t* odd = even + ld_src;
    uint32_t* to = pairs + int64_t{r / 2} * cols;
    for (int c = 0; c < cols; c += U32::kLanes) {
      const HalfRaw zero{};
      pairs_of(r < rows ? load_half(even + c) : zero, r + 1 < rows ? load_half(odd + c) : zero).store(to + c);
    }
  }
}

void right_pairs_transposed(const uint16_t* src, int ld_src, int rows, int cols, uint16_t* dst, int ld_dst,
                            int rows_padded) {
  transpose(reinterpret_cast<const uint32_t*>(src), ld_src / 2, rows, (cols + 1) / 2, reinterpret_cast<uint32_t*>(dst),
            ld_dst, rows_padded);
}

template <class T>
void left_transposed(const T* src, int ld_src, int rows, int cols, T* dst, int ld_dst, int rows_padded,
                     int cols_padded) {
  transpose(src, ld_src, rows, cols, dst, ld_dst, rows_padded);
  for (int c = cols; c < cols_padded; ++c) std::memset(dst + int64_t{c} * ld_dst, 0, rows_padded * sizeof(T));
}

// A transpose of pairs, one block of columns at a time, and then the pairs taken apart.
void left_pairs_transposed(const uint16_t* src, int ld_src, int rows, int cols, uint16_t* dst, int ld_dst,
                           int rows_padded, int cols_padded) {
  constexpr int kLanes = U32::kLanes;
  uint32_t block[kLanes * kLanes];
  for (int r0 = 0; r0 < rows_padded; r0 += kLanes) {
    const int rows_here = rows - r0 < kLanes ? (rows > r0 ? rows - r0 : 0) : kLanes;
    for (int c0 = 0; c0 < cols; c0 += 2 * kLanes) {
      const uint16_t* from = src + int64_t{r0} * ld_src + c0;
      transpose(reinterpret_cast<const uint32_t*>(from), ld_src / 2, rows_here, kLanes, block, kLanes, kLanes);
      for (int i = 0; i < 2 * kLanes && c0 + i < cols; ++i) {
        const U32::Raw pair = U32::load(block + i / 2 * kLanes).raw;
        const U32::Raw one = i % 2 == 0 ? pair & 0xFFFF : pair >> 16;
        store_half(__builtin_convertvector(one, HalfRaw), dst + int64_t{c0 + i} * ld_dst + r0);
      }
    }
  }
  for (int c = cols; c < cols_padded; ++c) std::memset(dst + int64_t{c} * ld_dst, 0, rows_padded * sizeof(uint16_t));
}

template <class Acc>
void transpose_acc(const Acc* src, int ld_src, int rows, int cols, Acc* dst, int ld_dst) {
  transpose(src, ld_src, rows, cols, dst, ld_dst, rows);
}

template <class Acc>
void store_transposed(const Acc* src, int ld_src, int rows, int cols, Acc* dst, int64_t ld_dst, bool adds) {
  using V = Vec<Acc>;
  constexpr int kLanes = V::kLanes;
  for (int c0 = 0; c0 < cols; c0 += kLanes) {
    for (int r0 = 0; r0 < rows; r0 += kLanes) {
      V block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i] = V::load(src + int64_t{r0 + i} * ld_src + c0);
      transpose_steps<1>(block);
      Acc* const to = dst + c0 * ld_dst + r0;
      if (c0 + kLanes <= cols && r0 + kLanes <= rows) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          Acc* const row = to + i * ld_dst;
          (adds ? V::load(row) + block[i] : block[i]).store(row);
        }
        continue;
      }
      Acc numbers[kLanes][kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i].store(numbers[i]);
      for (int i = 0; i < kLanes && c0 + i < cols; ++i) {
        for (int j = 0; j < kLanes && r0 + j < rows; ++j) {
          Acc& number = to[i * ld_dst + j];
          number = adds ? number + numbers[i][j] : numbers[i][j];
        }
      }
    }
  }
}

template <class Acc>
void store_element(Acc value, const Sink& sink, int64_t index) {
  switch (sink.type) {
    case Element::kFloat16:
      static_cast<uint16_t*>(sink.data)[index] = to_fp16(F32(static_cast<float>(value)))[0];
      return;
    case Element::kBFloat16:
      static_cast<uint16_t*>(sink.data)[index] = to_bf16(F32(static_cast<float>(value)))[0];
      return;
    case Element::kFloat32:
      static_cast<float*>(sink.data)[index] = static_cast<float>(value);
      return;
    default:
      static_cast<double*>(sink.data)[index] = static_cast<double>(value);
  }
}

// x / divisor by its reciprocal and one step of Newton's, which leaves the quotient's own rounding where a product and
// a sum are rounded once. NOTE: a division takes 16 cycles a vector; an infinite quotient would meet inf - inf in the
// step.
template <class V>
[[gnu::always_inline]] inline V quotient(V x, V divisor, [[maybe_unused]] V reciprocal) {
#if defined(__FMA__) || defined(__aarch64__)
  const V first = x * reciprocal;
  const V better = fma(fma(first, V(-divisor.raw), x), reciprocal, first);
  return V(first.raw - first.raw == V(0).raw ? better.raw : first.raw);
#else
  return x / divisor;
#endif
}

template <class Acc>
void store(const Acc* src, int ld, int rows, int cols, Acc scale, const Acc* row_sums, const Sink& sink) {
  using V = Vec<Acc>;
  for (int r = 0; r < rows; ++r) {
    const Acc* from = src + int64_t{r} * ld;
    const int64_t first = r * sink.row_stride;
    const bool divides = row_sums != nullptr;
    const Acc factor = divides ? row_sums[r] : scale;
    const V divisor(factor), reciprocal(Acc(1) / factor);
    int c = 0;
    if (divides && factor == Acc(0)) {  // a row without keys is 0 even where V holds a NaN
      for (; c < cols; ++c) store_element(Acc(0), sink, first + c * sink.col_stride);
      continue;
    }
    if (sink.col_stride == 1) {
      for (; c + V::kLanes <= cols; c += V::kLanes) {
        const V loaded = V::load(from + c), value = divides ? quotient(loaded, divisor, reciprocal) : loaded * divisor;
        if constexpr (sizeof(Acc) == 4) {
          if (sink.type == Element::kBFloat16) {
            store_half(to_bf16(value), static_cast<uint16_t*>(sink.data) + first + c);
          } else if (sink.type == Element::kFloat16) {
            store_half(to_fp16(value), static_cast<uint16_t*>(sink.data) + first + c);
          } else {
            value.store(static_cast<float*>(sink.data) + first + c);
          }
        } else {
          value.store(static_cast<double*>(sink.data) + first + c);
        }
      }
    }
    for (; c < cols; ++c)
      store_element(divides ? from[c] / factor : from[c] * factor, sink, first + c * sink.col_stride);
  }
}

}  // namespace
}  // namespace flash_ext::cpu::FLASH_CPU_VARIANT
