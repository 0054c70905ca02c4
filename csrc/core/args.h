// What every backend is handed: the problem, and where its tensors lie. Nothing here knows torch, CUDA or a kernel.
//
//   out = softmax(softcap(scale * q k^T) + bias + alibi, masked) v        lse = log-sum-exp of the same row (natural
//   log)
//
// A sink is one more score in each row of a head, of a key whose value is 0: it takes its part of the sum and of lse.
//
// torch/ builds these structures once per call (torch/problem.cpp); kernels read them and never change them.
// Packed sequences have views of [row, head, col] with batch strides of 0; masks, biases and slopes are indexed by
// sequence and by positions inside it, as are the bits of dropout.
// Invariant: every shape is already checked, there is at least one query and one key, every broadcast is a stride of 0,
// and every pointer a backend may write is distinct from every pointer it may read.
#pragma once

#include <cstdint>
#include <limits>

#include "core/dropout.h"
#include "core/portable.h"

namespace flash_ext {

enum class Pass : uint8_t { kForward, kBackward, kBiasGradient };
enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

// Leading dimensions (..., heads, rows, cols) that do not merge into one by stride, e.g. under a broadcast.
constexpr int kMaxBatchDims = 4;
constexpr int64_t kUnbounded = INT64_MAX;

// A tensor of [batch..., head, row, col]; strides in elements, 0 along a broadcast dimension; data == nullptr: absent.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride[kMaxBatchDims] = {};
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;

  FLASH_DEVICE explicit operator bool() const { return data != nullptr; }
};

// What is to be computed: sizes and options, no pointers. Enough for a backend to refuse or to plan.
struct Problem {
  DType dtype = DType::kFloat32;
  int batch_rank = 0;
  int64_t batch_size[kMaxBatchDims] = {};  // leading dimensions, merged jointly over all tensors
  int64_t batch = 1;                       // their product
  int64_t heads_q = 1;                     // heads of the result
  int64_t heads_k = 1;                     // query head h reads key head h / (heads_q / heads_k)
  int64_t heads_v = 1;                     // ... and value head h / (heads_q / heads_v)
  int64_t len_q = 0;
  int64_t len_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;

  double scale = 1.0;
  double softcap = 0.0;  // c * tanh(s / c) on the scaled score; 0: off
  bool causal = false;
  bool bottom_right = false;          // the diagonal's offset: 0 (top left) or len_k - len_q
  int64_t window_left = kUnbounded;   // keys j >= i + offset - window_left
  int64_t window_right = kUnbounded;  // keys j <= i + offset + window_right
  double dropout_p = 0.0;
  bool deterministic = false;
  bool batch_invariant = false;  // bits of a batch element depend on nothing else in the batch; deterministic as well
  bool allow_tf32 = false;       // float32 on a GPU: products may round their factors to TF32

  // Packed sequences (core/sequences.h): how many rows the tensors have. len_q and len_k are then of the longest
  // sequence, at most, and batch is how many there are.
  bool packed = false;
  int64_t rows_q = 0, rows_k = 0;

  bool has_mask = false;
  bool has_bias = false;
  bool has_alibi = false;
  DType bias_dtype = DType::kFloat32;  // dtype or float32

  // Backward only: which gradients are wanted.
  bool wants_dq = false, wants_dk = false, wants_dv = false, wants_dbias = false, wants_dalibi = false;
  bool whole_dbias = false;  // every score has an element of its own in dbias
  // NOTE: last, because what kernels read keeps its place so; elsewhere one more instance spilled.
  bool has_sinks = false;
  bool constant_lse = false;  // of backward: no score changes lse, so P need not sum to 1, and delta = -dlse
  // q, k and v are of e4m3, each times its descale; out has `dtype`, of 16 bits.
  bool fp8 = false;
  bool row_descales = false;  // one of them has a number for each row, not for each head
};

// How many batch elements the last leading dimension has: element b is number b % this in it.
FLASH_DEVICE int inner_batch_of(const Problem& problem) {
  return problem.batch_rank > 0 ? static_cast<int>(problem.batch_size[problem.batch_rank - 1]) : 1;
}

