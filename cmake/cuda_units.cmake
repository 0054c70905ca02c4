# flash_ext_add_cuda_units(target): adds what a build with CUDA has more, where CUDA_ENABLED. Sets CUDA_BACKENDS.
#
# The kernels of sm80/ are templates over (element, head dimension). Instances of a pass are units, written here from
# unit.cu.in of its forward/ and backward/, so that ninja builds them side by side and a changed pass rebuilds its own: of
# backward each one, of forward all of an element, because what a unit takes beside its kernels (5 s of 20) would be a
# quarter of it. The same lists become the types of sm80_instances.h, which dispatch reads: they exist once, and an instance
# that dispatch names and nobody compiles is an undefined symbol, which the linker refuses.
#
# Those of sm90/ (unit.cu.in of forward/ and backward/, unit_fp8.cu.in, sm90_instances.h), one or two head dims to a unit,
# are compiled for sm_90a and nothing else, because wgmma is an instruction of that one architecture. They are there
# where CUDA_ARCHS has machine code for 9.0 and the lists below leave an instance; without them the library has no backend
# of that name.
#
# FLASH_EXT_ELEMENTS and FLASH_EXT_HEAD_DIMS shorten the lists, for a quick build while tuning; calls beyond them are
# refused by name. Without Tf32 its calls go to Fp32.

set(FLASH_EXT_ELEMENTS Fp16 Bf16 Fp32 Tf32 CACHE STRING "Element types with tensor core kernels")
set(FLASH_EXT_HEAD_DIMS 32 64 96 128 192 256 CACHE STRING "Head dimensions with tensor core kernels, ascending")

# The library holds its own libcudart, hidden: nothing has to be found when it is loaded. Streams and contexts are the
# driver's, which this copy of the runtime and torch's share.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

# What units with CUDA are compiled with.
function(flash_ext_cuda_options target)
  # NOTE: -std=c++20 by hand, because CMake 3.25 drops CMAKE_CUDA_STANDARD 20.
  set(options -std=c++20 --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-fvisibility=hidden
              -Xptxas=-v,--warn-on-spills)
  # NOTE: by itself fatbinary compresses PTX alone, and so it does with --compress-mode=balance. This takes machine code
  # to a fifth in 30 ms a unit; --compress-mode=size would take it to a seventh in 1.5 s and more.
  list(APPEND options -Xfatbin=-compress-all)
  if("90-virtual" IN_LIST CUDA_ARCHS)
    list(APPEND options -DFLASH_EXT_WITH_PTX_90)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${options}>")
endfunction()

