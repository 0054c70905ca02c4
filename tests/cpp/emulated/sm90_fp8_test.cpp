// Inputs of e4m3 in sm90's forward, run on the host: products of 32, values transposed, descales of heads.
#include <random>

#include "attention_call.h"
#include "kernels/sm90/forward/run.cuh"
#include "kernels/stages/transpose_values.cu"

namespace flash_ext {
namespace {

struct Fp8Case : Case {
  double descale = 1;  // of query's heads, of both signs; 0: nobody gives one
};

template <DType kOut, int kHeadDim>
Results run_fp8(const Case& c, ForwardArgs args, std::vector<float>& workspace) {
  using T = std::conditional_t<kOut == DType::kFloat16, __half, __nv_bfloat16>;
  using sm90::Tiles;
  Problem& problem = args.problem;
  problem.dtype = kOut;
  constexpr sm90::ForwardShape kShape = sm90::forward_shape(kHeadDim, Tiles::kFp8);
  const sm90::ForwardOrder order = sm90::forward_order(problem, kShape.block_m(), c.multiprocessors);
  const int64_t bytes = sm90::kCounterBytes + cuda::transposed_bytes(problem) +
                        sm90::sum_scratch_bytes(problem, kShape, kHeadDim, order.grid);
  workspace.assign(bytes / 4 + 64, std::nanf(""));
  void* const scratch = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 127) / 128 * 128);
  Matrices<T> out(c.batch * c.heads_q, c.len_q, problem.head_dim_v, c.layout);
  Matrices<float> lse(c.batch * c.heads_q, c.len_q, 1, Layout::kHeadsFirst);
  args.out = out.view();
  args.out.batch_stride[0] = c.heads_q * args.out.head_stride;
  args.lse = lse.view().data;
  const sm90::ForwardLaunch how = {Tiles::kFp8, {}, static_cast<int>(order.grid)};
  sm90::run_forward_fp8<kOut, kHeadDim>(args, how, scratch);
  EXPECT_TRUE(out.guards_hold() && lse.guards_hold()) << "something beside a result was written";
  return {out.values(), lse.values(), {}, {}, {}, {}, {}};
}

void check_fp8(const Fp8Case& c) {
  cuda::emulated_seed = 1;
  const int64_t d = c.d > 0 ? c.d : c.head_dim, d_v = c.d_v > 0 ? c.d_v : c.head_dim;
  using Numbers = Matrices<__nv_fp8_e4m3>;
  Numbers q(c.batch * c.heads_q, c.len_q, d, c.layout), k(c.batch * c.heads_k, c.len_k, d, c.layout),
      v(c.batch * c.heads_v, c.len_k, d_v, c.layout);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (Numbers* x : {&q, &k, &v}) x->fill([&] { return normal(random); });
  for (int64_t i = 0; i < c.batch * c.heads_k * c.len_k && c.rise != 0; ++i) {
    k.at(i / c.len_k, i % c.len_k, 0) =
        __nv_fp8_e4m3(static_cast<float>(c.rise * static_cast<double>(c.len_k - 1 - i % c.len_k) / c.len_k));
  }
  for (int64_t i = 0; i < c.batch * c.heads_q * c.len_q && c.rise != 0; ++i) {
    q.at(i / c.len_q, i % c.len_q, 0) = __nv_fp8_e4m3(static_cast<float>(std::sqrt(static_cast<double>(d))));
  }
  Problem problem;
  problem.fp8 = true;
  problem.batch_rank = c.batch > 1 ? 1 : 0;
  problem.batch_size[0] = problem.batch = c.batch;
  problem.heads_q = c.heads_q;
  problem.heads_k = c.heads_k;
  problem.heads_v = c.heads_v;
  problem.len_q = c.len_q;
  problem.len_k = c.len_k;
  problem.head_dim = d;
  problem.head_dim_v = d_v;
  problem.scale = 1.0 / std::sqrt(static_cast<double>(d));
  problem.causal = c.causal;
  problem.bottom_right = c.bottom_right;
  problem.window_left = c.window;
  problem.has_sinks = c.sinks;
  ForwardArgs args;
  args.problem = problem;
  const auto batched = [](Numbers& x, int heads) {
    TensorView view = x.view();
    view.batch_stride[0] = heads * view.head_stride;
    return view;
  };
  args.q = batched(q, c.heads_q);
  args.k = batched(k, c.heads_k);
  args.v = batched(v, c.heads_v);
  std::vector<float> sinks;
  for (int i = 0; i < c.batch * c.heads_q; ++i) sinks.push_back(i % 3 == 0 ? 1.5f : -1.f);
  const auto of_heads = [](std::vector<float>& x, int heads) {
    TensorView view;
    view.data = x.data();
    view.head_stride = 1;
    view.batch_stride[0] = heads;
    return view;
  };
  if (c.sinks) args.sinks = of_heads(sinks, c.heads_q);
  // [tensor][batch x head]
  std::vector<float> descales[3];
  const int heads[] = {c.heads_q, c.heads_k, c.heads_v};
  TensorView* const views[] = {&args.q_descale, &args.k_descale, &args.v_descale};
  for (int t = 0; t < 3; ++t) {
    for (int i = 0; i < c.batch * heads[t]; ++i) {
      const double factor = t == 0 ? c.descale * (i % 2 == 0 ? 1 : -0.5) : 1.0 + 0.25 * (i % 3);
      descales[t].push_back(c.descale == 0 ? 1.f : static_cast<float>(factor));
    }
    if (c.descale != 0) *views[t] = of_heads(descales[t], heads[t]);
  }
  const auto dequantised = [&](Numbers& x, int t) {
    std::vector<double> result;
    const std::vector<float> numbers = x.values();
    const size_t of_head = numbers.size() / descales[t].size();
    for (size_t i = 0; i < numbers.size(); ++i) result.push_back(double{numbers[i]} * descales[t][i / of_head]);
    return result;
  };
  const std::vector<double> zeros(c.batch * c.heads_q * c.len_q * d_v);
  const std::vector<float> no_lse(c.batch * c.heads_q * c.len_q);
  const Results expected =
      reference(c, problem,
                {dequantised(q, 0), dequantised(k, 1), dequantised(v, 2), zeros, {}, {}, {}, sinks, no_lse, {}}, false);
  std::vector<float> workspace;
  const auto compare = [&](const Results& result) {
    EXPECT_LT(error(result.out, expected.out), 0.04) << "out";  // P has four digits
    EXPECT_LT(error(result.lse, expected.lse), 1e-6) << "lse";
  };
  if (c.head_dim == 64) {
    compare(run_fp8<DType::kBFloat16, 64>(c, args, workspace));
  } else if (c.head_dim == 256) {
    compare(run_fp8<DType::kBFloat16, 256>(c, args, workspace));
  } else {
    compare(run_fp8<DType::kFloat16, 128>(c, args, workspace));
  }
}

