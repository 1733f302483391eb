// Vectors of 512 bits: AVX-512 with VNNI. One lane is one row of weights.
#pragma once

#include "x86.hpp"

namespace {

using I = __m512i;  // 16 int32
using F = __m512;   // 16 float32
using H = __m256i;  // 16 half floats
constexpr int LANES = 16, N_REGISTERS = 32;
constexpr bool MULTIPLIES_SIGNED = false;  // stored weights must be unsigned

inline I ints(int x) { return _mm512_set1_epi32(x); }
inline F floats(float x) { return _mm512_set1_ps(x); }
inline F zeros() { return _mm512_setzero_ps(); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline F half_to_float(H x) { return _mm512_cvtph_ps(x); }
inline F bits_to_float(I x) { return _mm512_castsi512_ps(x); }
inline F multiply(F x, F y) { return _mm512_mul_ps(x, y); }
inline F multiply_add(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
inline F subtract_product(F x, F y, F z) { return _mm512_fnmadd_ps(x, y, z); }  // z - x * y
inline F add(F x, F y) { return _mm512_add_ps(x, y); }
inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline void store_from(float *p, F x, int first) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(0xffffu << first), x);
}
inline I load_ints(const void *p) { return _mm512_loadu_si512((const I *)p); }
inline H load_halves(const uint16_t *p) { return _mm256_loadu_si256((const H *)p); }
inline I band(I x, I y) { return _mm512_and_si512(x, y); }
inline I bor(I x, I y) { return _mm512_or_si512(x, y); }
inline I bor_band(I x, I y, I mask) { return _mm512_ternarylogic_epi32(x, y, mask, 0xf8); }  // x | y & mask
inline I flip(I x, I y) { return _mm512_xor_si512(x, y); }
inline I subtract(I x, I y) { return _mm512_sub_epi32(x, y); }
template <int N> inline I right(I x) { return _mm512_srli_epi32(x, N); }
template <int N> inline I left(I x) { return _mm512_slli_epi32(x, N); }
template <int N> inline I right_signed(I x) { return _mm512_srai_epi32(x, N); }
inline I high_nibbles(I x) { return band(right<4>(x), ints(0x0f0f0f0f)); }
inline I look_up(const llamaspec::Table &table, I x) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_table(table)), x);
}
inline I select_less(I x, I limit, I yes, I no) {  // unsigned
    return _mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(x, limit), no, yes);
}
inline I shift_left(I x, I by) { return _mm512_sllv_epi32(x, by); }

// Set bit 4 of byte j of each lane if bit SHIFT + j of `bits` is set, j = 0..3.
template <int SHIFT> inline I add_fifth_bits(I x, I bits) {
    const I byte = _mm512_shuffle_epi8(bits, _mm512_broadcast_i32x4(_mm_setr_epi8(
        SHIFT / 8, SHIFT / 8, SHIFT / 8, SHIFT / 8, 4 + SHIFT / 8, 4 + SHIFT / 8, 4 + SHIFT / 8, 4 + SHIFT / 8,
        8 + SHIFT / 8, 8 + SHIFT / 8, 8 + SHIFT / 8, 8 + SHIFT / 8, 12 + SHIFT / 8, 12 + SHIFT / 8, 12 + SHIFT / 8,
        12 + SHIFT / 8)));
    const __mmask64 set = _mm512_test_epi8_mask(byte, _mm512_set1_epi32(0x08040201 << SHIFT % 8));
    return _mm512_mask_blend_epi8(set, x, _mm512_or_si512(x, _mm512_set1_epi8(16)));
}

inline I four_rows(const uint8_t *p, size_t row_bytes) {  // 16 bytes of rows 0, 4, 8, 12
    I x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 4 * row_bytes)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 8 * row_bytes)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p + 12 * row_bytes)), 3);
}

