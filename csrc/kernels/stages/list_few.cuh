// The list of tiles of few sequences, by one block: a thread counts what stands before its sequence, and what it finds
// stays in shared memory.
//
// Called by sequences.cu. The result is that of its sort_sequences and fill_entry, but that tiles of a
// group of sequences, of so many groups for each of their other rows, stand in one order by what they have to do, in
// steps of a tile. Of 0 groups a row each sequence is one.
// NOTE: a kernel behind waits for this one, which as 5,300 instructions waited most for its own: nothing here is
// counted or divided in 64 bits that need not be. But what is not unrolled waits for shared memory, 75 clocks a
// sequence.
#pragma once

#include "kernels/stages/tiles_of.cuh"

namespace flash_ext::cuda {

constexpr int kFew = 128;  // sequences

__device__ __forceinline__ void list_few(const Problem& problem, const Sequences& sequences, const Tiling& tiling,
                                         float groups_a_row, const ListScratch& scratch) {
  constexpr int kMostOther = 1 << 24;  // rows; so many, and their sum, are beyond every `together`
  struct alignas(16) Own {
    int key, count, other_rows;  // key: ascends in the list's order
  };
  struct alignas(16) Listed {
    int first, count, level;  // first: its first tile; level: of that, how many tiles of keys it has to do
    int16_t b;
    bool falls, last_first;
  };
  __shared__ Own owns[kFew];
  __shared__ Listed listed[kFew];  // in order
  __shared__ int4 rows[kFew];
  __shared__ int groups[kFew];
  __shared__ int all;
  const int batch = static_cast<int>(problem.batch), b = static_cast<int>(threadIdx.x);
  Own own = {};
  Tiles tiles = {};
  Sequence sequence = {};
  if (b < batch) {
    sequence = sequence_of(problem, sequences, b);
    tiles = tiles_of(tiling, sequence);
    own = {bucket_of(tiles.longest) * kFew + b, tiles.count,
           min(tiling.of == TilesOf::kQueries ? sequence.len_k : sequence.len_q, kMostOther)};
    owns[b] = own;
  }
  if (b == 0) all = 0;
  const bool descends = descend(problem, sequences, tiling.of);  // behind a barrier
  if (b < batch) {
    int place = 0, first = 0;
    unsigned other_rows = 0;
#pragma unroll 8
    for (int i = 0; i < batch; ++i) {
      const Own other = owns[i];
      const bool before = other.key < own.key;
      place += before ? 1 : 0;
      first += before ? other.count : 0;
      other_rows += before ? static_cast<unsigned>(other.other_rows) : 0u;
    }
    listed[place] = {first,      tiles.count,     tile_count(tiles.longest, tiling.block), static_cast<int16_t>(b),
                     tiles.fall, tiles.last_first};
    rows[place] = {sequence.row_q, sequence.row_k, sequence.len_q, sequence.len_k};
    groups[place] = groups_a_row > 0.f ? static_cast<int>(static_cast<float>(other_rows) * groups_a_row) : place;
    if (place == batch - 1 && !descends) all = first + tiles.count;
  }
  __syncthreads();
  if (b == 0) scratch.first[batch] = all;
  // The first place of which `is` is true.
  const auto find = [&](const auto& is) {
    int low = 0, high = batch;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      (is(middle) ? high : low) = is(middle) ? middle : middle + 1;
    }
    return low;
  };
  const bool is_one_group = groups[0] == groups[batch - 1];
#pragma unroll 1
  for (int i = b; i < static_cast<int>(scratch.count); i += static_cast<int>(blockDim.x)) {
    if (i >= all) {
      scratch.tiles[i] = {-1, 0, {}, all};
      continue;
    }
    const int place = find([&](int p) { return listed[p].first > i; }) - 1;
    const Listed mine = listed[place];
    const int at = i - mine.first, level = mine.level - (mine.falls ? at : 0);
    // Before it: tiles of its group that have more to do, and of sequences before its own as much.
    int begin = 0, end = batch;
    if (!is_one_group) {
      const int group = groups[place];
      begin = find([&](int p) { return groups[p] >= group; });
      end = find([&](int p) { return groups[p] > group; });
    }
    int index = listed[begin].first + (mine.falls ? 0 : at);
#pragma unroll 8
    for (int p = begin; p < end; ++p) {
      const Listed other = listed[p];
      const int more = max(other.level - level + (p < place ? 1 : 0), 0);
      index += other.falls ? min(more, other.count) : (more > 0 ? other.count : 0);
    }
    const int4 of_rows = rows[place];
    scratch.tiles[index] = {
        mine.b, mine.last_first ? mine.count - 1 - at : at, {of_rows.x, of_rows.y, of_rows.z, of_rows.w}, all};
  }
}

}  // namespace flash_ext::cuda
