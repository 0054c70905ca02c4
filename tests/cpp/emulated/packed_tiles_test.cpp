// The list of tiles of packed sequences, and what is found of a row, by the kernels of
// csrc/kernels/stages/sequences.cu, which sm80_kernels_test.cpp compiles.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <vector>

#include "core/tile_schedule.h"
#include "gpu/host/launch.h"
#include "kernels/stages/find_sequence.cuh"
#include "kernels/stages/sequences.h"

namespace flash_ext {
namespace {

using cuda::TilesOf;

struct Sequences32 {
  std::vector<int32_t> cu_q, cu_k, used_q, used_k;
  Problem problem;

  Sequences all() const { return {cu_q.data(), cu_k.data(), nullptr, nullptr}; }
  Sequences used() const { return {cu_q.data(), cu_k.data(), used_q.data(), used_k.data()}; }
};

// Lengths that differ up to 10,000-fold, every fifth of them 0.
Sequences32 make_sequences(int batch, unsigned seed) {
  std::mt19937 random(seed);
  Sequences32 s;
  s.cu_q = s.cu_k = {static_cast<int32_t>(random() % 3)};
  for (int b = 0; b < batch; ++b) {
    const auto add = [&](std::vector<int32_t>& cu, std::vector<int32_t>& used, int64_t& longest) {
      const int32_t most = random() % 50 == 0 ? 10000 : 1 + static_cast<int32_t>(random() % 100);
      const int32_t len = random() % 5 == 0 ? 0 : static_cast<int32_t>(random()) % most;
      used.push_back(len < 0 ? -len : len);
      cu.push_back(cu.back() + used.back() + static_cast<int32_t>(random() % 3));
      longest = std::max<int64_t>(longest, cu.back() - cu[cu.size() - 2]);
    };
    add(s.cu_q, s.used_q, s.problem.len_q);
    add(s.cu_k, s.used_k, s.problem.len_k);
  }
  s.problem.packed = true;
  s.problem.batch_rank = 1;
  s.problem.batch_size[0] = s.problem.batch = batch;
  s.problem.rows_q = s.cu_q.back() + 1;
  s.problem.rows_k = s.cu_k.back() + 1;
  return s;
}

std::vector<PackedTile> list(const Problem& problem, const Sequences& sequences, TilesOf of, int64_t block,
                             const cuda::PackedResults& results = {}, int together = 0) {
  constexpr int kGuard = 64;
  const int64_t bytes = cuda::packed_tiles_bytes(problem, of, block);
  std::vector<char> memory(bytes + kGuard + 128, 77);
  char* const at = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128);
  const PackedTile* const tiles = cuda::prepare_packed(problem, sequences, of, block, at, results, nullptr, together);
  for (int i = 0; i < kGuard; ++i) EXPECT_EQ(at[bytes + i], 77);
  const int64_t rows = of == TilesOf::kQueries ? problem.rows_q : problem.rows_k;
  return {tiles, tiles + most_packed_tiles(problem, rows, block)};
}

int64_t work_of(const Problem& problem, const PackedTile& tile, TilesOf of, int64_t block) {
  const Sequence& s = tile.sequence;
  const Band band = make_band(problem, s);
  const int64_t first = tile.block * block, len = of == TilesOf::kQueries ? s.len_q : s.len_k;
  const Range own = {first, std::min(first + block, len)};
  return (of == TilesOf::kQueries ? band.keys(own, s.len_k) : band.queries(own, s.len_q)).size();
}

void check_list(const Sequences32& s, const Sequences& sequences, TilesOf of, int64_t block, int together = 0) {
  const std::vector<PackedTile> tiles = list(s.problem, sequences, of, block, {}, together);
  std::map<int, int64_t> seen;  // tiles of a sequence
  size_t count = 0;
  int64_t before = INT64_MAX;
  for (; count < tiles.size() && tiles[count].b >= 0; ++count) {
    const PackedTile& tile = tiles[count];
    ASSERT_LT(tile.b, s.problem.batch);
    const Sequence own = sequence_of(s.problem, sequences, tile.b);
    EXPECT_EQ(tile.sequence.row_q, own.row_q);
    EXPECT_EQ(tile.sequence.row_k, own.row_k);
    EXPECT_EQ(tile.sequence.len_q, own.len_q);
    EXPECT_EQ(tile.sequence.len_k, own.len_k);
    const int64_t of_all = block_count(of == TilesOf::kQueries ? own.len_q : own.len_k, block);
    const int64_t place = seen[tile.b]++, work = work_of(s.problem, tile, of, block);
    // One behind the other, from the first or the last on.
    EXPECT_TRUE(tile.block == place || (of == TilesOf::kQueries && tile.block == of_all - 1 - place));
    if (place == 0) {  // within half a power of two, no longer than the one before
      EXPECT_LE(work * 2, before * 3);
      before = std::max<int64_t>(work, 1);
    }
  }
  for (int64_t b = 0; b < s.problem.batch; ++b) {
    const Sequence own = sequence_of(s.problem, sequences, b);
    EXPECT_EQ(seen[static_cast<int>(b)], block_count(of == TilesOf::kQueries ? own.len_q : own.len_k, block)) << b;
  }
  for (const PackedTile& tile : tiles) EXPECT_EQ(tile.listed, static_cast<int>(count));
  for (; count < tiles.size(); ++count) {
    EXPECT_EQ(tiles[count].b, -1);
    EXPECT_EQ(tiles[count].sequence.len_q + tiles[count].sequence.len_k, 0);
  }
}

TEST(PackedTiles, EveryTileOnceAndTheLongestFirst) {
  for (const int batch : {1, 31, 128, 129, 1100}) {
    Sequences32 s = make_sequences(batch, batch);
    for (const bool causal : {false, true}) {
      s.problem.causal = s.problem.bottom_right = causal;
      for (const TilesOf of : {TilesOf::kQueries, TilesOf::kKeys}) {
        check_list(s, s.all(), of, 64);
        check_list(s, s.used(), of, 128);
        check_list(s, s.used(), of, 64, 3000);
        check_list(s, s.all(), of, 64, 1 << 20);
      }
    }
  }
}

// A tile of queries has no more to do than the one before it, but for a tile of keys, whichever sequences they are of.
TEST(PackedTiles, TilesOfWhatStaysInL2HaveOneOrder) {
  for (const int together : {1 << 20, 700}) {
    Sequences32 s = make_sequences(90, 5);
    s.problem.causal = s.problem.bottom_right = true;
    s.cu_k = s.cu_q;
    s.problem.len_k = s.problem.len_q;
    s.problem.rows_k = s.problem.rows_q;
    int64_t rises = 0, before = INT64_MAX;
    for (const PackedTile& tile : list(s.problem, s.all(), TilesOf::kQueries, 64, {}, together)) {
      if (tile.b < 0) break;
      const int64_t work = work_of(s.problem, tile, TilesOf::kQueries, 64);
      rises += work >= before + 64 ? 1 : 0;
      before = work;
    }
    const int64_t groups = (s.cu_q.back() - 1) / together + 1;
    EXPECT_LE(rises, groups) << together;
    if (together == 700) EXPECT_GT(rises, 0);
  }
}

TEST(PackedTiles, EndWhateverIsInMemory) {
  std::mt19937 random(3);
  for (int round = 0; round < 10; ++round) {
    Sequences32 s = make_sequences(60, round);
    const unsigned range = round % 2 == 0 ? 2000000000u : 3000u;
    for (std::vector<int32_t>* x : {&s.cu_q, &s.cu_k, &s.used_q, &s.used_k}) {
      if (round % 4 == 3 && x == &s.cu_q) continue;
      for (int32_t& value : *x) value = static_cast<int32_t>(random() % (2 * range)) - static_cast<int32_t>(range);
    }
    if (round % 5 == 0) {  // in order, but beyond the tensors
      std::sort(s.cu_q.begin(), s.cu_q.end());
      std::sort(s.cu_k.begin(), s.cu_k.end());
    }
    for (const TilesOf of : {TilesOf::kQueries, TilesOf::kKeys}) {
      int64_t rows = 0;
      for (const PackedTile& tile : list(s.problem, s.used(), of, 64, {}, round % 3 * 1000)) {
        if (tile.b < 0) continue;
        const Sequence& own = tile.sequence;
        ASSERT_TRUE(own.row_q >= 0 && own.len_q >= 0 && own.row_q + own.len_q <= s.problem.rows_q);
        ASSERT_TRUE(own.row_k >= 0 && own.len_k >= 0 && own.row_k + own.len_k <= s.problem.rows_k);
        rows += std::min<int64_t>(64, (of == TilesOf::kQueries ? own.len_q : own.len_k) - tile.block * 64);
      }
      EXPECT_LE(rows, of == TilesOf::kQueries ? s.problem.rows_q : s.problem.rows_k) << "no two overlap";
    }
    std::vector<float> lse(s.problem.rows_q + 2, 7.f);
    s.problem.heads_q = 1;
    const auto tiles = list(s.problem, s.used(), TilesOf::kQueries, 64, {.lse = lse.data() + 1});
    EXPECT_TRUE(lse.front() == 7.f && lse.back() == 7.f);
    if (tiles.front().b < 0) EXPECT_EQ(std::count(lse.begin(), lse.end(), -INFINITY), s.problem.rows_q);
  }
}

TEST(PackedTiles, QueriesMayShareKeys) {
  Sequences32 s = make_sequences(3, 1);
  s.cu_q = {0, 70, 70, 90};
  s.cu_k = {40, 50, 0, 50};  // the last one has keys of the first one's, and the second one none
  s.problem.len_q = s.problem.rows_q = 90;
  s.problem.len_k = s.problem.rows_k = 50;
  const std::vector<PackedTile> tiles = list(s.problem, s.all(), TilesOf::kQueries, 64);
  const auto places = [&] {
    std::vector<std::array<int, 4>> result;
    for (const PackedTile& tile : tiles) {
      if (tile.b >= 0) result.push_back({tile.b, tile.block, tile.sequence.row_k, tile.sequence.len_k});
    }
    return result;
  }();
  EXPECT_EQ(places, (std::vector<std::array<int, 4>>{{2, 0, 0, 50}, {0, 0, 40, 10}, {0, 1, 40, 10}}));
  EXPECT_EQ(list(s.problem, s.all(), TilesOf::kKeys, 64).front().b, -1);
}

TEST(PackedTiles, RowsOfNoSequenceAreCleared) {
  Sequences32 s = make_sequences(200, 5);
  s.problem.heads_q = 2;
  std::vector<uint16_t> rows;
  std::vector<float> queries, lse;
  uint32_t counter = 0;
  const auto run = [&](TilesOf of) {
    rows.assign(s.problem.rows_k * 3 * 5, 7);
    queries.assign(s.problem.rows_q * 4, 7.f);
    lse.assign(s.problem.rows_q * 2, 7.f);
    counter = 7;
    TensorView view;
    view.data = rows.data();
    view.row_stride = 15;
    view.head_stride = 5;
    view.col_stride = 1;
    TensorView wide = view;
    wide.data = queries.data();
    wide.row_stride = wide.head_stride = 4;  // chunks of 16 bytes
    list(s.problem, s.used(), of, 64,
         {.rows = {{view, TilesOf::kKeys, 3, 5, 2}, {}, {wide, TilesOf::kQueries, 1, 4, 4}},
          .lse = lse.data(),
          .counter = &counter});
    EXPECT_EQ(counter, 0u);
  };
  run(TilesOf::kKeys);
  std::vector<uint16_t> expected(rows.size(), 0);
  std::vector<float> expected_queries(queries.size(), 0.f), expected_lse(lse.size(), -INFINITY);
  for (int64_t b = 0; b < s.problem.batch; ++b) {
    const Sequence own = sequence_of(s.problem, s.used(), b);
    std::fill_n(expected.begin() + own.row_k * 15, own.len_k * 15, 7);
    std::fill_n(expected_queries.begin() + own.row_q * 4, own.len_q * 4, 7.f);
    for (int head = 0; head < 2; ++head) {
      std::fill_n(expected_lse.begin() + head * s.problem.rows_q + own.row_q, own.len_q, 7.f);
    }
  }
  EXPECT_EQ(rows, expected);
  EXPECT_EQ(queries, expected_queries);
  EXPECT_EQ(lse, expected_lse);

  std::swap(s.cu_k[7], s.cu_k[170]);  // which a list of keys has no tiles for, and no row of a sequence
  run(TilesOf::kKeys);
  EXPECT_EQ(rows, std::vector<uint16_t>(rows.size(), 0));
  EXPECT_EQ(queries, std::vector<float>(queries.size(), 0.f));
  EXPECT_EQ(lse, std::vector<float>(lse.size(), -INFINITY));
  run(TilesOf::kQueries);  // which may share keys
  EXPECT_EQ(queries, expected_queries);
  EXPECT_EQ(lse, expected_lse);
}

// As kernels have them that ask for a place of theirs in an array of all tiles of queries.
TEST(PackedTiles, OfAnArrayEachIsFound) {
  for (const int batch : {1, 31, 700}) {
    const Sequences32 s = make_sequences(batch, batch);
    for (const int block : {64, 128}) {
      int last = -1;
      std::vector<int> owner(most_packed_tiles(s.problem, s.problem.rows_q, block), -1);
      for (int b = 0; b < batch; ++b) {
        const Sequence own = sequence_of(s.problem, s.all(), b);
        const int first = first_packed_tile(own, b, block);
        EXPECT_GT(first, last);
        for (int i = 0; i * block < own.len_q; ++i) owner.at(last = first + i) = b;
        last = std::max(last, first);
      }
      for (int i = 0; i < static_cast<int>(owner.size()); ++i) {
        const int b = cuda::packed_tile_before(s.problem, s.all(), i, block);
        if (owner[i] >= 0) EXPECT_EQ(b, owner[i]);
        const Sequence own = b < 0 ? Sequence() : sequence_of(s.problem, s.all(), b);
        EXPECT_EQ(owner[i] >= 0, b >= 0 && (i - first_packed_tile(own, b, block)) * block < own.len_q);
      }
    }
  }
}

}  // namespace
}  // namespace flash_ext
