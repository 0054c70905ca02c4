// All vector code of the CPU backend, for one instruction set: fills the table that the backend calls through.
//
// Built once for each variant, with -DFLASH_CPU_VARIANT=<name> and the variant's flags (vector_table.cpp lists them);
// -O3 and nothing like -ffast-math: infinities and NaNs are part of the result.
// Invariant: nothing but table() leaves this file. An inline function that did would be merged with its twins of the
// other variants, and an older machine would run the newest one's instructions; hence the anonymous namespaces, and
// hence every function shared with other files is forced inline here.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12's own AVX-512 headers (its bug 105593)
#endif

#include "core/portable.h"
#undef FLASH_DEVICE
#define FLASH_DEVICE [[gnu::always_inline]] inline

#include "kernels/cpu/few_rows_kernels.h"
#include "kernels/cpu/softmax_kernels.h"

namespace flash_ext::cpu::FLASH_CPU_VARIANT {
namespace {

// Philox's product over the lanes (found by ADL): even and odd lanes apart, each with a 64-bit result.
[[gnu::always_inline]] inline void mul_hi_lo(uint32_t a, U32 b, U32& hi, U32& lo) {
  using Wide = Vec<uint64_t>;
  const Wide lanes = bit_cast<Wide>(b);
#if defined(__AVX512F__)
  const __m512i factor = _mm512_set1_epi64(a);
  const Wide even((Wide::Raw)_mm512_mul_epu32((__m512i)lanes.raw, factor));
  const Wide odd((Wide::Raw)_mm512_mul_epu32((__m512i)(lanes.raw >> 32), factor));
#elif defined(__AVX2__)
  const __m256i factor = _mm256_set1_epi64x(a);
  const Wide even((Wide::Raw)_mm256_mul_epu32((__m256i)lanes.raw, factor));
  const Wide odd((Wide::Raw)_mm256_mul_epu32((__m256i)(lanes.raw >> 32), factor));
#else
  const Wide even((lanes.raw & 0xFFFFFFFF) * a);
  const Wide odd((lanes.raw >> 32) * a);
#endif
  lo = bit_cast<U32>(Wide((even.raw & 0xFFFFFFFF) | (odd.raw << 32)));
  hi = bit_cast<U32>(Wide((even.raw >> 32) | (odd.raw & ~uint64_t{0xFFFFFFFF})));
}

// One 16x16 block at a time. Word w of lane 4 g + t holds keys 2 t and 2 t + 1 of row g of an 8x8 matrix (dropout.h);
// transposed, lanes are drawn with g running first, so that neighbours are neighbours in `keep` either way.
template <bool kTransposed>
void keep_tile(const Dropout& dropout, uint32_t bh, int64_t q0, int64_t k0, int rows, int cols, uint8_t* keep, int ld) {
  constexpr int kLanes = U32::kLanes, kRun = kTransposed && kLanes > 8 ? 8 : kTransposed ? kLanes : 4;
  const U32 threshold(dropout.threshold);
  for (int r0 = 0; r0 < rows; r0 += 16) {
    for (int c0 = 0; c0 < cols; c0 += 16) {
#pragma GCC unroll 2
      for (int first = 0; first < 32; first += kLanes) {
        const U32 index = U32::iota(first);
        const PhiloxWords<U32> drawn =
            dropout.block_words(bh, static_cast<uint32_t>((q0 + r0) / 16), static_cast<uint32_t>((k0 + c0) / 16),
                                kTransposed ? U32((index.raw & 7) * 4 + (index.raw >> 3)) : index);
#pragma GCC unroll 4
        for (int w = 0; w < 4; ++w) {
          const U32::Raw even = (drawn.word[w].raw & 0xFFFF) >= threshold.raw;
          const U32::Raw odd = (drawn.word[w].raw >> 16) >= threshold.raw;
          const int row = r0 + w % 2 * 8, col = c0 + w / 2 * 8;
          if constexpr (kTransposed) {
            const ByteRaw bytes[2] = {to_bytes(even & 1), to_bytes(odd & 1)};
            for (int i = 0; i < kLanes; i += kRun) {
              const int key = col + (first + i) / 8 * 2, query = row + (first + i) % 8;
              for (int j = 0; j < 2; ++j) {
                std::memcpy(keep + int64_t{key + j} * ld + query, reinterpret_cast<const char*>(&bytes[j]) + i, kRun);
              }
            }
          } else {
            const HalfRaw pairs = __builtin_convertvector((even & 1) | (odd & 0x100), HalfRaw);
            for (int i = 0; i < kLanes; i += kRun) {
              std::memcpy(keep + int64_t{row + (first + i) / 4} * ld + col,
                          reinterpret_cast<const char*>(&pairs) + 2 * i, 2 * kRun);
            }
          }
        }
      }
    }
  }
}

void keep_tile(const Dropout& dropout, uint32_t bh, int64_t q0, int64_t k0, int rows, int cols, bool transposed,
               uint8_t* keep, int ld) {
  (transposed ? keep_tile<true> : keep_tile<false>)(dropout, bh, q0, k0, rows, cols, keep, ld);
}

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 6, kTileVecs = 4;  // 24 accumulators of 32 registers
#else
constexpr int kTileRows = 4, kTileVecs = 2;  // 8 of 16
#endif

template <class T, int kRows, int kVecs>
[[gnu::always_inline]] inline void product_tile(int k, const T* a, int ld_a, const T* b, int ld_b, T* c, int ld_c,
                                                bool add) {
  using V = Vec<T>;
  V sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sum[r][v] = V(T(0));
  }
  for (int i = 0; i < k; ++i) {
    V right[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) right[v] = V::load(b + int64_t{i} * ld_b + v * V::kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const V left(a[int64_t{r} * ld_a + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      T* to = c + int64_t{r} * ld_c + v * V::kLanes;
      (add ? V::load(to) + sum[r][v] : sum[r][v]).store(to);
    }
  }
}

template <class T, int kVecs>
[[gnu::always_inline]] inline void product_columns(int m, int k, const T* a, int ld_a, const T* b, int ld_b, T* c,
                                                   int ld_c, bool add) {
  int r = 0;
  for (; r + kTileRows <= m; r += kTileRows) {
    product_tile<T, kTileRows, kVecs>(k, a + int64_t{r} * ld_a, ld_a, b, ld_b, c + int64_t{r} * ld_c, ld_c, add);
  }
  for (; r < m; ++r) {
    product_tile<T, 1, kVecs>(k, a + int64_t{r} * ld_a, ld_a, b, ld_b, c + int64_t{r} * ld_c, ld_c, add);
  }
}

template <class T>
void product(int m, int n, int k, const T* a, int ld_a, const T* b, int ld_b, T* c, int ld_c, bool add) {
  constexpr int kLanes = Vec<T>::kLanes;
  int col = 0;
  for (; col + kTileVecs * kLanes <= n; col += kTileVecs * kLanes) {
    product_columns<T, kTileVecs>(m, k, a, ld_a, b + col, ld_b, c + col, ld_c, add);
  }
  for (; col < n; col += kLanes) product_columns<T, 1>(m, k, a, ld_a, b + col, ld_b, c + col, ld_c, add);
}

template <class Compute>
VectorKernels<Compute> make_kernels() {
  using Acc = typename Compute::Acc;
  VectorKernels<Compute> kernels{};
  kernels.load_acc = load_acc<Acc>;
  kernels.transpose_acc = transpose_acc<Acc>;
  kernels.few_scores = few_scores<Compute>;
  kernels.few_outputs = few_outputs<Compute>;
  kernels.modify_scores = modify_scores<Acc>;
  kernels.softmax = softmax<Compute>;
  kernels.sum_probs = sum_probs<Compute>;
  kernels.gradient = gradient<Compute>;
  kernels.store = store<Acc>;
  kernels.dot_rows = dot_rows<Acc>;
  kernels.add_row_sums = add_row_sums<Acc>;
  kernels.add = add<Acc>;
  kernels.store_transposed = store_transposed<Acc>;
  kernels.keep_tile = keep_tile;
  if constexpr (Compute::kPairs) {
    kernels.load = load_bits;
    kernels.right_operand = right_pairs;
    kernels.right_transposed = right_pairs_transposed;
    kernels.left_transposed = left_pairs_transposed;
  } else {
    kernels.load = load_acc<Acc>;
    kernels.right_operand = right_rows<Acc>;
    kernels.right_transposed = transpose<Acc>;
    kernels.left_transposed = left_transposed<Acc>;
    kernels.product = product<Acc>;
  }
  return kernels;
}

}  // namespace

const VectorTable& table() {
  static const VectorTable result{make_kernels<ComputeF32>(), make_kernels<ComputeBf16>(), make_kernels<ComputeF64>()};
  return result;
}

}  // namespace flash_ext::cpu::FLASH_CPU_VARIANT
