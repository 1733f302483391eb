// What both lengths of vectors on x86 share. Included by the vectors.
#pragma once

#include <immintrin.h>

#include "kernels.hpp"

namespace {

inline __m128i load_table(const llamaspec::Table &table) { return _mm_load_si128((const __m128i *)table.values); }
inline float half_to_float_scalar(uint16_t x) { return _cvtsh_ss(x); }

// The greatest of 32 absolute values. As integers, NaN is the greatest.
inline float greatest_of_unit(const float *x) {
    __m256i bits = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8)
        bits = _mm256_max_epi32(bits, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), _mm256_set1_epi32(0x7fffffff)));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

inline int sum_of_lanes(__m256i x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// q[i] = x[i] * factor as the nearest integer; sums of each half.
inline void round_unit(const float *x, float factor, int8_t *out, int *sums) {
    __m256i q[4];
    for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(factor)));
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_storeu_si256((__m256i *)out, _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    for (int h = 0; h < 2; h++) sums[h] = sum_of_lanes(_mm256_add_epi32(q[2 * h], q[2 * h + 1]));
}

inline float total_of_eight(__m256 eight) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

}  // namespace
