# Read by CMake when it builds llama-cpp-python (see the Makefile).

# RPC workers: one object more. The user may still say -DGGML_RPC=OFF.
if(NOT DEFINED CACHE{GGML_RPC})
    set(GGML_RPC ON)
endif()

# Leave out llama.cpp's "common" library, 52 of 127 objects, which only llama.cpp's own programs use.
# llama-cpp-python asks for it in the cache; this variable hides that.
set(LLAMA_BUILD_COMMON OFF)

# No AMX: with GCC the tile configuration is optimised away, and the first evaluation of quantised weights
# ends the process (ggml-org/llama.cpp#20824, and #26954 for the cause).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
