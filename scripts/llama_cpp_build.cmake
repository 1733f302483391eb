# CMake reads this file when it builds llama-cpp-python (see the Makefile).

# RPC workers cost one more object. -DGGML_RPC=OFF leaves them out.
if(NOT DEFINED CACHE{GGML_RPC})
    set(GGML_RPC ON)
endif()

# Leave out llama.cpp's "common" library (52 of 127 objects), which only llama.cpp's own programs use.
# llama-cpp-python sets the cache variable; this normal variable takes precedence.
set(LLAMA_BUILD_COMMON OFF)

# No AMX: GCC optimises the tile configuration away, so the first evaluation of quantised weights ends the process
# (ggml-org/llama.cpp#20824; the cause is in #26954).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
endif()
