#undef _FORTIFY_SOURCE  // it takes a jump to another fiber's stack for an error
#include "emulator.h"

#include <cuda.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace flash_ext::emulated {
namespace {

struct Copy {
  uint32_t to;
  const void* from;
  int bytes, filled_to;
};

// Stacks of fibers that end one after another, of one kernel after another: they are taken once and never cleared.
struct FiberStacks {
  static constexpr size_t kBytes = 256 * 1024;
  std::vector<std::unique_ptr<char[]>> stacks;

  char* operator[](size_t fiber) {
    while (stacks.size() <= fiber) stacks.emplace_back(new char[kBytes]);
    return stacks[fiber].get();
  }
};

// NOTE: a fiber begins with setcontext and is left and entered again with _setjmp and _longjmp, because swapcontext
// asks the system for the signals' mask each time, which was a fifth of the tests.
struct Fiber {
  jmp_buf where;
  bool has_begun = false, is_done = false;
  int turn = 0;  // of the warp's two rows of slots
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::vector<std::function<void()>> stores, open_work;
  std::vector<std::vector<std::function<void()>>> work;
};

struct Barrier {
  int arrived = 0;
  std::vector<int> waiting;
};

struct Phase {
  int arrivals = 0, missing = 0, bytes = 0;
  uint32_t parity = 0;
  std::vector<int> waiting;
};

struct Warp {
  char slots[2][32 * kSlotBytes];
  const char* operation[2] = {};
  Barrier barrier;
};

struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::map<int, Barrier> barriers;
  std::map<uint32_t, Phase> phases;
  std::vector<std::function<void()>> engine;
  std::vector<int> ready;
  int running = 0, yields = 0;
  unsigned index = 0, count = 0;
  jmp_buf scheduler;
  std::mt19937 random;
  const std::function<void()>* body = nullptr;
};

Block* block = nullptr;
FiberStacks stacks;
alignas(1024) char shared[kSharedBytes];

void tell_who_waits() {
  const auto tell = [](const char* what, unsigned which, int missing, const std::vector<int>& threads) {
    if (threads.empty()) return;
    std::fprintf(stderr, "  %zu threads from %d on at %s %u, which lacks %d\n", threads.size(),
                 *std::min_element(threads.begin(), threads.end()), what, which, missing);
  };
  for (const auto& [id, barrier] : block->barriers) tell("barrier", id, -barrier.arrived, barrier.waiting);
  for (const auto& [address, phase] : block->phases) {
    tell(phase.bytes == 0 ? "mbarrier" : "mbarrier (bytes are missing)", address, phase.missing, phase.waiting);
  }
  for (size_t i = 0; i < block->warps.size(); ++i) {
    tell("warp", static_cast<unsigned>(i), 32 - block->warps[i].barrier.arrived, block->warps[i].barrier.waiting);
  }
}

void switch_away() {
  if (_setjmp(block->fibers[block->running]->where) == 0) _longjmp(block->scheduler, 1);
}

void release(Barrier& barrier) {
  barrier.arrived = 0;
  block->ready.insert(block->ready.end(), barrier.waiting.begin(), barrier.waiting.end());
  barrier.waiting.clear();
  block->yields = 0;
}

void arrive(Barrier& barrier, int count, bool waits) {
  if (++barrier.arrived == count) {
    if (waits) barrier.waiting.push_back(block->running);
    release(barrier);
    if (waits) switch_away();
    return;
  }
  if (!waits) return;
  barrier.waiting.push_back(block->running);
  switch_away();
}

void make(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    std::memcpy(place(copy.to), copy.from, copy.bytes);
    std::memset(place(copy.to) + copy.bytes, 0, copy.filled_to - copy.bytes);
  }
}

void start() {
  (*block->body)();
  Fiber& fiber = *block->fibers[block->running];
  wait_stores();
  if (!fiber.open.empty() || !fiber.open_work.empty() || !fiber.work.empty()) {
    give_up("a thread that ends has copies or products that it did not wait for");
  }
  fiber.is_done = true;
  switch_away();
}

