// The decode kernel and its merge, and the kernel that appends, of csrc/kernels/decode and
// csrc/kernels/stages/append.cu: random calls against float64, with numbers that are no numbers in all rows that no
// sequence has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/decode/merge.cu"
#include "kernels/decode/run.cuh"
#include "kernels/stages/append.cu"

namespace flash_ext {
namespace decode {

std::span<const Unit> bf16_units() {
  static const Unit all[] = {unit<Traits<__nv_bfloat16, 64, kFewRows>>(DType::kBFloat16),
                             unit<Traits<__nv_bfloat16, 128, kManyRows>>(DType::kBFloat16),
                             unit<Traits<__nv_bfloat16, 256, kManyRows>>(DType::kBFloat16)};
  return all;
}
std::span<const Unit> fp16_units() { return {}; }
std::span<const Unit> fp8_units() {
  static const Unit all[] = {unit<Traits<Fp8, 64, kFewRows>>(DType::kFloat16),
                             unit<Traits<Fp8, 64, kManyRows>>(DType::kFloat16)};
  return all;
}

}  // namespace decode

namespace {

// Few multiprocessors, so that runs end anywhere; the memory of two cards, so that the ring has 2 to 4 places.
constexpr DeviceInfo kDevices[] = {{DeviceType::kCuda, 80, 3, 166912, 167936},
                                   {DeviceType::kCuda, 90, 2, 232448, 233472}};

float number(std::mt19937& random) { return std::normal_distribution<float>()(random); }
float of_e4m3(uint8_t bits) {
  const __half_raw raw = __nv_cvt_fp8_to_halfraw(bits, __NV_E4M3);
  return static_cast<float>(reinterpret_cast<const __half&>(raw));
}

struct DecodeCase {
  int queries, heads_q, heads_k, cols, page = 0;
  bool fp8 = false, slots = false, causal = true;
  int left = DecodeArgs::kMostRows, right = DecodeArgs::kMostRows;
  float softcap = 0.f;
  bool slopes = false, sinks = false, invariant = false;
  std::vector<int> lengths = {70, 0, 200, -1, 1};
};

// A cache of one kind, keys or values, and its numbers.
struct Store {
  std::vector<__nv_bfloat16> wide;
  std::vector<uint8_t> narrow;
  int64_t row_stride, slot_stride;
  int cols;

