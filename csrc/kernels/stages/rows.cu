// One warp a row; see rows.h. Sums run in a fixed order, so everything here is deterministic.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/score_mod.h"
#include "gpu/arch.h"
#include "gpu/host/launch.h"
#include "gpu/warp.cuh"
#include "kernels/sm80/backward/renormalised_rows.cuh"
#include "kernels/stages/find_sequence.cuh"
#include "kernels/stages/rows.h"

namespace flash_ext::cuda {
namespace {

constexpr int kWarps = 8;

// A row of a view, for reading eight elements at a time where they are contiguous and aligned.
template <class T>
struct Row {
  T* data;
  int64_t stride;
  bool vectors;

  __device__ __forceinline__ Row(const Problem& problem, const TensorView& view, int64_t b, int64_t head, int64_t row)
      : data(static_cast<T*>(view.data) + batch_offset(problem, view, b) + head * view.head_stride +
             row * view.row_stride),
        stride(view.col_stride),
        vectors(view.col_stride == 1 && reinterpret_cast<uint64_t>(data) % 16 == 0) {}
};

using sm80::elements_of, sm80::rows_of_head;

template <class T>
using ElementOf = std::conditional_t<std::is_same_v<T, __half>, Fp16, Bf16>;

// Of row `index` of [b, h_q, s_q] or, packed, [h_q, rows_q], which has keys.
template <class Element>
__device__ __forceinline__ float2 renorm_row(const ForwardArgs& args, const sm80::RenormRows& renorm, int64_t index) {
  const Problem& problem = args.problem;
  const int64_t rows = rows_of_head(problem), head = index / rows % problem.heads_q, row = index % rows;
  int64_t b = index / rows / problem.heads_q;
  Sequence sequence = sm80::whole_sequence(problem);
  if (problem.packed) {
    b = sequence_before<true>(problem, args.sequences, row);
    if (b < 0) return {};
    sequence = sequence_of(problem, args.sequences, b);
  }
  const int query = static_cast<int>(row) - sequence.row_q;
  if (query < 0 || query >= sequence.len_q) return {};
  return sm80::find_renorm_row<Element>(args, renorm, sequence, static_cast<int>(b), static_cast<int>(head), query);
}

// NOTE: the bound of blocks keeps the search for renormalised rows within the registers of all else.
template <class T>
__global__ void __launch_bounds__(32 * kWarps, 5)
    delta_kernel(const __grid_constant__ BackwardArgs args, float* delta, float* bounds, bool dlse_apart,
                 const __grid_constant__ sm80::RenormRows renorm) {
  const Problem& problem = args.fwd.problem;
  const auto own_row = [] { return int64_t{blockIdx.x} * kWarps + no_hoist(threadIdx.x) / 32; };
  const int64_t index = own_row();
  const int64_t rows = rows_of_head(problem);
  const int64_t bh = index / rows, query = index % rows;
  const int64_t b = bh / problem.heads_q, head = bh % problem.heads_q;
  if (b >= elements_of(problem)) return;
  const int lane = threadIdx.x % 32;
  const float lse = static_cast<const float*>(args.fwd.lse)[index];
  float sum = 0.f, squares = 0.f;
  if (args.d_out) {
    const Row<const T> out(problem, args.fwd.out, b, head, query), d_out(problem, args.d_out, b, head, query);
    const auto add = [&](T o, T d) {
      sum = fmaf(static_cast<float>(o), static_cast<float>(d), sum);
      squares = fmaf(static_cast<float>(d), static_cast<float>(d), squares);
    };
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    // The order of the sum does not depend on the layout.
    const bool vectors = out.vectors && d_out.vectors && problem.head_dim_v % kVector == 0;
    for (int64_t i = lane * kVector; i < problem.head_dim_v; i += 32 * kVector) {
      if (vectors) {
        const uint4 x = *reinterpret_cast<const uint4*>(out.data + i);
        const uint4 y = *reinterpret_cast<const uint4*>(d_out.data + i);
#pragma unroll
        for (int j = 0; j < kVector; ++j) add(reinterpret_cast<const T*>(&x)[j], reinterpret_cast<const T*>(&y)[j]);
      } else {
        for (int64_t j = i; j < i + kVector && j < problem.head_dim_v; ++j) {
          add(out.data[j * out.stride], d_out.data[j * d_out.stride]);
        }
      }
    }
  }
  sum = warp_sum(sum);
  if (bounds != nullptr && problem.packed) {
    const int64_t sequence = sequence_before<true>(problem, args.fwd.sequences, query);
    bounds = lse == -INFINITY || sequence < 0 ? nullptr : bounds + 2 * sequence * problem.heads_q;
  }
  if (bounds != nullptr) squares = warp_sum(squares);
  if (lane == 0) {
    if (sizeof(T) == 4 && problem.len_k == 1 && !problem.batch_invariant && !problem.has_sinks) {
      sum *= 0.f;  // has_one_float_key
    }
    if (problem.constant_lse) sum = 0.f;
    float d_lse = args.d_lse != nullptr ? static_cast<const float*>(args.d_lse)[index] : 0.f;
    if (lse == -INFINITY) sum = d_lse = 0.f;
    delta[index] = dlse_apart ? sum : sum - d_lse;
    if (bounds != nullptr) {  // non-negative floats order like their bits
      atomicMax(reinterpret_cast<int*>(bounds) + 2 * bh, __float_as_int(sqrtf(squares)));
      atomicMax(reinterpret_cast<int*>(bounds) + 2 * bh + 1,
                __float_as_int(dlse_apart ? fabsf(sum) + fabsf(d_lse) : fabsf(sum - d_lse)));
    }
  }
  if constexpr (sizeof(T) == 2) {
    if (renorm.rows != nullptr && sm80::needs_renorm(lse)) {
      renorm.rows[own_row()] = renorm_row<ElementOf<T>>(args.fwd, renorm, own_row());
    }
  }
}

// A thread converts eight columns of rows r and r + 8 of a group of sixteen.
template <class T>
__global__ void convert_kernel(const __grid_constant__ BackwardArgs args, const float* dq_accum, float scale,
                               bool in_fragments) {
  const Problem& problem = args.fwd.problem;
  in_fragments = in_fragments && kHasBulkAdditions && !problem.packed;
  const int64_t len_q = rows_of_head(problem);
  const int64_t columns = (problem.head_dim + 7) / 8, groups = (len_q + 15) / 16;
  const int64_t index = int64_t{blockIdx.x} * (32 * kWarps) + threadIdx.x;
  const int64_t first_col = index % columns * 8, row_in_group = index / columns % 8, group = index / (columns * 8);
  const int64_t bh = group / groups, first_row = group % groups * 16;
  const int64_t b = bh / problem.heads_q, head = bh % problem.heads_q;
  if (b >= elements_of(problem)) return;
  const float* const rows = dq_accum + (bh * len_q + first_row) * problem.head_dim;
  float numbers[2][8];
  if (in_fragments && first_row + 16 <= len_q) {
    const float4* const from = reinterpret_cast<const float4*>(rows + first_col * 16) + row_in_group * 4;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float4 x = from[pair];
      numbers[0][2 * pair] = x.x, numbers[0][2 * pair + 1] = x.y;
      numbers[1][2 * pair] = x.z, numbers[1][2 * pair + 1] = x.w;
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = row_in_group + half * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool inside = first_row + row < len_q && first_col + i < problem.head_dim;
        numbers[half][i] = inside ? rows[row * problem.head_dim + first_col + i] : 0.f;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t query = first_row + row_in_group + half * 8;
    if (query >= len_q) break;
    const Row<T> dq(problem, args.dq, b, head, query);
    if (dq.vectors && first_col + 8 <= problem.head_dim && problem.head_dim * sizeof(T) % 16 == 0) {
      alignas(16) T values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = static_cast<T>(numbers[half][i] * scale);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(values)) / 16; ++i) {
        reinterpret_cast<uint4*>(dq.data + first_col)[i] = reinterpret_cast<const uint4*>(values)[i];
      }
    } else {
      for (int64_t i = first_col; i < first_col + 8 && i < problem.head_dim; ++i) {
        dq.data[i * dq.stride] = static_cast<T>(numbers[half][i - first_col] * scale);
      }
    }
  }
}

