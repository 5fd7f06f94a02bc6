"""Dense weights and the mapped files they are read from: a file's pages count as ours while it is mapped."""

from __future__ import annotations

import ctypes
import mmap
import re
from itertools import chain
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)


def release_pages(files: list[Path]) -> None:
    """Give back the resident pages of the mappings of `files`; they are read again when they are touched.

    Only for files that are read: what was written to a private mapping would be lost.
    """
    for places in _mappings(files):
        _libc.madvise(ctypes.c_void_p(places.start), ctypes.c_size_t(len(places)), mmap.MADV_DONTNEED)


def own_tensors(model: Any, files: list[Path]) -> None:
    """Copy each parameter and buffer of `model` that lies in a mapping of `files`: one of them keeps all of it."""
    mappings = _mappings(files)
    for tensor in chain(model.parameters(), model.buffers()):
        if any(tensor.data_ptr() in places for places in mappings):
            tensor.data = tensor.data.clone()


def _mappings(files: list[Path]) -> list[range]:
    """Addresses at which `files` are mapped."""
    names = {str(file.resolve()) for file in files}
    found = re.findall(r"^(\w+)-(\w+) \S+ \S+ \S+ \d+ +(.*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [range(int(start, 16), int(end, 16)) for start, end, name in found if name in names]
