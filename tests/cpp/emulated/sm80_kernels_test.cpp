// The kernels of csrc/sm80, run on the host by emulator.h: forward and backward of small problems with every feature,
// against the formulas in double. What must hold: every element of every result is written and near the reference,
// nothing beside it is touched, and deterministic gradients do not depend on the order in which threads run.
#include "attention_call.h"
#include "cuda/rows.cu"
#include "sm80/fwd.cuh"
#include "sm80/run_bwd.cuh"

namespace flash_ext {
namespace {

using sm80::Bf16;
using sm80::Fp16;
using sm80::Fp32;

// The instance, whatever the problem's head dimension.
template <class Element, int kHeadDim>
const Backend kInstance = {
    .name = "sm80",
    .device = DeviceType::kCuda,
    .refuses = [](const Problem&, Pass, const DeviceInfo&) { return std::string(); },
    .plan =
        [](const Problem& problem, Pass pass, const DeviceInfo& device) {
          return pass == Pass::kForward ? sm80::plan_forward<Element, kHeadDim>(problem, device)
                                        : sm80::plan_backward<Element, kHeadDim>(problem, device);
        },
    .forward = [](const ForwardArgs& args, const Plan& plan,
                  void*) { sm80::run_forward<Element, kHeadDim>(args, plan); },
    .backward = sm80::run_backward<Element, kHeadDim>,
};

template <class Element>
void check_element(const Case& c) {
  const Backend& backend = c.head_dim == 32   ? kInstance<Element, 32>
                           : c.head_dim == 64 ? kInstance<Element, 64>
                                              : kInstance<Element, 128>;
  check<sm80::StorageOf<Element>>(backend, c);
}

class Sm80Kernels : public testing::TestWithParam<Case> {};

TEST_P(Sm80Kernels, Bf16) { check_element<Bf16>(GetParam()); }
TEST_P(Sm80Kernels, Fp16) { check_element<Fp16>(GetParam()); }
TEST_P(Sm80Kernels, Fp32) { check_element<Fp32>(GetParam()); }

const Case kCases[] = {
    {.name = "plain", .len_q = 160, .len_k = 130},
    {.name = "head_dim_128", .head_dim = 128, .len_q = 144, .len_k = 160},
    {.name = "head_dim_32", .head_dim = 32, .len_q = 100, .len_k = 70},
    {.name = "fewer_columns", .len_q = 100, .len_k = 130, .d = 40, .d_v = 56},
    {.name = "odd_columns", .len_q = 40, .len_k = 70, .d = 33, .d_v = 7},
    {.name = "one_column", .len_q = 140, .len_k = 130, .d = 1, .d_v = 40},
    {.name = "few_columns",
     .head_dim = 128,
     .len_q = 70,
     .len_k = 90,
     .d = 7,
     .d_v = 120,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .bias = true,
     .bias_gradient = true},
    {.name = "few_columns_of_value_too",
     .head_dim = 32,
     .len_q = 70,
     .len_k = 90,
     .d = 8,
     .d_v = 5,
     .heads_q = 4,
     .heads_k = 2,
     .heads_v = 2,
     .bias = true,
     .one_row = true,
     .bias_gradient = true,
     .d_lse = true},
    {.name = "causal", .len_q = 144, .len_k = 144, .causal = true, .layout = Layout::kRowsFirst},
    {.name = "bottom_right", .len_q = 70, .len_k = 150, .causal = true, .bottom_right = true},
    {.name = "rows_without_keys", .len_q = 150, .len_k = 70, .causal = true, .bottom_right = true, .d_lse = true},
    {.name = "tiles_without_keys", .len_q = 400, .len_k = 60, .causal = true, .bottom_right = true},
    {.name = "window", .head_dim = 128, .len_q = 200, .len_k = 200, .causal = true, .window = 30},
    {.name = "groups", .len_q = 80, .len_k = 72, .heads_q = 4, .heads_k = 2, .heads_v = 2, .causal = true},
    {.name = "groups_that_differ", .len_q = 40, .len_k = 72, .heads_q = 4, .heads_k = 2, .mask = true},
    {.name = "odd_addresses", .len_q = 90, .len_k = 70, .bias = true, .mask = true, .layout = Layout::kOdd},
    {.name = "mask", .len_q = 128, .len_k = 144, .mask = true},
    {.name = "mask_head_dim_128", .head_dim = 128, .len_q = 128, .len_k = 256, .mask = true, .deterministic = true},
    {.name = "mask_of_one_row", .len_q = 80, .len_k = 160, .mask = true, .one_row = true},
    {.name = "bias", .len_q = 144, .len_k = 144, .bias = true, .bias_gradient = true, .d_lse = true},
    {.name = "bias_head_dim_128", .head_dim = 128, .len_q = 128, .len_k = 128, .bias = true, .bias_gradient = true},
    {.name = "bias_of_a_batch",
     .len_q = 144,
     .len_k = 200,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .batch = 3,
     .bias = true,
     .bias_gradient = true},
    {.name = "bias_of_a_batch_head_dim_128",
     .head_dim = 128,
     .len_q = 150,
     .len_k = 136,
     .batch = 2,
     .causal = true,
     .bias = true,
     .mask = true,
     .softcap = 3.0,
     .deterministic = true,
     .bias_gradient = true},
    {.name = "bias_of_a_large_batch", .len_q = 70, .len_k = 72, .batch = 9, .bias = true, .bias_gradient = true},
    {.name = "bias_of_odd_rows", .len_q = 70, .len_k = 75, .batch = 2, .bias = true, .bias_gradient = true},
    {.name = "bias_of_one_row",
     .len_q = 144,
     .len_k = 136,
     .heads_q = 2,
     .heads_k = 2,
     .heads_v = 2,
     .bias = true,
     .one_row = true,
     .bias_gradient = true},
    {.name = "float_bias", .len_q = 130, .len_k = 128, .causal = true, .bias = true, .mask = true, .float_bias = true},
    {.name = "large_bias",
     .len_q = 80,
     .len_k = 80,
     .bias = true,
     .bias_gradient = true,
     .bias_offset = -40000.f,
     .rounding = 2e-3},
    {.name = "lowest_bias_of_one_key", .len_q = 150, .len_k = 1, .bias = true, .float_bias = true, .lowest_bias = true},
    {.name = "lowest_bias_and_a_window_of_one_key",
     .head_dim = 128,
     .len_q = 100,
     .len_k = 130,
     .causal = true,
     .window = 0,
     .bias = true,
     .one_row = true,
     .d_lse = true,
     .lowest_bias = true,
     .rounding = 1e-3},
    {.name = "lowest_bias_and_a_softcap",
     .len_q = 70,
     .len_k = 1,
     .bias = true,
     .float_bias = true,
     .softcap = 15.0,
     .lowest_bias = true},
    {.name = "few_keys", .len_q = 80, .len_k = 3, .bias = true, .bias_gradient = true, .d_lse = true},
    {.name = "one_key", .len_q = 70, .len_k = 1, .d_lse = true},
    {.name = "slopes",
     .len_q = 100,
     .len_k = 130,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .alibi = true,
     .slope_gradient = true},
    {.name = "softcap", .len_q = 130, .len_k = 70, .softcap = 2.0},
    {.name = "softcap_of_many_tiles", .head_dim = 128, .len_q = 70, .len_k = 350, .softcap = 5.0},
    {.name = "dropout", .len_q = 130, .len_k = 140, .dropout = 0.25},
    {.name = "dropout_head_dim_128",
     .head_dim = 128,
     .len_q = 200,
     .len_k = 140,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .dropout = 0.5},
    {.name = "dropout_head_dim_32", .head_dim = 32, .len_q = 270, .len_k = 16, .d = 16, .d_v = 16, .dropout = 0.5},
    {.name = "dropout_odd_addresses", .len_q = 90, .len_k = 200, .dropout = 0.25, .layout = Layout::kOdd},
    {.name = "dropout_small_tiles", .len_q = 70, .len_k = 40, .dropout = 0.3, .shared_limit = 64 * 1024},
    {.name = "dropout_of_one_key", .len_q = 70, .len_k = 1, .dropout = 0.3, .d_lse = true},
    {.name = "dropout_of_none", .len_q = 40, .len_k = 40, .dropout = 1e-6},
    {.name = "dropout_of_all", .len_q = 40, .len_k = 40, .dropout = 1.0},
    {.name = "dropout_that_rounds_to_all", .len_q = 300, .len_k = 300, .bias = true, .dropout = 1 - 1e-6},
    {.name = "everything",
     .len_q = 144,
     .len_k = 160,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .bias = true,
     .mask = true,
     .alibi = true,
     .softcap = 3.0,
     .dropout = 0.1,
     .bias_gradient = true,
     .slope_gradient = true,
     .d_lse = true},
    {.name = "deterministic", .len_q = 150, .len_k = 300, .causal = true, .deterministic = true},
    {.name = "small_tiles", .len_q = 100, .len_k = 70, .causal = true, .bias = true, .shared_limit = 99 * 1024},
    {.name = "one_tile",
     .head_dim = 32,
     .len_q = 49,
     .len_k = 49,
     .heads_q = 3,
     .heads_k = 3,
     .heads_v = 3,
     .bias = true,
     .bias_gradient = true},
};

INSTANTIATE_TEST_SUITE_P(All, Sm80Kernels, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flash_ext
