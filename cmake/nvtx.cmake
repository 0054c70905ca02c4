# NVTX's headers (they are all of NVTX), for csrc/torch/nvtx.cpp: from the toolkit, beside torch (its CUDA wheels bring them)
# or where CUDA is usually installed. Without them the library has no ranges, and build_info says so.
# Sets NVTX_INCLUDE_DIR (empty: none).

set(NVTX_INCLUDE_DIR "")
file(GLOB candidates ${TORCH_ROOT}/../nvidia/cu*/include ${TORCH_ROOT}/../nvidia/nvtx/include)
foreach(candidate IN LISTS candidates ITEMS /usr/local/cuda/include)
  if(EXISTS ${candidate}/nvtx3/nvToolsExtPayload.h AND NOT NVTX_INCLUDE_DIR)
    set(NVTX_INCLUDE_DIR ${candidate})
  endif()
endforeach()
if(CUDA_TOOLKIT AND EXISTS ${CUDA_TOOLKIT_ROOT}/include/nvtx3/nvToolsExtPayload.h)
  set(NVTX_INCLUDE_DIR ${CUDA_TOOLKIT_ROOT}/include)
endif()
