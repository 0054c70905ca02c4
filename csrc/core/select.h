// Which row of a table runs a call: of those that accept it the one of least cost, or of those the one that is named.
//
// Called by torch/dispatch.cpp and torch/explain.cpp; inline, so that tests bring tables of their own. Invariant:
// `accepts` and the reasons that explain prints are one function.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernel.h"

namespace flash_ext {

using Table = std::span<const Kernel* const>;

// What rows are asked about. `backward` is null in forward.
struct Asked {
  const ForwardArgs& forward;
  const BackwardArgs* backward = nullptr;

  const Problem& problem() const { return forward.problem; }
};

// Why a row refuses: clauses in `text`, or, without it, only whether. `count`: how far it is from accepting.
struct Reasons {
  std::string* text = nullptr;
  int count = 0;

  template <class Clause>
  void add(const Clause& clause) {
    ++count;
    if (text != nullptr) *text += (text->empty() ? "" : ", ") + clause();
  }
  bool is_decided() const { return count > 0 && text == nullptr; }
};

inline std::string number_text(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.12g", number);
  return text;
}

inline std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (size_t i = text.size(); i > 3; i -= 3) text.insert(i - 3, ",");
  return text;
}

inline std::string feature_names(Features features, const char* last = " and ") {
  std::string text;
  for (unsigned i = 0; i < static_cast<unsigned>(Feature::kCount); ++i) {
    if (!features.has(static_cast<Feature>(i))) continue;
    features = features.without({static_cast<Feature>(i)});
    text += (text.empty() ? "" : features.empty() ? last : ", ") + std::string(kFeatureNames[i]);
  }
  return text;
}

inline void ask_limits(const Limits& limits, const Problem& problem, const DeviceInfo& device, Reasons& reasons) {
  const auto check = [&](const char* name, auto value, auto least, auto most) {
    if (value >= least && value <= most) return;
    reasons.add([&] {
      const auto text = [](auto number) { return number_text(static_cast<double>(number)); };
      return name + (" " + text(value)) +
             (value > most ? " is more than " + text(most) : " is less than " + text(least));
    });
  };
  const auto version = [](int number) { return std::to_string(number / 10) + "." + std::to_string(number % 10); };
  const int capability = device.compute_capability;
  const bool too_late = capability > limits.compute_capability;
  if (too_late || capability < limits.least_compute_capability) {
    reasons.add([&] {
      return "compute capability " + version(capability) +
             (too_late ? " is more than " + version(limits.compute_capability)
                       : " is less than " + version(limits.least_compute_capability));
    });
  }
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  check(problem.head_dim_v > problem.head_dim ? "head_dim_v" : "head_dim", head_dim, limits.least_head_dim,
        limits.head_dim);
  if (head_dim < limits.least_head_dim) reasons.count += 3;  // another row is for it
  const auto check_multiple = [&](const char* name, int64_t size) {
    if (size % limits.head_dim_multiple == 0) return;
    reasons.add([&] {
      return name + (" " + std::to_string(size)) + " is not a multiple of " + std::to_string(limits.head_dim_multiple);
    });
  };
  check_multiple("head_dim", problem.head_dim);
  if (problem.head_dim_v != problem.head_dim) check_multiple("head_dim_v", problem.head_dim_v);
  check(problem.len_k > problem.len_q ? "len_k" : "len_q", std::max(problem.len_q, problem.len_k), limits.least_length,
        limits.length);
  if (limits.least_keys > 1) {
    const int64_t keys = make_band(problem).keys({0, problem.len_q}, problem.len_k).size();
    if (keys < limits.least_keys) {
      reasons.add([&] {
        return "all queries together see " + std::to_string(keys) + " keys, fewer than " +
               std::to_string(limits.least_keys);
      });
    }
  }
  check("softcap", problem.softcap, 0.0, limits.softcap);
  check("dropout_p", problem.dropout_p, 0.0, limits.dropout_p);
  check("scale", problem.scale, limits.least_scale, limits.scale);
}

