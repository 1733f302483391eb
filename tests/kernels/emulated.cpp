// Calls functions of a library of kernels for another program, which is on another processor: emulated LIBRARY
//
// A call comes from standard input: the name of the function, then its arguments until a zero byte. An argument is an
// integer ('i', 8 bytes), a float ('f', 4 bytes), or an array ('a', its number of bytes, content; -1 bytes = none). The
// result goes to standard output, then the content of all arrays after the call.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <vector>

struct Argument {
    int64_t number = 0;  // bytes of an array
    float real = 0;
    std::vector<char> array;

    template <class T> operator T *() { return number < 0 ? nullptr : reinterpret_cast<T *>(array.data()); }
};

static void read(void *to, size_t n) {
    if (n && std::fread(to, n, 1, stdin) != 1) std::exit(0);
}
template <class T> static T read() {
    T x;
    read(&x, sizeof x);
    return x;
}
static std::vector<Argument> read_arguments() {
    std::vector<Argument> all;
    while (const char kind = read<char>()) {
        Argument x;
        if (kind == 'f') x.real = read<float>();
        else x.number = read<int64_t>();
        if (kind == 'a' && x.number >= 0) x.array.resize(x.number), read(x.array.data(), x.number);
        all.push_back(std::move(x));
    }
    return all;
}

using Multiply = int(int, const void *, size_t, int64_t, int64_t, const float *, int64_t, float *, int, int64_t, void *);
using Attend = int(int, int, const float *, const void *, const void *, const void *, const float *, const float *, float,
                   float, int, int, int, int, int, int64_t, int, float *);
using SetLevel = int(const char *);

int main(int, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    auto function = [&](const char *name) { return dlsym(library, (std::string("llamaspec_kernels_") + name).c_str()); };
    auto *multiply = reinterpret_cast<Multiply *>(function("multiply"));
    auto *attend = reinterpret_cast<Attend *>(function("attend"));
    auto *set_level = reinterpret_cast<SetLevel *>(function("set_level"));
    for (;;) {
        const char name = read<char>();
        auto a = read_arguments();
        auto n = [&](int i) { return a[i].number; };
        int32_t result = -1;
        if (name == 'm') result = multiply(n(0), a[1], n(2), n(3), n(4), a[5], n(6), a[7], n(8), n(9), a[10]);
        if (name == 'a')
            result = attend(n(0), n(1), a[2], a[3], a[4], a[5], a[6], a[7], a[8].real, a[9].real, n(10), n(11), n(12), n(13),
                            n(14), n(15), n(16), a[17]);
        if (name == 's') result = set_level(a[0]);
        std::fwrite(&result, sizeof result, 1, stdout);
        for (const Argument &each : a) std::fwrite(each.array.data(), 1, each.array.size(), stdout);
        std::fflush(stdout);
    }
}
