# The torch to build against, as the imported target `torch`: no find_package(Torch), which adds every CUDA architecture
# that torch knows and wants a toolkit even for a CPU-only build.
#
# With FLASH_EXT_PYTHON it is the torch of PYTHON_EXECUTABLE (found, not imported), else the LibTorch on CMAKE_PREFIX_PATH.
# Nothing is cached, so a changed torch is seen by the next configure.
# Sets TORCH_ROOT, TORCH_VERSION, TORCH_CUDA_VERSION (empty: torch's CPU build), TORCH_CXX11_ABI (0 or 1) and, with
# FLASH_EXT_PYTHON, PYTHON_INCLUDE_DIR and PYTHON_EXTENSION_SUFFIX.

if(FLASH_EXT_PYTHON)
  set(environments ${CMAKE_SOURCE_DIR}/.venv/bin) # uv's, else the active one or the first on PATH
  if(DEFINED ENV{VIRTUAL_ENV})
    set(environments $ENV{VIRTUAL_ENV}/bin)
  endif()
  find_program(PYTHON_EXECUTABLE python3 HINTS ${environments} REQUIRED DOC "The Python whose torch is used")
  execute_process(
    COMMAND
      ${PYTHON_EXECUTABLE} -c "
import importlib.util, os, sysconfig
spec = importlib.util.find_spec('torch')
print(os.path.dirname(spec.origin) if spec else '')
print(sysconfig.get_path('include'))
print(sysconfig.get_config_var('EXT_SUFFIX'))"
    OUTPUT_VARIABLE answer COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" answer "${answer}")
  list(GET answer 0 TORCH_ROOT)
  list(GET answer 1 PYTHON_INCLUDE_DIR)
  list(GET answer 2 PYTHON_EXTENSION_SUFFIX)
  if(NOT TORCH_ROOT)
    message(FATAL_ERROR "${PYTHON_EXECUTABLE} has no torch: name the Python that has it with -DPYTHON_EXECUTABLE=...")
  endif()
  if(NOT EXISTS ${PYTHON_INCLUDE_DIR}/Python.h)
    message(FATAL_ERROR "${PYTHON_INCLUDE_DIR} has no Python.h: install Python's headers (Debian: python3-dev).")
  endif()
else()
  unset(TORCH_ROOT)
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    if(EXISTS ${prefix}/include/torch/csrc/api/include/torch/version.h)
      set(TORCH_ROOT ${prefix})
      break()
    endif()
  endforeach()
  if(NOT TORCH_ROOT)
    message(FATAL_ERROR "No LibTorch found: point CMAKE_PREFIX_PATH at the folder that holds its include/ and lib/.")
  endif()
endif()

# torch/version.py in a wheel (`__version__ = '2.11.0+cu130'`), build-version in a LibTorch archive (`2.11.0+cu130`).
if(EXISTS ${TORCH_ROOT}/version.py)
  file(READ ${TORCH_ROOT}/version.py text)
  string(REGEX MATCH "__version__ = '([^']+)'" _ "${text}")
  set(TORCH_VERSION "${CMAKE_MATCH_1}")
  string(REGEX MATCH "cuda: Optional\\[str\\] = '([^']+)'" _ "${text}")
  set(TORCH_CUDA_VERSION "${CMAKE_MATCH_1}")
else()
  file(STRINGS ${TORCH_ROOT}/build-version TORCH_VERSION LIMIT_COUNT 1)
  string(REGEX MATCH "\\+cu([0-9]+)([0-9])$" _ "${TORCH_VERSION}")
  string(REGEX REPLACE "^\\.$" "" TORCH_CUDA_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
endif()
if(NOT TORCH_VERSION OR TORCH_VERSION VERSION_LESS 2.9)
  message(FATAL_ERROR "flash_ext needs torch 2.9 or later, and ${TORCH_ROOT} is '${TORCH_VERSION}'.")
endif()

# std::string in c10's exported names says which ABI the library was built with.
file(STRINGS ${TORCH_ROOT}/lib/libc10.so cxx11_name REGEX "__cxx11" LIMIT_COUNT 1)
set(TORCH_CXX11_ABI 0)
if(cxx11_name)
  set(TORCH_CXX11_ABI 1)
endif()

add_library(torch INTERFACE)
target_include_directories(torch SYSTEM INTERFACE ${TORCH_ROOT}/include ${TORCH_ROOT}/include/torch/csrc/api/include)
target_compile_definitions(torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI})
target_link_libraries(torch INTERFACE ${TORCH_ROOT}/lib/libtorch.so ${TORCH_ROOT}/lib/libtorch_cpu.so
                                      ${TORCH_ROOT}/lib/libc10.so)

# at::parallel_for is inline OpenMP code: it needs -fopenmp to be parallel at all, and must run on the runtime that torch
# ships. A second one in the process would be a second pool of threads.
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "flash_ext is compiled with g++ 11 or later, because torch's OpenMP runtime is GCC's, and this is \
${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}: set CXX=g++.")
endif()
file(GLOB torch_openmp ${TORCH_ROOT}/lib/libgomp*.so* ${TORCH_ROOT}/../torch.libs/libgomp*.so*)
target_compile_options(torch INTERFACE -fopenmp)
if(torch_openmp)
  list(GET torch_openmp 0 torch_openmp)
  target_link_libraries(torch INTERFACE ${torch_openmp})
else()
  target_link_options(torch INTERFACE -fopenmp)
endif()
