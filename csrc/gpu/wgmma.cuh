// wgmma.mma_async: C[64, N] += A[64, 16] B[N, 16] by one warpgroup, float accumulators, fp16 or bf16 operands; or
// C[64, N] += A[64, 32] B[N, 32] of e4m3, both K-major.
//
//   Wgmma<T, N>::ss(c, a, b, accumulate)       A and B in shared memory, both K-major
//   Wgmma<T, N>::ss<1, 1>(...)                 the same, A or B or both MN-major
//   Wgmma<T, N>::rs(c, a, b, accumulate)       A in registers, B in shared memory, MN-major (rows are k)
//   Wgmma<T, N>::rs<0>(...)                    the same, B K-major
//
// With g = lane / 4, t = lane % 4 and w the warp of the group, c[4n + i] holds row 16w + g + 8 (i / 2), column
// 8n + 2t + i % 2; a[0..3] are rows {g, g + 8} x columns {2t, 2t + 8} as pairs, so four packed accumulators of two
// neighbouring n are one operand. Of e4m3 a[0..3] are rows {g, g + 8} x columns {4t, 4t + 16} as four bytes. Called by
// the kernels of sm90/ and by the tests of each shape. Invariant: issue is between wgmma_fence and wgmma_commit; nobody
// touches c or a before wgmma_wait, which is what `fence_registers` tells the compiler: to it the asm below looks
// finished when it returns.
#pragma once

#include <cstdint>

#include "gpu/ptx.cuh"

