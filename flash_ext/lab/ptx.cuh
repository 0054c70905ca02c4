// Instructions that CUDA C++ has no word of its own for, under the names that the PTX manual has. flash_ext/lab/ptx.py
// is what they do where the lab executes a kernel. nvcc finds this file by -I flash_ext/lab.
#pragma once

__device__ inline unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Begins to copy 4 or 16 bytes from global to shared memory, past the registers, and does not wait. `bytes` of them are
// read, what is behind them becomes 0. Both addresses are multiples of 4 or of 16.
__device__ inline void cp_async_4(float* to, const float* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_16(float* to, const float* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

// What the thread has begun since the last call becomes a group.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `open` of this thread's last groups are under way, 0 or 1. The copies of other threads are seen
// after a __syncthreads() behind it.
__device__ inline void cp_async_wait(int open) {
  if (open == 0) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  }
}

// The nearest number of 11 significant bits, which is all that mma_tf32 looks at.
__device__ inline float to_tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// c += a b by all 32 threads of a warp, a of 16 x 8, b of 8 x 8, c of 16 x 8. Thread 4 g + t, with t < 4, holds of
//   a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)    b: (t, g), (t + 4, g)
//   c: (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
__device__ inline void mma_tf32(float* c, const float* a, const float* b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
