# flash_ext_add_cpu_variants(target source...): adds each source to target once per instruction set. The right one is
# chosen at run time (csrc/kernels/cpu/vector_table.cpp), so a library built anywhere runs everywhere: never -march=native.
#
# The macro FLASH_CPU_VARIANT names the object's instruction set. Sets CPU_VARIANTS: only baseline outside x86-64.
#
# NOTE: an inline function that several objects emit is kept once, from the first object on the link line, and objects
# stand there in the order of the target's sources. So this is called last, and the variants are listed from the smallest
# instruction set to the largest: no object ever runs code of a larger instruction set than its own.

function(flash_ext_add_cpu_variants target)
  set(variants baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND variants avx2 avx512 avx512_bf16)
  endif()
  set(flags_baseline "")
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
  set(flags_avx512_bf16 ${flags_avx512} -mavx512bf16)

  foreach(variant IN LISTS variants)
    foreach(source IN LISTS ARGN)
      get_filename_component(name ${source} NAME_WE)
      set(unit ${CMAKE_BINARY_DIR}/generated/${name}_${variant}.cpp)
      file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"@source@\"\n" @ONLY)
      set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS "${flags_${variant}}"
                                                     COMPILE_DEFINITIONS FLASH_CPU_VARIANT=${variant})
      target_sources(${target} PRIVATE ${unit})
    endforeach()
  endforeach()
  set(CPU_VARIANTS ${variants} PARENT_SCOPE)
endfunction()
