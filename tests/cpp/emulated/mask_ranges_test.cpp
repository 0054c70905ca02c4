// Ranges that csrc/kernels/stages/mask_ranges.cu finds: of random masks, however they lie, against every pair. What
// must hold: no visible pair is outside, and what they keep of a mask that hides much is not more than a chunk at each
// end.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "emulator.h"
// Behind the emulator, whose shared memory and intrinsics it takes.
#include "kernels/stages/mask_ranges.cu"

namespace flash_ext {
namespace {

constexpr int64_t kChunk = 128;

struct Mask {
  const char* name;
  int64_t batch, heads, rows, cols;  // 1: one for all
  int64_t padding = 0;               // behind each row
  bool transposed = false;
  int64_t first = 0;  // element of the first
};

void PrintTo(const Mask& mask, std::ostream* out) { *out << mask.name; }

class MaskRangesOf : public testing::TestWithParam<Mask> {};

TEST_P(MaskRangesOf, AllTiles) {
  const Mask& mask = GetParam();
  constexpr int64_t kBatch = 2, kHeadsQ = 4, kHeadsK = 2, kLenQ = 330, kLenK = 700;
  ForwardArgs args;
  Problem& problem = args.problem;
  problem.batch_rank = 1;
  problem.batch = problem.batch_size[0] = kBatch;
  problem.heads_q = kHeadsQ;
  problem.heads_k = problem.heads_v = kHeadsK;
  problem.len_q = kLenQ;
  problem.len_k = kLenK;
  problem.has_mask = true;
  const int64_t pitch = (mask.transposed ? mask.rows : mask.cols) + mask.padding;
  const int64_t head = pitch * (mask.transposed ? mask.cols : mask.rows);
  std::vector<uint8_t> data(mask.first + mask.batch * mask.heads * head + 16, 1);
  const auto step = [](int64_t size, int64_t stride) { return size > 1 ? stride : 0; };
  args.mask.data = data.data() + mask.first;
  args.mask.batch_stride[0] = step(mask.batch, mask.heads * head);
  args.mask.head_stride = step(mask.heads, head);
  args.mask.row_stride = step(mask.rows, mask.transposed ? 1 : pitch);
  args.mask.col_stride = step(mask.cols, mask.transposed ? pitch : 1);
  const auto at = [&](int64_t b, int64_t h, int64_t i, int64_t j) -> uint8_t& {
    return data[mask.first + b * args.mask.batch_stride[0] + h * args.mask.head_stride + i * args.mask.row_stride +
                j * args.mask.col_stride];
  };
  std::mt19937 random(3);
  for (int64_t b = 0; b < mask.batch; ++b) {
    for (int64_t h = 0; h < mask.heads; ++h) {
      const int64_t centre = random() % kLenK, width = 1 + random() % 200;
      for (int64_t i = 0; i < mask.rows; ++i) {
        for (int64_t j = 0; j < mask.cols; ++j) {
          const int64_t from_centre = j - (centre + i) % kLenK;
          at(b, h, i, j) = i / 100 != 1 && std::abs(from_centre) < width && random() % 50 == 0;
        }
      }
    }
  }

  const auto check = [&](cuda::RangesOf of, int block) {
    const bool of_queries = of == cuda::RangesOf::kQueries;
    const int64_t length = of_queries ? kLenQ : kLenK, other = of_queries ? kLenK : kLenQ;
    const int64_t heads = of_queries ? kHeadsQ : kHeadsK, members = kHeadsQ / heads;
    const int64_t bytes = cuda::mask_ranges_bytes(problem, of, block);
    std::vector<MaskRange> scratch(bytes / sizeof(MaskRange) + 1, MaskRange{-7, -7});
    uint32_t counter = 5;
    const MaskRanges ranges = cuda::find_mask_ranges(args, of, block, scratch.data(), of_queries ? &counter : nullptr);
    EXPECT_EQ(counter, of_queries ? 0u : 5u);
    EXPECT_EQ(scratch.back().first, -7) << "written behind the scratch";
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t tile = 0; tile * block < length; ++tile) {
          int64_t first = other, last = 0;
          for (int64_t member = h * members; member < (h + 1) * members; ++member) {
            for (int64_t x = tile * block; x < std::min((tile + 1) * block, length); ++x) {
              for (int64_t y = 0; y < other; ++y) {
                if (at(b, member, of_queries ? x : y, of_queries ? y : x) == 0) continue;
                first = std::min(first, y);
                last = std::max(last, y + 1);
              }
            }
          }
          const MaskRange found = ranges.at(b, h, tile);
          if (last == 0) {
            EXPECT_EQ(found.last, 0) << "b " << b << " head " << h << " tile " << tile;
          } else {
            EXPECT_TRUE(found.first <= first && found.last >= last && found.last <= other)
                << "b " << b << " head " << h << " tile " << tile << ": " << found.first << " to " << found.last
                << ", visible " << first << " to " << last;
            EXPECT_TRUE(first - found.first < kChunk && found.last - last < kChunk);
          }
        }
      }
    }
  };
  check(cuda::RangesOf::kQueries, 64);
  check(cuda::RangesOf::kQueries, 192);
  check(cuda::RangesOf::kKeys, 64);
  check(cuda::RangesOf::kKeys, 128);
}

const Mask kMasks[] = {
    {"whole", 2, 4, 330, 700},
    {"aligned", 2, 4, 330, 700, 4},
    {"of_heads", 1, 4, 330, 700, 20},
    {"of_batch", 2, 1, 330, 700, 4},
    {"one", 1, 1, 330, 700, 4},
    {"one_row", 2, 1, 1, 700, 4},
    {"one_column", 2, 4, 330, 1},
    {"transposed", 2, 1, 330, 700, 0, true},
    {"odd", 1, 2 * 2, 330, 700, 4, false, 3},
};

INSTANTIATE_TEST_SUITE_P(All, MaskRangesOf, testing::ValuesIn(kMasks),
                         [](const auto& info) { return info.param.name; });

TEST(MaskRanges, NotOfPackedSequencesOrWithoutMask) {
  Problem problem;
  problem.len_q = problem.len_k = 1 << 16;
  EXPECT_FALSE(finds_mask_ranges(problem, 132));
  EXPECT_EQ(cuda::mask_ranges_bytes(problem, cuda::RangesOf::kKeys, 128), 0);
  problem.has_mask = true;
  EXPECT_TRUE(finds_mask_ranges(problem, 132));
  EXPECT_EQ(cuda::mask_ranges_bytes(problem, cuda::RangesOf::kKeys, 128), 512 * 8);
  problem.len_q = problem.len_k = 1024;  // a million pairs
  EXPECT_FALSE(finds_mask_ranges(problem, 132));
  EXPECT_TRUE(finds_mask_ranges(problem, 0));
  problem.batch_invariant = true;
  EXPECT_FALSE(finds_mask_ranges(problem, 0));
  problem.batch_invariant = false;
  problem.packed = true;
  EXPECT_FALSE(finds_mask_ranges(problem, 0));
}

}  // namespace
}  // namespace flash_ext
