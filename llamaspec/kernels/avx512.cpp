#include "vectors512.hpp"

#include "product.hpp"

const llamaspec::Level llamaspec::AVX512 = make_level("avx512");