const Fp8Case kCases[] = {
    {{.name = "plain_64", .head_dim = 64, .len_q = 150, .len_k = 400}, 0},
    {{.name = "plain_128", .head_dim = 128, .len_q = 150, .len_k = 400}, 0},
    {{.name = "plain_256", .head_dim = 256, .len_q = 150, .len_k = 400}, 0},
    {{.name = "causal_and_grouped",
      .head_dim = 128,
      .len_q = 300,
      .len_k = 300,
      .heads_q = 4,
      .heads_k = 2,
      .heads_v = 1,
      .batch = 2,
      .causal = true,
      .multiprocessors = 3},
     0.5},
    {{.name = "window_and_sinks",
      .head_dim = 64,
      .len_q = 300,
      .len_k = 420,
      .heads_q = 3,
      .heads_k = 3,
      .heads_v = 3,
      .batch = 2,
      .causal = true,
      .bottom_right = true,
      .window = 90,
      .sinks = true,
      .layout = Layout::kRowsFirst,
      .multiprocessors = 2},
     2},
    {{.name = "rows_without_keys",
      .head_dim = 128,
      .len_q = 290,
      .len_k = 40,
      .causal = true,
      .bottom_right = true,
      .sinks = true},
     1},
    {{.name = "rising", .head_dim = 128, .len_q = 140, .len_k = 700, .rise = 100}, 0},
    {{.name = "rising_256", .head_dim = 256, .len_q = 140, .len_k = 700, .rise = 100}, -1},
    {{.name = "rising_64", .head_dim = 64, .len_q = 140, .len_k = 700, .rise = 100}, 1},
    {{.name = "far", .head_dim = 128, .len_q = 140, .len_k = 300, .rise = 400}, 32},
    // So many tiles that O is added up in shared memory, twice at head dim 128.
    {{.name = "long", .head_dim = 128, .len_q = 70, .len_k = 3500, .rise = 3}, 0.7},
    {{.name = "long_64", .head_dim = 64, .len_q = 100, .len_k = 1300, .rise = 40}, 1},
    // In scratch, of each block's own.
    {{.name = "long_256",
      .head_dim = 256,
      .len_q = 260,
      .len_k = 4400,
      .heads_q = 2,
      .heads_k = 1,
      .heads_v = 1,
      .causal = true,
      .bottom_right = true,
      .rise = 30,
      .multiprocessors = 2},
     0.7},
    {{.name = "long_and_causal",
      .head_dim = 128,
      .len_q = 130,
      .len_k = 1700,
      .causal = true,
      .bottom_right = true,
      .multiprocessors = 2},
     1},
    {{.name = "very_far", .head_dim = 128, .len_q = 140, .len_k = 700, .causal = true, .rise = 40}, 0x1p26},
    {{.name = "very_far_64", .head_dim = 64, .len_q = 140, .len_k = 700, .rise = 400}, 0x1p26},
    {{.name = "no_score", .head_dim = 128, .len_q = 140, .len_k = 300, .causal = true}, 0x1p-149},
    {{.name = "columns", .head_dim = 128, .len_q = 70, .len_k = 131, .d = 80, .d_v = 112}, 1},
    {{.name = "columns_256",
      .head_dim = 256,
      .len_q = 140,
      .len_k = 200,
      .d = 144,
      .d_v = 240,
      .causal = true,
      .sinks = true,
      .layout = Layout::kRowsFirst},
     1},
    {{.name = "columns_64", .head_dim = 64, .len_q = 70, .len_k = 200, .d = 16, .d_v = 48}, 1},
};

class Sm90Fp8 : public testing::TestWithParam<Fp8Case> {};

TEST_P(Sm90Fp8, Forward) { check_fp8(GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Sm90Fp8, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flash_ext
