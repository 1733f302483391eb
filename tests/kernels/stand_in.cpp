// A small library with the functions of the kernels, for tests of how they are loaded. Its one product is llama.cpp's own.
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))

static const char *level = "avx512";
static long long calls = 0;
using Product = bool (*)(const void *, void *);
static Product product = nullptr;

API int llamaspec_kernels_version(void) { return 7; }

API const char *llamaspec_kernels_attach(void *cpu, void *base) {
    if (!dlsym(base, "ggml_version")) return "this is not libggml-base";
    product = (Product)dlsym(cpu, "ggml_compute_forward_mul_mat_tiled");
    return std::getenv("STAND_IN_REFUSES") ? "llama.cpp is another one; install an older one" : nullptr;
}

API const char *llamaspec_kernels_level(void) { return level; }
API int llamaspec_kernels_set_level(const char *name) { return !std::strcmp(name, level); }
API int llamaspec_kernels_covers(int type) { return type == 2; } // Q4_0
API long long llamaspec_kernels_calls(void) { return calls; }
API long long llamaspec_kernels_missed(void) { return 0; }
API void llamaspec_kernels_want(const int *, long long, long long) {}
API size_t llamaspec_kernels_bytes_per_cell(int heads, int n_threads) { return heads * n_threads; }

#ifdef TAKES_PRODUCTS
API bool ggml_compute_forward_mul_mat_tiled(const void *parameters, void *result) {
    calls += product != nullptr; // from several threads: only whether it is 0 matters
    return product && product(parameters, result);
}
#endif
