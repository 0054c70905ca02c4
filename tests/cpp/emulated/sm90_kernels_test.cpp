// The kernels of csrc/kernels/sm90, run on the host by emulator.h as sm80_kernels_test.cpp runs those of sm80: TMA,
// mbarriers and asynchronous products included. The rows of the backend are here, so that its own plans choose tiles,
// orders and kernels; those are units of their own (CMakeLists.txt).
#include "attention_call.h"
#include "document_cases.h"
#include "gpu/host/tensor_map.cpp"
#include "kernels/sm90/rows.cpp"
#include "kernels/stages/combine.cu"
#include "rising_cases.h"
#include "sink_cases.h"
#include "sm90_large_head_dim_cases.h"
#include "sm90_narrow_cases.h"
#include "sm90_packed.h"
#include "sm90_two_pass_cases.h"

namespace flash_ext {
namespace {

const Rows kTable(sm90::kernels());

class Sm90Kernels : public testing::TestWithParam<Case> {};

TEST_P(Sm90Kernels, Bf16) { check<__nv_bfloat16>(kTable, GetParam()); }
// Beyond the range of gradients in fp16.
TEST(Sm90LargeScores, Bf16) {
  for (const int head_dim : {64, 128, 192}) {
    const Case exact{.name = "exact",
                     .head_dim = head_dim,
                     .len_q = 140,
                     .len_k = 170,
                     .causal = true,
                     .d_lse = true,
                     .scale = 0x1p24,
                     .integers = true};
    check<__nv_bfloat16>(kTable, exact);
    Case equal = exact;
    equal.integers = false;
    equal.equal = 4096;
    check<__nv_bfloat16>(kTable, equal);
  }
  const Case beside_a_lowest_one{.name = "beside_a_lowest_one",
                                 .len_q = 160,
                                 .len_k = 144,
                                 .bias = true,
                                 .float_bias = true,
                                 .one_row = true,
                                 .d_lse = true,
                                 .lowest = 5,
                                 .scale = 128,
                                 .integers = true};
  check<__nv_bfloat16>(kTable, beside_a_lowest_one);
  // What rounding may do to a product is more than the softcap leaves of it.
  const Case capped{.name = "capped",
                    .len_q = 130,
                    .len_k = 144,
                    .bias = true,
                    .softcap = 30,
                    .bias_offset = -10000,
                    .scale = 0x1p20};
  check<__nv_bfloat16>(kTable, capped);
}
TEST_P(Sm90Kernels, Fp16) { check<__half>(kTable, GetParam()); }

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
    {.name = "equal", .len_q = 160, .len_k = 330, .d_lse = true, .scale = 1, .equal = 256},
    {.name = "equal_causal_128",
     .head_dim = 128,
     .len_q = 200,
     .len_k = 200,
     .causal = true,
     .deterministic = true,
     .d_lse = true,
     .scale = 1,
     .equal = 256},
    {.name = "equal_192",
     .head_dim = 192,
     .len_q = 150,
     .len_k = 150,
     .causal = true,
     .d_lse = true,
     .scale = 1,
     .equal = 256},
    {.name = "equal_split", .len_q = 20, .len_k = 900, .d_lse = true, .scale = 1, .equal = 256, .multiprocessors = 12},
    {.name = "equal_dropout", .len_q = 100, .len_k = 150, .dropout = 0.2, .d_lse = true, .scale = 1, .equal = 256},
    {.name = "equal_mask", .len_q = 130, .len_k = 144, .mask = true, .d_lse = true, .scale = 1, .equal = 256},
    {.name = "lowest_bias", .len_q = 144, .len_k = 144, .bias = true, .bias_gradient = true, .lowest_bias = true},
    {.name = "lowest_float_bias", .len_q = 144, .len_k = 144, .bias = true, .float_bias = true, .lowest_bias = true},
    {.name = "integers", .len_q = 160, .len_k = 330, .heads_q = 2, .causal = true, .scale = 16, .integers = true},
    {.name = "negative_slopes", .len_q = 100, .len_k = 200, .causal = true, .alibi = true, .slope = -3},
    {.name = "integers_of_40_columns", .len_q = 70, .len_k = 90, .d = 40, .d_lse = true, .scale = 16, .integers = true},
    {.name = "integers_of_8_columns", .len_q = 70, .len_k = 90, .d = 8, .d_lse = true, .scale = 16, .integers = true},
    {.name = "integers_128", .head_dim = 128, .len_q = 180, .len_k = 130, .d_lse = true, .scale = 16, .integers = true},
    {.name = "integers_192", .head_dim = 192, .len_q = 130, .len_k = 130, .d_lse = true, .scale = 16, .integers = true},
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
    {.name = "bias_of_one_query",
     .len_q = 1,
     .len_k = 257,
     .d = 48,
     .d_v = 48,
     .heads_q = 15,
     .heads_k = 3,
     .heads_v = 3,
     .bias = true,
     .one_head = true,
     .bias_gradient = true},
    {.name = "bias_of_one_query_of_a_batch",
     .head_dim = 128,
     .len_q = 1,
     .len_k = 139,
     .heads_q = 2,
     .heads_k = 2,
     .heads_v = 2,
     .batch = 5,
     .bias = true,
     .bias_gradient = true},
    {.name = "bias_of_odd_rows_and_heads",
     .len_q = 130,
     .len_k = 147,
     .heads_q = 3,
     .heads_k = 1,
     .heads_v = 1,
     .bias = true,
     .one_row = true,
     .one_head = true,
     .bias_gradient = true},
    {.name = "bias_of_one_row_odd",
     .len_q = 75,
     .len_k = 133,
     .heads_q = 2,
     .batch = 2,
     .bias = true,
     .one_row = true,
     .bias_gradient = true},
    {.name = "mask_of_odd_rows", .len_q = 67, .len_k = 201, .heads_q = 2, .mask = true, .layout = Layout::kRowsFirst},
    {.name = "mask_of_one_odd_row", .len_q = 67, .len_k = 203, .heads_q = 2, .mask = true, .one_row = true},
    {.name = "float_bias_of_one_odd_row",
     .head_dim = 128,
     .len_q = 67,
     .len_k = 203,
     .heads_q = 2,
     .bias = true,
     .mask = true,
     .float_bias = true,
     .one_row = true},
    {.name = "bias_of_odd_rows_192", .head_dim = 192, .len_q = 70, .len_k = 131, .d = 136, .d_v = 184, .bias = true},
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

INSTANTIATE_TEST_SUITE_P(Documents, Sm90Kernels, testing::ValuesIn(kDocumentCases),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Sinks, Sm90Kernels, testing::ValuesIn(kSinkCases),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Rising, Sm90Kernels, testing::ValuesIn(kRisingCases),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(LargeHeadDims, Sm90Kernels, testing::ValuesIn(kLargeHeadDims),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(NarrowValues, Sm90Kernels, testing::ValuesIn(kNarrowValues),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(TwoPass, Sm90Kernels, testing::ValuesIn(kTwoPassCases),
                         [](const auto& info) { return info.param.name; });

// As in sm80_kernels_test.cpp.
const Case kSpecialCases[] = {
    {.name = "infinite_query",
     .len_q = 130,
     .len_k = 140,
     .special = Operand::kQuery,
     .special_value = INFINITY,
     .special_row = 70},
    {.name = "infinite_key",
     .head_dim = 128,
     .len_q = 130,
     .len_k = 140,
     .causal = true,
     .special = Operand::kKey,
     .special_value = INFINITY,
     .special_row = 20},
    {.name = "infinite_value",
     .len_q = 130,
     .len_k = 136,
     .bias = true,
     .bias_gradient = true,
     .special = Operand::kValue,
     .special_value = INFINITY,
     .special_row = 40},
    {.name = "query_of_split_keys",
     .head_dim = 128,
     .len_q = 60,
     .len_k = 900,
     .special = Operand::kQuery,
     .multiprocessors = 12},
    {.name = "query_of_few",
     .len_q = 4,
     .len_k = 600,
     .heads_q = 4,
     .heads_k = 1,
     .heads_v = 1,
     .special = Operand::kQuery,
     .special_row = 2,
     .multiprocessors = 16},
    {.name = "query_and_dropout", .len_q = 130, .len_k = 140, .dropout = 0.9, .special = Operand::kQuery},
    {.name = "infinite_query_and_dropout",
     .head_dim = 128,
     .len_q = 130,
     .len_k = 260,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .causal = true,
     .bottom_right = true,
     .dropout = 0.5,
     .special = Operand::kQuery,
     .special_value = -INFINITY,
     .special_row = 70},
    {.name = "bias_and_dropout",
     .len_q = 144,
     .len_k = 144,
     .bias = true,
     .dropout = 0.5,
     .special = Operand::kBias,
     .special_value = INFINITY,
     .special_row = 100,
     .whole_row = true},
    {.name = "key_and_dropout",
     .head_dim = 128,
     .len_q = 200,
     .len_k = 144,
     .mask = true,
     .dropout = 0.9,
     .special = Operand::kKey,
     .special_row = 20},
    {.name = "infinite_value_and_dropout",
     .len_q = 130,
     .len_k = 140,
     .dropout = 0.5,
     .special = Operand::kValue,
     .special_value = INFINITY,
     .special_row = 40},
    {.name = "grad_and_dropout", .len_q = 130, .len_k = 140, .dropout = 0.5, .special = Operand::kGrad},
};

INSTANTIATE_TEST_SUITE_P(Special, Sm90Kernels, testing::ValuesIn(kSpecialCases),
                         [](const auto& info) { return info.param.name; });

// What is NaN or infinite in a row stays away from the keys that it does not see.
template <class T>
void check_hidden(Case c) {
  struct Special {
    Operand operand;
    float value;
    int64_t row;
  };
  for (const Special x :
       {Special{Operand::kGrad, NAN, 70}, Special{Operand::kGrad, INFINITY, 129}, Special{Operand::kKey, INFINITY, 60},
        Special{Operand::kKey, NAN, 139}, Special{Operand::kValue, INFINITY, 20}, Special{Operand::kQuery, NAN, 70}}) {
    SCOPED_TRACE(testing::Message() << c.name << ", head dim " << c.head_dim << ", operand "
                                    << static_cast<int>(x.operand) << ", row " << x.row);
    c.special = x.operand;
    c.special_value = x.value;
    c.special_row = x.row;
    check<T>(kTable, c);
  }
}

template <class T>
class Sm90HiddenPairs : public testing::Test {};
using Elements = testing::Types<__nv_bfloat16, __half>;
TYPED_TEST_SUITE(Sm90HiddenPairs, Elements);

// Keys from 130 on are seen by no query, the last tile of queries has some beyond the sequence.
constexpr Case kWindow{.name = "window", .len_q = 130, .len_k = 144, .causal = true, .window = 40};

TYPED_TEST(Sm90HiddenPairs, OfABand) {
  for (const int head_dim : {64, 128, 192}) {
    Case c = kWindow;
    c.head_dim = head_dim;
    check_hidden<TypeParam>(c);
    c.name = "softcap";
    c.softcap = 5;
    check_hidden<TypeParam>(c);
  }
}

TYPED_TEST(Sm90HiddenPairs, OfABandInOneOrder) {
  for (const int head_dim : {64, 128}) {
    Case c = kWindow;
    c.head_dim = head_dim;
    c.deterministic = true;
    check_hidden<TypeParam>(c);
  }
}

TYPED_TEST(Sm90HiddenPairs, OfAMask) {
  for (const int head_dim : {64, 128}) {
    Case c{.name = "mask", .head_dim = head_dim, .len_q = 130, .len_k = 144, .mask = true};
    check_hidden<TypeParam>(c);
    c.name = "mask, dropout";
    c.causal = true;
    c.dropout = 0.3;
    check_hidden<TypeParam>(c);
    c.name = "mask, dropout, in one order";
    c.deterministic = true;
    check_hidden<TypeParam>(c);
  }
}

TYPED_TEST(Sm90HiddenPairs, OfABias) {
  for (const int head_dim : {64, 128}) {
    Case c = kWindow;
    c.head_dim = head_dim;
    c.bias = c.bias_gradient = true;
    check_hidden<TypeParam>(c);
    c.name = "bias of one row";
    c.one_row = true;
    check_hidden<TypeParam>(c);
  }
}

TYPED_TEST(Sm90HiddenPairs, OfARowThatABiasEmpties) {
  for (const int head_dim : {64, 128}) {
    Case c{.name = "bias", .head_dim = head_dim, .len_q = 130, .len_k = 144, .bias = true, .emptied = 70};
    c.bias_gradient = true;
    check_hidden<TypeParam>(c);
    c.name = "bias, mask, dropout";
    c.bias_gradient = false;
    c.mask = true;
    c.dropout = 0.3;
    check_hidden<TypeParam>(c);
    c.name = "bias, mask, dropout, in one order";
    c.deterministic = true;
    check_hidden<TypeParam>(c);
  }
}

}  // namespace
}  // namespace flash_ext
