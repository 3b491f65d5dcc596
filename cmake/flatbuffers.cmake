# flexpte_flatbuffers_cpp(target fbs...): an interface library with the generated C++ headers on
# its include path (<name>_generated.h). flatc and headers come from the same package.
find_program(FLATC flatc REQUIRED)
find_path(FLATBUFFERS_INCLUDE_DIR flatbuffers/flatbuffers.h REQUIRED)

function(flexpte_flatbuffers_cpp target)
  set(out_dir ${CMAKE_CURRENT_BINARY_DIR}/${target})
  set(headers)
  foreach(fbs IN LISTS ARGN)
    cmake_path(GET fbs STEM name)
    list(APPEND headers ${out_dir}/${name}_generated.h)
  endforeach()
  add_custom_command(
    OUTPUT ${headers}
    COMMAND ${FLATC} --cpp --scoped-enums --gen-object-api -o ${out_dir} ${ARGN}
    DEPENDS ${ARGN}
    COMMENT "flatc ${target}")
  add_custom_target(${target}_generate DEPENDS ${headers})
  add_library(${target} INTERFACE)
  add_dependencies(${target} ${target}_generate)
  target_include_directories(${target} SYSTEM INTERFACE ${out_dir} ${FLATBUFFERS_INCLUDE_DIR})
endfunction()
