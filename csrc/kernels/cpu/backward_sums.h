// Sums that several items of the sweep have made apart: dK and dV of chunks of queries, and a bias's gradient.
//
// Called by backward.cpp once all items are done. Invariant: slots are added in order, so that every run gives the same
// bits.
#pragma once

#include "kernels/cpu/bias_route.h"

namespace flash_ext::cpu {

// dk and dv of keys of one key or value head, from their sums.
template <class Compute>
void store_keys(const Problem& problem, const TensorView& view, bool in_accum, int64_t batch, int64_t head, Range keys,
                const typename Compute::Acc* sums, int cols, int64_t head_dim, double scale) {
  using Acc = typename Compute::Acc;
  const Element type = in_accum ? element_of(problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32)
                                : element_of(problem.dtype);
  vector_table().get<Compute>().store(sums, cols, static_cast<int>(keys.size()), static_cast<int>(head_dim),
                                      static_cast<Acc>(scale), nullptr,
                                      sink_at(problem, view, type, batch, head, keys.first, 0));
}

// Adds the slots of some keys of one unit, in order, and writes them. chunks > 1 means that a unit is one key head.
template <class Compute>
void reduce_unit(const BackwardArgs& args, const BackwardLayout<Compute>& at, int64_t unit, Range keys) {
  using Acc = typename Compute::Acc;
  const Problem& problem = args.fwd.problem;
  const auto& kernels = vector_table().get<Compute>();
  const auto add_slots = [&](Acc* slots, int cols) {
    Acc* sums = slots + (unit * at.cut.chunks * at.keys + keys.first) * cols;
    for (int64_t chunk = 1; chunk < at.cut.chunks; ++chunk) {
      kernels.add(sums, sums + chunk * at.keys * cols, keys.size() * cols);
    }
    return sums;
  };
  const int64_t batch = unit / at.cut.groups, head = unit % at.cut.groups;
  if (problem.wants_dk) {
    store_keys<Compute>(problem, args.dk, args.dk_in_accum, batch, head, keys, add_slots(at.dk_slots, at.tiles.cols),
                        at.tiles.cols, problem.head_dim, problem.scale);
  }
  if (problem.wants_dv) {
    store_keys<Compute>(problem, args.dv, args.dv_in_accum, batch, head, keys, add_slots(at.dv_slots, at.tiles.cols_v),
                        at.tiles.cols_v, problem.head_dim_v, 1.0);
  }
}

// Adds the slots of all that share a place in dbias, in the order of batches, heads and chunks.
template <class Compute>
void reduce_key_sums(const BackwardArgs& args, const BackwardLayout<Compute>& at, const BiasRoute& bias) {
  const Problem& problem = args.fwd.problem;
  const auto& kernels = vector_table().get<Compute>();
  const Element type = problem.dtype == DType::kFloat64 ? Element::kFloat64 : Element::kFloat32;
  const Partition& cut = at.cut;
  const int64_t heads = bias.sums_heads ? 1 : problem.heads_q;
  for (size_t set = 0; set + 1 < bias.starts.size(); ++set) {
    for (int64_t head = 0; head < heads; ++head) {
      typename Compute::Acc* total = nullptr;
      for (int64_t i = bias.starts[set]; i < bias.starts[set + 1]; ++i) {
        for (int64_t h = head; h < (bias.sums_heads ? problem.heads_q : head + 1); ++h) {
          for (int64_t chunk = 0; chunk < cut.chunks; ++chunk) {
            const int64_t slot = (bias.members[i] * cut.groups + h / cut.heads) * cut.chunks + chunk;
            typename Compute::Acc* sums = at.key_sums + (slot * cut.heads + h % cut.heads) * at.keys;
            if (total == nullptr) {
              total = sums;
            } else {
              kernels.add(total, sums, at.keys);
            }
          }
        }
      }
      kernels.store(total, 0, 1, static_cast<int>(problem.len_k), 1, nullptr,
                    sink_at(problem, args.dbias, type, bias.members[bias.starts[set]], head, 0, 0));
    }
  }
}

// Adds the tables of a bias's gradient to it, in the order of the parts.
template <class Compute>
void add_bias_tables(const BackwardArgs& args, const BackwardLayout<Compute>& at, const BiasRoute& bias) {
  using Acc = typename Compute::Acc;
  const Problem& problem = args.fwd.problem;
  const int64_t size = problem.len_q * problem.len_k, heads = bias.heads_of_owner(at.cut);
  const int64_t owners = static_cast<int64_t>(bias.starts.size() - 1) * bias.owners_of_set(at.cut);
  const Acc* table = at.bias_sums;
  for (int64_t owner = 0; owner < owners; ++owner) {
    const int64_t batch = bias.members[bias.starts[owner / bias.owners_of_set(at.cut)]];
    for (int64_t part = 1; part < bias.parts; ++part) {
      for (int64_t head = 0; head < heads; ++head, table += size) {
        const Sink to = sink_at(problem, args.dbias, kAccElement<Acc>, batch,
                                owner % bias.owners_of_set(at.cut) * heads + head, 0, 0);
        for (int64_t row = 0; row < problem.len_q; ++row) {
          Acc* const sums = static_cast<Acc*>(to.data) + row * to.row_stride;
          for (int64_t col = 0; col < problem.len_k; ++col) sums[col] += table[row * problem.len_k + col];
        }
      }
    }
  }
}

}  // namespace flash_ext::cpu
