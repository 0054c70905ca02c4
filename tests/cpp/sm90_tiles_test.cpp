// csrc/kernels/sm90's pure functions: where TMA and wgmma find an element of a tile, the bits of a descriptor, and what
// the tiles of each head dimension take.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/sm90/backward/config.h"
#include "kernels/sm90/config.h"
#include "kernels/sm90/descriptor.h"

namespace flash_ext::sm90 {
namespace {

constexpr int kHeadDims[] = {64, 96, 128, 192, 256, 384, 512};

uint64_t bits(uint64_t descriptor, int first, int last) {
  return descriptor >> first & ((uint64_t{1} << (last - first)) - 1);
}

TEST(Descriptor, TileIsPanelsOf64Columns) {
  EXPECT_EQ(panels(1), 1);
  EXPECT_EQ(panels(64), 1);
  EXPECT_EQ(panels(65), 2);
  EXPECT_EQ(panels(256), 4);
  EXPECT_EQ(tile_bytes(128, 128), 128 * 128 * 2);
  EXPECT_EQ(tile_bytes(80, 96), 80 * 128 * 2);  // the second panel is half empty
}

TEST(Descriptor, TileOffsetIsABijection) {
  for (const int rows : {16, 80, 128, 192}) {
    for (const int cols : {64, 128, 192, 256}) {
      std::set<int> seen;
      for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
          const int offset = tile_offset(rows, row, col);
          EXPECT_GE(offset, 0);
          EXPECT_LT(offset, tile_bytes(rows, cols));
          EXPECT_EQ(offset % 2, 0);
          seen.insert(offset);
        }
      }
      EXPECT_EQ(static_cast<int>(seen.size()), rows * cols);
    }
  }
}

// The hardware permutes by address bits: bits 4-6 of an address are XORed with its bits 7-9.
TEST(Descriptor, SwizzleIsTheOneOfTheAddressBits) {
  for (const int rows : {80, 128}) {
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < 128; ++col) {
        const int plain = col / 64 * panel_size(rows) + row * 128 + col % 64 * 2;
        EXPECT_EQ(tile_offset(rows, row, col), plain ^ (plain >> 7 & 7) << 4);
      }
    }
  }
}

// 8 rows of one chunk, and 8 chunks of one row, lie in 8 different groups of four banks.
TEST(Descriptor, SwizzleHasNoConflicts) {
  std::set<int> down, along;
  for (int i = 0; i < 8; ++i) {
    down.insert(tile_offset(64, i, 24) / 16 % 8);
    along.insert(tile_offset(64, 5, 8 * i) / 16 % 8);
  }
  EXPECT_EQ(down.size(), 8u);
  EXPECT_EQ(along.size(), 8u);
}

TEST(Descriptor, FieldsStandWhereTheManualSays) {
  const uint64_t descriptor = make_descriptor(0x2C400, 0x4000, 0x400);
  EXPECT_EQ(bits(descriptor, 0, 14), 0x2C40u);
  EXPECT_EQ(bits(descriptor, 16, 30), 0x400u);
  EXPECT_EQ(bits(descriptor, 32, 46), 0x40u);
  EXPECT_EQ(bits(descriptor, 49, 52), 0u);  // base offset: tiles are aligned
  EXPECT_EQ(descriptor >> 62, 1u);          // 128-byte swizzle
  EXPECT_EQ(bits(k_major(0x400), 32, 46), 1024u >> 4);
  EXPECT_EQ(bits(mn_major(0x400, 80), 16, 30), 80u * 128 >> 4);
}

// A step's descriptor begins where its first element lies, in units of 16 bytes; row 0 is not permuted.
TEST(Descriptor, StepsBeginAtTheirFirstElement) {
  for (const int rows : {80, 128, 192}) {
    for (int k = 0; k < 16; ++k) {
      EXPECT_EQ(k_major_step(rows, k) * 16, static_cast<uint64_t>(tile_offset(rows, 0, 16 * k)));
    }
    for (int k = 0; k < rows / 16; ++k) {
      EXPECT_EQ(mn_major_step(k) * 16, static_cast<uint64_t>(tile_offset(rows, 16 * k, 0)));
    }
  }
}

