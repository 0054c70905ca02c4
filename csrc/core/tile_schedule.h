// The order in which tiles run: a pure function from a linear index to (b, head, block), so that a grid and a
// persistent loop with an atomic counter walk the same order.
//
//   section of key heads (their K and V stay in L2)  >  block, longest first  >  key head  >  query head of its group
//
// Longest first (LPT): under a causal band the last queries see the most keys, and starting with them leaves only short
// tiles for the end of the grid. That is so if the last section has enough of them (set_sections). Query heads of one
// key head are neighbours, so they read its K and V together.
// Called by sm80 and sm90 on the host to size the grid and on the device to find the tile.
// Invariant: at() is a bijection from [0, size()) to all tiles, whatever the sizes.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "core/band.h"
#include "core/portable.h"

namespace flash_ext {

struct Tile {
  int64_t b = 0;
  int64_t head = 0;   // query head
  int64_t block = 0;  // m_block; n_block in a kernel that is parallel over keys
};

struct TileSchedule {
  int64_t blocks = 0;
  int64_t heads_k = 0;
  int64_t group = 1;        // query heads of a key head
  int64_t kv_heads = 0;     // batch * heads_k
  int64_t section = 1;      // of them, how many share the L2 cache
  int64_t tail = 0;         // the last ones, which are one section
  bool last_first = false;  // from the last block to the first
  int64_t batch = 1;
  bool batch_inner = false;  // key heads of all batch elements follow each other, to share a bias or mask tile in L2

  FLASH_DEVICE int64_t size() const { return blocks * group * kv_heads; }

  // Index: what the divisions are done in. A GPU takes uint32_t, because its grids are smaller than 2^31 and a division
  // of 64-bit numbers is a function call there.
  template <class Index = int64_t>
  FLASH_DEVICE Tile at(Index linear) const {
    const Index all = static_cast<Index>(kv_heads), per_head = static_cast<Index>(group);
    const Index tail_first = all - static_cast<Index>(tail), head_tiles = per_head * static_cast<Index>(blocks);
    const bool in_tail = linear >= tail_first * head_tiles;
    const Index in_section = section < kv_heads ? static_cast<Index>(section) : all;
    const Index section_first = in_tail ? tail_first : linear / (in_section * head_tiles) * in_section;
    const Index rest = linear - section_first * head_tiles;
    const Index left = (in_tail ? all : tail_first) - section_first;
    const Index heads = (in_tail || left < in_section ? left : in_section) * per_head;  // query heads of this section
    const Index index = rest / heads;
    const Index head = rest % heads;
    const Index kv_head = section_first + head / per_head;
    const Index inner = static_cast<Index>(batch_inner ? batch : heads_k), low = kv_head % inner,
                high = kv_head / inner;
    const int64_t block = static_cast<int64_t>(index);
    return {static_cast<int64_t>(batch_inner ? low : high),
            static_cast<int64_t>((batch_inner ? high : low) * per_head + head % per_head),
            last_first ? blocks - 1 - block : block};
  }
};

FLASH_DEVICE int64_t block_count(int64_t len, int64_t block) { return (len + block - 1) / block; }

// Bytes that tiles which run at a time are to find in L2, of the 40 to 60 MB of A100, H100 and H200.
constexpr int64_t kL2Budget = 24 << 20;

// Key heads whose K and V (kv_head_bytes each) fit the budget together; at least one.
FLASH_DEVICE int64_t heads_per_section(int64_t kv_head_bytes, int64_t l2_budget) {
  return kv_head_bytes > 0 && l2_budget > kv_head_bytes ? l2_budget / kv_head_bytes : 1;
}

// Sections of about l2_heads key heads for `resident` tiles that run at a time; 0: not known. work(block): how long a
// tile takes, in any unit. Where all take the same time, sections are as L2 has them. Else
//
//   - a section has a round of heads, as many as run at a time anyway, or rounds: then its tiles begin together and
//     read together what they share, and who had a long one gets a short one in the next round;
//   - the last section has work for all that run at a time for as long as its longest tile takes, because otherwise
//     that one begins when little else is left. Before it there is an even number of rounds, so that it begins at one
//     time, too.
//
// NOTE: of causal calls on 132 multiprocessors (4 to 128 heads, 512 to 12k tokens, each tile in its time) the last tile
// would end 6.8 % later than it could in the mean, and 64 % at most, with sections as L2 has them; 0.4 %, and 13 %, so.
// Measured (an H200, one process, interleaved): the backward of 4, 1 and 2 x 32 query heads on 8 key heads, 4096 x 128
// and 8192 x 128, takes 10, 27 and 8 % less, that of 64 heads of 4096 x 128 3.9 %, the forward 0 to 5 % less, sm80's 11
// %. A last section that began at different times took up to 12 % more than before: tiles of a head shared nothing.
template <class Work>
void set_sections(TileSchedule& schedule, int64_t l2_heads, int64_t resident, const Work& work) {
  schedule.section = l2_heads;
  constexpr int64_t kSamples = 64;
  const int64_t count = schedule.blocks < kSamples ? schedule.blocks : kSamples;
  int64_t longest = 0, shortest = INT64_MAX, sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t time = work(count > 1 ? i * (schedule.blocks - 1) / (count - 1) : 0);
    longest = time > longest ? time : longest;
    shortest = time < shortest ? time : shortest;
    sum += time;
  }
  if (resident == 0 || longest <= shortest) return;
  const int64_t head_tiles = schedule.blocks * schedule.group;
  const int64_t together = resident > head_tiles ? resident / head_tiles : 1;
  schedule.section = l2_heads > together ? l2_heads / together * together : together;
  const double head = static_cast<double>(sum) / static_cast<double>(count) * static_cast<double>(head_tiles);
  const auto needed = static_cast<int64_t>(static_cast<double>(longest * resident) / head) + 1;
  const int64_t even = schedule.section / together % 2 == 0 ? schedule.section : 2 * schedule.section;
  const int64_t before = schedule.kv_heads > needed ? (schedule.kv_heads - needed) / even * even : 0;
  schedule.tail = schedule.kv_heads - before;
}

