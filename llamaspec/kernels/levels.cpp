// The instruction sets of this family of processors, and whether this one has them.
#include "kernels.hpp"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace llamaspec {
namespace {

#if defined(__x86_64__)

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx_vnni() {
    unsigned a = 7, b = 0, c = 1, d = 0;  // GCC 11 knows the flag, but not by name in __builtin_cpu_supports
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return has_avx2() && (a >> 4 & 1);
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
const Choice CHOICES[] = {{&AVX512, has_avx512}, {&AVX_VNNI, has_avx_vnni}, {&AVX2, has_avx2}, {}};
constexpr char TOO_OLD[] = "the processor lacks AVX2";

#elif defined(__aarch64__)

// Bits of the kernel's interface, which older headers do not name
bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
const Choice CHOICES[] = {{&NEON_DOTPROD, has_dotprod}, {}};
constexpr char TOO_OLD[] = "the processor lacks dot products (dotprod)";

#else
#error no instruction set of this processor is known
#endif

}  // namespace

const Choice *const choices = CHOICES;
const char *const too_old = TOO_OLD;

}  // namespace llamaspec