  Store(const DecodeCase& c, int slots, int rows)
      : row_stride(int64_t{c.heads_k} * c.cols), slot_stride(rows * row_stride), cols(c.cols) {
    if (c.fp8) {
      narrow.assign(slots * slot_stride, 0x7F);
    } else {
      wide.assign(slots * slot_stride, __nv_bfloat16(std::numeric_limits<float>::quiet_NaN()));
    }
  }
  int64_t at(int slot, int row, int head, int col) const {
    return slot * slot_stride + row * row_stride + int64_t{head} * cols + col;
  }
  void set(int64_t at, float x) {
    if (wide.empty()) {
      narrow[at] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    } else {
      wide[at] = __nv_bfloat16(x);
    }
  }
  double get(int64_t at) const { return wide.empty() ? of_e4m3(narrow[at]) : static_cast<float>(wide[at]); }
  CacheView view() const {
    const void* const data = wide.empty() ? static_cast<const void*>(narrow.data()) : wide.data();
    return {data, slot_stride, row_stride, cols};
  }
};

void check_decode(const DecodeCase& c, unsigned seed) {
  std::mt19937 random(seed);
  const int batch = static_cast<int>(c.lengths.size()), capacity = 256, columns = c.page > 0 ? 256 / c.page : 1;
  const int slots = c.page > 0 ? batch * columns + 1 : batch + 1, group = c.heads_q / c.heads_k;
  Store k(c, slots, c.page > 0 ? c.page : capacity), v = k;
  std::vector<int32_t> lengths(c.lengths.begin(), c.lengths.end()), table(batch * columns, -1), slot_of(batch);
  std::vector<float> k_descale, v_descale, slopes, sinks;
  for (int i = 0; i < batch * c.heads_k; ++i) {
    k_descale.push_back(0.5f + static_cast<float>(random() % 100) / 100.f);
    v_descale.push_back(0.5f + static_cast<float>(random() % 100) / 100.f);
  }
  for (int i = 0; i < c.heads_q; ++i) slopes.push_back(static_cast<float>(random() % 100) / 1000.f);
  // Among the scores, above all of them, below all of them, and none.
  constexpr float kSinks[] = {0.5f, 40.f, -60.f, -std::numeric_limits<float>::infinity()};
  for (int i = 0; i < c.heads_q; ++i) sinks.push_back(kSinks[i % 4]);
  const auto place = [&](int b, int row) -> std::pair<int, int> {
    if (c.page > 0) return {table[b * columns + row / c.page], row % c.page};
    return {slot_of[b], row};
  };
  std::vector<int> order(slots);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (int b = 0; b < batch; ++b) {
    slot_of[b] = c.slots ? order[b] : b;
    for (int row = 0; row < c.lengths[b]; ++row) {
      if (c.page > 0 && row % c.page == 0) table[b * columns + row / c.page] = order[b * columns + row / c.page];
    }
  }
  for (int b = 0; b < batch; ++b) {
    for (int row = 0; row < c.lengths[b]; ++row) {
      const auto [slot, in_slot] = place(b, row);
      for (int head = 0; head < c.heads_k; ++head) {
        for (int col = 0; col < c.cols; ++col) {
          k.set(k.at(slot, in_slot, head, col), number(random));
          v.set(v.at(slot, in_slot, head, col), number(random));
        }
      }
    }
  }
  std::vector<__nv_bfloat16> q(int64_t{batch} * c.queries * c.heads_q * c.cols), out(q.size());
  std::vector<float> lse(int64_t{batch} * c.heads_q * c.queries, 77.f);
  for (auto& x : q) x = __nv_bfloat16(number(random));

  DecodeArgs args;
  args.fp8 = c.fp8;
  args.batch = batch;
  args.len_q = c.queries;
  args.heads_q = c.heads_q;
  args.heads_k = c.heads_k;
  args.head_dim = c.cols;
  args.capacity = capacity;
  args.slots = slots;
  args.page_rows = c.page;
  args.scale = 0.3f;
  args.softcap = c.softcap;
  args.left = c.left;
  args.right = c.causal ? std::min(c.right, 0) : c.right;
  args.q = {q.data(), int64_t{c.queries} * c.heads_q * c.cols, int64_t{c.heads_q} * c.cols, c.cols};
  args.k = k.view();
  args.v = v.view();
  args.lengths = lengths.data();
  if (c.slots) args.slot_of = slot_of.data();
  if (c.page > 0) args.table = table.data();
  args.table_stride = columns;
  if (c.fp8) args.k_descale = {k_descale.data(), c.heads_k, 1};
  if (c.fp8) args.v_descale = {v_descale.data(), c.heads_k, 1};
  if (c.slopes) args.alibi = {slopes.data(), 0, 1};
  if (c.sinks) args.sinks = {sinks.data(), 0, 1};
  args.out = out.data();
  args.lse = lse.data();
  const DecodePlan plan = plan_decode(args, kDevices[seed % 2], c.invariant);
  ASSERT_TRUE(plan.runs);
  std::vector<float4> scratch(plan.scratch_bytes / 16 + 1, make_float4(NAN, NAN, NAN, NAN));
  run_decode(args, plan, scratch.data());

  for (int b = 0; b < batch; ++b) {
    const int rows = std::max(0, c.lengths[b]);
    for (int i = 0; i < c.queries; ++i) {
      for (int head = 0; head < c.heads_q; ++head) {
        const int head_k = head / group, at_scale = b * c.heads_k + head_k, position = rows - c.queries + i;
        const int64_t row_q = ((int64_t{b} * c.queries + i) * c.heads_q + head) * c.cols;
        std::vector<double> scores(rows, -std::numeric_limits<double>::infinity());
        double most = -std::numeric_limits<double>::infinity(), sum = 0.0;
        for (int j = 0; j < rows; ++j) {
          if (j - position > args.right || position - j > args.left) continue;
          const auto [slot, in_slot] = place(b, j);
          double s = 0.0;
          for (int col = 0; col < c.cols; ++col) {
            s += static_cast<float>(q[row_q + col]) * k.get(k.at(slot, in_slot, head_k, col));
          }
          s *= 0.3f * (c.fp8 ? k_descale[at_scale] : 1.f);
          if (c.softcap > 0.f) s = c.softcap * std::tanh(s / c.softcap);
          if (c.slopes) s -= slopes[head] * std::abs(position - j);
          scores[j] = s;
          most = std::max(most, s);
        }
        const double sink = c.sinks ? sinks[head] : -std::numeric_limits<double>::infinity();
        most = std::max(most, sink);
        if (!std::isinf(sink)) sum = std::exp(sink - most);
        std::vector<double> sums(c.cols, 0.0);
        for (int j = 0; j < rows; ++j) {
          if (std::isinf(scores[j])) continue;
          const auto [slot, in_slot] = place(b, j);
          const double p = std::exp(scores[j] - most);
          sum += p;
          for (int col = 0; col < c.cols; ++col) sums[col] += p * v.get(v.at(slot, in_slot, head_k, col));
        }
        const double truth_lse = sum > 0.0 ? most + std::log(sum) : most;
        const float got_lse = lse[(int64_t{b} * c.heads_q + head) * c.queries + i];
        if (sum > 0.0) {
          ASSERT_NEAR(got_lse, truth_lse, 1e-4 * (1.0 + std::abs(truth_lse))) << "row " << b << " " << i << " " << head;
        } else {
          ASSERT_EQ(got_lse, -std::numeric_limits<float>::infinity()) << "row " << b << " " << i << " " << head;
        }
        for (int col = 0; col < c.cols; ++col) {
          const double truth = sum > 0.0 ? sums[col] / sum * (c.fp8 ? v_descale[at_scale] : 1.f) : 0.0;
          ASSERT_NEAR(static_cast<float>(out[row_q + col]), truth, 0.03) << b << " " << i << " " << head << " " << col;
        }
      }
    }
  }
}

TEST(DecodeKernels, SlotsAndPages) {
  check_decode({.queries = 1, .heads_q = 4, .heads_k = 2, .cols = 64}, 1);
  check_decode({.queries = 2, .heads_q = 6, .heads_k = 2, .cols = 64, .slots = true}, 2);
  for (const int page : {1, 16, 64}) {
    check_decode({.queries = 3, .heads_q = 4, .heads_k = 2, .cols = 64, .page = page}, page == 16 ? 3 : 12);
  }
}

TEST(DecodeKernels, ManyRows) {
  check_decode({.queries = 9, .heads_q = 8, .heads_k = 2, .cols = 128}, 4);
  check_decode({.queries = 21, .heads_q = 4, .heads_k = 1, .cols = 128, .page = 16, .lengths = {40, 256}}, 5);
}

TEST(DecodeKernels, WideHeadsFitEitherCard) {  // what is merged lies where Q lay
  for (const unsigned seed : {16u, 17u}) {
    check_decode({.queries = 9, .heads_q = 2, .heads_k = 1, .cols = 256, .lengths = {40, 100}}, seed);
  }
}

TEST(DecodeKernels, Fp8) {
  check_decode({.queries = 1, .heads_q = 4, .heads_k = 2, .cols = 64, .fp8 = true}, 6);
  check_decode({.queries = 9, .heads_q = 4, .heads_k = 2, .cols = 64, .page = 64, .fp8 = true}, 7);
}

TEST(DecodeKernels, Sinks) {  // joined where one block has all of a row, and where parts are merged
  check_decode({.queries = 2, .heads_q = 4, .heads_k = 2, .cols = 64, .sinks = true}, 18);
  check_decode({.queries = 9, .heads_q = 8, .heads_k = 2, .cols = 128, .sinks = true}, 19);
  check_decode({.queries = 1, .heads_q = 4, .heads_k = 1, .cols = 64, .fp8 = true, .sinks = true}, 20);
  check_decode({.queries = 3, .heads_q = 4, .heads_k = 2, .cols = 64, .sinks = true, .invariant = true}, 21);
}

TEST(DecodeKernels, Scores) {
  check_decode({.queries = 3, .heads_q = 4, .heads_k = 2, .cols = 64, .causal = false, .slopes = true}, 8);
  check_decode({.queries = 4, .heads_q = 4, .heads_k = 2, .cols = 64, .causal = false, .left = 20, .right = 1}, 9);
  check_decode({.queries = 3, .heads_q = 2, .heads_k = 2, .cols = 64, .left = 0, .softcap = 2.f}, 10);
}

TEST(DecodeKernels, ManySequences) {  // whose parts the kernel tells
  std::vector<int> lengths(260);
  for (size_t b = 0; b < lengths.size(); ++b) lengths[b] = b % 50 == 7 ? 250 : static_cast<int>(b % 3);
  check_decode({.queries = 1, .heads_q = 2, .heads_k = 1, .cols = 64, .lengths = lengths}, 13);
}

TEST(DecodeKernels, PartsByTheSequenceAlone) {
  check_decode({.queries = 1, .heads_q = 4, .heads_k = 2, .cols = 64, .invariant = true, .lengths = {256, 5, 0}}, 11);
  check_decode({.queries = 5, .heads_q = 4, .heads_k = 1, .cols = 128, .invariant = true, .lengths = {256, 0, 3}}, 14);
}

// Sequences of one query each that read the same rows of one slot or of pages of 16, as many as their lengths say.
class SameRows {
 public:
  static constexpr int kRows = 2400, kHeads = 16, kCols = 64, kPage = 16;

