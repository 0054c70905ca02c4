// The project's one macro: a function that host and device share.
// NOTE: always inlined on the host as well. CPU code is compiled for several instruction sets; a copy that is not
// inlined would be merged by the linker, and the baseline could end up running the one for AVX-512.
#pragma once

#if defined(__CUDACC__)
#define FLASH_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_DEVICE [[gnu::always_inline]] inline
#endif