// True where batch elements, but not heads, share a bias or mask.
inline bool batch_shares_scores(const Problem& problem, const ForwardArgs& args) {
  const auto shares = [&](const TensorView& view) {
    bool shared = view && view.head_stride != 0 && problem.heads_q > 1;
    for (int i = 0; i < problem.batch_rank; ++i) shared = shared && view.batch_stride[i] == 0;
    return shared;
  };
  return shares(args.bias) || shares(args.mask);
}

// Tiles of block_m queries. A packed batch is scheduled by its longest sequence, problem.len_q and problem.len_k.
// resident: as set_sections says.
inline TileSchedule make_tile_schedule(const Problem& problem, int64_t block_m, int64_t kv_head_bytes,
                                       int64_t l2_budget, int64_t resident = 0) {
  TileSchedule schedule;
  schedule.blocks = block_count(problem.len_q, block_m);
  schedule.heads_k = problem.heads_k;
  schedule.group = problem.heads_k > 0 ? problem.heads_q / problem.heads_k : 0;
  schedule.kv_heads = problem.batch * problem.heads_k;
  schedule.batch = problem.batch;
  const Band band = make_band(problem);
  const auto keys_of = [&](int64_t block) {
    const int64_t end = (block + 1) * block_m;
    return band.keys({block * block_m, end < problem.len_q ? end : problem.len_q}, problem.len_k).size();
  };
  schedule.last_first = keys_of(schedule.blocks - 1) > keys_of(0);
  set_sections(schedule, heads_per_section(kv_head_bytes, l2_budget), resident, keys_of);
  return schedule;
}

}  // namespace flash_ext
