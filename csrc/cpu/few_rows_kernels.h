// Products for a handful of queries (decoding), where packing K and V would cost more than the products themselves.
//
//   S[r][c] = q[r] . k[c]        O[r] += sum_c P[r][c] v[c]        with k and v read once, where and as they lie
//
// Included by vector_kernels.cpp alone, once per instruction set. Invariant: a row of K or V is contiguous and its
// length a multiple of kPad; keys beyond the last are read as the last and masked later.
#pragma once

#include "cpu/pack_kernels.h"

namespace flash_ext::cpu::FLASH_CPU_VARIANT {
namespace {

// One vector of a tensor of the caller, as Acc.
template <Element kType>
[[gnu::always_inline]] inline auto load_vector(const void* data, int64_t index) {
  if constexpr (kType == Element::kFloat64) {
    return F64::load(static_cast<const double*>(data) + index);
  } else if constexpr (kType == Element::kFloat32) {
    return F32::load(static_cast<const float*>(data) + index);
  } else if constexpr (kType == Element::kBFloat16) {
    return from_bf16(load_half(static_cast<const uint16_t*>(data) + index));
  } else {
    return from_fp16(load_half(static_cast<const uint16_t*>(data) + index));
  }
}

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

template <Element kType, class Acc>
void few_scores_of(const Acc* q, int ld_q, int rows, const Source& k, int keys, int depth, Acc* scores, int ld) {
  using V = Vec<Acc>;
  constexpr int kLanes = V::kLanes;
  for (int c0 = 0; c0 < keys; c0 += kLanes) {
    for (int r = 0; r < rows; ++r) {
      V sum[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sum[i] = V(Acc(0));
      for (int d = 0; d < depth; d += kLanes) {
        const V query = V::load(q + int64_t{r} * ld_q + d);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const int key = c0 + i < keys ? c0 + i : keys - 1;
          sum[i] = fma(query, load_vector<kType>(k.data, key * k.row_stride + d), sum[i]);
        }
      }
      sum_rows<1>(sum).store(scores + int64_t{r} * ld + c0);
    }
  }
}

template <class Acc>
Acc prob_value(Acc p) {
  return p;
}
[[maybe_unused]] float prob_value(uint16_t p) { return bit_cast<float>(uint32_t{p} << 16); }

template <Element kType, int kVecs, class Acc, class Operand>
[[gnu::always_inline]] inline void few_outputs_at(const Operand* p, const Source& v, int keys, int d, Acc* out,
                                                  bool add) {
  using V = Vec<Acc>;
  V sum[2][kVecs];
  for (int i = 0; i < kVecs; ++i) {
    sum[0][i] = add ? V::load(out + i * V::kLanes) : V(Acc(0));
    sum[1][i] = V(Acc(0));
  }
  const auto add_key = [&](int key, V(&into)[kVecs]) {
    const V weight(prob_value(p[key]));
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      into[i] = fma(weight, load_vector<kType>(v.data, key * v.row_stride + d + i * V::kLanes), into[i]);
    }
  };
  int key = 0;
  for (; key + 2 <= keys; key += 2) {
    add_key(key, sum[0]);
    add_key(key + 1, sum[1]);
  }
  if (key < keys) add_key(key, sum[0]);
  for (int i = 0; i < kVecs; ++i) (sum[0][i] + sum[1][i]).store(out + i * V::kLanes);
}

template <Element kType, class Acc, class Operand>
void few_outputs_of(const Operand* p, int ld_p, int rows, const Source& v, int keys, int d_v, Acc* out, int ld_out,
                    bool add) {
  constexpr int kLanes = Vec<Acc>::kLanes;
  for (int r = 0; r < rows; ++r) {
    const Operand* weights = p + int64_t{r} * ld_p;
    Acc* to = out + int64_t{r} * ld_out;
    int d = 0;
    for (; d + 4 * kLanes <= d_v; d += 4 * kLanes) few_outputs_at<kType, 4>(weights, v, keys, d, to + d, add);
    for (; d < d_v; d += kLanes) few_outputs_at<kType, 1>(weights, v, keys, d, to + d, add);
  }
}

template <class Acc>
void few_scores(const Acc* q, int ld_q, int rows, const Source& k, int keys, int depth, Acc* scores, int ld) {
  if constexpr (sizeof(Acc) == 8) {
    few_scores_of<Element::kFloat64>(q, ld_q, rows, k, keys, depth, scores, ld);
  } else if (k.type == Element::kFloat32) {
    few_scores_of<Element::kFloat32>(q, ld_q, rows, k, keys, depth, scores, ld);
  } else if (k.type == Element::kBFloat16) {
    few_scores_of<Element::kBFloat16>(q, ld_q, rows, k, keys, depth, scores, ld);
  } else {
    few_scores_of<Element::kFloat16>(q, ld_q, rows, k, keys, depth, scores, ld);
  }
}

template <class Acc, class Operand>
void few_outputs(const Operand* p, int ld_p, int rows, const Source& v, int keys, int d_v, Acc* out, int ld_out,
                 bool add) {
  if constexpr (sizeof(Acc) == 8) {
    few_outputs_of<Element::kFloat64>(p, ld_p, rows, v, keys, d_v, out, ld_out, add);
  } else if (v.type == Element::kFloat32) {
    few_outputs_of<Element::kFloat32>(p, ld_p, rows, v, keys, d_v, out, ld_out, add);
  } else if (v.type == Element::kBFloat16) {
    few_outputs_of<Element::kBFloat16>(p, ld_p, rows, v, keys, d_v, out, ld_out, add);
  } else {
    few_outputs_of<Element::kFloat16>(p, ld_p, rows, v, keys, d_v, out, ld_out, add);
  }
}

}  // namespace
}  // namespace flash_ext::cpu::FLASH_CPU_VARIANT
