// Memory that may be missing: nothing is thrown through C.
#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace llamaspec {

// A part for a growing context: it would otherwise be allocated again for every few tokens.
constexpr size_t with_reserve(size_t n) { return n + n / 8; }

// A block that is reused. Memory that is not touched takes only addresses.
class Memory {
    static constexpr int PATIENCE = 4096;  // uses of a quarter at most, after which the rest is given back

    char *data = nullptr;
    size_t size = 0;
    int n_small = 0;

    void replace(size_t n) {
        if (data) munmap(data, size);
        void *made = n ? mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
        data = made == MAP_FAILED ? nullptr : static_cast<char *>(made), size = data ? n : 0, n_small = 0;
    }

public:
    Memory() = default;
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() { replace(0); }

    // Return n bytes, aligned to a page, whose contents are undefined; nullptr if there is no memory.
    char *reserve(size_t n) {
        n_small = n <= size / 4 ? n_small + 1 : 0;
        if (n > size || n_small == PATIENCE) replace(with_reserve(n));
        return data;
    }
};

}  // namespace llamaspec
