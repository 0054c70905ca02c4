// Products for a handful of queries, as in decoding, where packing K and V would cost more than the products
// themselves.
//
//   S[r][c] = q[r] . k[c]        O[r] += sum_c P[r][c] v[c]        with k and v read once, where and as they lie
//
// Forward's two, and the same two in backward: dP = dO V^T and dQ += dS K. Included by vector_kernels.cpp alone, once
// per instruction set. Invariant: a row of K or V is contiguous and is never read beyond its end; sums over the
// columns of a row have one partial sum a lane, so they are as exact as a tree where inputs have one sign.
#pragma once

#include "kernels/cpu/pack_kernels.h"

namespace flash_ext::cpu::FLASH_CPU_VARIANT {
namespace {

template <Element kType>
using ElementType = std::conditional_t<kType == Element::kFloat64, double,
                                       std::conditional_t<kType == Element::kFloat32, float, uint16_t>>;

// One vector of a tensor of the caller, as Acc.
template <Element kType>
[[gnu::always_inline]] inline auto load_vector(const ElementType<kType>* from) {
  if constexpr (kType == Element::kFloat64) {
    return F64::load(from);
  } else if constexpr (kType == Element::kFloat32) {
    return F32::load(from);
  } else if constexpr (kType == Element::kBFloat16) {
    return from_bf16(load_half(from));
  } else {
    return from_fp16(load_half(from));
  }
}

// `count` numbers of any size, fewer than fill the vector, and zeros.
template <class Raw, class T>
[[gnu::always_inline]] inline Raw load_part(const T* from, int count) {
#if defined(__AVX512F__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(T) == 8) {
    return bit_cast<Raw>(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), from));
  } else if constexpr (sizeof(T) == 4) {
    return bit_cast<Raw>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), from));
  } else if constexpr (sizeof(Raw) == 32) {
    return bit_cast<Raw>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), from));
  } else {
    return bit_cast<Raw>(_mm512_maskz_loadu_epi16(mask, from));
  }
#else
  T part[sizeof(Raw) / sizeof(T)] = {};
  for (int i = 0; i < count; ++i) part[i] = from[i];
  return bit_cast<Raw>(part);
#endif
}

template <Element kType>
[[gnu::always_inline]] inline auto load_vector_part(const ElementType<kType>* from, int count) {
  if constexpr (kType == Element::kFloat64) {
    return F64(load_part<F64::Raw>(from, count));
  } else if constexpr (kType == Element::kFloat32) {
    return F32(load_part<F32::Raw>(from, count));
  } else if constexpr (kType == Element::kBFloat16) {
    return from_bf16(load_part<HalfRaw>(from, count));
  } else {
    return from_fp16(load_part<HalfRaw>(from, count));
  }
}

// short_scores_of(): the longest dot product, and how many rows.
constexpr int kShortDepth = 48, kLeastRows = 6, kMostRows = 16;