inline void transpose(I a, I b, I c, I d, I *out) {
    const I ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const I ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
    out[0] = _mm512_unpacklo_epi64(ab, cd), out[1] = _mm512_unpackhi_epi64(ab, cd);
    out[2] = _mm512_unpacklo_epi64(ab2, cd2), out[3] = _mm512_unpackhi_epi64(ab2, cd2);
}

// Load 16 bytes of each row; out[g] has bytes 4 g to 4 g + 3 of row r in lane r.
inline void load_rows(const uint8_t *p, size_t row_bytes, I *out) {
    transpose(four_rows(p, row_bytes), four_rows(p + row_bytes, row_bytes), four_rows(p + 2 * row_bytes, row_bytes),
              four_rows(p + 3 * row_bytes, row_bytes), out);
}

inline H low_halves(I x) { return _mm512_cvtepi32_epi16(x); }    // of each lane
inline H high_halves(I x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)); }

// p + the sum over 8 vectors of four products of unsigned weights with signed activations in each lane.
template <int MAX> inline I dot(I p, const I *w, const int8_t *q) {
    const llamaspec::Four *four = (const llamaspec::Four *)q;
    for (int g = 0; g < 8; g++) p = _mm512_dpbusd_epi32(p, w[g], _mm512_set1_epi32(four[g]));
    return p;
}
template <int MAX> inline I half_dot(I p, const I *w, const int8_t *q) {
    const llamaspec::Four *four = (const llamaspec::Four *)q;
    for (int g = 0; g < 4; g++) p = _mm512_dpbusd_epi32(p, w[g], _mm512_set1_epi32(four[g]));
    return p;
}

// The same as `load_rows` for rows anywhere.
inline I four_cells(const uint8_t *const *p, size_t offset) {
    I x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(p[0] + offset)));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p[4] + offset)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p[8] + offset)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(p[12] + offset)), 3);
}
inline void load_cells(const uint8_t *const *p, size_t offset, I *out) {
    transpose(four_cells(p, offset), four_cells(p + 1, offset), four_cells(p + 2, offset), four_cells(p + 3, offset), out);
}

inline F at_least(F x, F least) { return _mm512_max_ps(least, x); }  // NaN stays NaN
inline F nearest(F x) { return _mm512_roundscale_ps(x, 0); }
inline F power_of_two(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline F subtract_floats(F x, F y) { return _mm512_sub_ps(x, y); }
inline F divide(F x, F y) { return _mm512_div_ps(x, y); }
inline F absolute(F x) { return _mm512_abs_ps(x); }
inline F with_sign_of(F x, F sign) { return _mm512_or_ps(x, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f))); }
inline __mmask16 is_none(F x) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ); }
inline F none_where_none(F mask, F x) {  // minus infinity where the mask is
    return _mm512_mask_mov_ps(x, is_none(mask), _mm512_set1_ps(-__builtin_inff()));
}
inline F zero_where_none(F score, F x) { return _mm512_mask_mov_ps(x, is_none(score), _mm512_setzero_ps()); }
inline float greatest_lane(F x) { return _mm512_reduce_max_ps(x); }
inline float first_lane(F x) { return _mm512_cvtss_f32(x); }
inline F load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
inline I load_signed_bytes(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline F load_brain(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

// 16 partial sums of a product of floats, of which each has every 16th input.
struct Sums {
    F x;
    void clear() { x = _mm512_setzero_ps(); }
    void add(Sums w, Sums a) { x = _mm512_fmadd_ps(w.x, a.x, x); }
    static Sums load(const float *p) { return {_mm512_loadu_ps(p)}; }
    static Sums load_half(const uint16_t *p) { return {::load_half(p)}; }
    static Sums load_brain(const uint16_t *p) { return {::load_brain(p)}; }
    void save(float *p) const { _mm512_storeu_ps(p, x); }
    float total() const {  // pairwise, the same on every instruction set
        return total_of_eight(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    }
};
constexpr int TILE_COLUMNS = 6;  // of a product of floats: 4 x 6 sums fit into the registers

}  // namespace