// A warp a head. What sm80's weighted_by_distance leaves of a row is the sum of dS, dlse, times the distance that its
// keys share; with a sink, of probability p, that sum is dlse + p (delta - dlse).
// block_n: of keys that have a number each, packed.
__global__ void sum_slopes_kernel(const __grid_constant__ BackwardArgs args, const float* partial, int64_t count,
                                  int64_t block_n, const float* delta, const float* inverse, bool dlse_apart) {
  const Problem& problem = args.fwd.problem;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= problem.batch * problem.heads_q) return;
  const int64_t b = row / problem.heads_q, head = row % problem.heads_q;
  const Sequence sequence =
      problem.packed ? sequence_of(problem, args.fwd.sequences, b) : sm80::whole_sequence(problem);
  const int len_q = sequence.len_q, len_k = sequence.len_k;
  const int64_t first = problem.packed ? head * count + sm80::first_tile(b, sequence.row_k, block_n) : row * count;
  const int64_t own = problem.packed ? block_count(len_k, block_n) : count;
  float sum = 0.f;
  for (int64_t i = threadIdx.x % 32; i < own; i += 32) sum += partial[first + i];
  if (args.d_lse != nullptr || problem.has_sinks) {
    const int offset = problem.bottom_right ? len_k - len_q : 0;
    const int64_t first_row = sm80::row_index(problem, sequence, b, head);
    const float* const lse = static_cast<const float*>(args.fwd.lse) + first_row;
    const float sink = sink_of<float>(args.fwd, b, head, 0);
    for (int i = threadIdx.x % 32; i < len_q; i += 32) {
      const int away = distance_to_keys(i + offset, len_k);
      if (away <= 0 || lse[i] == -INFINITY) continue;
      const float d_lse = args.d_lse != nullptr ? static_cast<const float*>(args.d_lse)[first_row + i] : 0.f;
      float of_row = d_lse;
      if (problem.has_sinks) {
        const float p = expf(sink - lse[i]) * inverse[first_row + i];
        of_row += p * (delta[first_row + i] - (dlse_apart ? d_lse : 0.f));
      }
      sum -= static_cast<float>(away) * of_row;
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) static_cast<float*>(args.dalibi)[row] = sum;
}

