#include "callers.hpp"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <mutex>

namespace llamaspec {
namespace {

constexpr int MAX_CALLERS = 32;  // more are looked up at every call
Caller callers[MAX_CALLERS];
std::atomic<int> n_callers;
std::mutex adding;

struct Code {
    const char *begin, *end, *library;
};

// Return the executable segment that contains an address, and its library.
Code code_at(const void *address) {
    struct Search {
        const char *address;
        Code found;
    } search{static_cast<const char *>(address), {}};
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *data) {
            auto *search = static_cast<Search *>(data);
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto &segment = info->dlpi_phdr[i];
                const auto *begin = reinterpret_cast<const char *>(info->dlpi_addr + segment.p_vaddr);
                const char *end = begin + segment.p_memsz;
                if (segment.p_type == PT_LOAD && segment.p_flags & PF_X && begin <= search->address && search->address < end)
                    return search->found = {begin, end, info->dlpi_name}, 1;
            }
            return 0;
        },
        &search);
    return search.found;
}

template <class F> void find(void *library, const char *name, F *&function) {
    void *found = library ? dlsym(library, name) : nullptr;  // in the library, or in those that it needs
    const Code ours = code_at(reinterpret_cast<const void *>(&code_at));
    function = found >= ours.begin && found < ours.end ? nullptr : reinterpret_cast<F *>(found);
}

Caller look_up(const void *address) {
    const Code code = code_at(address);
    // It stays open, because its functions must not go while we may call them.
    void *library = code.library ? dlopen(code.library, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    Caller made{};
    made.begin = code.begin, made.end = code.end;
    find(library, "ggml_compute_forward_mul_mat_tiled", made.mul_mat_tiled);
    find(library, "ggml_compute_forward_mul_mat_id_tiled", made.mul_mat_id_tiled);
    find(library, "ggml_tiled_wdata_size", made.tiled_wdata_size);
    find(library, "ggml_compute_forward_flash_attn_ext", made.flash_attention);
    return made;
}

const Caller *known(const void *address) {
    const int n = n_callers.load(std::memory_order_acquire);
    for (int i = 0; i < n; i++)
        if (callers[i].contains(address)) return &callers[i];
    return nullptr;
}

}  // namespace

const Caller &caller_at(const void *address) {
    if (const Caller *found = known(address)) return *found;
    const std::lock_guard<std::mutex> lock(adding);
    if (const Caller *found = known(address)) return *found;  // another thread was faster
    thread_local Caller latest;
    latest = look_up(address);
    const int n = n_callers.load(std::memory_order_relaxed);
    if (!latest.begin || n == MAX_CALLERS) return latest;
    callers[n] = latest;
    n_callers.store(n + 1, std::memory_order_release);
    return callers[n];
}

}  // namespace llamaspec