// A step never carries into the other fields, wherever in the 227 KiB the tile lies.
TEST(Descriptor, StepsStayInTheAddressField) {
  for (const int head_dim : kHeadDims) {
    const ForwardShape shape = forward_shape(head_dim, Tiles::kLarge);
    const uint32_t last = kSharedMemoryLimit / kTileAlign * kTileAlign;
    const uint64_t k = k_major(last - tile_bytes(shape.block_n, head_dim));
    EXPECT_EQ((k + k_major_step(shape.block_n, head_dim / 16 - 1)) >> 14, k >> 14);
  }
}

TEST(Shapes, FitTheMultiprocessor) {
  for (const int head_dim : kHeadDims) {
    for (const Tiles tiles : {Tiles::kLarge, Tiles::kSmall, Tiles::kSplit, Tiles::kScored, Tiles::kNarrow}) {
      if (tiles == Tiles::kNarrow && head_dim != 192) continue;
      const ForwardShape shape = forward_shape(head_dim, tiles);
      const ForwardSmem smem = forward_smem(shape, head_dim);
      EXPECT_EQ(shape.block_n % 16, 0);
      EXPECT_EQ(shape.split % 16, 0);
      EXPECT_LE(shape.split, shape.block_n);
      for (const int offset : {smem.k, smem.v, smem.scores}) EXPECT_EQ(offset % kTileAlign, 0);
      EXPECT_EQ(smem.works % 16, 0);
      EXPECT_EQ(smem.barriers % 16, 0);
      const int scores = shape.block_m() * (score_pitch(shape.block_n, 4) + score_pitch(shape.block_n, 1));
      EXPECT_EQ(smem.works - smem.scores >= scores, shape.scored);
      EXPECT_LE(smem.total, kSharedMemoryLimit);
      // What a launch gives every thread is what setmaxnreg can hand from one warpgroup to the others.
      const int launch = 65536 / shape.threads() / 8 * 8;
      for (const bool packed : {false, true}) {
        EXPECT_LE(shape.producer_registers(packed) + shape.consumers * shape.consumer_registers(packed),
                  launch * (shape.consumers + 1));
      }
      EXPECT_LE(1 + 2 * shape.consumers, 16);  // named barriers, with __syncthreads
    }
  }
}

// Eight rows of a tile of bias or mask, at the same column, lie in eight different chunks of 16 bytes of the banks.
TEST(Scores, RowsLieInDifferentBanks) {
  for (const int head_dim : kHeadDims) {
    for (const int element : {1, 2, 4}) {
      const int block_n = forward_shape(head_dim, Tiles::kScored).block_n, pitch = score_pitch(block_n, element);
      EXPECT_GE(pitch, block_n * element);
      unsigned seen = 0;
      for (int row = 0; row < 8; ++row) seen |= 1U << row * pitch / 16 % 8;
      EXPECT_EQ(seen, 0xFFU);
    }
  }
}

class BackwardShapes : public testing::TestWithParam<ScoreKind> {};
INSTANTIATE_TEST_SUITE_P(All, BackwardShapes,
                         testing::Values(ScoreKind::kNone, ScoreKind::kSoftcap, ScoreKind::kScores,
                                         ScoreKind::kDropout));