// Until the fiber that runs switches away.
void enter_running_fiber() {
  Fiber& fiber = *block->fibers[block->running];
  if (_setjmp(block->scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.where, 1);
  fiber.has_begun = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks[static_cast<size_t>(block->running)];
  context.uc_stack.ss_size = FiberStacks::kBytes;
  context.uc_link = nullptr;
  makecontext(&context, start, 0);
  setcontext(&context);
}

}  // namespace

void give_up(const char* why) {
  std::fprintf(stderr, "emulated kernel: %s (block %u, thread %d)\n", why, block == nullptr ? 0 : block->index,
               block == nullptr ? -1 : block->running);
  std::abort();
}

char* shared_memory() { return shared; }
Index thread_index() { return {static_cast<unsigned>(block->running)}; }
Index block_index() { return {block->index}; }
Index threads() { return {static_cast<unsigned>(block->fibers.size())}; }
Index blocks() { return {block->count}; }

void barrier(int id, int count, bool waits) {
  arrive(block->barriers[id], count == 0 ? static_cast<int>(block->fibers.size()) : count, waits);
}

void yield() {
  if (++block->yields > 1000000) give_up("threads wait for what nobody does");
  block->ready.push_back(block->running);
  switch_away();
}

const char* exchange(const char* operation, const void* data, int bytes) {
  Fiber& fiber = *block->fibers[block->running];
  Warp& warp = block->warps[block->running / 32];
  const int turn = fiber.turn;
  fiber.turn ^= 1;
  if (warp.barrier.arrived == 0) warp.operation[turn] = operation;
  if (std::strcmp(warp.operation[turn], operation) != 0) give_up("lanes of a warp do different things");
  std::memcpy(warp.slots[turn] + block->running % 32 * kSlotBytes, data, bytes);
  arrive(warp.barrier, 32, true);
  return warp.slots[turn];
}

void copy_later(uint32_t to, const void* from, int bytes, int filled_to) {
  aligned(to, filled_to);
  aligned(from, filled_to);
  block->fibers[block->running]->open.push_back({to, from, bytes, filled_to});
}

