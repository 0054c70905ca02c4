// A register of numbers, and the few functions attention needs of it: exp, tanh, conversions, reductions.
//
// Included by vector_kernels.cpp alone, which is compiled once for each instruction set; everything lies in a namespace
// named after the variant, so that the linker never mixes two of them. Built on GCC/clang vector extensions:
// any target works, and an intrinsic appears only where the compiler cannot be led to the instruction.
// Invariant: exp(-inf) = 0, exp of anything below -87.33 is 0 (no denormals: they cost an assist), NaN stays NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace flash_ext::cpu::FLASH_CPU_VARIANT {
namespace {

#if defined(__AVX512F__)
constexpr int kVecBytes = 64;
#elif defined(__AVX2__)
constexpr int kVecBytes = 32;
#else
constexpr int kVecBytes = 16;
#endif

// g++ drops the attribute from a dependent type, so every element type is spelled out.
template <class T>
struct RawOf;
template <>
struct RawOf<float> {
  typedef float Type __attribute__((vector_size(kVecBytes)));
};
template <>
struct RawOf<double> {
  typedef double Type __attribute__((vector_size(kVecBytes)));
};
template <>
struct RawOf<int32_t> {
  typedef int32_t Type __attribute__((vector_size(kVecBytes)));
};
template <>
struct RawOf<uint32_t> {
  typedef uint32_t Type __attribute__((vector_size(kVecBytes)));
};
template <>
struct RawOf<int64_t> {
  typedef int64_t Type __attribute__((vector_size(kVecBytes)));
};
template <>
struct RawOf<uint64_t> {
  typedef uint64_t Type __attribute__((vector_size(kVecBytes)));
};

// NOTE: lanes set one by one are as many masked broadcasts in AVX-512.
template <class T>
constexpr T kSteps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <class T>
struct Vec {
  using Scalar = T;
  static constexpr int kLanes = kVecBytes / sizeof(T);
  using Raw = typename RawOf<T>::Type;

  Raw raw;

  Vec() = default;
  [[gnu::always_inline]] Vec(T scalar) : raw(scalar - Raw{}) {}
  [[gnu::always_inline]] Vec(Raw value) : raw(value) {}

  [[gnu::always_inline]] static Vec load(const T* from) {
    Vec result;
    std::memcpy(&result.raw, from, sizeof(Raw));
    return result;
  }
  [[gnu::always_inline]] void store(T* to) const { std::memcpy(to, &raw, sizeof(Raw)); }

  // first, first + 1, ...
  [[gnu::always_inline]] static Vec iota(T first) { return load(kSteps<T>).raw + first; }