inline void ask(const Kernel& kernel, const Asked& asked, const DeviceInfo& device, Reasons& reasons) {
  const Problem& problem = asked.problem();
  if (kernel.device != device.type) {
    return reasons.add([&] {
      return std::string("the tensors are not on ") + (kernel.device == DeviceType::kCpu ? "the CPU" : "a CUDA device");
    });
  }
  if (problem.batch_rank > kMaxBatchDims) {
    return reasons.add([&] { return "the leading dimensions do not merge into " + std::to_string(kMaxBatchDims); });
  }
  // Valid and rare: the scores are all 0, or there is no output. No tile has to think of it.
  if (problem.head_dim == 0) return reasons.add([] { return std::string("head_dim is 0"); });
  if (problem.head_dim_v == 0) return reasons.add([] { return std::string("head_dim_v is 0"); });

  const Features needed = required(problem, kernel.pass);
  const Features missing = needed.without(kernel.supports);
  if (!missing.empty()) {
    reasons.add([&] { return "no support for " + feature_names(missing); });
    reasons.count += 2 * std::popcount(missing.bits) - 1;  // a number that is off is nearer
  }
  if (reasons.is_decided()) return;
  if (!kernel.serves_only.empty() && (needed.bits & kernel.serves_only.bits) == 0) {
    reasons.add([&] { return "made for calls with " + feature_names(kernel.serves_only, " or "); });
    reasons.count += 3;  // another row is for it
  }
  Limits limits = kernel.limits;
  // Beside a long sequence a short one has the kernel that it has alone. A length below the least is slow, not wrong;
  // few keys are wrong in a backward, unless it takes packed sequences, of which some may have few.
  if (problem.batch_invariant && (kernel.pass == Pass::kForward || problem.packed)) {
    limits.least_length = limits.least_keys = 1;
  }
  ask_limits(limits, problem, device, reasons);
  if (reasons.count > 0) return;
  if (kernel.shared_bytes != nullptr) {
    const int64_t bytes = kernel.shared_bytes(problem, device);
    if (bytes > device.shared_memory_per_block) {
      return reasons.add([&] {
        return "a block needs " + grouped(bytes) + " bytes of shared memory, the device has " +
               grouped(device.shared_memory_per_block);
      });
    }
  }
  if (kernel.refuses_views == nullptr) return;
  const std::string clause = kernel.refuses_views(asked.forward, asked.backward);
  if (!clause.empty()) reasons.add([&] { return clause; });
}

inline bool accepts(const Kernel& kernel, const Asked& asked, const DeviceInfo& device) {
  Reasons reasons;
  ask(kernel, asked, device, reasons);
  return reasons.count == 0;
}

// A call of one size with all else of the problem: who computes must not follow from lengths or the size of the batch
// where the call is batch-invariant, and is who is fastest where both are large.
inline Problem of_one_size(Problem problem) {
  problem.packed = false;
  problem.len_q = problem.len_k = 4096;
  problem.batch = 16;
  return problem;
}

inline double cost_of(const Kernel& kernel, const Problem& problem, const DeviceInfo& device) {
  if (kernel.cost == nullptr) return 0.0;
  return kernel.cost(problem.batch_invariant ? of_one_size(problem) : problem, device);
}

// `name` is a backend's or a kernel's; where it is that of a kernel of another pass, it means the kernel's backend.
// Empty: any.
class Name {
 public:
  Name(Table table, Pass pass, std::string_view name) : name_(name) {
    if (name.empty()) return;
    for (const Kernel* kernel : table) {
      if (name == kernel->name && kernel->pass != pass) name_ = kernel->backend;
    }
  }
  bool matches(const Kernel& kernel) const { return name_.empty() || name_ == kernel.backend || name_ == kernel.name; }

 private:
  std::string_view name_;
};

inline const Kernel* select(Table table, Pass pass, const Asked& asked, const DeviceInfo& device,
                            std::string_view name) {
  const Name wanted(table, pass, name);
  const Kernel* best = nullptr;
  std::optional<double> least;  // asked only where there is a choice
  for (const Kernel* kernel : table) {
    if (kernel->pass != pass || !wanted.matches(*kernel) || !accepts(*kernel, asked, device)) continue;
    if (best == nullptr) {
      best = kernel;
      continue;
    }
    if (!least.has_value()) least = cost_of(*best, asked.problem(), device);
    const double cost = cost_of(*kernel, asked.problem(), device);
    if (cost >= *least) continue;
    best = kernel;
    least = cost;
  }
  return best;
}

