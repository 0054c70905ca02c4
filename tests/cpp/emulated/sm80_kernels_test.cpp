// The kernels of csrc/kernels/sm80, run on the host by emulator.h: forward and backward of small problems with every
// feature, against the formulas in double. What must hold: every element of every result is written and near the
// reference, nothing beside it is touched, and deterministic gradients do not depend on the order in which threads run.
#include "attention_call.h"
#include "document_cases.h"
#include "kernels/sm80/rows.cpp"
#include "kernels/stages/rows.cu"
#include "kernels/stages/sequences.cu"
#include "sink_cases.h"
#include "sm80_cases.h"
#include "sm80_hidden_cases.h"
#include "sm80_large_tile_cases.h"
#include "sm80_packed_cases.h"

namespace flash_ext {
namespace {

const Rows kTable(sm80::kernels());

template <class Element>
void check_element(const Case& c) {
  check<StorageOf<Element>>(kTable, c);
}

class Sm80Kernels : public testing::TestWithParam<Case> {};

TEST_P(Sm80Kernels, Bf16) { check_element<Bf16>(GetParam()); }
TEST_P(Sm80Kernels, Fp16) { check_element<Fp16>(GetParam()); }
TEST_P(Sm80Kernels, Fp32) { check_element<Fp32>(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Far, Sm80Kernels, testing::ValuesIn(kFarCases),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(All, Sm80Kernels, testing::ValuesIn(kCases), [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Documents, Sm80Kernels, testing::ValuesIn(kDocumentCases),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Sinks, Sm80Kernels, testing::ValuesIn(kSinkCases),
                         [](const auto& info) { return info.param.name; });

// The kernels of large tiles alone.
const Rows& large_tile_table() {
  static const std::vector<Kernel> rows = [] {
    std::vector<Kernel> found;
    for (const Kernel& kernel : sm80::kernels()) {
      if (std::string_view(kernel.name).find("one_tile_144") != std::string_view::npos) found.push_back(kernel);
    }
    return found;
  }();
  static const Rows table(rows);
  return table;
}

class Sm80LargeTile : public testing::TestWithParam<Case> {};

TEST_P(Sm80LargeTile, Bf16) { check<__nv_bfloat16>(large_tile_table(), GetParam()); }
TEST_P(Sm80LargeTile, Fp16) { check<__half>(large_tile_table(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Sm80LargeTile, testing::ValuesIn(kLargeTileCases),
                         [](const auto& info) { return info.param.name; });

// What is infinite or NaN shows where the formulas have it. A probability that is NaN is so, too, where it is dropped,
// and so is a dropped product with an infinity.
const Case kSpecialCases[] = {
    {.name = "query", .len_q = 70, .len_k = 90, .special = Operand::kQuery, .special_row = 3},
    {.name = "query_beside_renorm_rows",
     .len_q = 70,
     .len_k = 90,
     .scale = 0x1p28,
     .integers = true,
     .special = Operand::kQuery,
     .special_value = INFINITY,
     .special_row = 3},
    {.name = "infinite_query",
     .len_q = 70,
     .len_k = 90,
     .special = Operand::kQuery,
     .special_value = INFINITY,
     .special_row = 3},
    {.name = "infinite_key",
     .len_q = 70,
     .len_k = 90,
     .causal = true,
     .special = Operand::kKey,
     .special_value = INFINITY,
     .special_row = 20},
    {.name = "infinite_key_of_few",
     .len_q = 70,
     .len_k = 2,
     .special = Operand::kKey,
     .special_value = -INFINITY,
     .special_row = 1},
    {.name = "infinite_key_and_a_softcap",
     .head_dim = 128,
     .len_q = 70,
     .len_k = 90,
     .alibi = true,
     .softcap = 5.0,
     .special = Operand::kKey,
     .special_value = INFINITY,
     .special_row = 20},
    {.name = "infinite_value",
     .len_q = 70,
     .len_k = 90,
     .special = Operand::kValue,
     .special_value = INFINITY,
     .special_row = 40},
    {.name = "infinite_value_and_a_bias",
     .len_q = 70,
     .len_k = 90,
     .heads_q = 2,
     .heads_k = 1,
     .heads_v = 1,
     .bias = true,
     .bias_gradient = true,
     .special = Operand::kValue,
     .special_value = -INFINITY,
     .special_row = 40,
     .whole_row = true},
    {.name = "infinite_value_and_everything",
     .head_dim = 128,
     .len_q = 130,
     .len_k = 140,
     .d = 72,
     .d_v = 40,
     .bias = true,
     .softcap = 3.0,
     .dropout = 0.2,
     .special = Operand::kValue,
     .special_value = INFINITY,
     .special_row = 40},
    {.name = "value", .len_q = 70, .len_k = 90, .special = Operand::kValue, .special_row = 40},
    {.name = "few_columns_and_an_infinite_key",
     .len_q = 70,
     .len_k = 90,
     .d = 8,
     .d_v = 8,
     .special = Operand::kKey,
     .special_value = INFINITY,
     .special_row = 40},
    {.name = "value_of_one_key", .len_q = 70, .len_k = 1, .special = Operand::kValue},
    {.name = "infinite_value_of_one_key",
     .len_q = 70,
     .len_k = 1,
     .bias = true,
     .bias_gradient = true,
     .special = Operand::kValue,
     .special_value = INFINITY},
    {.name = "infinite_value_of_one_dropped_key",
     .len_q = 70,
     .len_k = 1,
     .dropout = 0.5,
     .d_lse = true,
     .special = Operand::kValue,
     .special_value = INFINITY,
     .whole_row = true},
    {.name = "value_of_few_dropped_keys",
     .len_q = 140,
     .len_k = 3,
     .bias = true,
     .dropout = 0.9,
     .bias_gradient = true,
     .special = Operand::kValue,
     .special_row = 1,
     .whole_row = true},
    {.name = "infinite_value_of_few_keys_all_dropped",
     .len_q = 140,
     .len_k = 3,
     .dropout = 1.0,
     .special = Operand::kValue,
     .special_value = -INFINITY,
     .special_row = 1},
    {.name = "grad_of_few_keys_all_dropped", .len_q = 70, .len_k = 3, .dropout = 1.0, .special = Operand::kGrad},
    {.name = "query_and_dropout", .len_q = 70, .len_k = 90, .dropout = 0.9, .special = Operand::kQuery},
    {.name = "query_and_dropout_head_dim_128",
     .head_dim = 128,
     .len_q = 70,
     .len_k = 90,
     .dropout = 0.5,
     .special = Operand::kQuery,
     .special_value = INFINITY,
     .whole_row = true},
    {.name = "query_and_dropout_of_all",
     .len_q = 70,
     .len_k = 90,
     .dropout = 1.0,
     .special = Operand::kQuery,
     .special_row = 66},
    {.name = "bias_and_dropout",
     .len_q = 130,
     .len_k = 140,
     .causal = true,
     .bias = true,
     .dropout = 0.5,
     .bias_gradient = true,
     .special = Operand::kBias,
     .special_value = INFINITY,
     .special_row = 70,
     .whole_row = true},
    {.name = "key_and_dropout_small_tiles",
     .len_q = 70,
     .len_k = 40,
     .mask = true,
     .dropout = 0.3,
     .special = Operand::kKey,
     .special_row = 7,
     .shared_limit = 64 * 1024},
    {.name = "grad_and_dropout",
     .len_q = 70,
     .len_k = 90,
     .bias = true,
     .dropout = 0.5,
     .bias_gradient = true,
     .special = Operand::kGrad,
     .special_value = INFINITY,
     .special_row = 20},
};

INSTANTIATE_TEST_SUITE_P(Special, Sm80Kernels, testing::ValuesIn(kSpecialCases),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Hidden, Sm80Kernels, testing::ValuesIn(kHiddenCases),
                         [](const auto& info) { return info.param.name; });

// ---- packed sequences
// ----------------------------------------------------------------------------------------------

class Sm80Packed : public testing::TestWithParam<PackedCase> {};

TEST_P(Sm80Packed, Bf16) { check_packed<StorageOf<Bf16>>(kTable, GetParam()); }
TEST_P(Sm80Packed, Fp16) { check_packed<StorageOf<Fp16>>(kTable, GetParam()); }
TEST_P(Sm80Packed, Fp32) { check_packed<StorageOf<Fp32>>(kTable, GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Sm80Packed, testing::ValuesIn(kPackedCases),
                         [](const auto& info) { return info.param.options.name; });

// Whatever the numbers in memory are, a call ends and writes nothing beside its results.
TEST(Sm80PackedGarbage, EndsWhateverIsInMemory) {
  std::mt19937 random(11);
  for (int round = 0; round < 6; ++round) {
    PackedCall<StorageOf<Bf16>> call({{.name = "garbage", .causal = true, .deterministic = true}, kShort});
    for (std::vector<int32_t>* cu : {&call.cu_q(), &call.cu_k()}) {
      for (int32_t& x : *cu) x = static_cast<int32_t>(random() % 400) - 100;
      if (round % 2 == 0) std::sort(cu->begin(), cu->end());
    }
    call.run_garbage(kTable);
  }
}

}  // namespace
}  // namespace flash_ext
