// Kernels whose blocks wait for each other, on stand_ins.h: four blocks at a time, as if a GPU had room for no more.
// They start in a random order, one when another has ended, and their warps go on in random order.
#pragma once

#include "stand_ins.h"

constexpr int64_t kSlots = 4, kMostBlocks = 64, kMostTurns = 1 << 15;
inline char shared_of[kSlots][48 << 10];
inline uint64_t random_state;

inline int64_t draw(int64_t below) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return int64_t(random_state >> 33) % below;
}

// How many turns of a warp there were; -1 if blocks have not ended after kMostTurns of them.
extern "C" inline int64_t __attribute__((used))
run_at_once(const uint32_t* shape, char** data, const int32_t* ints, uint64_t seed) {
  tensors = data, numbers = ints, region_count = 0, random_state = seed;
  gridDim = {shape[0], shape[1]}, blockDim = {shape[2], shape[3]};
  block_threads = blockDim.x * blockDim.y, others_run = true;
  const int64_t blocks = gridDim.x, warps = block_threads / 32, shared = __stop_lab_shared - __start_lab_shared;

  int64_t order[kMostBlocks], block_of[kSlots], started = 0, ended = 0, turns = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t other = draw(i + 1);
    order[i] = order[other], order[other] = i;
  }
  const auto start_next = [&](int64_t slot) {
    block_of[slot] = started < blocks ? order[started++] : -1;
    if (block_of[slot] < 0) return;
    start_block(slot * block_threads);
    std::memcpy(shared_of[slot], __start_lab_shared, shared);
  };
  for (int64_t slot = 0; slot < kSlots; ++slot) start_next(slot);
  while (ended < blocks && ++turns < kMostTurns) {
    const int64_t slot = draw(kSlots), first = slot * block_threads;
    if (block_of[slot] < 0) continue;
    current_block = block_of[slot];
    std::memcpy(__start_lab_shared, shared_of[slot], shared);
    run_threads(first + 32 * draw(warps), 32);
    std::memcpy(shared_of[slot], __start_lab_shared, shared);
    bool all = true;
    for (int64_t i = first; i < first + block_threads; ++i) all = all && done[i];
    if (all) ++ended, start_next(slot);
  }
  return ended == blocks ? turns : -1;
}
