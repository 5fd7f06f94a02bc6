// CRC-32C (Castagnoli), the checksum of every extent in a store.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dynaexq {

// Continues `crc` (0 to start) over `size` bytes. Uses SSE 4.2 where the processor has it.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc = 0);
// The table-driven form, the reference for the accelerated one.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc = 0);

}  // namespace dynaexq