# NOTE: that ptxas serialises wgmma (C75xx) is no warning to it, only a line of its output: .ci/run looks for it there.
function(flash_ext_add_sm90_units target generated)
  set(archs ${CUDA_ARCHS})
  list(FILTER archs INCLUDE REGEX "^90a?(-real)?$")
  set(folder ${CMAKE_SOURCE_DIR}/csrc/kernels/sm90)
  set(Fp16 kFloat16)
  set(Bf16 kBFloat16)
  set(backward_head_dims 64 128 192 256 384 512)
  set(fp8_head_dims 64 128 256)
  set(units "")
  set(INSTANCES "")
  set(FP8_INSTANCES "")
  foreach(pass forward backward)
    file(READ ${folder}/${pass}/unit.cu.in ${pass})
  endforeach()
  file(READ ${folder}/forward/unit_fp8.cu.in forward_fp8)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${folder}/forward/unit.cu.in ${folder}/backward/unit.cu.in
                                                                 ${folder}/forward/unit_fp8.cu.in)
  foreach(element Fp16 Bf16)
    set(DTYPE ${${element}})
    string(TOLOWER ${element} name)
    foreach(group "64 96" 128 "192 256" "384 512") # head dims of a unit
      string(REPLACE " " ";" group "${group}")
      foreach(pass forward backward)
        set(unit_${pass} "")
        set(name_${pass} sm90_${pass}_${name})
      endforeach()
      foreach(HEAD_DIM IN LISTS group)
        set(listed ${HEAD_DIM})
        if(HEAD_DIM GREATER 256)
          set(listed 256)
        endif()
        if(NOT archs OR NOT element IN_LIST FLASH_EXT_ELEMENTS OR NOT listed IN_LIST FLASH_EXT_HEAD_DIMS)
          continue()
        endif()
        set(passes forward)
        set(functions run_forward)
        if(HEAD_DIM IN_LIST backward_head_dims)
          list(APPEND passes backward)
          list(APPEND functions backward_scratch_bytes run_backward)
        endif()
        foreach(pass IN LISTS passes)
          string(CONFIGURE "${${pass}}" instance @ONLY)
          string(APPEND unit_${pass} "${instance}")
          string(APPEND name_${pass} _${HEAD_DIM})
        endforeach()
        if(HEAD_DIM IN_LIST fp8_head_dims)
          string(CONFIGURE "${forward_fp8}" instance @ONLY)
          string(APPEND unit_forward "${instance}")
          set(function "run_forward_fp8<DType::${DTYPE}, ${HEAD_DIM}>")
          string(APPEND FP8_INSTANCES "\n    {DType::${DTYPE}, ${HEAD_DIM}, ${function}},")
        endif()
        list(TRANSFORM functions APPEND "<DType::${DTYPE}, ${HEAD_DIM}>")
        list(JOIN functions ", " FUNCTIONS)
        string(APPEND INSTANCES "\n    {DType::${DTYPE}, ${HEAD_DIM}, ${FUNCTIONS}},")
      endforeach()
      foreach(pass forward backward)
        if(unit_${pass})
          set(unit ${generated}/${name_${pass}}.cu)
          file(CONFIGURE OUTPUT ${unit} CONTENT "${unit_${pass}}" @ONLY)
          list(APPEND units ${unit})
        endif()
      endforeach()
    endforeach()
  endforeach()
  if(NOT units)
    return()
  endif()
  configure_file(${folder}/sm90_instances.h.in ${generated}/sm90_instances.h @ONLY)
  set_property(SOURCE ${folder}/rows.cpp APPEND PROPERTY INCLUDE_DIRECTORIES ${generated})
  add_library(${target}_sm90 OBJECT ${units})
  set_target_properties(${target}_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_link_libraries(${target}_sm90 PRIVATE flash_ext_options)
  flash_ext_cuda_options(${target}_sm90)

  file(GLOB sources CONFIGURE_DEPENDS csrc/kernels/sm90/*.cpp)
  target_sources(${target} PRIVATE ${sources} $<TARGET_OBJECTS:${target}_sm90>)
  target_compile_definitions(${target} PRIVATE FLASH_EXT_WITH_SM90)
  set(CUDA_BACKENDS sm90 ${CUDA_BACKENDS} PARENT_SCOPE)
endfunction()

# The instances of sm80/forward_single_tile and backward_single_tile that belong to an instance of forward and backward
# (kHasOneTile), as ONE_TILE_FORWARD and ONE_TILE_BACKWARD.
function(flash_ext_one_tile element head_dim)
  set(ONE_TILE_FORWARD "" PARENT_SCOPE)
  set(ONE_TILE_BACKWARD "" PARENT_SCOPE)
  if(head_dim LESS_EQUAL 64 AND element MATCHES "^(Fp|Bf)16$")
    set(blocks 64)
    if(head_dim LESS_EQUAL 32)
      list(APPEND blocks 144)
    endif()
    foreach(pass forward backward)
      set(arguments "const ForwardArgs&, const Plan&")
      if(pass STREQUAL "backward")
        set(arguments "const BackwardArgs&, const Plan&, void*")
      endif()
      set(instances "")
      foreach(block IN LISTS blocks)
        set(of "one_tile_${pass}<${element}, ${head_dim}, ${block}>")
        string(APPEND instances "template Plan plan_${of}(const Problem&, const DeviceInfo&);\n"
                      "template void run_${of}(${arguments});\n"
                      "template void inspect_${of}(const Problem&, Plan&);\n")
      endforeach()
      string(TOUPPER ONE_TILE_${pass} result)
      set(${result} "${instances}" PARENT_SCOPE)
    endforeach()
  endif()
endfunction()

function(flash_ext_add_cuda_units target)
  set(CUDA_BACKENDS "" PARENT_SCOPE)
  if(NOT CUDA_ENABLED)
    return()
  endif()
  set(generated ${CMAKE_BINARY_DIR}/generated)
  set(folder ${CMAKE_SOURCE_DIR}/csrc/kernels/sm80)
  # NOTE: TF32 has three sizes, to which others are padded: they add 15 % to the compiler's time, all six would 29 %.
  set(tf32_head_dims ${FLASH_EXT_HEAD_DIMS})
  list(FILTER tf32_head_dims INCLUDE REGEX "^(64|128|256)$")
  list(GET FLASH_EXT_HEAD_DIMS -1 largest)
  if(NOT largest IN_LIST tf32_head_dims)
    list(APPEND tf32_head_dims ${largest})
  endif()
  file(READ ${folder}/forward/unit.cu.in forward)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${folder}/forward/unit.cu.in)
  foreach(ELEMENT IN LISTS FLASH_EXT_ELEMENTS)
    string(TOLOWER ${ELEMENT} element)
    set(instances "")
    set(head_dims ${FLASH_EXT_HEAD_DIMS})
    if(ELEMENT STREQUAL "Tf32")
      set(head_dims ${tf32_head_dims})
    endif()
    foreach(HEAD_DIM IN LISTS head_dims)
      flash_ext_one_tile(${ELEMENT} ${HEAD_DIM})
      string(CONFIGURE "${forward}" instance @ONLY)
      string(APPEND instances "${instance}")
      configure_file(${folder}/backward/unit.cu.in ${generated}/sm80_bwd_${element}_${HEAD_DIM}.cu @ONLY)
      target_sources(${target} PRIVATE ${generated}/sm80_bwd_${element}_${HEAD_DIM}.cu)
    endforeach()
    file(CONFIGURE OUTPUT ${generated}/sm80_fwd_${element}.cu CONTENT "${instances}" @ONLY)
    target_sources(${target} PRIVATE ${generated}/sm80_fwd_${element}.cu)
  endforeach()
  list(JOIN FLASH_EXT_ELEMENTS ", " ELEMENTS)
  list(JOIN FLASH_EXT_HEAD_DIMS ", " HEAD_DIMS)
  list(JOIN tf32_head_dims ", " TF32_HEAD_DIMS)
  configure_file(${folder}/sm80_instances.h.in ${generated}/sm80_instances.h @ONLY)
  set_property(SOURCE ${folder}/rows.cpp APPEND PROPERTY INCLUDE_DIRECTORIES ${generated})

  file(GLOB sources CONFIGURE_DEPENDS csrc/kernels/stages/*.cu csrc/kernels/decode/*.cu csrc/gpu/host/*.cpp
       csrc/gpu/host/*.cu csrc/kernels/sm80/*/*.cu csrc/kernels/sm80/*.cpp)
  target_sources(${target} PRIVATE ${sources})
  target_compile_definitions(${target} PRIVATE FLASH_EXT_WITH_CUDA)

  flash_ext_cuda_options(${target})
  set(CUDA_BACKENDS sm80)
  flash_ext_add_sm90_units(${target} ${generated})
  set(CUDA_BACKENDS ${CUDA_BACKENDS} PARENT_SCOPE)

  # A toolkit has lib64 or, from PyPI, lib.
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_directories(${target} PRIVATE ${CUDA_TOOLKIT_ROOT}/lib64 ${CUDA_TOOLKIT_ROOT}/lib)
endfunction()
