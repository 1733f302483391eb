// Another version of ggml in the process, with other tensors and other parameters. With CALLS_ONLY it has no functions of
// its own, like a library that asks whether somebody has them.
#include <cstddef>
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))

struct Tensor {
    int number;
};

#ifdef CALLS_ONLY
#define BODY(code) __attribute__((weak));
#else
#define BODY(code) { code }
#endif

API bool ggml_compute_forward_mul_mat_tiled(const void *, Tensor *dst) BODY(return dst->number += 1;)
API bool ggml_compute_forward_mul_mat_id_tiled(const void *, Tensor *dst, int64_t expert, int64_t n, const int32_t *rows,
                                               char *scratch)
    BODY(return dst->number += expert * n + *rows + *scratch;)
API size_t ggml_tiled_wdata_size(int n_threads, const Tensor *dst) BODY(return n_threads * dst->number;)
#ifndef CALLS_ONLY
API void ggml_compute_forward_flash_attn_ext(const void *, const Tensor *q, const Tensor *k, const Tensor *v,
                                             const Tensor *mask, Tensor *dst)
    BODY(dst->number += q->number + 2 * k->number + 3 * v->number + 4 * mask->number;)
#endif

// Call all functions as an evaluation does.
API int evaluate(int number) {
    const auto *parameters = reinterpret_cast<const void *>(8);  // nobody may read them
    Tensor dst{number}, source{1};
    const int32_t row = 5;
    char scratch = 6;
    bool is_computed = ggml_compute_forward_mul_mat_tiled(parameters, &dst);
    is_computed |= ggml_compute_forward_mul_mat_id_tiled(parameters, &dst, 100, 10, &row, &scratch);
#ifndef CALLS_ONLY
    ggml_compute_forward_flash_attn_ext(parameters, &source, &source, &source, &source, &dst);
#endif
    return is_computed ? static_cast<int>(ggml_tiled_wdata_size(2, &dst)) : -1 - static_cast<int>(ggml_tiled_wdata_size(2, &source));
}
