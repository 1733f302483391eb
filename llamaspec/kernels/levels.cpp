// The instruction sets of this family of processors, and whether this one has them.
#include "kernels.hpp"

#if defined(__aarch64__)
#include <sys/auxv.h>
#else
#include <cpuid.h>
#endif

namespace llamaspec {
namespace {

#if defined(__x86_64__)

// Not __builtin_cpu_supports: in libraries that zig builds, it denies everything.
struct Processor {
    unsigned one[4] = {}, seven[4] = {}, seven_more[4] = {};  // cpuid: EAX, EBX, ECX, EDX
    unsigned saved = 0;                                       // registers that the system saves

    Processor() {
        __get_cpuid(1, &one[0], &one[1], &one[2], &one[3]);
        __get_cpuid_count(7, 0, &seven[0], &seven[1], &seven[2], &seven[3]);
        if (seven[0] >= 1) __get_cpuid_count(7, 1, &seven_more[0], &seven_more[1], &seven_more[2], &seven_more[3]);
        unsigned high;
        if (one[2] >> 27 & 1) __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    }
    bool saves(unsigned mask) const { return (saved & mask) == mask; }
};

bool has_avx2() {
    const Processor p;
    const bool fma = p.one[2] >> 12 & 1, f16c = p.one[2] >> 29 & 1, avx2 = p.seven[1] >> 5 & 1;
    return fma && f16c && avx2 && p.saves(0x06);
}
bool has_avx_vnni() { return has_avx2() && (Processor().seven_more[0] >> 4 & 1); }
bool has_avx512() {
    const Processor p;
    const unsigned b = p.seven[1];
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = p.seven[2] >> 11 & 1;
    return has_avx2() && f && dq && bw && vl && vnni && p.saves(0xe6);
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