// A dot product, kStep columns at a time: the two sides as registers, and what adds their product to a sum.
template <class Compute, Element kType>
struct Dot {
  using V = Vec<typename Compute::Acc>;
  static constexpr int kStep = V::kLanes;
  [[gnu::always_inline]] static V query(const typename Compute::Operand* q) {
    if constexpr (Compute::kPairs) {
      return from_bf16(load_half(q));
    } else {
      return V::load(q);
    }
  }
  [[gnu::always_inline]] static V key(const ElementType<kType>* k) { return load_vector<kType>(k); }
  [[gnu::always_inline]] static V key_part(const ElementType<kType>* k, int count) {
    return load_vector_part<kType>(k, count);
  }
  [[gnu::always_inline]] static V add(V sum, V query, V key) { return fma(query, key, sum); }
};
#if defined(__AVX512BF16__)
// vdpbf16ps: no conversion, half the instructions.
template <>
struct Dot<ComputeBf16, Element::kBFloat16> {
  static constexpr int kStep = 32;
  [[gnu::always_inline]] static __m512i query(const uint16_t* q) { return _mm512_loadu_si512(q); }
  [[gnu::always_inline]] static __m512i key(const uint16_t* k) { return _mm512_loadu_si512(k); }
  [[gnu::always_inline]] static __m512i key_part(const uint16_t* k, int count) { return load_part<__m512i>(k, count); }
  [[gnu::always_inline]] static F32 add(F32 sum, __m512i a, __m512i b) {
    return F32((F32::Raw)_mm512_dpbf16_ps((__m512)sum.raw, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
  }
};
#endif

// Adds the lanes of every row: lane l of the result is the sum of rows[l].
template <int kStep, class V>
[[gnu::always_inline]] inline V sum_rows(V (&rows)[V::kLanes]) {
  if constexpr (kStep == V::kLanes) {
    return rows[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < V::kLanes; i += 2 * kStep) {
      exchange<kStep>(rows[i], rows[i + kStep], std::make_index_sequence<V::kLanes>{});
      rows[i] = rows[i] + rows[i + kStep];
    }
    return sum_rows<2 * kStep>(rows);
  }
}

// As many (row, key) pairs as a vector has lanes, so that one reduction serves all. Rows beyond the last are the last.
template <class Compute, Element kType, int kRows>
[[gnu::always_inline]] inline void score_tile(const typename Compute::Operand* q, int ld_q, int rows, const Source& k,
                                              int first, int keys, int depth, typename Compute::Acc* scores, int ld,
                                              bool transposed) {
  using Acc = typename Compute::Acc;
  using V = Vec<Acc>;
  using D = Dot<Compute, kType>;
  constexpr int kKeys = V::kLanes / kRows;
  const auto* data = static_cast<const ElementType<kType>*>(k.data);
  const ElementType<kType>* key_row[kKeys];
#pragma GCC unroll 16
  for (int i = 0; i < kKeys; ++i) key_row[i] = data + (first + i < keys ? first + i : keys - 1) * k.row_stride;
  V sum[V::kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < V::kLanes; ++i) sum[i] = V(Acc(0));
  const auto add = [&](int d, const auto& load) {
    decltype(D::query(q)) query[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) query[r] = D::query(q + int64_t{r < rows ? r : rows - 1} * ld_q + d);
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      const auto key = load(key_row[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r * kKeys + i] = D::add(sum[r * kKeys + i], query[r], key);
    }
  };
  int d = 0;
  for (; d + D::kStep <= depth; d += D::kStep) add(d, [](const auto* from) { return D::key(from); });
  if (d < depth) add(d, [&](const auto* from) { return D::key_part(from, depth - d); });
  Acc lanes[V::kLanes];
  sum_rows<1>(sum).store(lanes);
  for (int r = 0; r < kRows && r < rows; ++r) {
    if (transposed) {
      for (int i = 0; i < kKeys && first + i < keys; ++i) scores[int64_t{first + i} * ld + r] = lanes[r * kKeys + i];
    } else {
      std::memcpy(scores + int64_t{r} * ld + first, lanes + r * kKeys, kKeys * sizeof(Acc));
    }
  }
}

// The same for several rows and short dot products: a vector's keys are transposed once, and each row's sums are lanes.
// Parts of a vector's length are summed apart, which is as exact as lanes are.
template <class Compute, Element kType>
void short_scores_of(const typename Compute::Operand* q, int ld_q, int rows, const Source& k, int keys, int depth,
                     typename Compute::Acc* scores, int ld, bool transposed) {
  using Acc = typename Compute::Acc;
  using V = Vec<Acc>;
  constexpr int kLanes = V::kLanes, kGroup = kLanes < 8 ? 4 : 8;
  alignas(64) Acc columns[kShortDepth][kLanes];
  alignas(64) Acc sums[kMostRows][kLanes];
  const auto* data = static_cast<const ElementType<kType>*>(k.data);
  for (int first = 0; first < keys; first += kLanes) {
    for (int d = 0; d < depth; d += kLanes) {
      V block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const auto* from = data + (first + i < keys ? first + i : keys - 1) * k.row_stride + d;
        block[i] = d + kLanes <= depth ? V(load_vector<kType>(from)) : V(load_vector_part<kType>(from, depth - d));
      }
      transpose_steps<1>(block);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) block[i].store(columns[d + i]);
    }
    for (int r = 0; r < rows; r += kGroup) {
      V total[kGroup];
#pragma GCC unroll 8
      for (int i = 0; i < kGroup; ++i) total[i] = V(Acc(0));
      const Acc* query[kGroup];
      for (int i = 0; i < kGroup; ++i) query[i] = q + int64_t{r + i < rows ? r + i : rows - 1} * ld_q;
      for (int d = 0; d < depth; d += kLanes) {
        V part[kGroup];
#pragma GCC unroll 8
        for (int i = 0; i < kGroup; ++i) part[i] = V(Acc(0));
        for (int j = d; j < d + kLanes && j < depth; ++j) {
          const V key = V::load(columns[j]);
#pragma GCC unroll 8
          for (int i = 0; i < kGroup; ++i) part[i] = fma(V(query[i][j]), key, part[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kGroup; ++i) total[i] = total[i] + part[i];
      }
#pragma GCC unroll 8
      for (int i = 0; i < kGroup; ++i) total[i].store(sums[r + i]);
    }
    const int here = keys - first < kLanes ? keys - first : kLanes;
    if (transposed) {
      transpose(sums[0], kLanes, rows, here, scores + int64_t{first} * ld, ld, (rows + kPad - 1) / kPad * kPad);
    } else {
      for (int r = 0; r < rows; ++r) V::load(sums[r]).store(scores + int64_t{r} * ld + first);
    }
  }
}

template <class Compute, Element kType>
void few_scores_of(const typename Compute::Operand* q, int ld_q, int rows, const Source& k, int keys, int depth,
                   typename Compute::Acc* scores, int ld, bool transposed) {
  if (transposed) std::memset(scores, 0, int64_t{keys + kPad - 1} / kPad * kPad * ld * sizeof(scores[0]));
  if constexpr (!Compute::kPairs) {
    if (rows >= kLeastRows && rows <= kMostRows && depth <= kShortDepth) {
      return short_scores_of<Compute, kType>(q, ld_q, rows, k, keys, depth, scores, ld, transposed);
    }
  }
  constexpr int kLanes = Vec<typename Compute::Acc>::kLanes;
  constexpr int kMost = kLanes < 4 ? kLanes : 4;
  const auto tiles = [&]<int kRows>(std::integral_constant<int, kRows>, int c0, int r) {
    for (int c = c0; c < c0 + kLanes && c < keys; c += kLanes / kRows) {
      score_tile<Compute, kType, kRows>(q + int64_t{r} * ld_q, ld_q, rows - r, k, c, keys, depth,
                                        scores + (transposed ? r : int64_t{r} * ld), ld, transposed);
    }
  };
  for (int c0 = 0; c0 < keys; c0 += kLanes) {
    int r = 0;
    for (; r + 2 < rows; r += kMost) tiles(std::integral_constant<int, kMost>{}, c0, r);
    if (r + 1 == rows) {
      tiles(std::integral_constant<int, 1>{}, c0, r);
    } else if (r < rows) {
      tiles(std::integral_constant<int, 2>{}, c0, r);
    }
  }
}

template <class Compute>
[[gnu::always_inline]] inline typename Compute::Acc weight_at(const FewWeights<typename Compute::Operand>& p, int row,
                                                              int key) {
  if constexpr (Compute::kPairs) {
    const int64_t pair = int64_t{row} * p.row_stride + int64_t{key / 2} * p.key_stride;
    return bit_cast<float>(uint32_t{p.data[2 * pair + key % 2]} << 16);
  } else {
    return p.data[int64_t{row} * p.row_stride + int64_t{key} * p.key_stride];
  }
}

// kVecs vectors of columns of kRows rows; `count` columns where a vector is not full. Rows beyond the last are the
// last.
template <class Compute, Element kType, int kRows, int kVecs>
[[gnu::always_inline]] inline void output_tile(const FewWeights<typename Compute::Operand>& p, int rows,
                                               const Source& v, int keys, int d, int count, typename Compute::Acc* out,
                                               int ld_out, bool add) {
  using V = Vec<typename Compute::Acc>;
  constexpr int kChains = 2;  // sums of every other key: more exact, and they hide the latency of an addition
  const auto* data = static_cast<const ElementType<kType>*>(v.data) + d;
  V sum[kChains][kRows][kVecs];
#pragma GCC unroll 2
  for (int j = 0; j < kChains; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) sum[j][r][i] = V(typename Compute::Acc(0));
    }
  }
  const auto add_key = [&](int key, V(&into)[kRows][kVecs]) {
    const auto* from = data + key * v.row_stride;
    V value[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      value[i] = count < V::kLanes ? load_vector_part<kType>(from, count) : load_vector<kType>(from + i * V::kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V weight(weight_at<Compute>(p, r < rows ? r : rows - 1, key));
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; ++i) into[r][i] = fma(weight, value[i], into[r][i]);
    }
  };
  int key = 0;
  for (; key + kChains <= keys; key += kChains) {
#pragma GCC unroll 2
    for (int j = 0; j < kChains; ++j) add_key(key + j, sum[j]);
  }
  if (key < keys) add_key(key, sum[0]);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      typename Compute::Acc* to = out + int64_t{r} * ld_out + d + i * V::kLanes;
      const V total = sum[0][r][i] + sum[1][r][i];
      (add ? V::load(to) + total : total).store(to);
    }
  }
}

