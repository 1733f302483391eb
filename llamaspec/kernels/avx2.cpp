#include "vectors256.hpp"

#include "product.hpp"

const llamaspec::Level llamaspec::AVX2 = make_level("avx2");
