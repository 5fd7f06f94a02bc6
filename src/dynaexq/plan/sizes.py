"""Sizes that people type."""

from __future__ import annotations

import re

from dynaexq.core import OptionError

UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "KB": 10**3,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "MB": 10**6,
    "G": 1 << 30,
    "GIB": 1 << 30,
    "GB": 10**9,
    "T": 1 << 40,
    "TIB": 1 << 40,
    "TB": 10**12,
}


def parse_size(text: str, option: str) -> int:
    """Bytes of a size such as `700M`, `1.5GiB` (binary) or `2GB` (decimal). Raises OptionError."""
    match = re.fullmatch(r"\s*([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise OptionError(f"{option} {text!r} is no size; write bytes or a unit, such as 700M, 1.5G or 12GB")
    return int(float(match[1]) * unit)
