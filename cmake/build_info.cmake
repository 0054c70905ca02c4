# How this library was built, as flash_ext/build_info.json (read by Python before it loads the library) and as the header
# flash_ext_build_info.h (the same text for torch.ops.flash_ext.build_info()).
#
# What configure knows is filled in then; the commit is filled in by every build, in a run of this file as a script
# (cmake -P), and files whose text stays the same keep their time. git_dirty is about what the library is made of.

if(CMAKE_SCRIPT_MODE_FILE)
  set(git git -c safe.directory=* -C ${SOURCE_DIR})
  execute_process(COMMAND ${git} rev-parse HEAD OUTPUT_VARIABLE GIT_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE
                  RESULT_VARIABLE no_commit ERROR_QUIET)
  execute_process(COMMAND ${git} status --porcelain -- csrc cmake CMakeLists.txt OUTPUT_VARIABLE changes ERROR_QUIET)
  set(GIT_DIRTY false)
  if(no_commit)
    set(GIT_COMMIT "")
  elseif(changes)
    set(GIT_DIRTY true)
  endif()
  # Operators and kernels fit each other where these headers are the same.
  file(GLOB headers ${SOURCE_DIR}/csrc/core/*.h)
  list(SORT headers)
  set(all "")
  foreach(header IN LISTS headers)
    file(SHA256 ${header} hash)
    string(APPEND all ${hash})
  endforeach()
  string(SHA256 INTERFACE "${all}")
  string(SUBSTRING ${INTERFACE} 0 16 INTERFACE)
  configure_file(${BINARY_DIR}/build_info.json.in ${BINARY_DIR}/build_info.json)
  file(CONFIGURE OUTPUT ${BINARY_DIR}/kernels_info.json CONTENT "{\"interface\": \"\${INTERFACE}\"}\n")
  file(READ ${BINARY_DIR}/build_info.json JSON)
  file(CONFIGURE OUTPUT ${BINARY_DIR}/generated/flash_ext_build_info.h
       CONTENT "#pragma once\n\nconstexpr const char kBuildInfo[] = R\"json(\${JSON})json\";\n")
  return()
endif()

function(to_json_strings result)
  list(TRANSFORM ARGN REPLACE "(.+)" "\"\\1\"")
  list(JOIN ARGN ", " text)
  set(${result} "${text}" PARENT_SCOPE)
endfunction()
function(to_json_bool result value)
  set(${result} false PARENT_SCOPE)
  if(value)
    set(${result} true PARENT_SCOPE)
  endif()
endfunction()
to_json_bool(TORCH_CXX11_ABI_JSON ${TORCH_CXX11_ABI})
to_json_bool(CUDA_ENABLED_JSON ${CUDA_ENABLED})
to_json_bool(NVTX_JSON "${NVTX_INCLUDE_DIR}")
to_json_strings(CUDA_ARCHS_JSON ${CUDA_ARCHS})
to_json_strings(CUDA_BACKENDS_JSON ${CUDA_BACKENDS})
to_json_strings(CPU_VARIANTS_JSON ${CPU_VARIANTS})
configure_file(${CMAKE_CURRENT_LIST_DIR}/build_info.json.in ${CMAKE_BINARY_DIR}/build_info.json.in @ONLY)

add_custom_target(
  build_info ALL
  COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${CMAKE_SOURCE_DIR} -DBINARY_DIR=${CMAKE_BINARY_DIR} -P ${CMAKE_CURRENT_LIST_FILE}
  BYPRODUCTS ${CMAKE_BINARY_DIR}/generated/flash_ext_build_info.h ${CMAKE_BINARY_DIR}/build_info.json
             ${CMAKE_BINARY_DIR}/kernels_info.json)