  SameRows() : k_({.queries = 1, .heads_q = kHeads, .heads_k = 1, .cols = kCols}, 1, kRows), v_(k_) {
    std::mt19937 random(15);
    for (int64_t at = 0; at < k_.slot_stride; ++at) {
      k_.set(at, number(random));
      v_.set(at, number(random));
    }
    for (int i = 0; i < kHeads * kCols; ++i) q_.push_back(__nv_bfloat16(number(random)));
  }

  // Bits of out and lse of each sequence, [batch][heads, cols] and behind them [heads].
  std::vector<std::vector<uint32_t>> attend(std::vector<int32_t> lengths, int capacity, bool paged,
                                            const DeviceInfo& device, bool invariant = true, int left = -1) const {
    const int batch = static_cast<int>(lengths.size()), row = kHeads * kCols;
    std::vector<int32_t> slot_of(batch, 0), table(kRows / kPage);
    std::iota(table.begin(), table.end(), 0);
    std::vector<__nv_bfloat16> out(static_cast<size_t>(batch) * row);
    std::vector<float> lse(batch * kHeads);
    DecodeArgs args;
    args.batch = batch;
    args.len_q = args.heads_k = 1;
    args.heads_q = kHeads;
    args.head_dim = kCols;
    args.capacity = paged ? kRows : capacity;
    args.slots = paged ? kRows / kPage : 1;
    args.scale = 0.2f;
    args.right = 0;
    if (left >= 0) args.left = left;
    args.q = {q_.data(), 0, 0, kCols};
    args.k = k_.view();
    args.v = v_.view();
    if (paged) {
      args.page_rows = kPage;
      args.table = table.data();
      args.k.slot_stride = args.v.slot_stride = int64_t{kPage} * kCols;
    } else {
      args.slot_of = slot_of.data();
    }
    args.lengths = lengths.data();
    args.out = out.data();
    args.lse = lse.data();
    const DecodePlan plan = plan_decode(args, device, invariant);
    EXPECT_TRUE(plan.runs);
    std::vector<float4> scratch(plan.scratch_bytes / 16 + 1, make_float4(NAN, NAN, NAN, NAN));
    run_decode(args, plan, scratch.data());
    std::vector<std::vector<uint32_t>> result(batch);
    for (int b = 0; b < batch; ++b) {
      for (int i = 0; i < row; ++i) result[b].push_back(reinterpret_cast<const uint16_t&>(out[b * row + i]));
      for (int i = 0; i < kHeads; ++i) result[b].push_back(reinterpret_cast<const uint32_t&>(lse[b * kHeads + i]));
    }
    return result;
  }