// Where packed sequences lie: sequence b has rows cu[b] to cu[b + 1], of which the first used[b] are in use. On the
// device of q; read by core/sequences.h, stages/find_sequence.cuh and stages/tiles_of.cuh alone.
struct Sequences {
  const int32_t* cu_q = nullptr;    // [b + 1]
  const int32_t* cu_k = nullptr;    // [b + 1]
  const int32_t* used_q = nullptr;  // [b]; null: all rows
  const int32_t* used_k = nullptr;
};

struct ForwardArgs {
  Problem problem;
  Sequences sequences;  // of a packed problem

  TensorView q;      // [b..., h_q, s_q, d]
  TensorView k;      // [b..., h_k, s_k, d]
  TensorView v;      // [b..., h_v, s_k, d_v]
  TensorView mask;   // [b..., h_q, s_q, s_k] bool (uint8), true = attend
  TensorView bias;   // [b..., h_q, s_q, s_k] problem.bias_dtype
  TensorView alibi;  // [b..., h_q, 1, 1] float32

  TensorView out;                      // [b..., h_q, s_q, d_v] problem.dtype
  void* lse = nullptr;                 // [b, h_q, s_q] contiguous, float32 (float64 for float64); null: not wanted.
                                       // Packed: [h_q, rows_q]
  const int64_t* rng_state = nullptr;  // {seed, offset} on the device of q; null without dropout

  void* stream = nullptr;  // cudaStream_t on a GPU: every launch goes there

  TensorView sinks;            // [b..., h_q, s_q, 1] float32 (float64 for float64); row_stride is 0 but of folded heads
  DropoutPlace dropout_place;  // where the call lies in the map of dropout
  TensorView q_descale;        // [b..., h_q, s_q, 1] float32, row_stride 0 without row_descales; absent: 1
  TensorView k_descale;        // [b..., h_k, s_k, 1]
  TensorView v_descale;        // [b..., h_v, s_k, 1]
};

struct BackwardArgs {
  ForwardArgs fwd;  // out and lse hold what forward wrote; lse is never null here

  TensorView d_out;             // [b..., h_q, s_q, d_v] problem.dtype, any strides; absent: zero
  const void* d_lse = nullptr;  // [b, h_q, s_q] contiguous, dtype of lse; absent: zero

  // Gradients; absent: not wanted. `*_in_accum`: written in float32 (float64 for float64) instead of problem.dtype,
  // because the caller sums over broadcast dimensions afterwards.
  TensorView dq;  // [b..., h_q, s_q, d]
  TensorView dk;  // [b..., h_k, s_k, d]
  TensorView dv;  // [b..., h_v, s_k, d_v]
  bool dq_in_accum = false;
  bool dk_in_accum = false;
  bool dv_in_accum = false;
  // float32 (float64 for float64), with Plan::dbias_in_bias_dtype the bias's own dtype; a stride of 0 means: summed
  // over that dimension. Its data is there when a backend runs, not while it is chosen.
  TensorView dbias;
  void* dalibi = nullptr;  // [b, h_q] contiguous, float32 (float64 for float64)
};

// Whether every score has an element of its own in a bias or mask.
inline bool is_whole(const Problem& problem, const TensorView& scores) {
  bool whole = (scores.head_stride != 0 || problem.heads_q == 1) && (scores.row_stride != 0 || problem.len_q == 1) &&
               (scores.col_stride != 0 || problem.len_k == 1);
  for (int i = 0; i < problem.batch_rank; ++i) {
    whole = whole && (scores.batch_stride[i] != 0 || problem.batch_size[i] == 1);
  }
  return whole;
}

// Element offset of flat batch index b in a view.
FLASH_DEVICE int64_t batch_offset(const Problem& problem, const TensorView& view, int64_t b) {
  if (problem.batch_rank == 0) return 0;
  int64_t offset = 0;
  for (int i = problem.batch_rank - 1; i > 0; --i) {
    offset += (b % problem.batch_size[i]) * view.batch_stride[i];
    b /= problem.batch_size[i];
  }
  return offset + b * view.batch_stride[0];
}

// Of a row of a head: -inf where there is none.
template <class Real>
FLASH_DEVICE Real sink_of(const ForwardArgs& args, int64_t b, int64_t head, int64_t row) {
  if (!args.sinks) return -std::numeric_limits<Real>::infinity();
  const TensorView& sinks = args.sinks;
  return static_cast<const Real*>(
      sinks.data)[batch_offset(args.problem, sinks, b) + head * sinks.head_stride + row * sinks.row_stride];
}

}  // namespace flash_ext