  [[gnu::always_inline]] friend Vec operator+(Vec a, Vec b) { return a.raw + b.raw; }
  [[gnu::always_inline]] friend Vec operator-(Vec a, Vec b) { return a.raw - b.raw; }
  [[gnu::always_inline]] friend Vec operator*(Vec a, Vec b) { return a.raw * b.raw; }
  [[gnu::always_inline]] friend Vec operator/(Vec a, Vec b) { return a.raw / b.raw; }
  [[gnu::always_inline]] friend Vec operator^(Vec a, Vec b) { return a.raw ^ b.raw; }
};

using F32 = Vec<float>;
using F64 = Vec<double>;
using I32 = Vec<int32_t>;
using U32 = Vec<uint32_t>;

template <class To, class From>
[[gnu::always_inline]] inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// a * b + c. Contraction (-ffp-contract) makes it one instruction where the target has it.
template <class V>
[[gnu::always_inline]] inline V fma(V a, V b, V c) {
  return a.raw * b.raw + c.raw;
}

// x itself: what it was computed from takes no part in a contraction.
template <class V>
[[gnu::always_inline]] inline V rounded(V x) {
#if defined(__x86_64__)
  asm("" : "+v"(x.raw));
#elif defined(__aarch64__)
  asm("" : "+w"(x.raw));
#else
  asm("" : "+m"(x.raw));
#endif
  return x;
}

// The larger one; a NaN in `a` is dropped, a NaN in `b` stays.
template <class T>
[[gnu::always_inline]] inline Vec<T> max(Vec<T> a, Vec<T> b) {
  return Vec<T>(a.raw > b.raw ? a.raw : b.raw);
}
#if defined(__AVX512F__)
[[gnu::always_inline]] inline F32 max(F32 a, F32 b) {
  return F32((F32::Raw)_mm512_max_ps((__m512)a.raw, (__m512)b.raw));
}
#elif defined(__AVX2__)
[[gnu::always_inline]] inline F32 max(F32 a, F32 b) {
  return F32((F32::Raw)_mm256_max_ps((__m256)a.raw, (__m256)b.raw));
}
#endif

// Lanes first + l of [low, high) keep their value, the others take `other`.
template <class V>
[[gnu::always_inline]] inline V keep_range(V value, int first, int low, int high, V other) {
  using Int = typename std::conditional<sizeof(typename V::Scalar) == 8, Vec<int64_t>, I32>::type;
  const Int index = Int::iota(first);
  const auto keep = (index.raw >= Int(low).raw) & (index.raw < Int(high).raw);
  return V(keep ? value.raw : other.raw);
}

// `other` where x is not below limit.
template <class V>
[[gnu::always_inline]] inline V keep_below(V value, V x, V limit, V other) {
  return V(x.raw >= limit.raw ? other.raw : value.raw);
}

// `other` where flag is zero.
template <class V>
[[gnu::always_inline]] inline V keep_nonzero(V value, V flag, V other) {
  return V(flag.raw != V(0).raw ? value.raw : other.raw);
}

template <class V>
[[gnu::always_inline]] inline V abs(V x) {
  return V(x.raw < V(0).raw ? -x.raw : x.raw);
}

// Sum and maximum over lanes, by halves, always in the same order.
template <class V>
[[gnu::always_inline]] inline typename V::Scalar sum_lanes(V v) {
  typename V::Scalar lanes[V::kLanes];
  v.store(lanes);
  for (int half = V::kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}
template <class V>
[[gnu::always_inline]] inline typename V::Scalar max_lanes(V v) {
  typename V::Scalar lanes[V::kLanes];
  v.store(lanes);
  for (int half = V::kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
}
#if defined(__AVX512F__)
[[gnu::always_inline]] inline float sum_lanes(F32 v) { return _mm512_reduce_add_ps((__m512)v.raw); }
[[gnu::always_inline]] inline float max_lanes(F32 v) { return _mm512_reduce_max_ps((__m512)v.raw); }
#endif

// How exactly exp is needed: the result of kRounded is rounded to bf16 or fp16 right after.
enum class Precision { kFull, kRounded };

// e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln(2) / 2; minimax polynomials in r, relative error 1.9e-9 (degree 6)
// and 2.6e-6 (degree 4). The argument is at most a rounding above 0 for a softmax, up to 88 otherwise.
template <Precision kPrecision>
[[gnu::always_inline]] inline F32 exp(F32 x) {
  const F32 magic(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits
  const F32 shifted = fma(x, F32(1.44269504f), magic);
  const F32 n = shifted - magic;
  F32 r = fma(n, F32(-0.693359375f), x);  // 9 bits: n times it is exact
  r = fma(n, F32(2.12194440e-4f), r);
  F32 p;
  if constexpr (kPrecision == Precision::kFull) {
    p = fma(F32(0.0013836742f), r, F32(0.008374899f));
    p = fma(p, r, F32(0.041668233f));
    p = fma(p, r, F32(0.1666642f));
    p = fma(p, r, F32(0.4999999f));
    p = fma(p, r, F32(1.0f));
    p = fma(p, r, F32(1.0f));
  } else {
    p = fma(F32(0.041458193f), r, F32(0.16791154f));
    p = fma(p, r, F32(0.50004375f));
    p = fma(p, r, F32(0.9999633f));
    p = fma(p, r, F32(0.9999993f));
  }
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x.raw, _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);
  return F32((F32::Raw)_mm512_maskz_scalef_ps(normal, (__m512)p.raw, (__m512)n.raw));
#else
  // 2^n in two factors: n = 128 would leave the exponent's range, and a NaN must not meet integer arithmetic.
  const I32 bits = bit_cast<I32>(shifted);
  const I32 whole = bits.raw - bit_cast<I32>(magic).raw;
  const I32 half = whole.raw >> 1;
  const F32 low = bit_cast<F32>(I32((half.raw + 127) << 23));
  const F32 high = bit_cast<F32>(I32((whole.raw - half.raw + 127) << 23));
  const F32 y = p * low * high;
  const F32 not_small(x.raw < F32(-87.33f).raw ? F32(0.0f).raw : y.raw);
  return F32(x.raw == x.raw ? not_small.raw : x.raw);
#endif
}
template <Precision>
[[gnu::always_inline]] inline F64 exp(F64 x) {
  for (int i = 0; i < F64::kLanes; ++i) x.raw[i] = std::exp(x.raw[i]);
  return x;
}

// tanh by an odd polynomial below 0.625 (minimax, 4e-9) and by e^(-2|x|) above it; about 2 ulp.
[[gnu::always_inline]] inline F32 tanh(F32 x) {
  const F32 z = x * x;
  F32 q = fma(F32(-0.0057170456f), z, F32(0.020650588f));
  q = fma(q, z, F32(-0.053743497f));
  q = fma(q, z, F32(0.13331491f));
  q = fma(q, z, F32(-0.33333284f));
  const F32 near = fma(q * z, x, x);
  const F32 magnitude = abs(x);
  const F32 e = exp<Precision::kFull>(magnitude * F32(-2.0f));
  const F32 far = (F32(1.0f) - e) / (F32(1.0f) + e);
  const F32 signed_far(x.raw < F32(0.0f).raw ? -far.raw : far.raw);
  return F32(magnitude.raw < F32(0.625f).raw ? near.raw : signed_far.raw);
}
[[gnu::always_inline]] inline F64 tanh(F64 x) {
  for (int i = 0; i < F64::kLanes; ++i) x.raw[i] = std::tanh(x.raw[i]);
  return x;
}

typedef uint16_t HalfRaw __attribute__((vector_size(kVecBytes / 2)));

[[gnu::always_inline]] inline HalfRaw load_half(const uint16_t* from) {
  HalfRaw raw;
  std::memcpy(&raw, from, sizeof(raw));
  return raw;
}
[[gnu::always_inline]] inline void store_half(HalfRaw raw, uint16_t* to) { std::memcpy(to, &raw, sizeof(raw)); }

[[gnu::always_inline]] inline F32 from_bf16(HalfRaw raw) {
  return bit_cast<F32>(U32(__builtin_convertvector(raw, U32::Raw) << 16));
}

// Round to nearest even; NaN becomes the quiet NaN.
[[gnu::always_inline]] inline HalfRaw to_bf16(F32 v) {
#if defined(__AVX512BF16__)
  return bit_cast<HalfRaw>(_mm512_cvtneps_pbh((__m512)v.raw));
#else
  const U32::Raw bits = bit_cast<U32>(v).raw;
  const U32::Raw rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const U32::Raw quiet = U32::Raw{} + 0x7FC0;
  return __builtin_convertvector((v.raw == v.raw) ? rounded : quiet, HalfRaw);
#endif
}

[[gnu::always_inline]] inline F32 from_fp16(HalfRaw raw) {
#if defined(__AVX512F__)
  return F32((F32::Raw)_mm512_cvtph_ps(bit_cast<__m256i>(raw)));
#elif defined(__F16C__)
  return F32((F32::Raw)_mm256_cvtph_ps(bit_cast<__m128i>(raw)));
#else
  const U32::Raw wide = __builtin_convertvector(raw, U32::Raw);
  const U32::Raw magnitude = (wide & 0x7FFF) << 13;
  const F32 scaled = bit_cast<F32>(U32(magnitude)) * F32(0x1p112f);  // moves the exponent's bias, denormals included
  const U32::Raw special = U32::Raw(magnitude >= (0x7C00u << 13)) & 0x7F800000;
  return bit_cast<F32>(U32(bit_cast<U32>(scaled).raw | special | ((wide & 0x8000) << 16)));
#endif
}

[[gnu::always_inline]] inline HalfRaw to_fp16(F32 v) {
#if defined(__AVX512F__)
  return bit_cast<HalfRaw>(_mm512_cvtps_ph((__m512)v.raw, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return bit_cast<HalfRaw>(_mm256_cvtps_ph((__m256)v.raw, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const U32::Raw bits = bit_cast<U32>(v).raw;
  const U32::Raw magnitude = bits & 0x7FFFFFFF;
  const F32 half(0.5f);  // its last bit is worth 2^-24, as that of a denormal fp16: the addition rounds
  const U32::Raw denormal = bit_cast<U32>(bit_cast<F32>(U32(magnitude)) + half).raw - bit_cast<U32>(half).raw;
  const U32::Raw normal = (magnitude - (112u << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const U32::Raw infinity = U32::Raw{} + 0x7C00;
  const U32::Raw quiet = U32::Raw{} + 0x7E00;
  U32::Raw result = magnitude < 0x38800000 ? denormal : normal;
  result = magnitude >= 0x47800000 ? infinity : result;
  result = magnitude > 0x7F800000 ? quiet : result;
  return __builtin_convertvector(result | ((bits >> 16) & 0x8000), HalfRaw);
#endif
}

// Bytes, one a lane, as numbers. NOTE: g++ 12 converts bytes to 32 bits or more, and back, one by one.
template <class V>
[[gnu::always_inline]] inline V from_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(typename V::Scalar) == 4) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return V((typename V::Raw)_mm512_cvtepi32_ps(wide));
  } else {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return V((typename V::Raw)_mm512_cvtepi32_pd(wide));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(typename V::Scalar) == 4) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return V((typename V::Raw)_mm256_cvtepi32_ps(wide));
  } else {
    int32_t four;
    std::memcpy(&four, from, sizeof(four));
    return V((typename V::Raw)_mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four))));
  }
#else
  V result;
  for (int i = 0; i < V::kLanes; ++i) result.raw[i] = from[i];
  return result;
#endif
}

typedef uint8_t ByteRaw __attribute__((vector_size(kVecBytes / 4)));

[[gnu::always_inline]] inline ByteRaw to_bytes(U32::Raw raw) {
#if defined(__AVX512F__)
  return (ByteRaw)_mm512_cvtepi32_epi8((__m512i)raw);
#else
  return __builtin_convertvector(__builtin_convertvector(raw, HalfRaw), ByteRaw);
#endif
}

}  // namespace
}  // namespace flash_ext::cpu::FLASH_CPU_VARIANT