template <class Compute, Element kType, int kRows>
void output_rows(const FewWeights<typename Compute::Operand>& p, int rows, const Source& v, int keys, int d_v,
                 typename Compute::Acc* out, int ld_out, bool add) {
  constexpr int kLanes = Vec<typename Compute::Acc>::kLanes;
#if defined(__AVX512F__) || defined(__aarch64__)
  constexpr int kOutputVecs = kRows == 4 ? 2 : 4;  // at most 16 accumulators of 32 registers
#else
  constexpr int kOutputVecs = 4 / kRows;  // 8 of 16
#endif
  int d = 0;
  for (; d + kOutputVecs * kLanes <= d_v; d += kOutputVecs * kLanes) {
    output_tile<Compute, kType, kRows, kOutputVecs>(p, rows, v, keys, d, kLanes, out, ld_out, add);
  }
  for (; d + kLanes <= d_v; d += kLanes) {
    output_tile<Compute, kType, kRows, 1>(p, rows, v, keys, d, kLanes, out, ld_out, add);
  }
  if (d < d_v) output_tile<Compute, kType, kRows, 1>(p, rows, v, keys, d, d_v - d, out, ld_out, add);
}

#if defined(__AVX512BF16__)
// 32 kBlocks columns, two keys at a time: two rows of V interleaved meet a pair of weights in vdpbf16ps. `count`: of
// the last 32 columns.
template <int kRows, int kBlocks>
[[gnu::always_inline]] inline void output_pairs(const FewWeights<uint16_t>& p, int rows, const Source& v, int keys,
                                                int d, int count, float* out, int ld_out, bool add) {
  const auto* data = static_cast<const uint16_t*>(v.data) + d;
  __m512 sum[kRows][kBlocks][2];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum[r][b][0] = sum[r][b][1] = _mm512_setzero_ps();
  }
  const auto load = [&](const uint16_t* from) {
    return count < 32 ? load_part<__m512i>(from, count) : _mm512_loadu_si512(from);
  };
  for (int key = 0; key < keys; key += 2) {
    const uint16_t* from = data + key * v.row_stride;
    __m512bh low[kBlocks], high[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512i even = load(from + 32 * b);
      const __m512i odd = key + 1 < keys ? load(from + v.row_stride + 32 * b) : _mm512_setzero_si512();
      low[b] = bit_cast<__m512bh>(_mm512_unpacklo_epi16(even, odd));
      high[b] = bit_cast<__m512bh>(_mm512_unpackhi_epi16(even, odd));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int64_t pair = int64_t{r < rows ? r : rows - 1} * p.row_stride + int64_t{key / 2} * p.key_stride;
      int bits;
      std::memcpy(&bits, p.data + 2 * pair, sizeof(bits));
      const __m512bh weight = bit_cast<__m512bh>(_mm512_set1_epi32(bits));
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        sum[r][b][0] = _mm512_dpbf16_ps(sum[r][b][0], low[b], weight);
        sum[r][b][1] = _mm512_dpbf16_ps(sum[r][b][1], high[b], weight);
      }
    }
  }
  // The interleaving left columns 8i to 8i + 3 in the low sums and 8i + 4 to 8i + 7 in the high ones.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    if (r >= rows) break;
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      float* to = out + int64_t{r} * ld_out + d + 32 * b;
      const auto write = [&](float* at, __m512i order) {
        const F32 total((F32::Raw)_mm512_permutex2var_ps(sum[r][b][0], order, sum[r][b][1]));
        (add ? F32::load(at) + total : total).store(at);
      };
      write(to, first);
      if (count > 16) write(to + 16, second);
    }
  }
}