namespace flash_ext {

// wgmma.fence.sync.aligned: before the first wgmma and after ordinary writes to its registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group.sync.aligned
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group.sync.aligned: until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: uses of these registers stay on their side of it.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void fence_registers(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

template <class First, class Second, class... Others>
__device__ __forceinline__ void fence_registers(First& first, Second& second, Others&... others) {
  fence_registers(first);
  fence_registers(second);
  (fence_registers(others), ...);
}

template <class T, int kN>
struct Wgmma;

// An asm statement takes its operands one by one, so the lists of up to 128 registers are made by macros, which end
// with this file. FLASH_T*: the text of eight accumulators; FLASH_C8: the operands.
#define FLASH_T0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_T1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_T2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_T3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_T4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_T5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_T6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_T7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_T8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_T9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_T10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_T11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_T12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_T13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_T14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_T15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_C8(i)                                                                                           \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define FLASH_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define FLASH_TEXT_1 FLASH_T0
#define FLASH_OPERANDS_1 FLASH_C8(0)
#define FLASH_TEXT_2 FLASH_TEXT_1 ", " FLASH_T1
#define FLASH_OPERANDS_2 FLASH_OPERANDS_1, FLASH_C8(8)
#define FLASH_TEXT_3 FLASH_TEXT_2 ", " FLASH_T2
#define FLASH_OPERANDS_3 FLASH_OPERANDS_2, FLASH_C8(16)
#define FLASH_TEXT_4 FLASH_TEXT_3 ", " FLASH_T3
#define FLASH_OPERANDS_4 FLASH_OPERANDS_3, FLASH_C8(24)
#define FLASH_TEXT_4H FLASH_TEXT_4 ", %32, %33, %34, %35"
#define FLASH_OPERANDS_4H FLASH_OPERANDS_4, FLASH_C4(32)
#define FLASH_TEXT_5 FLASH_TEXT_4 ", " FLASH_T4
#define FLASH_OPERANDS_5 FLASH_OPERANDS_4, FLASH_C8(32)
#define FLASH_TEXT_6 FLASH_TEXT_5 ", " FLASH_T5
#define FLASH_OPERANDS_6 FLASH_OPERANDS_5, FLASH_C8(40)
#define FLASH_TEXT_7 FLASH_TEXT_6 ", " FLASH_T6
#define FLASH_OPERANDS_7 FLASH_OPERANDS_6, FLASH_C8(48)
#define FLASH_TEXT_8 FLASH_TEXT_7 ", " FLASH_T7
#define FLASH_OPERANDS_8 FLASH_OPERANDS_7, FLASH_C8(56)
#define FLASH_TEXT_8H FLASH_TEXT_8 ", %64, %65, %66, %67"
#define FLASH_OPERANDS_8H FLASH_OPERANDS_8, FLASH_C4(64)
#define FLASH_TEXT_9 FLASH_TEXT_8 ", " FLASH_T8
#define FLASH_OPERANDS_9 FLASH_OPERANDS_8, FLASH_C8(64)
#define FLASH_TEXT_10 FLASH_TEXT_9 ", " FLASH_T9
#define FLASH_OPERANDS_10 FLASH_OPERANDS_9, FLASH_C8(72)
#define FLASH_TEXT_11 FLASH_TEXT_10 ", " FLASH_T10
#define FLASH_OPERANDS_11 FLASH_OPERANDS_10, FLASH_C8(80)
#define FLASH_TEXT_12 FLASH_TEXT_11 ", " FLASH_T11
#define FLASH_OPERANDS_12 FLASH_OPERANDS_11, FLASH_C8(88)
#define FLASH_TEXT_13 FLASH_TEXT_12 ", " FLASH_T12
#define FLASH_OPERANDS_13 FLASH_OPERANDS_12, FLASH_C8(96)
#define FLASH_TEXT_14 FLASH_TEXT_13 ", " FLASH_T13
#define FLASH_OPERANDS_14 FLASH_OPERANDS_13, FLASH_C8(104)
#define FLASH_TEXT_15 FLASH_TEXT_14 ", " FLASH_T14
#define FLASH_OPERANDS_15 FLASH_OPERANDS_14, FLASH_C8(112)
#define FLASH_TEXT_16 FLASH_TEXT_15 ", " FLASH_T15
#define FLASH_OPERANDS_16 FLASH_OPERANDS_15, FLASH_C8(120)

// kCount: groups of eight accumulators; p0..p5: numbers of the operands that follow them.
#define FLASH_WGMMA(T, name, kCount, n, p0, p1, p2, p3, p4, p5, p6)                                               \
  template <>                                                                                                     \
  struct Wgmma<T, n> {                                                                                            \
    template <int kMnA = 0, int kMnB = 0>                                                                         \
    static __device__ __forceinline__ void ss(float (&c)[n / 2], uint64_t a, uint64_t b, int accumulate) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #name "." #name " {" FLASH_TEXT_##kCount     \
                   "}, %" #p0 ", %" #p1 ", p, 1, 1, %" #p3 ", %" #p4 ";\n}"                                       \
                   : FLASH_OPERANDS_##kCount                                                                      \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kMnA), "n"(kMnB));                                      \
    }                                                                                                             \
    template <int kMnB = 1>                                                                                       \
    static __device__ __forceinline__ void rs(float (&c)[n / 2], const uint32_t* a, uint64_t b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p5                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #name "." #name " {" FLASH_TEXT_##kCount     \
                   "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1, %" #p6 ";\n}"                 \
                   : FLASH_OPERANDS_##kCount                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kMnB));             \
    }                                                                                                             \
  };
#define FLASH_WGMMA_E4M3(kCount, n, p0, p1, p2, p3, p4, p5)                                                       \
  template <>                                                                                                     \
  struct Wgmma<E4m3, n> {                                                                                         \
    static __device__ __forceinline__ void ss(float (&c)[n / 2], uint64_t a, uint64_t b, int accumulate) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" FLASH_TEXT_##kCount               \
                   "}, %" #p0 ", %" #p1 ", p, 1, 1;\n}"                                                           \
                   : FLASH_OPERANDS_##kCount                                                                      \
                   : "l"(a), "l"(b), "r"(accumulate));                                                            \
    }                                                                                                             \
    template <int kMnB = 0>                                                                                       \
    static __device__ __forceinline__ void rs(float (&c)[n / 2], const uint32_t* a, uint64_t b, int accumulate) { \
      static_assert(kMnB == 0);                                                                                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p5                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" FLASH_TEXT_##kCount               \
                   "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1;\n}"                           \
                   : FLASH_OPERANDS_##kCount                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                        \
    }                                                                                                             \
  };
