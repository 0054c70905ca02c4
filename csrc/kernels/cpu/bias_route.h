// Where the gradient of a bias goes while the sweep over tiles runs, so that a pass of its own is rarely needed.
//
//   kTiles   an element belongs to one (query, key): each tile of dS is stored; where batches or heads share it, one
//            item visits all of them in order and adds
//   kKeys    summed over queries: sums by key, one slot for each head of each item, added up in order afterwards
//   kPass    summed over keys, or shared by more batches and heads than one item may hold: bias_gradient.cpp
// Called by backward.cpp. Invariant: every order of summation is fixed, and every element of dbias is written.
#pragma once

#include <vector>

#include "kernels/cpu/backward_tiles.h"

namespace flash_ext::cpu {

struct BiasRoute {
  enum Kind : uint8_t { kNone, kTiles, kKeys, kPass };
  Kind kind = kNone;
  bool sums_heads = false;
  // Batches that share one place in dbias, by first member; each is a contiguous run of `members`.
  std::vector<int64_t> members;
  std::vector<int64_t> starts;

  BiasRoute(const BackwardArgs& args, const Partition& cut, int64_t threads) {
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
      kind = cut.chunks == 1 && (owners >= threads || problem.batch_invariant) ? kTiles : kPass;
    }
  }

  // Items of the sweep: with shared tiles, an owner's units are one item.
  bool shared() const { return kind == kTiles && (sums_heads || starts.size() <= members.size()); }
  int64_t items(const Partition& cut) const {
    return shared() ? static_cast<int64_t>(starts.size() - 1) * (sums_heads ? 1 : cut.groups) : cut.items;
  }
  template <class Run>
  void for_each_unit(const Partition& cut, int64_t index, const Run& run) const {
    if (!shared()) return run(cut.item(index));
    const int64_t set = sums_heads ? index : index / cut.groups;
    for (int64_t i = starts[set]; i < starts[set + 1]; ++i) {
      const int64_t first = sums_heads ? 0 : index % cut.groups;
      const int64_t last = sums_heads ? cut.groups : first + 1;
      for (int64_t group = first; group < last; ++group) {
        run(Partition::Item{members[i], group, 0, {0, cut.row_blocks}});
      }
    }
  }
  // Whether (batch, head) is the first of those that share its place.
  bool is_first(int64_t batch, int64_t head) const {
    if (sums_heads && head != 0) return false;
    for (size_t set = 0; set + 1 < starts.size(); ++set) {
      if (members[starts[set]] == batch) return true;
    }
    return false;
  }
};

}  // namespace flash_ext::cpu