TEST_P(BackwardShapes, FitTheMultiprocessor) {
  for (const int head_dim : {64, 128}) {
    const BackwardShape shape = backward_shape(head_dim, GetParam());
    const BackwardSmem smem = backward_smem(shape, head_dim);
    EXPECT_EQ(shape.block_m % 16, 0);
    EXPECT_EQ(shape.block_n, 64 * shape.consumers);
    EXPECT_EQ(shape.threads, 128 * (1 + shape.consumers));
    EXPECT_LE(shape.producer_registers() + shape.consumers * shape.consumer_registers(), 3 * 168);
    // The parts of dQ of the two warpgroups are the tile.
    const int queries = shape.dq_cols(head_dim) == head_dim ? shape.block_m / shape.consumers : shape.block_m;
    EXPECT_EQ(queries, 64);
    EXPECT_EQ(queries * shape.dq_cols(head_dim) * shape.consumers, shape.block_m * head_dim);
    for (const int tile : {smem.k, smem.v, smem.q, smem.d_out, smem.ds, smem.dq}) EXPECT_EQ(tile % kTileAlign, 0);
    EXPECT_EQ(smem.stats % 16, 0);  // what a bulk copy writes
    EXPECT_EQ(smem.barriers % 8, 0);
    EXPECT_EQ(smem.scores % 16, 0);
    EXPECT_EQ(smem.walk % 8, 0);
    const int offsets[] = {smem.k,     smem.v,     smem.q,      smem.d_out,    smem.ds,   smem.dq,   smem.scores,
                           smem.drops, smem.stats, smem.maxima, smem.barriers, smem.walk, smem.total};
    EXPECT_TRUE(std::is_sorted(std::begin(offsets), std::end(offsets)));
    EXPECT_LE(smem.total, kSharedMemoryLimit);
    // A slot of what takes most, bias in float and mask, fits; one of 16 bits has a second.
    const int room = smem.drops - smem.scores, wide = kScoreRows * score_pitch(shape.block_n, 4) + kMaskBytes;
    EXPECT_EQ(room >= wide, shape.scored);
    EXPECT_EQ(room >= 2 * (kScoreRows * score_pitch(shape.block_n, 2) + kMaskBytes), shape.scored);
    EXPECT_EQ(smem.drop_keys - smem.drops, shape.scored ? shape.stages * shape.drop_bytes() : 0);
    EXPECT_EQ(shape.drop_bytes(), shape.block_m * shape.block_n / 8);
    EXPECT_EQ(shape.block_m % kScoreRows, 0);
    EXPECT_EQ(kMaskBytes % 32, 0);
  }
}

Problem problem(int64_t length, bool causal) {
  Problem p;
  p.dtype = DType::kBFloat16;
  p.len_q = p.len_k = length;
  p.head_dim = p.head_dim_v = 128;
  p.heads_q = p.heads_k = 16;
  p.causal = causal;
  return p;
}

TEST(Shapes, FewKeysAreAMean) {
  for (const auto& [causal, head_dim, few] : {std::tuple{false, 128, 1024}, {true, 128, 2048}, {false, 64, 512}}) {
    EXPECT_TRUE(has_few_keys(problem(few, causal), head_dim));
    EXPECT_FALSE(has_few_keys(problem(2 * few, causal), head_dim));
  }
  Problem window = problem(16384, true);
  window.window_left = 512;
  EXPECT_TRUE(has_few_keys(window, 128));
  Problem one = problem(4096, true);
  one.len_q = 1;  // top left: sees one key
  EXPECT_TRUE(has_few_keys(one, 64));
}

TEST(Order, TilesInTurnWhereAllAreAlike) {
  for (const int block_m : {128, 192, 256}) {
    const ForwardOrder even = forward_order(problem(block_m * 64, false), block_m, 132);
    EXPECT_FALSE(even.counted);
    EXPECT_EQ(even.schedule.section, 1);
    EXPECT_EQ(even.grid, 132);
    EXPECT_TRUE(forward_order(problem(block_m * 64 - 1, false), block_m, 132).counted);
    EXPECT_TRUE(forward_order(problem(block_m * 64, true), block_m, 132).counted);
    const ForwardOrder one_wave = forward_order(problem(block_m * 8, true), block_m, 132);
    EXPECT_FALSE(one_wave.counted);
    EXPECT_EQ(one_wave.grid, 128);
    EXPECT_FALSE(forward_order(problem(block_m * 64, true), block_m, 0).counted);  // a block each
  }
  Problem decode = problem(4096, false);
  decode.len_q = 1;
  decode.batch = 64;
  EXPECT_FALSE(forward_order(decode, 128, 132).counted);
}

