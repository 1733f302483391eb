"""llama.cpp: the only package that imports `llama_cpp`."""

from llamaspec.kernels import library

library.load()  # llama.cpp takes our kernels only if they are loaded before any module here imports it
