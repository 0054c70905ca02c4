// core/smem.h and bank_conflicts.h: the swizzles, the bank-conflict model against counts made by hand, and the
// conflicts of every access of the kernels, which are also the tables of docs/learn/5-shared-memory.md.
#include "bank_conflicts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace flash_ext::smem {
namespace {

constexpr int kRows = 64;  // of the tiles looked at: every pattern repeats sooner

struct Tile {
  int pitch;
  TileLayout naive_at, padded_at, swizzled_at, fp32_at;  // fp32_at: null where rows are not whole lines
};

template <int kPitch>
Tile tile() {
  TileLayout fp32_at = nullptr;
  if constexpr (kPitch % kLineBytes == 0) fp32_at = &swizzled_fp32<kPitch>;
  return {kPitch, &naive<kPitch>, &padded<kPitch>, &swizzled<kPitch>, fp32_at};
}

// Head dims 32, 64, 96, 128, 192 and 256 of 2 bytes, of 4 bytes, and of both.
std::vector<Tile> float_tiles() {
  return {tile<128>(), tile<256>(), tile<384>(), tile<512>(), tile<768>(), tile<1024>()};
}
std::vector<Tile> all_tiles() {
  std::vector<Tile> tiles = float_tiles();
  tiles.insert(tiles.begin(), tile<64>());
  tiles.insert(tiles.begin() + 2, tile<192>());
  return tiles;
}

// One instruction, at every place of a tile where a kernel issues it.
struct Access {
  std::string name;
  int bytes_per_lane;
  std::function<std::vector<LaneAddresses>(TileLayout, int pitch)> everywhere;