template <int kRows>
void output_rows_pairs(const FewWeights<uint16_t>& p, int rows, const Source& v, int keys, int d_v, float* out,
                       int ld_out, bool add) {
  constexpr int kBlocks = kRows == 4 ? 2 : 4;
  int d = 0;
  for (; d + 32 * kBlocks <= d_v; d += 32 * kBlocks) {
    output_pairs<kRows, kBlocks>(p, rows, v, keys, d, 32, out, ld_out, add);
  }
  for (; d + 32 <= d_v; d += 32) output_pairs<kRows, 1>(p, rows, v, keys, d, 32, out, ld_out, add);
  if (d < d_v) output_pairs<kRows, 1>(p, rows, v, keys, d, d_v - d, out, ld_out, add);
}
#endif

template <class Compute, Element kType>
void few_outputs_of(FewWeights<typename Compute::Operand> p, int rows, const Source& v, int keys, int d_v,
                    typename Compute::Acc* out, int ld_out, bool add) {
  const auto some_rows = [&]<int kRows>(std::integral_constant<int, kRows>, int r) {
    FewWeights<typename Compute::Operand> of_row = p;
    of_row.data += int64_t{r} * p.row_stride * (Compute::kPairs ? 2 : 1);
    typename Compute::Acc* to = out + int64_t{r} * ld_out;
#if defined(__AVX512BF16__)
    if constexpr (Compute::kPairs) return output_rows_pairs<kRows>(of_row, rows - r, v, keys, d_v, to, ld_out, add);
#endif
    output_rows<Compute, kType, kRows>(of_row, rows - r, v, keys, d_v, to, ld_out, add);
  };
  int r = 0;
  for (; r + 2 < rows; r += 4) some_rows(std::integral_constant<int, 4>{}, r);
  if (r + 1 == rows) {
    some_rows(std::integral_constant<int, 1>{}, r);
  } else if (r < rows) {
    some_rows(std::integral_constant<int, 2>{}, r);
  }
}

