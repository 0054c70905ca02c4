// Stands in for csrc/gpu/tma.cuh: the same names. Copies arrive when the emulator's engine likes.
#pragma once

#include <cuda.h>

#include "warp.h"

namespace flash_ext::cuda {

// ---- mbarrier -------------------------------------------------------------------------------------------------------

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  emulated::init_phase(barrier, static_cast<int>(arrivals));
}
inline void fence_barrier_init() {}
inline void barrier_arrive(uint32_t barrier) { emulated::arrive_phase(barrier, 1, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  emulated::arrive_phase(barrier, 1, static_cast<int>(bytes));
}
inline bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  if (!emulated::is_past(barrier, parity)) emulated::yield();
  return emulated::is_past(barrier, parity);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulated::wait_phase(barrier, parity); }

// ---- TMA ------------------------------------------------------------------------------------------------------------

struct BoxStart {
  int col, row, head, b0, b1;
};

// What emulated cuTensorMapEncodeTiled writes.
struct EncodedMap {
  char* data;
  uint64_t size[5], stride[4];  // stride in bytes, of dimensions 1 to 4
  uint32_t box[5];
};
static_assert(sizeof(EncodedMap) <= sizeof(CUtensorMap));

// fn(address in shared memory, address in global memory, null outside of the tensor) for each 16-bit number of a box.
template <class Fn>
void visit_box(const CUtensorMap* map, uint32_t shared, const BoxStart& at, const Fn& fn) {
  EncodedMap encoded;
  std::memcpy(&encoded, map, sizeof(encoded));
  const int64_t start[5] = {at.col, at.row, at.head, at.b0, at.b1};
  uint32_t row_address = shared;
  for (int64_t head = 0; head < encoded.box[2]; ++head) {
    for (int64_t row = 0; row < encoded.box[1]; ++row, row_address += encoded.box[0] * 2) {
      for (int64_t col = 0; col < encoded.box[0]; ++col) {
        const int64_t place[5] = {start[0] + col, start[1] + row, start[2] + head, start[3], start[4]};
        bool inside = true;
        char* global = encoded.data + place[0] * 2;
        for (int i = 0; i < 5; ++i)
          inside = inside && place[i] >= 0 && place[i] < static_cast<int64_t>(encoded.size[i]);
        for (int i = 1; i < 5; ++i) global += place[i] * static_cast<int64_t>(encoded.stride[i - 1]);
        const uint32_t linear = row_address + static_cast<uint32_t>(col) * 2;
        const uint32_t swizzle = encoded.box[0] == 64 ? 7 : 3;  // of 128 or 64 bytes
        fn(linear ^ (linear >> 7 & swizzle) << 4, inside ? global : nullptr);
      }
    }
  }
}

inline void prefetch_map(const CUtensorMap*) {}
inline void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, BoxStart at) {
  if (shared % 1024 != 0) emulated::give_up("a box that does not start at a multiple of 1024 bytes");
  emulated::engine([=] {
    int bytes = 0;
    visit_box(map, shared, at, [&](uint32_t address, const char* from) {
      const uint16_t number = from == nullptr ? 0 : *reinterpret_cast<const uint16_t*>(from);
      std::memcpy(emulated::place(address), &number, sizeof(number));
      bytes += 2;
    });
    emulated::arrive_phase(barrier, 0, -bytes);
  });
}
inline void tma_store(const CUtensorMap* map, uint32_t shared, BoxStart at) {
  emulated::store_later([=] {
    visit_box(map, shared, at, [](uint32_t address, char* to) {
      if (to != nullptr) *reinterpret_cast<uint16_t*>(to) = emulated::at_shared<uint16_t>(address);
    });
  });
}
// Of bf16.
inline void tma_add(const CUtensorMap* map, uint32_t shared, BoxStart at) {
  emulated::store_later([=] {
    visit_box(map, shared, at, [](uint32_t address, char* to) {
      if (to == nullptr) return;
      __nv_bfloat16& sum = *reinterpret_cast<__nv_bfloat16*>(to);
      sum = __nv_bfloat16(static_cast<float>(sum) + static_cast<float>(emulated::at_shared<__nv_bfloat16>(address)));
    });
  });
}

}  // namespace flash_ext::cuda