 private:
  Store k_, v_;
  std::vector<__nv_bfloat16> q_;
};

TEST(DecodeKernels, BitsFollowFromTheSequenceAlone) {
  const SameRows rows;
  const DeviceInfo &small = kDevices[0], &other = kDevices[1];
  for (const int length : {130, 257, 1100}) {
    const auto alone = rows.attend({length}, length, false, small)[0];
    EXPECT_EQ(rows.attend({3, length, 0, 700, length}, 1200, false, small)[1], alone) << length;
    EXPECT_EQ(rows.attend({3, length, 0, 700, length}, 1100, false, other)[4], alone) << length;
    EXPECT_EQ(rows.attend({length, 900}, 1200, true, other)[0], alone) << length;
    EXPECT_EQ(rows.attend({900, length}, 1200, true, small, true, 600)[1],
              rows.attend({length}, 1150, false, other, true, 600)[0])
        << length;
  }
}

TEST(DecodeKernels, BitsAreThoseOfAnyMerge) {  // of a row a block, and of many rows
  const SameRows rows;
  std::vector<int32_t> lengths(260, 1);
  lengths[3] = lengths[258] = 2400;
  const auto alone = rows.attend({2400}, 2400, false, kDevices[0])[0],
             loose = rows.attend({2400}, 2400, false, kDevices[0], false)[0];
  const auto all = rows.attend(lengths, 2400, false, kDevices[0]);
  EXPECT_EQ(all[3], alone);
  EXPECT_EQ(all[258], alone);
  EXPECT_NE(loose, rows.attend({2400, 2400}, 2400, false, kDevices[0], false)[1]);  // without, something differs
}

// Two new rows of each of four sequences, of which one has no length, one no page, and one no place for the second row.
void check_append(bool paged, bool fp8, bool interleaved) {
  constexpr int kBatch = 4, kAdded = 2, kHeads = 2, kCols = 16, kHalf = 4, kCapacity = 16, kPage = 8, kSlots = 8;
  std::mt19937 random(3);
  const DecodeCase c{.queries = 1, .heads_q = kHeads, .heads_k = kHeads, .cols = kCols, .fp8 = fp8};
  Store k(c, kSlots, paged ? kPage : kCapacity), v = k;
  const Store before = k;
  const std::vector<int32_t> lengths = {3, -1, 7, 15}, table = {5, 1, 2, 3, 4, 99, 0, 7};
  const std::vector<float> descale = {0.5f, 2.f, 0.5f, 2.f, 0.5f, 2.f, 0.5f, 2.f};
  std::vector<float> cos, sin;
  for (int i = 0; i < 10 * kHalf; ++i) {
    cos.push_back(std::cos(static_cast<float>(i)));
    sin.push_back(std::sin(static_cast<float>(i)));
  }
  std::vector<__nv_bfloat16> key, value, query, turned(kBatch * kAdded * kHeads * kCols);
  for (auto* rows : {&key, &value, &query}) {
    for (size_t i = 0; i < turned.size(); ++i) rows->push_back(__nv_bfloat16(number(random)));
  }
  const auto copy = [&](const std::vector<__nv_bfloat16>& from, void* to, int64_t slot, int64_t row) {
    return RowCopy{
        from.data(), to, {kAdded * kHeads * kCols, kHeads * kCols, kCols, 1}, {slot, row, kCols, 1}, kAdded, kHeads,
        kCols,       {}};
  };
  const auto data = [](Store& store) {
    return store.wide.empty() ? static_cast<void*>(store.narrow.data()) : store.wide.data();
  };
  AppendArgs args;
  args.fp8 = fp8;
  args.batch = kBatch;
  args.capacity = kCapacity;
  args.slots = kSlots;
  args.lengths = lengths.data();
  if (paged) args.table = table.data();
  args.table_stride = 2;
  args.page_rows = kPage;
  args.key = copy(key, data(k), k.slot_stride, k.row_stride);
  args.value = copy(value, data(v), v.slot_stride, v.row_stride);
  args.query = copy(query, turned.data(), kAdded * kHeads * kCols, kHeads * kCols);
  if (fp8) args.key.descale = args.value.descale = {descale.data(), kHeads, 1};
  args.cos = cos.data();
  args.sin = sin.data();
  args.cos_stride[0] = args.sin_stride[0] = kHalf;
  args.cos_stride[1] = args.sin_stride[1] = 1;
  args.float_angles = args.queries_move = true;
  args.positions = 10;
  args.half = kHalf;
  args.interleaved = interleaved;
  run_append(args);

  Store expected_k = before, expected_v = before;
  for (int b = 0; b < kBatch; ++b) {
    for (int i = 0; i < kAdded; ++i) {
      const int position = lengths[b] + i, angle = std::clamp(position, 0, 9) * kHalf;
      const int slot = paged ? table[b * 2 + std::min(position / kPage, 1)] : b;
      const bool has_place = lengths[b] >= 0 && position < kCapacity && slot < kSlots;
      for (int head = 0; head < kHeads; ++head) {
        const int row = ((b * kAdded + i) * kHeads + head) * kCols;
        const auto turn = [&](const std::vector<__nv_bfloat16>& from, int col) {
          const int pair = interleaved ? col / 2 : col % kHalf, first = interleaved ? 2 * pair : pair;
          const int second = interleaved ? first + 1 : pair + kHalf;
          if (col >= 2 * kHalf) return static_cast<float>(from[row + col]);
          const float x = from[row + first], y = from[row + second];
          return col == first ? x * cos[angle + pair] - y * sin[angle + pair]
                              : x * sin[angle + pair] + y * cos[angle + pair];
        };
        for (int col = 0; col < kCols; ++col) {
          EXPECT_EQ(static_cast<float>(turned[row + col]), static_cast<float>(__nv_bfloat16(turn(query, col))));
          if (!has_place) continue;
          const int64_t at = k.at(slot, paged ? position % kPage : position, head, col);
          const float scale = fp8 ? descale[b * kHeads + head] : 1.f;
          expected_k.set(at, static_cast<float>(__nv_bfloat16(turn(key, col))) / scale);
          expected_v.set(at, static_cast<float>(value[row + col]) / scale);
        }
      }
    }
  }
  const auto same = [](const Store& x, const Store& y) {
    return x.narrow == y.narrow && std::memcmp(x.wide.data(), y.wide.data(), 2 * x.wide.size()) == 0;
  };
  EXPECT_TRUE(same(k, expected_k));
  EXPECT_TRUE(same(v, expected_v));
}

TEST(DecodeKernels, NewRows) {
  for (const bool paged : {false, true}) {
    for (const bool fp8 : {false, true}) {
      check_append(paged, fp8, /*interleaved=*/paged != fp8);
    }
  }
}

}  // namespace
}  // namespace flash_ext
