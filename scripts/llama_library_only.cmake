# Read by CMake when it builds llama-cpp-python: leaves out llama.cpp's "common" library, 52 of 127 objects,
# which only llama.cpp's own programs use. llama-cpp-python asks for it in the cache; this variable hides that.
set(LLAMA_BUILD_COMMON OFF)
