// The kernels of csrc/sm90, run on the host by emulator.h as sm80_kernels_test.cpp runs those of sm80: TMA, mbarriers
// and asynchronous products included. The whole backend is here, so that its own plans choose tiles, orders and
// kernels.
#include "attention_call.h"
#include "cuda/combine.cu"
#include "cuda/tensor_map.cpp"
#include "sm90/backend.cpp"
#include "sm90/bwd_instance.cuh"
#include "sm90/run_fwd.cuh"

namespace flash_ext {

// What sm90 leaves to sm80 is not tested here.
extern const Backend sm80_backend = {.name = "sm80", .device = DeviceType::kCuda};

namespace {

class Sm90Kernels : public testing::TestWithParam<Case> {};

TEST_P(Sm90Kernels, Bf16) { check<__nv_bfloat16>(sm90_backend, GetParam()); }
TEST_P(Sm90Kernels, Fp16) { check<__half>(sm90_backend, GetParam()); }

const Case kCases[] = {
    {.name = "plain", .len_q = 160, .len_k = 330},
    {.name = "plain_many", .len_q = 200, .len_k = 200, .heads_q = 3, .heads_k = 3, .heads_v = 3, .multiprocessors = 4},
    {.name = "head_dim_128", .head_dim = 128, .len_q = 300, .len_k = 260},
    {.name = "head_dim_192", .head_dim = 192, .len_q = 130, .len_k = 150},
    {.name = "fewer_columns", .head_dim = 128, .len_q = 100, .len_k = 130, .d = 72, .d_v = 104},
    {.name = "causal", .len_q = 300, .len_k = 300, .causal = true, .layout = Layout::kRowsFirst},
    {.name = "causal_128", .head_dim = 128, .len_q = 300, .len_k = 300, .causal = true, .multiprocessors = 3},
    {.name = "causal_192", .head_dim = 192, .len_q = 140, .len_k = 140, .causal = true},
    {.name = "bottom_right", .len_q = 70, .len_k = 250, .causal = true, .bottom_right = true, .d_lse = true},
    {.name = "rows_without_keys", .len_q = 250, .len_k = 70, .causal = true, .bottom_right = true},
    {.name = "window", .head_dim = 128, .len_q = 400, .len_k = 400, .causal = true, .window = 60},
    {.name = "groups", .len_q = 140, .len_k = 200, .heads_q = 4, .heads_k = 2, .heads_v = 2, .causal = true},
    {.name = "few_queries", .len_q = 4, .len_k = 600, .heads_q = 4, .heads_k = 1, .heads_v = 1, .multiprocessors = 16},
    {.name = "split_keys", .head_dim = 128, .len_q = 60, .len_k = 900, .multiprocessors = 12},
    {.name = "mask", .len_q = 130, .len_k = 144, .mask = true},
    {.name = "mask_128",
     .head_dim = 128,
     .len_q = 144,
     .len_k = 256,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .mask = true},
    {.name = "mask_of_one_row", .len_q = 80, .len_k = 160, .mask = true, .one_row = true},
    {.name = "bias",
     .len_q = 144,
     .len_k = 144,
     .heads_q = 2,
     .heads_k = 2,
     .heads_v = 2,
     .bias = true,
     .bias_gradient = true,
     .d_lse = true},
    {.name = "bias_128",
     .head_dim = 128,
     .len_q = 160,
     .len_k = 136,
     .causal = true,
     .bias = true,
     .bias_gradient = true},
    {.name = "bias_of_one_row", .len_q = 144, .len_k = 136, .bias = true, .one_row = true, .bias_gradient = true},
    {.name = "float_bias", .len_q = 130, .len_k = 128, .bias = true, .mask = true, .float_bias = true},
    {.name = "slopes",
     .len_q = 200,
     .len_k = 200,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .alibi = true},
    {.name = "dropout", .len_q = 130, .len_k = 140, .dropout = 0.25},
    {.name = "softcap",
     .head_dim = 128,
     .len_q = 130,
     .len_k = 260,
     .d = 72,
     .d_v = 104,
     .softcap = 2.0,
     .d_lse = true},
    {.name = "softcap_64",
     .len_q = 200,
     .len_k = 180,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .softcap = 5.0},
    {.name = "softcap_128",
     .head_dim = 128,
     .len_q = 200,
     .len_k = 180,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .softcap = 20.0},
    {.name = "softcap_192", .head_dim = 192, .len_q = 130, .len_k = 150, .causal = true, .softcap = 30.0},
    {.name = "everything",
     .head_dim = 128,
     .len_q = 144,
     .len_k = 160,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .bias = true,
     .mask = true,
     .alibi = true,
     .dropout = 0.1,
     .d_lse = true},
    {.name = "deterministic",
     .len_q = 300,
     .len_k = 300,
     .heads_q = 2,
     .heads_k = 2,
     .heads_v = 2,
     .causal = true,
     .deterministic = true,
     .multiprocessors = 2},
    {.name = "deterministic_128",
     .head_dim = 128,
     .len_q = 200,
     .len_k = 390,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .deterministic = true,
     .multiprocessors = 3},
};

INSTANTIATE_TEST_SUITE_P(All, Sm90Kernels, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flash_ext
