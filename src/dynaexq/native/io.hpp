// Blocking reads into memory that the caller owns.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dynaexq {

// Reads exactly `size` bytes at `offset` of `fd` into `destination` and returns how many arrived:
// fewer only at the end of the file. Throws std::system_error with errno on failure.
// For a descriptor opened with O_DIRECT, destination, offset and size must be multiples of 4096.
std::size_t read_exactly(int fd, std::uint64_t offset, void* destination, std::size_t size);

// Keeps the C allocator from hoarding: two arenas, blocks of 4 MiB and a free top of 8 MiB go back at once.
// Lower thresholds cost more than they save: quantisers then fault their working set in again and again.
void limit_malloc();

}  // namespace dynaexq
