# flash_ext_add_cuda_units(target): adds what a build with CUDA has more, where CUDA_ENABLED.
#
# The kernels of sm80/ are templates over (element, head dimension). Each instance of each pass is a unit of its own,
# written here from csrc/sm80/fwd.cu.in and bwd.cu.in, so that ninja builds them side by side and a changed pass rebuilds
# its own. The same lists become the types of sm80_instances.h, which dispatch reads: they exist once, and an instance
# that dispatch names and nobody compiles is an undefined symbol, which the linker refuses.
#
# FLASH_EXT_ELEMENTS and FLASH_EXT_HEAD_DIMS shorten the lists, for a quick build while tuning; calls beyond them are
# refused by name. Without Tf32 its calls go to Fp32.

set(FLASH_EXT_ELEMENTS Fp16 Bf16 Fp32 Tf32 CACHE STRING "Element types with tensor core kernels")
set(FLASH_EXT_HEAD_DIMS 32 64 96 128 192 256 CACHE STRING "Head dimensions with tensor core kernels, ascending")

# The library holds its own libcudart, hidden: nothing has to be found when it is loaded. Streams and contexts are the
# driver's, which this copy of the runtime and torch's share.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

function(flash_ext_add_cuda_units target)
  if(NOT CUDA_ENABLED)
    return()
  endif()
  set(generated ${CMAKE_BINARY_DIR}/generated)
  set(folder ${CMAKE_SOURCE_DIR}/csrc/sm80)
  # NOTE: TF32 has three sizes, to which others are padded: they add 15 % to the compiler's time, all six would 29 %.
  set(tf32_head_dims ${FLASH_EXT_HEAD_DIMS})
  list(FILTER tf32_head_dims INCLUDE REGEX "^(64|128|256)$")
  list(GET FLASH_EXT_HEAD_DIMS -1 largest)
  if(NOT largest IN_LIST tf32_head_dims)
    list(APPEND tf32_head_dims ${largest})
  endif()
  foreach(ELEMENT IN LISTS FLASH_EXT_ELEMENTS)
    set(head_dims ${FLASH_EXT_HEAD_DIMS})
    if(ELEMENT STREQUAL "Tf32")
      set(head_dims ${tf32_head_dims})
    endif()
    foreach(HEAD_DIM IN LISTS head_dims)
      string(TOLOWER ${ELEMENT} element)
      foreach(pass fwd bwd)
        set(unit ${generated}/sm80_${pass}_${element}_${HEAD_DIM}.cu)
        configure_file(${folder}/${pass}.cu.in ${unit} @ONLY)
        target_sources(${target} PRIVATE ${unit})
      endforeach()
    endforeach()
  endforeach()
  list(JOIN FLASH_EXT_ELEMENTS ", " ELEMENTS)
  list(JOIN FLASH_EXT_HEAD_DIMS ", " HEAD_DIMS)
  list(JOIN tf32_head_dims ", " TF32_HEAD_DIMS)
  configure_file(${folder}/sm80_instances.h.in ${generated}/sm80_instances.h @ONLY)

  file(GLOB sources CONFIGURE_DEPENDS csrc/cuda/*.cu csrc/sm80/*.cu csrc/sm80/*.cpp)
  target_sources(${target} PRIVATE ${sources})
  target_compile_definitions(${target} PRIVATE FLASH_EXT_WITH_CUDA)

  # NOTE: -std=c++20 by hand, because CMake 3.25 drops CMAKE_CUDA_STANDARD 20.
  set(options -std=c++20 --expt-relaxed-constexpr --expt-extended-lambda -Xcompiler=-Wall,-Wextra,-fvisibility=hidden
              -Xptxas=-v)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND options --compress-mode=size)
  else()
    list(APPEND options -Xfatbin=-compress-all)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${options}>")

  # c10_cuda for the current stream; its headers include the toolkit's. A toolkit has lib64 or, from PyPI, lib.
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_directories(${target} PRIVATE ${CUDA_TOOLKIT_ROOT}/lib64 ${CUDA_TOOLKIT_ROOT}/lib)
  target_link_libraries(${target} PRIVATE ${TORCH_ROOT}/lib/libc10_cuda.so)
  target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL)
endfunction()