  int worst(TileLayout at, int pitch) const {
    int most = 0;
    for (const LaneAddresses& lanes : everywhere(at, pitch)) most = std::max(most, conflicts(lanes, bytes_per_lane));
    return most;
  }
};

// An instruction that moves blocks of `rows` rows by `columns` bytes: place(at, first row, number of the column block).
template <class Place>
Access blocks(std::string name, int bytes_per_lane, int rows, int columns, Place place) {
  return {name, bytes_per_lane, [=](TileLayout at, int pitch) {
            std::vector<LaneAddresses> all;
            for (int row = 0; row < kRows; row += rows)
              for (int column = 0; column < pitch / columns; ++column) all.push_back(place(at, row, column));
            return all;
          }};
}

Access copy(std::string name, int bytes) {
  return {name, bytes, [=](TileLayout at, int pitch) {
            std::vector<LaneAddresses> all;
            for (int first = 0; first < kRows * pitch / bytes; first += kLanes)
              all.push_back(tile_copy(at, pitch, first, bytes));
            return all;
          }};
}

std::vector<Access> accesses() {
  return {copy("`cp.async` of 16 bytes", 16), copy("`cp.async` of 4 bytes", 4),
          blocks("`ldmatrix.x4` of A, `.trans` of V", 16, 16, 32,
                 [](TileLayout at, int row, int i) { return ldmatrix_a(at, row, 2 * i); }),
          blocks("`ldmatrix.x4` of B, `.trans` of A", 16, 16, 32,
                 [](TileLayout at, int row, int i) { return ldmatrix_b(at, row, 2 * i); }),
          blocks("store of 2-byte pairs", 4, 8, 16,
                 [](TileLayout at, int row, int i) { return accumulator_pairs(at, row, i, 2); })};
}

std::vector<Access> float_accesses() {
  return {blocks("store of float pairs", 8, 8, 32,
                 [](TileLayout at, int row, int i) { return accumulator_pairs(at, row, i, 4); }),
          blocks("load of floats, rows r + t", 4, 4, 32,
                 [](TileLayout at, int row, int i) { return float_columns(at, row, i, 1); }),
          // 4 rows a load, too: of 8 rows first the even ones, then the odd ones
          blocks("load of floats, rows r + 2t", 4, 4, 32,
                 [](TileLayout at, int row, int i) { return float_columns(at, row - row % 8 + row / 4 % 2, i, 2); })};
}

// A table of the document: a row an access, a column a pitch, a cell the worst count in each layout.
std::string table(const std::vector<Access>& rows, const std::vector<Tile>& tiles, bool with_fp32) {
  std::ostringstream out;
  out << "| access | passes |";
  for (const Tile& tile : tiles) out << " " << tile.pitch << " B |";
  out << "\n|---|---|";
  for (size_t i = 0; i < tiles.size(); ++i) out << "---|";
  for (const Access& access : rows) {
    out << "\n| " << access.name << " | " << access.bytes_per_lane / kWordBytes << " |";
    for (const Tile& tile : tiles) {
      const auto worst = [&](TileLayout at) { return access.worst(at, tile.pitch); };
      out << " " << worst(tile.naive_at) << " / " << worst(tile.padded_at) << " / " << worst(tile.swizzled_at);
      if (with_fp32) out << " / " << worst(tile.fp32_at);
      out << " |";
    }
  }
  out << "\n";
  return out.str();
}

void expect_permutation_of_each_row(TileLayout at, int pitch) {
  std::set<int> chunks;
  for (int row = 0; row < kRows; ++row)
    for (int byte = 0; byte < pitch; ++byte) {
      const int offset = at(row, byte);
      EXPECT_EQ(offset / pitch, row);
      EXPECT_EQ(offset % kChunkBytes, byte % kChunkBytes);  // a chunk moves as a whole
      if (byte % kChunkBytes == 0) chunks.insert(offset);
    }
  EXPECT_EQ(chunks.size(), static_cast<size_t>(kRows * pitch / kChunkBytes));
}

TEST(BankConflicts, SwizzlesAreBijectionsThatStayInsideTheirRows) {
  for (const Tile& tile : all_tiles()) {
    SCOPED_TRACE(tile.pitch);
    expect_permutation_of_each_row(tile.swizzled_at, tile.pitch);
    if (tile.fp32_at) expect_permutation_of_each_row(tile.fp32_at, tile.pitch);
  }
}

TEST(BankConflicts, SameChunkOfEightRowsLiesInEightBankGroups) {
  for (const Tile& tile : all_tiles())
    for (const TileLayout at : {tile.swizzled_at, tile.fp32_at}) {
      if (!at) continue;
      for (int row = 0; row < kRows - 8; ++row)
        for (int byte = 0; byte < tile.pitch; byte += kChunkBytes) {
          std::set<int> groups;
          for (int i = 0; i < 8; ++i) groups.insert(at(row + i, byte) % kLineBytes);
          EXPECT_EQ(groups.size(), 8u) << "pitch " << tile.pitch << " row " << row << " byte " << byte;
        }
    }
}

TEST(BankConflicts, ConflictsCountPassesAsByHand) {
  const auto count = [](int bytes, auto address) { return conflicts(each_lane(address), bytes); };
  EXPECT_EQ(count(4, [](int lane) { return 4 * lane; }), 0);
  EXPECT_EQ(count(4, [](int lane) { return 4 * (31 - lane); }), 0);
  EXPECT_EQ(count(4, [](int) { return 64; }), 0);                      // one word for all
  EXPECT_EQ(count(4, [](int lane) { return 4 * (lane / 2); }), 0);     // 16 words, two lanes each
  EXPECT_EQ(count(4, [](int lane) { return 8 * lane; }), 1);           // 16 banks of two words
  EXPECT_EQ(count(4, [](int lane) { return 128 * lane; }), 31);        // one bank
  EXPECT_EQ(count(4, [](int lane) { return 4 * 33 * lane; }), 0);      // the classic pad of one word
  EXPECT_EQ(count(4, [](int lane) { return 128 * (lane % 4); }), 3);   // four words of one bank, eight lanes each
  EXPECT_EQ(count(8, [](int lane) { return 8 * lane; }), 0);           // two passes, both full
  EXPECT_EQ(count(8, [](int lane) { return 16 * lane; }), 2);          // each half warp over 16 of the banks
  EXPECT_EQ(count(8, [](int lane) { return lane / 16 * 8; }), 0);      // halves do not meet
  EXPECT_EQ(count(16, [](int lane) { return 16 * lane; }), 0);         // four passes
  EXPECT_EQ(count(16, [](int lane) { return 128 * lane; }), 28);       // 8 rows in one bank group, four times
  EXPECT_EQ(count(16, [](int lane) { return 128 * (lane / 8); }), 0);  // quarters do not meet
  const LaneAddresses rows = each_lane([](int lane) { return 128 * lane; });
  EXPECT_EQ(conflicts(std::span(rows).first(16), 16), 14);  // ldmatrix.x2: two matrices
}

TEST(BankConflicts, AddressesAreAlignedAndEveryPlaceIsTouchedOnce) {
  const auto check = [](const std::vector<Access>& accesses, const std::vector<Tile>& tiles) {
    for (const Access& access : accesses)
      for (const Tile& tile : tiles)
        for (const TileLayout at : {tile.naive_at, tile.padded_at, tile.swizzled_at}) {
          std::set<int> touched;
          for (const LaneAddresses& lanes : access.everywhere(at, tile.pitch))
            for (const int address : lanes) {
              EXPECT_EQ(address % access.bytes_per_lane, 0) << access.name;
              touched.insert(address);
            }
          EXPECT_EQ(touched.size(), static_cast<size_t>(kRows * tile.pitch / access.bytes_per_lane)) << access.name;
        }
  };
  check(accesses(), all_tiles());
  check(float_accesses(), float_tiles());
}

TEST(BankConflicts, NaiveAndPaddedCountsOfKnownCases) {
  const std::vector<Access> all = accesses();
  const auto worst = [&](int access, TileLayout at, int pitch) { return all[access].worst(at, pitch); };
  EXPECT_EQ(worst(0, naive<128>, 128), 0);   // contiguous
  EXPECT_EQ(worst(0, padded<64>, 64), 4);    // two rows a quarter warp, 5 chunks apart: chunk 8 meets chunk 0
  EXPECT_EQ(worst(0, padded<128>, 128), 0);  // a quarter warp a row
  EXPECT_EQ(worst(1, naive<64>, 64), 0);
  EXPECT_EQ(worst(1, padded<64>, 64), 1);
  EXPECT_EQ(worst(2, naive<64>, 64), 12);    // 8 rows in two bank groups: 4 passes a matrix
  EXPECT_EQ(worst(2, naive<128>, 128), 28);  // all in one: 8 passes
  EXPECT_EQ(worst(3, naive<192>, 192), 12);
  EXPECT_EQ(worst(3, naive<256>, 256), 28);
  EXPECT_EQ(worst(2, padded<128>, 128), 0);
  EXPECT_EQ(worst(4, naive<128>, 128), 7);  // 8 rows of 4 words
  EXPECT_EQ(worst(4, padded<256>, 256), 0);

  const std::vector<Access> floats = float_accesses();
  EXPECT_EQ(floats[0].worst(naive<256>, 256), 6);   // halves of 4 rows: 4 passes each
  EXPECT_EQ(floats[0].worst(padded<256>, 256), 2);  // two chunks a row, rows one chunk apart: 5 groups
  EXPECT_EQ(floats[1].worst(naive<256>, 256), 3);
  EXPECT_EQ(floats[1].worst(padded<256>, 256), 1);
  EXPECT_EQ(floats[2].worst(padded<256>, 256), 0);
}

TEST(BankConflicts, NoAccessConflictsInASwizzledTile) {
  for (const Access& access : accesses())
    for (const Tile& tile : all_tiles()) {
      EXPECT_EQ(access.worst(tile.swizzled_at, tile.pitch), 0) << access.name << ", pitch " << tile.pitch;
      if (tile.fp32_at) {
        EXPECT_EQ(access.worst(tile.fp32_at, tile.pitch), 0) << access.name << " (fp32), pitch " << tile.pitch;
      }
    }
}

TEST(BankConflicts, NoFloatAccessConflictsInATileSwizzledForFloats) {
  for (const Access& access : float_accesses())
    for (const Tile& tile : float_tiles())
      EXPECT_EQ(access.worst(tile.fp32_at, tile.pitch), 0) << access.name << ", pitch " << tile.pitch;
}

TEST(BankConflicts, DocumentShowsTheseCounts) {
  std::ifstream file(GOLDEN_DIR "/../../docs/learn/5-shared-memory.md");
  ASSERT_TRUE(file) << "docs/learn/5-shared-memory.md is missing";
  std::stringstream text;
  text << file.rdbuf();
  for (const std::string& expected :
       {table(accesses(), all_tiles(), false), table(float_accesses(), float_tiles(), true)}) {
    EXPECT_NE(text.str().find("\n\n" + expected + "\n"), std::string::npos)
        << "docs/learn/5-shared-memory.md should hold, between empty lines:\n"
        << expected;
  }
}

}  // namespace
}  // namespace flash_ext::smem