// The types that a compute type's tensors may have.
template <class Compute, class Function>
[[gnu::always_inline]] inline void with_type(Element type, const Function& function) {
  if constexpr (Compute::kPairs) {
    function(std::integral_constant<Element, Element::kBFloat16>{});
  } else if constexpr (sizeof(typename Compute::Acc) == 8) {
    function(std::integral_constant<Element, Element::kFloat64>{});
  } else if (type == Element::kFloat32) {
    function(std::integral_constant<Element, Element::kFloat32>{});
  } else if (type == Element::kBFloat16) {
    function(std::integral_constant<Element, Element::kBFloat16>{});
  } else {
    function(std::integral_constant<Element, Element::kFloat16>{});
  }
}

template <class Compute>
void few_scores(const typename Compute::Operand* q, int ld_q, int rows, const Source& k, int keys, int depth,
                typename Compute::Acc* scores, int ld, bool transposed) {
  with_type<Compute>(k.type, [&]<Element kType>(std::integral_constant<Element, kType>) {
    few_scores_of<Compute, kType>(q, ld_q, rows, k, keys, depth, scores, ld, transposed);
  });
}

template <class Compute>
void few_outputs(const FewWeights<typename Compute::Operand>& p, int rows, const Source& v, int keys, int d_v,
                 typename Compute::Acc* out, int ld_out, bool add) {
  with_type<Compute>(v.type, [&]<Element kType>(std::integral_constant<Element, kType>) {
    few_outputs_of<Compute, kType>(p, rows, v, keys, d_v, out, ld_out, add);
  });
}

}  // namespace
}  // namespace flash_ext::cpu::FLASH_CPU_VARIANT
