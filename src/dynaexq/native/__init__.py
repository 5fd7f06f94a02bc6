"""C++ parts: handle words and window epochs, aligned reads, checksums. All long calls run without the GIL."""

from dynaexq.native._native import (
    HandleTable,
    crc32c,
    crc32c_portable,
    limit_malloc,
    read_extent,
)

__all__ = ["HandleTable", "crc32c", "crc32c_portable", "limit_malloc", "read_extent"]