void commit_copies() {
  Fiber& fiber = *block->fibers[block->running];
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

void wait_copies(int pending) {
  auto& groups = block->fibers[block->running]->groups;
  while (static_cast<int>(groups.size()) > pending) {
    make(groups.front());
    groups.erase(groups.begin());
  }
}

void store_later(std::function<void()> store) { block->fibers[block->running]->stores.push_back(std::move(store)); }

void wait_stores() {
  auto& stores = block->fibers[block->running]->stores;
  for (const auto& store : stores) store();
  stores.clear();
}

void engine(std::function<void()> work) { block->engine.push_back(std::move(work)); }

void later(std::function<void()> work) { block->fibers[block->running]->open_work.push_back(std::move(work)); }

void commit_work() {
  Fiber& fiber = *block->fibers[block->running];
  fiber.work.push_back(std::move(fiber.open_work));
  fiber.open_work.clear();
}

void wait_work(int pending) {
  auto& groups = block->fibers[block->running]->work;
  while (static_cast<int>(groups.size()) > pending) {
    for (const auto& work : groups.front()) work();
    groups.erase(groups.begin());
  }
}

void init_phase(uint32_t barrier, int arrivals) {
  Phase phase;
  phase.arrivals = phase.missing = arrivals;
  block->phases[barrier] = phase;
}

void arrive_phase(uint32_t barrier, int arrivals, int bytes) {
  const auto found = block->phases.find(barrier);
  if (found == block->phases.end()) give_up("an mbarrier that nobody initialised");
  Phase& phase = found->second;
  phase.missing -= arrivals;
  phase.bytes += bytes;
  if (phase.missing < 0) give_up("an mbarrier with more arrivals than it was initialised for");
  if (phase.missing > 0 || phase.bytes != 0) return;
  phase.missing = phase.arrivals;
  phase.parity ^= 1;
  block->ready.insert(block->ready.end(), phase.waiting.begin(), phase.waiting.end());
  phase.waiting.clear();
  block->yields = 0;
}

bool is_past(uint32_t barrier, uint32_t parity) {
  const auto found = block->phases.find(barrier);
  if (found == block->phases.end()) give_up("an mbarrier that nobody initialised");
  return found->second.parity != parity;
}

void wait_phase(uint32_t barrier, uint32_t parity) {
  if (is_past(barrier, parity)) return;
  block->phases[barrier].waiting.push_back(block->running);
  switch_away();  // until the phase ends; by the time this thread goes on the next may have ended, too
}

void run(int64_t blocks, int threads, int64_t shared_bytes, unsigned seed, const std::function<void()>& body) {
  if (shared_bytes > kSharedBytes) {
    std::fprintf(stderr, "emulated kernel: %d threads with %lld bytes\n", threads,
                 static_cast<long long>(shared_bytes));
    std::abort();
  }
  Block state;
  block = &state;
  state.body = &body;
  state.random.seed(seed);
  state.count = static_cast<unsigned>(blocks);
  for (int i = 0; i < threads; ++i) state.fibers.push_back(std::make_unique<Fiber>());
  for (int64_t index = 0; index < blocks; ++index) {
    std::memset(shared, 0xFF, sizeof(shared));  // NaN in every type
    state.index = static_cast<unsigned>(index);
    state.warps.assign((threads + 31) / 32, Warp());
    state.phases.clear();
    state.barriers.clear();
    state.ready.clear();
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = *state.fibers[i];
      fiber.has_begun = fiber.is_done = false;
      fiber.turn = 0;
      fiber.groups.clear();
      state.ready.push_back(i);
    }
    // Half of the time the thread that became ready last: a warp then runs ahead of the others for a while.
    while (!state.ready.empty() || !state.engine.empty()) {
      if (!state.engine.empty() && (state.ready.empty() || state.random() % 16 == 0)) {
        const size_t chosen = state.random() % state.engine.size();
        const std::function<void()> work = std::move(state.engine[chosen]);
        state.engine.erase(state.engine.begin() + static_cast<std::ptrdiff_t>(chosen));
        work();
        continue;
      }
      const size_t last = state.ready.size() - 1;
      const size_t chosen = state.random() % 2 == 0 ? last : state.random() % state.ready.size();
      state.running = state.ready[chosen];
      state.ready[chosen] = state.ready[last];
      state.ready.pop_back();
      enter_running_fiber();
    }
    for (const auto& fiber : state.fibers) {
      if (fiber->is_done) continue;
      tell_who_waits();
      give_up("some threads wait for what nobody does");
    }
  }
  block = nullptr;
}

}  // namespace flash_ext::emulated

int __syncthreads_or(int predicate) {
  using namespace flash_ext::emulated;
  static int any;
  if (predicate) any = 1;
  __syncthreads();
  const int result = any;
  __syncthreads();
  any = 0;
  __syncthreads();
  return result;
}

int __syncthreads_count(int predicate) {
  using namespace flash_ext::emulated;
  static int count;
  if (predicate) ++count;
  __syncthreads();
  const int result = count;
  __syncthreads();
  count = 0;
  __syncthreads();
  return result;
}

// What the host code of the backend asks of the runtime.
extern "C" {
// What gpu/ptx.cuh here reads as EncodedMap.
static CUresult encode_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data, const cuuint64_t* size,
                           const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  using flash_ext::emulated::give_up;
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) give_up("a tensor map of an address that is not aligned");
  for (int i = 0; i < 4; ++i) {
    if (stride[i] % 16 != 0) give_up("a tensor map with a stride that is not a multiple of 16 bytes");
  }
  char* to = reinterpret_cast<char*>(map);
  std::memcpy(to, &data, 8);
  std::memcpy(to + 8, size, 40);
  std::memcpy(to + 48, stride, 32);
  std::memcpy(to + 80, box, 20);
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&encode_map);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;  // multiprocessors
  return cudaSuccess;
}
}
