#include "vectors_neon.hpp"

#include "product.hpp"

const llamaspec::Level llamaspec::NEON_DOTPROD = make_level("neon-dotprod");
