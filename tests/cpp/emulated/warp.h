// What a warp does together with shared memory and with fragments of matrices.
#pragma once

#include "emulator.h"

namespace flash_ext::emulated {

template <class T>
T at_shared(uint32_t address) {
  T value;
  std::memcpy(&value, aligned(address, sizeof(T)), sizeof(T));
  return value;
}

// A lane's address of eight numbers of 16 bits.
inline uint32_t matrix_row(uint32_t address) {
  aligned(address, 16);
  return address;
}

// Lane (g, t) gets words of row g, columns 2t and 2t + 1, of matrix i, whose row r is at lane 8i + r's address.
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const auto rows = exchange("ldmatrix", matrix_row(address));
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) r[i] = at_shared<uint32_t>(rows[8 * i + g] + 4 * t);
  __syncwarp();
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  const auto rows = exchange("ldmatrix.trans", matrix_row(address));
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = at_shared<uint16_t>(rows[8 * i + 2 * t] + 2 * g);
    const uint32_t high = at_shared<uint16_t>(rows[8 * i + 2 * t + 1] + 2 * g);
    r[i] = low | high << 16;
  }
  __syncwarp();
}
inline uint32_t movmatrix_trans(uint32_t value) {
  const auto words = exchange("movmatrix", value);
  const int g = lane() / 4, t = lane() % 4;
  const auto element = [&](int row, int col) { return words[row * 4 + col / 2] >> col % 2 * 16 & 0xFFFFu; };
  return element(2 * t, g) | element(2 * t + 1, g) << 16;
}

// C[16 x 8] += A[16 x kSteps] B[kSteps x 8] of fragments as the PTX ISA lays them over a warp.
template <class T, int kA, int kB>
void multiply_fragments(float (&c)[4], const T (&a)[kA], const T (&b)[kB]) {
  struct Operands {
    T a[kA], b[kB];
  } mine;
  std::memcpy(mine.a, a, sizeof(a));
  std::memcpy(mine.b, b, sizeof(b));
  const auto lanes = exchange("mma", mine);
  const int g = lane() / 4, t = lane() % 4;
  constexpr int kPair = kA == 8 ? 2 : 1;  // neighbours in k that a register holds
  for (int i = 0; i < 4; ++i) {
    const int row_half = i / 2, col = 2 * t + i % 2;
    float sum = 0.f;
    for (int part = 0; part < kB; ++part) {
      for (int u = 0; u < 4; ++u) {
        // Register `part / kPair` of B is k = u * kPair + part % kPair + 4 * kPair * (part / kPair), and of A as well.
        const Operands left = lanes[g * 4 + u], right = lanes[col * 4 + u];
        const int in_a = (part / kPair * 2 + row_half) * kPair + part % kPair;
        sum += to_float(left.a[in_a]) * to_float(right.b[part]);
      }
    }
    c[i] += sum;
  }
}

// The same of e4m3, C[16 x 8] += A[16 x 32] B[32 x 8]: a register has four neighbours in k.
inline void multiply_fp8_fragments(float (&c)[4], const __nv_fp8_e4m3 (&a)[16], const __nv_fp8_e4m3 (&b)[8]) {
  struct Operands {
    __nv_fp8_e4m3 a[16], b[8];
  } mine;
  std::memcpy(static_cast<void*>(mine.a), a, sizeof(a));
  std::memcpy(static_cast<void*>(mine.b), b, sizeof(b));
  const auto lanes = exchange("mma", mine);
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    float sum = 0.f;
    for (int k = 0; k < 32; ++k) {
      const Operands left = lanes[g * 4 + k % 16 / 4], right = lanes[(2 * t + i % 2) * 4 + k % 16 / 4];
      sum += to_float(left.a[(k / 16 * 2 + i / 2) * 4 + k % 4]) * to_float(right.b[k / 16 * 4 + k % 4]);
    }
    c[i] += sum;
  }
}
}  // namespace flash_ext::emulated