template <class T>
__global__ void sum_parts_kernel(T* sums, const float* partial, int64_t count, int64_t parts) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0.f;
#pragma unroll 16  // loads in flight: few elements may have hundreds of parts
  for (int64_t part = 0; part < parts; ++part) sum += partial[part * count + i];
  sums[i] = T(sum);
}

dim3 grid_of_rows(int64_t rows) { return grid_of((rows + kWarps - 1) / kWarps); }

template <class Function>
void with_type(DType dtype, const Function& function) {
  if (dtype == DType::kFloat16) return function(__half());
  if (dtype == DType::kBFloat16) return function(__nv_bfloat16());
  return function(float());
}

}  // namespace

void delta(const BackwardArgs& args, float* delta, float* bounds, bool dlse_apart, float2* renorm) {
  const Problem& problem = args.fwd.problem;
  with_type(problem.dtype, [&]<class T>(T) {
    sm80::RenormRows renorm_rows{};
    if (renorm != nullptr) renorm_rows = sm80::make_renorm_rows<ElementOf<T>>(args.fwd, renorm);
    launch(delta_kernel<T>, grid_of_rows(elements_of(problem) * problem.heads_q * rows_of_head(problem)), 32 * kWarps,
           0, args.fwd.stream, args, delta, bounds, dlse_apart, renorm_rows);
  });
}

void convert_dq(const BackwardArgs& args, const float* dq_accum, bool in_fragments) {
  const Problem& problem = args.fwd.problem;
  const int64_t rows = (rows_of_head(problem) + 15) / 16 * 8, columns = (problem.head_dim + 7) / 8;
  with_type(args.dq_in_accum ? DType::kFloat32 : problem.dtype, [&]<class T>(T) {
    launch(convert_kernel<T>, grid_of_rows((elements_of(problem) * problem.heads_q * rows * columns + 31) / 32),
           32 * kWarps, 0, args.fwd.stream, args, dq_accum, static_cast<float>(problem.scale), in_fragments);
  });
}

void sum_slopes(const BackwardArgs& args, const float* partial, int64_t count, int64_t block_n, const float* delta,
                const float* inverse, bool dlse_apart) {
  const int64_t rows = args.fwd.problem.batch * args.fwd.problem.heads_q;
  launch(sum_slopes_kernel, grid_of_rows(rows), 32 * kWarps, 0, args.fwd.stream, args, partial, count, block_n, delta,
         inverse, dlse_apart);
}

void sum_parts(void* sums, DType dtype, const float* partial, int64_t count, int64_t parts, void* stream) {
  with_type(dtype, [&]<class T>(T) {
    launch(sum_parts_kernel<T>, grid_of((count + 255) / 256), 256, 0, stream, static_cast<T*>(sums), partial, count,
           parts);
  });
}

}  // namespace flash_ext::cuda
