#include "io.hpp"

#include <malloc.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace dynaexq {

std::size_t read_exactly(int fd, std::uint64_t offset, void* destination, std::size_t size) {
  auto* out = static_cast<unsigned char*>(destination);
  std::size_t done = 0;
  while (done < size) {
    const ssize_t got = pread(fd, out + done, size - done, static_cast<off_t>(offset + done));
    if (got == 0) break;
    if (got < 0) {
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category(), "pread");
    }
    done += static_cast<std::size_t>(got);
  }
  return done;
}

void limit_malloc() {
#if defined(__GLIBC__)
  mallopt(M_ARENA_MAX, 2);
  mallopt(M_MMAP_THRESHOLD, 4 << 20);
  mallopt(M_TRIM_THRESHOLD, 8 << 20);
#endif
}

}  // namespace dynaexq
