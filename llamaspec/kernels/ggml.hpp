// What we use of ggml, declared here so that no header of llama.cpp is needed. `llamaspec_kernels_attach` checks at
// run time that the library has the same layout.
#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_tensor {
    int type;
    void *buffer;
    int64_t ne[4];  // numbers in each dimension
    size_t nb[4];   // bytes from one to the next
    int op;
    int32_t op_params[16];
    int32_t flags;
    ggml_tensor *src[10];
    ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    void *extra;
    char padding[8];
};
static_assert(sizeof(ggml_tensor) == 336);
constexpr size_t GGML_OBJECT_BYTES = 32;  // before each tensor

struct ggml_compute_params {
    int ith, nth;  // this thread, and the number of threads
    size_t wsize;  // bytes of wdata, which all threads share
    void *wdata;
    void *threadpool;
    bool use_ref;
};

struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};
