// Which library calls our functions, and which functions it would call if we were not there.
//
// A process may have several versions of ggml (whisper.cpp, stable-diffusion.cpp), whose tensors and parameters differ.
// All of them find our functions first, but we compute only for the one that was attached.
#pragma once

#include "ggml.hpp"

namespace llamaspec {

// A parameter that another version may have: all of them have at most six, each in a register, and all are passed on.
using Word = uint64_t;

struct Caller {
    const char *begin, *end;  // its code
    // Its own functions; nullptr = none
    bool (*mul_mat_tiled)(const ggml_compute_params *, ggml_tensor *, Word, Word, Word, Word);
    bool (*mul_mat_id_tiled)(const ggml_compute_params *, ggml_tensor *, int64_t, int64_t, const int32_t *, char *);
    size_t (*tiled_wdata_size)(Word, const ggml_tensor *, Word, Word, Word, Word);
    void (*flash_attention)(const ggml_compute_params *, ggml_tensor *, Word, Word, Word, Word);

    bool contains(const void *address) const { return begin <= address && address < end; }
    bool has_all() const { return mul_mat_tiled && mul_mat_id_tiled && tiled_wdata_size && flash_attention; }
};

// Return the library that an address in its code belongs to; for any thread, and in nanoseconds if it has called before.
const Caller &caller_at(const void *address);

}  // namespace llamaspec
