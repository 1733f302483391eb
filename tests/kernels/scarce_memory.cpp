// Goes before the C library, and refuses memory on request.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default")))

API int refuses;
API long held;
int refuses = 0;  // only calls from other libraries: those of the C library itself do not come here
long held = 0;    // bytes

API void *mmap(void *address, size_t n, int protection, int flags, int file, off_t offset) {
    if (refuses) return MAP_FAILED;
    held += n;
    return reinterpret_cast<void *>(syscall(SYS_mmap, address, n, protection, flags, file, offset));
}

API int munmap(void *address, size_t n) {
    held -= n;
    return static_cast<int>(syscall(SYS_munmap, address, n));
}