#define FLASH_WGMMA_BOTH(kCount, n, p0, p1, p2, p3, p4, p5, p6)           \
  FLASH_WGMMA(__nv_bfloat16, bf16, kCount, n, p0, p1, p2, p3, p4, p5, p6) \
  FLASH_WGMMA(__half, f16, kCount, n, p0, p1, p2, p3, p4, p5, p6)

FLASH_WGMMA_BOTH(1, 16, 8, 9, 10, 11, 12, 13, 14)
FLASH_WGMMA_BOTH(2, 32, 16, 17, 18, 19, 20, 21, 22)
FLASH_WGMMA_BOTH(3, 48, 24, 25, 26, 27, 28, 29, 30)
FLASH_WGMMA_BOTH(4, 64, 32, 33, 34, 35, 36, 37, 38)
FLASH_WGMMA_BOTH(5, 80, 40, 41, 42, 43, 44, 45, 46)
FLASH_WGMMA_BOTH(6, 96, 48, 49, 50, 51, 52, 53, 54)
FLASH_WGMMA_BOTH(7, 112, 56, 57, 58, 59, 60, 61, 62)
FLASH_WGMMA_BOTH(8, 128, 64, 65, 66, 67, 68, 69, 70)
FLASH_WGMMA_BOTH(9, 144, 72, 73, 74, 75, 76, 77, 78)
FLASH_WGMMA_BOTH(10, 160, 80, 81, 82, 83, 84, 85, 86)
FLASH_WGMMA_BOTH(11, 176, 88, 89, 90, 91, 92, 93, 94)
FLASH_WGMMA_BOTH(12, 192, 96, 97, 98, 99, 100, 101, 102)
FLASH_WGMMA_BOTH(16, 256, 128, 129, 130, 131, 132, 133, 134)

FLASH_WGMMA_E4M3(4H, 72, 36, 37, 38, 39, 40, 41)
FLASH_WGMMA_E4M3(8, 128, 64, 65, 66, 67, 68, 69)
FLASH_WGMMA_E4M3(8H, 136, 68, 69, 70, 71, 72, 73)
FLASH_WGMMA_E4M3(12, 192, 96, 97, 98, 99, 100, 101)

#undef FLASH_WGMMA_BOTH
#undef FLASH_WGMMA_E4M3
#undef FLASH_WGMMA
#undef FLASH_C8
#undef FLASH_C4
#undef FLASH_T0
#undef FLASH_T1
#undef FLASH_T2
#undef FLASH_T3
#undef FLASH_T4
#undef FLASH_T5
#undef FLASH_T6
#undef FLASH_T7
#undef FLASH_T8
#undef FLASH_T9
#undef FLASH_T10
#undef FLASH_T11
#undef FLASH_T12
#undef FLASH_T13
#undef FLASH_T14
#undef FLASH_T15
#undef FLASH_TEXT_1
#undef FLASH_OPERANDS_1
#undef FLASH_TEXT_2
#undef FLASH_OPERANDS_2
#undef FLASH_TEXT_3
#undef FLASH_OPERANDS_3
#undef FLASH_TEXT_4
#undef FLASH_OPERANDS_4
#undef FLASH_TEXT_4H
#undef FLASH_OPERANDS_4H
#undef FLASH_TEXT_5
#undef FLASH_OPERANDS_5
#undef FLASH_TEXT_6
#undef FLASH_OPERANDS_6
#undef FLASH_TEXT_7
#undef FLASH_OPERANDS_7
#undef FLASH_TEXT_8
#undef FLASH_OPERANDS_8
#undef FLASH_TEXT_8H
#undef FLASH_OPERANDS_8H
#undef FLASH_TEXT_9
#undef FLASH_OPERANDS_9
#undef FLASH_TEXT_10
#undef FLASH_OPERANDS_10
#undef FLASH_TEXT_11
#undef FLASH_OPERANDS_11
#undef FLASH_TEXT_12
#undef FLASH_OPERANDS_12
#undef FLASH_TEXT_13
#undef FLASH_OPERANDS_13
#undef FLASH_TEXT_14
#undef FLASH_OPERANDS_14
#undef FLASH_TEXT_15
#undef FLASH_OPERANDS_15
#undef FLASH_TEXT_16
#undef FLASH_OPERANDS_16

}  // namespace flash_ext
