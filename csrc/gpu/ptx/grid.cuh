// Programmatic dependent launch, compute capability 9.0. NOTE: the toolkit's functions of these instructions, because
// NVRTC has none: cudaGridDependencySynchronize and cudaTriggerProgrammaticLaunchCompletion.
#pragma once

namespace flash_ext {

// griddepcontrol.wait: the kernel launched before has ended, and what it wrote is there.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents: the kernel launched behind may begin, once all blocks have said so or ended.
// Before 9.0, where none may, nothing.
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace flash_ext