TEST(Order, SectionsHoldWhatTheCacheDoes) {
  EXPECT_EQ(forward_order(problem(16384, true), 128, 132).schedule.section, 2);  // 8 MiB a head of 16
  EXPECT_EQ(forward_order(problem(1 << 20, true), 128, 132).schedule.section, 1);
  EXPECT_TRUE(forward_order(problem(4096, true), 128, 132).schedule.last_first);
}

TEST(BackwardTiles, PersistentWhereTilesAreShortAndDiffer) {
  EXPECT_TRUE(is_backward_persistent(problem(1024, true), 0));
  EXPECT_FALSE(is_backward_persistent(problem(1024, false), 0));
  EXPECT_FALSE(is_backward_persistent(problem(8192, true), 0));
  Problem many = problem(1024, true);
  many.batch = 132 * 8;  // as many tiles of keys, or more
  EXPECT_TRUE(is_backward_persistent(many, 132));
  EXPECT_FALSE(is_backward_persistent(problem(1024, true), 132));
  for (const int group : {1, 2, 4, 8}) {
    many.heads_q = group * many.heads_k;
    EXPECT_EQ(is_backward_persistent(many, 132), group <= 2);
  }
}

// Blocks are tiles of keys of a key head, first keys first: under a causal band they are seen by the most queries.
TEST(BackwardTiles, BlocksAreTilesOfKeys) {
  Problem grouped = problem(1000, true);
  grouped.heads_k = grouped.heads_v = 4;
  grouped.batch = 3;
  const TileSchedule schedule = backward_schedule(grouped, 128, 0);
  EXPECT_EQ(schedule.size(), 3 * 4 * 8);
  EXPECT_EQ(schedule.at(0).block, 0);
  EXPECT_EQ(schedule.at(schedule.size() - 1).block, 7);
  EXPECT_EQ(backward_schedule(problem(16384, true), 128, 132).section, 1);  // 16 MiB a head of 24
}

// What a tile of keys and a tile of queries say of each other, against the pairs that the band keeps: the deterministic
// kernel waits for as many tiles as `before` says, so one too many would wait for ever.
template <int kBlockM, int kBlockN>
void check_meetings(const TileRanges<kBlockM, kBlockN>& tile_ranges) {
  const int m_blocks = static_cast<int>(block_count(tile_ranges.len_q, kBlockM));
  const int n_blocks = static_cast<int>(block_count(tile_ranges.len_k, kBlockN));
  std::vector<std::vector<int>> keys_of(m_blocks);
  for (int n = 0; n < n_blocks; ++n) {
    const auto tiles = tile_ranges.of_keys(n * kBlockN);
    ASSERT_LE(tiles.first, tiles.last);
    if (tiles.first < tiles.last) {
      ASSERT_GE(tiles.first, 0);
      ASSERT_LE(tiles.last, m_blocks);
    }
    for (int m = tiles.first; m < tiles.last; ++m) keys_of[m].push_back(n);
    for (int m = 0; m < m_blocks; ++m) {
      bool kept = false;
      for (int i = m * kBlockM; i < std::min((m + 1) * kBlockM, tile_ranges.len_q) && !kept; ++i) {
        const int first = std::max(n * kBlockN, i + tile_ranges.lower);
        kept = first <= std::min(std::min((n + 1) * kBlockN, tile_ranges.len_k) - 1, i + tile_ranges.upper);
      }
      ASSERT_TRUE(!kept || (tiles.first <= m && m < tiles.last)) << m << " " << n;
    }
  }
  for (int m = 0; m < m_blocks; ++m) {
    const std::vector<int>& keys = keys_of[m];
    ASSERT_EQ(tile_ranges.meets_keys(m), !keys.empty()) << m;
    if (keys.empty()) continue;
    ASSERT_EQ(tile_ranges.first_keys_of(m), keys.front()) << m;
    ASSERT_EQ(tile_ranges.last_keys_of(m), keys.back()) << m;
    ASSERT_EQ(keys.back() - keys.front() + 1, static_cast<int>(keys.size())) << m;
  }
  // Tiles of queries that meet keys follow each other, so that the first and the last say whether all do.
  int changes = 0;
  for (int m = 1; m < m_blocks; ++m) changes += keys_of[m].empty() != keys_of[m - 1].empty();
  ASSERT_LE(changes, 2);
  ASSERT_TRUE(changes == 0 || !tile_ranges.meets_keys(0) || !tile_ranges.meets_keys(m_blocks - 1));
}

