// Thin wrappers of PTX instructions, one for each that a kernel uses; each names its instruction. wgmma is in
// wgmma.cuh.
//
// Called by the kernels; no other file has an instruction in asm. tests/cpp/emulated/gpu/ptx.cuh has the same names for
// the host.
#pragma once

#include "gpu/ptx/barrier.cuh"
#include "gpu/ptx/cp_async.cuh"
#include "gpu/ptx/global.cuh"
#include "gpu/ptx/math.cuh"
#include "gpu/ptx/matrix.cuh"
#include "gpu/ptx/shared.cuh"
#include "gpu/ptx/tma.cuh"
#include "gpu/ptx/warp.cuh"