inline const Kernel* select_forward(Table table, const ForwardArgs& args, const DeviceInfo& device,
                                    std::string_view name) {
  return select(table, Pass::kForward, {args}, device, name);
}

// Who would make the gradient of the bias where a main kernel does not; null: nobody. Where no other gradient is wanted
// there is nothing for a main kernel to do.
inline const Kernel* select_bias_gradient(Table table, const BackwardArgs& args, const DeviceInfo& device) {
  const Problem& problem = args.fwd.problem;
  if (!problem.wants_dbias) return nullptr;
  if (!problem.wants_dq && !problem.wants_dk && !problem.wants_dv && !problem.wants_dalibi) return nullptr;
  BackwardArgs alone = args;
  keep_bias_gradient(alone);
  return select(table, Pass::kBiasGradient, {alone.fwd, &alone}, device, {});
}

inline Stages select_backward(Table table, const BackwardArgs& args, const DeviceInfo& device, std::string_view name) {
  const Asked asked{args.fwd, &args};
  const Kernel* const whole = select(table, Pass::kBackward, asked, device, name);
  const Problem& problem = args.fwd.problem;
  const Kernel* const bias_gradient = select_bias_gradient(table, args, device);
  if (bias_gradient == nullptr) return Stages(whole);
  // A main kernel that leaves the gradient of the bias costs what it costs without, and the other one besides.
  BackwardArgs rest = args;
  drop_bias_gradient(rest);
  const Kernel* const main = select(table, Pass::kBackward, {rest.fwd, &rest}, device, name);
  if (main == nullptr || main == whole) return Stages(whole);
  const auto total = [&] {
    BackwardArgs alone = args;
    keep_bias_gradient(alone);
    return cost_of(*main, rest.fwd.problem, device) + cost_of(*bias_gradient, alone.fwd.problem, device);
  };
  if (whole == nullptr || total() < cost_of(*whole, problem, device)) return Stages(main, bias_gradient);
  return Stages(whole);
}

// A row of the pass, whether it accepts, and why not: for explain, and for the error where a named one refuses.
struct Considered {
  const Kernel* kernel;
  std::string reason;  // empty: it accepts
  int reasons = 0;
  double cost = 0.0;             // where it accepts
  const Kernel* left = nullptr;  // who makes the gradient of the bias for it
};

inline std::vector<Considered> consider(Table table, Pass pass, const Asked& asked, const DeviceInfo& device) {
  std::vector<Considered> result;
  const Kernel* const bias_gradient =
      pass == Pass::kBackward ? select_bias_gradient(table, *asked.backward, device) : nullptr;
  BackwardArgs rest, alone;
  if (bias_gradient != nullptr) {
    rest = alone = *asked.backward;
    drop_bias_gradient(rest);
    keep_bias_gradient(alone);
  }
  for (const Kernel* kernel : table) {
    if (kernel->pass != pass) continue;
    const bool leaves = bias_gradient != nullptr && !accepts(*kernel, asked, device);
    const Asked own = leaves ? Asked{rest.fwd, &rest} : asked;
    Considered row{kernel, {}};
    Reasons reasons{&row.reason};
    ask(*kernel, own, device, reasons);
    row.reasons = reasons.count;
    if (reasons.count == 0) {
      row.cost = cost_of(*kernel, own.problem(), device);
      if (leaves) {
        row.left = bias_gradient;
        row.cost += cost_of(*bias_gradient, alone.fwd.problem, device);
      }
    }
    result.push_back(std::move(row));
  }
  return result;
}

// Of those that are meant by a name and refuse, the one with the fewest reasons; null where one accepts.
inline const Considered* nearest(Table table, Pass pass, std::string_view name, const std::vector<Considered>& rows) {
  const Name wanted(table, pass, name);
  const Considered* result = nullptr;
  for (const Considered& row : rows) {
    if (!wanted.matches(*row.kernel)) continue;
    if (row.reason.empty()) return nullptr;
    if (result == nullptr || row.reasons < result->reasons) result = &row;
  }
  return result;
}

}  // namespace flash_ext
