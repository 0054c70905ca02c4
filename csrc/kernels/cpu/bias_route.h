// Where the gradient of a bias goes while the sweep over tiles runs, so that a pass of its own is rarely needed.
//
//   kTiles   an element belongs to one (query, key): each tile of dS is stored; where batches or heads share it, one
//            item visits all of them in order and adds, or a few items each visit a part of them, into tables
//   kKeys    summed over queries: sums by key, one slot for each head of each item, added up in order afterwards
//   kPass    summed over keys, or shared by more batches and heads than one item may hold: bias_gradient.cpp
// Called by backward.cpp. Invariant: every order of summation is fixed, and every element of dbias is written.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cpu/backward_tiles.h"

namespace flash_ext::cpu {

// How many tables [len_q, len_k] of a bias's gradient there may be beside the gradient itself, so that threads share
// its batches and heads. NOTE: three heads on two threads took a third longer without.
template <class Acc>
int64_t bias_tables(const Problem& problem, int64_t threads) {
  constexpr int64_t kBytesPerThread = 512 * 1024;
  const int64_t bytes = problem.len_q * problem.len_k * static_cast<int64_t>(sizeof(Acc));
  if (!problem.wants_dbias || problem.batch_invariant || threads == 1 || bytes == 0) return 0;
  return std::min(2 * threads, threads * kBytesPerThread / bytes);
}

struct BiasRoute {
  enum Kind : uint8_t { kNone, kTiles, kKeys, kPass };
  Kind kind = kNone;
  bool sums_heads = false;
  int64_t parts = 1;  // of those that share a place, each an item; the first adds up in dbias, the others in tables
  // Batches that share one place in dbias, by first member; each is a contiguous run of `members`.
  std::vector<int64_t> members;
  std::vector<int64_t> starts;

  // tables: how many there are.
  BiasRoute(const BackwardArgs& args, const Partition& cut, int64_t threads, int64_t tables) {
    const Problem& problem = args.fwd.problem;
    if (!problem.wants_dbias) return;
    std::vector<int64_t> places;
    std::vector<std::vector<int64_t>> sets;
    for (int64_t b = 0; b < problem.batch; ++b) {
      const int64_t place = batch_offset(problem, args.dbias, b);
      const auto found = std::find(places.begin(), places.end(), place) - places.begin();
      if (found == static_cast<int64_t>(places.size())) {
        places.push_back(place);
        sets.emplace_back();
      }
      sets[found].push_back(b);
    }
    for (const auto& set : sets) {
      starts.push_back(static_cast<int64_t>(members.size()));
      members.insert(members.end(), set.begin(), set.end());
    }
    starts.push_back(static_cast<int64_t>(members.size()));
    sums_heads = args.dbias.head_stride == 0 && problem.heads_q > 1;
    const bool sums_batch = static_cast<int64_t>(sets.size()) < problem.batch;
    const int64_t owners = static_cast<int64_t>(sets.size()) * (sums_heads ? 1 : cut.groups);
    const bool sums_rows = args.dbias.row_stride == 0 && problem.len_q > 1;
    const bool sums_cols = args.dbias.col_stride == 0 && problem.len_k > 1;
    if (sums_cols) {
      kind = kPass;
    } else if (sums_rows) {
      kind = kKeys;
    } else if (!sums_batch && !sums_heads) {
      kind = kTiles;
    } else {
      if (cut.chunks == 1) parts = choose_parts(cut, owners, threads, tables);
      kind = cut.chunks == 1 && (owners * parts >= threads || problem.batch_invariant) ? kTiles : kPass;
      if (kind == kPass) parts = 1;
    }
  }

  // Items of the sweep: with shared tiles, a part of an owner's units is one item.
  bool shared() const { return kind == kTiles && (sums_heads || starts.size() <= members.size()); }
  int64_t items(const Partition& cut) const {
    return shared() ? static_cast<int64_t>(starts.size() - 1) * owners_of_set(cut) * parts : cut.items;
  }
  template <class Run>
  void for_each_unit(const Partition& cut, int64_t index, const Run& run) const {
    if (!shared()) return run(cut.item(index));
    const Range units = units_of(cut, index);
    for (int64_t unit = units.first; unit < units.last; ++unit) run(unit_of(cut, index / parts, unit));
  }

  // Where an item of the sweep adds up.
  template <class Acc>
  struct Sums {
    Acc* tables = nullptr;         // [heads of an owner][len_q, len_k]; without them in dbias
    int64_t batch = 0, group = 0;  // of its first unit, which stores what others add to
  };
  template <class Acc>
  Sums<Acc> sums_of(const Problem& problem, const Partition& cut, int64_t index, Acc* tables) const {
    if (!shared()) return {};
    const Partition::Item first = unit_of(cut, index / parts, units_of(cut, index).first);
    const int64_t part = index % parts, size = heads_of_owner(cut) * problem.len_q * problem.len_k;
    return {part == 0 ? nullptr : tables + (index / parts * (parts - 1) + part - 1) * size, first.batch, first.group};
  }

  int64_t owners_of_set(const Partition& cut) const { return sums_heads ? 1 : cut.groups; }
  int64_t heads_of_owner(const Partition& cut) const { return sums_heads ? 1 : cut.heads; }

 private:
  // As few as leave no thread without work for more than a tenth of the time, if there are tables for so many.
  int64_t choose_parts(const Partition& cut, int64_t owners, int64_t threads, int64_t tables) const {
    const int64_t tables_of_part = owners * heads_of_owner(cut);
    int64_t least = cut.units;  // of an owner
    for (size_t set = 0; set + 1 < starts.size(); ++set) least = std::min(least, units_of_owner(cut, set));
    const auto idle = [&](int64_t count) {  // share of the threads' time
      const int64_t rounds = (owners * count + threads - 1) / threads;
      return 1.0 - static_cast<double>(owners * count) / static_cast<double>(rounds * threads);
    };
    int64_t best = 1;
    for (int64_t count = 2; idle(best) > 0.1 && count <= least && tables_of_part * (count - 1) <= tables; ++count) {
      if (idle(count) < idle(best)) best = count;
    }
    return best;
  }

  int64_t units_of_owner(const Partition& cut, int64_t set) const {
    return (starts[set + 1] - starts[set]) * (sums_heads ? cut.groups : 1);
  }
  Range units_of(const Partition& cut, int64_t index) const {  // of an item, among its owner's
    const int64_t part = index % parts, count = units_of_owner(cut, index / parts / owners_of_set(cut));
    return {count * part / parts, count * (part + 1) / parts};
  }
  Partition::Item unit_of(const Partition& cut, int64_t owner, int64_t unit) const {
    const int64_t start = starts[owner / owners_of_set(cut)];
    const Range blocks{0, cut.row_blocks};
    if (sums_heads) return {members[start + unit / cut.groups], unit % cut.groups, 0, blocks};
    return {members[start + unit], owner % cut.groups, 0, blocks};
  }
};

}  // namespace flash_ext::cpu
