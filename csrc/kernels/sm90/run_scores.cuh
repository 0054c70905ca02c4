// The parameters of a softcap, a bias, slopes, a mask and dropout, for both passes: views, and what fits the room in
// shared memory. Called by forward/run.cuh, backward/run.cuh and backward_two_pass/run.cuh.
#pragma once

#include <algorithm>

#include "core/args.h"
#include "gpu/host/tensor_map.h"
#include "kernels/sm90/scores.cuh"

namespace flash_ext::sm90 {

using cuda::make_packed_map, cuda::make_tensor_map, cuda::Promotion;

// element: bytes; zero strides where a dimension has one index, whatever stood there.
inline ScoreView make_score_view(const Problem& problem, const TensorView& view, int element) {
  const auto batch = [&](int from_last) {
    const int dim = problem.batch_rank - 1 - from_last;
    return dim >= 0 && problem.batch_size[dim] > 1 ? view.batch_stride[dim] * element : 0;
  };
  return {static_cast<const char*>(view.data),
          view.col_stride * element,
          problem.len_q > 1 ? view.row_stride * element : 0,
          problem.heads_q > 1 ? view.head_stride * element : 0,
          batch(0),
          batch(1),
          reads_chunks(problem, view, element)};
}

// Tiles of rows by cols; mask_bytes: of a tile of the mask, 0 where it lies as bytes. room: of the ring.
inline ScoreParams make_scores(const ForwardArgs& args, int rows, int cols, int mask_bytes, int room) {
  const Problem& problem = args.problem;
  ScoreParams scores = {};
  const auto tile = [&](const ScoreView& view, int element) {
    return (view.row == 0 ? 1 : rows) * score_pitch(cols, element);
  };
  scores.softcap = SoftcapParams::of(problem, 1.0);
  scores.scale = static_cast<float>(problem.softcap != 0.0 ? 1.0 : problem.scale);
  scores.bias_is_float = problem.bias_dtype == DType::kFloat32;
  if (problem.has_bias) {
    const int element = scores.bias_is_float ? 4 : 2;
    scores.bias = make_score_view(problem, args.bias, element);
    scores.mask_at = tile(scores.bias, element);
  }
  scores.stage_bytes = scores.mask_at;
  if (problem.has_mask) {
    scores.mask = make_score_view(problem, args.mask, 1);
    scores.stage_bytes += mask_bytes > 0 ? mask_bytes : tile(scores.mask, 1);
  }
  scores.dropout = {nullptr, 0, 1.f, {}};
  if (problem.dropout_p > 0.0) {
    const Dropout dropout = make_dropout(0, 0, problem.dropout_p);
    scores.dropout = {args.rng_state, dropout.threshold * 0x10001U, static_cast<float>(dropout.scale),
                      args.dropout_place};
  }
  scores.stages = scores.stage_bytes > 0 ? std::min(kScoreStages, room / scores.stage_bytes) : 1;
  if (problem.has_alibi) {
    const auto batch = [&](int from_last) {
      const int dim = problem.batch_rank - 1 - from_last;
      return dim >= 0 && problem.batch_size[dim] > 1 ? args.alibi.batch_stride[dim] : 0;
    };
    scores.alibi = {static_cast<const float*>(args.alibi.data), problem.heads_q > 1 ? args.alibi.head_stride : 0,
                    batch(0), batch(1), 0};
  }
  scores.alibi.offset = static_cast<int>(problem.bottom_right ? problem.len_k - problem.len_q : 0);
  return scores;
}

}  // namespace flash_ext::sm90