// A tile is masked unless all of its pairs are kept and no query is beyond the sequence.
template <int kBlockM, int kBlockN>
void check_inside(const TileRanges<kBlockM, kBlockN>& tile_ranges) {
  for (int key = 0; key < tile_ranges.len_k; key += kBlockN) {
    const auto inside = tile_ranges.inside(key);
    for (int m = 0; m * kBlockM < tile_ranges.len_q; ++m) {
      const int most = key + kBlockN - 1 - m * kBlockM, least = key - (m * kBlockM + kBlockM - 1);
      const bool kept = most <= tile_ranges.upper && least >= tile_ranges.lower && key + kBlockN <= tile_ranges.len_k &&
                        (m + 1) * kBlockM <= tile_ranges.len_q;
      ASSERT_EQ(inside.has(m), kept) << m << " " << key;
    }
  }
}

TEST(BackwardTiles, MeetingsCountTheSameFromBothSides) {
  constexpr int kRenorm = 1 << 30;
  for (const int len_q : {1, 63, 64, 65, 129, 300, 641, 1000}) {
    for (const int len_k : {16, 127, 128, 129, 300, 641, 1000}) {
      for (const int lower : {-kRenorm, -900, -200, -77, -1, 0, 1, 100, 300, 900}) {
        for (const int upper : {-300, -76, 0, 1, 30, 101, 128, 500, 901, kRenorm}) {
          if (upper <= lower) continue;
          check_meetings(TileRanges<64, 128>{lower, upper, len_q, len_k});
          check_meetings(TileRanges<128, 128>{lower, upper, len_q, len_k});
          check_inside(TileRanges<64, 64>{lower, upper, len_q, len_k});
          check_inside(TileRanges<128, 64>{lower, upper, len_q, len_k});
          if (HasFatalFailure()) FAIL() << len_q << " x " << len_k << ", " << lower << " to " << upper;
        }
      }
    }
  }
}

// The tile of keys with the fewest queries comes first: the others of its head wait for it, not it for them.
TEST(BackwardTiles, InOrderTheShortestComesFirst) {
  EXPECT_TRUE(ordered_schedule(problem(1000, true), 128).last_first);
  EXPECT_FALSE(ordered_schedule(problem(1000, false), 128).last_first);
  Problem window = problem(1000, false);
  window.window_left = 100;  // keys are seen from the same position on
  EXPECT_FALSE(ordered_schedule(window, 128).last_first);
}

