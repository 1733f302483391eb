#include "vectors256.hpp"

#include "product.hpp"

const llamaspec::Level llamaspec::AVX_VNNI = make_level("avx-vnni");
