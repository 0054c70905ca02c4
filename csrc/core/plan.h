// How a kernel will compute a problem: made before anything is allocated, shown by explain and handed to the run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace flash_ext {

// What explain prints, what the caller provides, and what the kernel has chosen, which is its own. Plain
// data: making one costs no allocation. Sizes in elements, memory in bytes.
struct Plan {
  struct Use {
    const char* name = nullptr;
    int64_t bytes = 0;
  };
  const char* kernel = "";    // e.g. "cpu.forward.bf16.brgemm"
  const char* schedule = "";  // how products, softmax and tiles take turns; empty where the notion does not exist
  int64_t block_m = 0, block_n = 0;  // queries, keys
  int stages = 0;                    // 0 where the notion does not exist
  int splits = 1;                    // parts of a tile's keys, each the work of a block
  int64_t split_keys = 0;            // of a part, where there are several
  Use on_chip[10];                   // shared memory (CPU: cache) by what it holds; ends at the first null name
  int64_t on_chip_limit = 0;
  // One more of them, if it has any bytes.
  void use(const char* name, int64_t bytes) {
    Use* place = on_chip;
    while (place->name != nullptr) ++place;
    if (bytes > 0) *place = {name, bytes};
  }
  int64_t on_chip_bytes() const {
    int64_t bytes = 0;
    for (const Use& use : on_chip) bytes += use.bytes;
    return bytes;
  }
  int64_t scratch_bytes = 0;         // memory beside inputs and outputs
  bool dbias_in_bias_dtype = false;  // dbias is wanted in the bias's own dtype, not in float
  int64_t grid = 0;                  // work items
  double waves = 0.0;
  int64_t l2_section = 0;  // key heads whose tiles run together, so that their K and V stay in the L2 cache; 0: no such
  int producer_registers = 0;  // of a thread that loads, where roles have their own numbers
  // What only the compiled kernel knows: filled by Kernel::inspect, for explain alone, or by plan() where it is fixed.
  int registers = 0;         // a thread; where roles have their own numbers, of one that computes
  int64_t local_bytes = 0;   // a thread, of any kernel of the pass: registers that did not suffice
  int64_t static_bytes = 0;  // shared memory beside on_chip
  int resident_blocks = 0;   // on a multiprocessor at a time
  double occupancy = 0.0;    // their threads over those that a multiprocessor can have

  // field(name, value) of what explain prints, in its order.
  template <class Field>
  void visit(const Field& field) const {
    field("schedule", schedule);
    field("block_m", block_m);
    field("block_n", block_n);
    field("stages", stages);
    field("on_chip", on_chip);
    field("on_chip_limit", on_chip_limit);
    field("scratch_bytes", scratch_bytes);
    field("grid", grid);
    field("waves", waves);
    field("registers", registers);
    field("producer_registers", producer_registers);
    field("local_bytes", local_bytes);
    field("static_bytes", static_bytes);
    field("resident_blocks", resident_blocks);
    field("occupancy", occupancy);
    field("l2_section", l2_section);
    field("splits", splits);
    field("split_keys", split_keys);
  }

  // The choice, as the kernel wrote it: a plain structure, which nobody else reads.
  template <class Choice>
  void choose(const Choice& value) {
    static_assert(std::is_trivially_copyable_v<Choice> && sizeof(Choice) <= sizeof(choice));
    std::memcpy(choice, &value, sizeof(Choice));
  }
  template <class Choice>
  Choice chosen() const {
    Choice value;
    std::memcpy(&value, choice, sizeof(Choice));
    return value;
  }

 private:
  alignas(8) std::byte choice[64] = {};
};

}  // namespace flash_ext