// What a tile of keys waits for has smaller numbers: of a head they ascend with the list, however many tiles it has.
TEST(BackwardTiles, InOrderNumbersOfPackedTilesAscendWithTheList) {
  for (const int64_t heads : {1, 3, 16, 100}) {
    for (const int64_t longest : {100, 1024, 65536}) {
      Problem packed = problem(longest, true);
      packed.packed = packed.deterministic = true;
      packed.batch = 20;
      packed.heads_q = 2 * heads;
      packed.heads_k = heads;
      packed.rows_q = packed.rows_k = 5 * longest;
      TileSchedule schedule = ordered_schedule(packed, 128);
      EXPECT_FALSE(schedule.last_first) << "each sequence has an order of its own";
      EXPECT_EQ(schedule.blocks, most_packed_tiles(packed, packed.rows_k, 128));
      EXPECT_TRUE(schedule.section >= 1 && schedule.section <= heads);
      EXPECT_TRUE(longest > 100 || schedule.section == heads) << "L2 has room for one sequence of all heads";
      EXPECT_TRUE(longest < 65536 || schedule.section == 1);
      for (const int64_t tiles : {int64_t{1}, int64_t{7}, schedule.blocks}) {
        schedule.blocks = tiles;
        std::vector<int64_t> next(heads, 0);
        for (uint32_t i = 0; i < schedule.size(); ++i) {
          const Tile tile = schedule.at<uint32_t>(i);
          ASSERT_EQ(tile.block, next.at(tile.head)++);
        }
        EXPECT_EQ(next, std::vector<int64_t>(heads, tiles));
      }
    }
  }
}

TEST(BackwardTiles, DqOfOneTileOfKeysIsStored) {
  Problem one = problem(128, true);
  EXPECT_TRUE(is_dq_stored(one));
  one.deterministic = true;
  EXPECT_FALSE(is_ordered(one));
  one.len_q = 100000;  // aligned at the top left: all see keys
  EXPECT_TRUE(is_dq_stored(one));
  one.bottom_right = true;
  EXPECT_FALSE(is_dq_stored(one));  // the first queries see none, and get zeros elsewhere
  EXPECT_FALSE(is_dq_stored(problem(129, false)));
  Problem masked = problem(100, false);
  masked.has_mask = true;
  masked.head_dim = masked.head_dim_v = 64;
  EXPECT_TRUE(is_dq_stored(masked));
  masked.head_dim_v = 72;
  EXPECT_FALSE(is_dq_stored(masked));
  masked.head_dim_v = 64;
  masked.dropout_p = 0.1;
  EXPECT_FALSE(is_dq_stored(masked));
}

TEST(BackwardTiles, InOrderWhereAskedForOrShort) {
  EXPECT_TRUE(is_ordered(problem(512, false)));
  EXPECT_FALSE(is_ordered(problem(512, true)));
  EXPECT_FALSE(is_ordered(problem(1024, false)));
  for (const bool causal : {false, true}) {
    const int64_t longest = causal ? 2048 : 1024;
    Problem many = problem(longest, causal);
    many.batch = 512 / (longest / 128) / many.heads_k;
    many.head_dim = many.head_dim_v = 128;
    EXPECT_TRUE(is_ordered(many));
    many.head_dim = many.head_dim_v = 64;
    EXPECT_FALSE(is_ordered(many));
    many.head_dim = 128;
    many.len_q = many.len_k = longest + 1;
    EXPECT_FALSE(is_ordered(many));
  }
  Problem strict = problem(1024, true);
  strict.deterministic = true;
  EXPECT_TRUE(is_ordered(strict));
}

// Above head dim 64; a tile of keys of a group takes as many times as long.
TEST(BackwardTiles, InOrderOfGroupedHeads) {
  for (const int group : {1, 2, 4, 8}) {
    for (const int64_t length : {512, 1024, 2048}) {
      for (const bool causal : {false, true}) {
        Problem many = problem(length, causal);
        many.batch = 512;
        many.head_dim = many.head_dim_v = 128;
        many.heads_q = group * many.heads_k;
        const int64_t longest = causal ? (group <= 2 ? 2048 : 512) : (group == 1 ? 1024 : 512);
        EXPECT_EQ(is_ordered(many), length <= longest) << group << " " << length << " " << causal;
        many.deterministic = true;
        EXPECT_TRUE(is_ordered(many));
      }
    }
  }
}

}  // namespace
}  // namespace flash_ext::sm90
