// What a backend is to the rest of the library: a name, a reason to refuse, and two functions.
//
// Forward and backward are chosen independently, so the hand-over between them is fixed: out (problem.dtype),
// lse (contiguous [b, h_q, s_q], natural log, no padding, no private form) and rng_state. A backend may serve fewer
// problems backward than forward: the gradients are then another backend's.
// A new backend is a folder with one `extern const Backend` and one name in dispatch.cpp's list.
#pragma once

#include <cstdint>
#include <string>

#include "core/args.h"

namespace flash_ext {

enum class Pass : uint8_t { kForward, kBackward };
enum class DeviceType : uint8_t { kCpu, kCuda };

// Where a problem would run; filled without touching the device, so that explain can plan for an absent one.
struct DeviceInfo {
  DeviceType type = DeviceType::kCpu;
  int compute_capability = 0;                    // 90 for 9.0; 0 on the CPU
  int multiprocessors = 0;                       // SMs, or threads on the CPU
  int64_t shared_memory_per_block = 0;           // bytes, opt-in maximum; 0 on the CPU
  int64_t shared_memory_per_multiprocessor = 0;  // bytes; what the blocks that share one have together
};

// What explain prints and the operator executes. Plain data: making one costs no allocation. Sizes in elements,
// memory in bytes.
struct Plan {
  struct Use {
    const char* name = nullptr;
    int64_t bytes = 0;
  };
  const char* kernel = "";    // e.g. "cpu.forward.bf16.brgemm"
  const char* schedule = "";  // how products, softmax and tiles take turns; empty where the notion does not exist
  int64_t block_m = 0, block_n = 0;  // queries, keys
  int stages = 0;                    // 0 where the notion does not exist
  bool small_tiles = false;          // of a backend that has two tiles for a pass, the smaller
  bool tensor_maps = false;          // of a backend that can do without, tiles are copied by TMA
  int splits = 0;       // parts of a tile's keys, each the work of a block; 0 where the notion does not exist
  int split_tiles = 0;  // tiles of keys a part
  int head_rows = 0;    // of a tile that heads of a group share, for each of them; 0: they do not
  Use on_chip[10];      // shared memory (CPU: cache) by what it holds; ends at the first null name
  int64_t on_chip_limit = 0;
  int64_t on_chip_bytes() const {
    int64_t bytes = 0;
    for (const Use& use : on_chip) bytes += use.bytes;
    return bytes;
  }
  int64_t scratch_bytes = 0;  // memory beside inputs and outputs
  bool narrow_dbias = false;  // dbias is wanted in the bias's own dtype, not in float
  int64_t grid = 0;           // work items
  int64_t processors = 0;     // of them that run at a time on the device; 0: not known
  double waves = 0.0;
  int64_t l2_section = 0;  // key heads whose tiles run together, so that their K and V stay in the L2 cache; 0: no such
  int producer_registers = 0;  // of a thread that loads, where roles have their own numbers
  // What only the compiled kernel knows: filled by Backend::inspect, for explain alone, or by plan() where it is fixed.
  int registers = 0;         // a thread; where roles have their own numbers, of one that computes
  int64_t local_bytes = 0;   // a thread, of any kernel of the pass: registers that did not suffice
  int64_t static_bytes = 0;  // shared memory beside on_chip
  int resident_blocks = 0;   // on a multiprocessor at a time
  double occupancy = 0.0;    // their threads over those that a multiprocessor can have
};

// Scratch comes from torch's allocator on the current stream; the caller of a backend provides it.
// `workspace` holds plan().scratch_bytes bytes, aligned to 64.
struct Backend {
  const char* name;
  DeviceType device;
  // Empty string: accepts. Otherwise one clause, e.g. "head_dim 300 is more than 256".
  std::string (*refuses)(const Problem& problem, Pass pass, const DeviceInfo& device);
  Plan (*plan)(const Problem& problem, Pass pass, const DeviceInfo& device);
  void (*forward)(const ForwardArgs& args, const Plan& plan, void* workspace);
  void (*backward)(const BackwardArgs& args, const Plan& plan, void* workspace);
  // Asks the current device about the kernel of a plan; null where there is nothing to ask.
  void (*inspect)(const Problem& problem, Pass pass, Plan& plan) = nullptr;
  // A clause about where a tensor lies, e.g. "query does not start at a multiple of 16 bytes"; asked after refuses()
  // has accepted, with all views set. `backward` is null in forward, and otherwise what backward will be given, `args`
  // in it. Addresses of explain count from the storage. Null: reads any strides.
  std::string (*refuses_views)(const ForwardArgs& args, const BackwardArgs* backward) = nullptr;
  // Empty, or a clause about which backend behind it in the list is faster at a pass that this one accepts, too. Asked
  // only where no backend is named, and heeded where another one accepts. Null: it is the fastest at all it accepts.
  std::string (*yields)(const Problem& problem, Pass pass) = nullptr;
};

extern const Backend cpu_backend;
extern const Backend sm80_backend;  // only in a build with CUDA
extern const Backend sm90_backend;  // only in one for compute capability 9.0

// True where dropout keeps, out [batch_heads, rows, cols] contiguous: (n, i, j) is the map at (n, q0 + i, k0 + j).
void cpu_dropout_mask(const int64_t* rng_state, double p, int64_t batch_heads, int64_t rows, int64_t cols, int64_t q0,
                      int64_t k0, bool* out);
// The same on the device and stream of the caller; rng_state lies on the device. Only in a build with CUDA.
void cuda_dropout_mask(const int64_t* rng_state, double p, int64_t batch_heads, int64_t rows, int64_t cols, int64_t q0,
                       int64_t k0, bool* out, void* stream);

}  // namespace flash_ext
