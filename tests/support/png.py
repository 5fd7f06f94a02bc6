"""Reads the PNG files that browsers write: 8 bits a channel, RGB or RGBA, not interlaced."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

Pixel = tuple[int, ...]


class Image:
    """The pixels of a file; `rows` from the top, to save time."""

    def __init__(self, path: Path, rows: int | None = None) -> None:
        data, at, packed = path.read_bytes(), 8, b""
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        while at < len(data):
            length, kind = struct.unpack(">I4s", data[at : at + 8])
            body = data[at + 8 : at + 8 + length]
            if kind == b"IHDR":
                self.width, self.height, *form = struct.unpack(">IIBBBBB", body)
            elif kind == b"IDAT":
                packed += body
            at += length + 12
        assert form[0] == 8 and form[1] in (2, 6) and form[4] == 0, form
        self._channels = 3 if form[1] == 2 else 4
        self._lines: list[bytearray] = []
        plain, size = zlib.decompress(packed), self.width * self._channels
        above = bytearray(size)
        for start in range(0, min(rows or self.height, self.height) * (size + 1), size + 1):
            above = _unfilter(plain[start], bytearray(plain[start + 1 : start + 1 + size]), above, self._channels)
            self._lines.append(above)

    def at(self, x: float, y: float) -> Pixel:
        """Red, green, blue."""
        start = int(x) * self._channels
        return tuple(self._lines[int(y)][start : start + 3])


def _unfilter(kind: int, line: bytearray, above: bytearray, step: int) -> bytearray:
    for i in range(len(line)) if kind else ():
        left, up, corner = (line[i - step], above[i], above[i - step]) if i >= step else (0, above[i], 0)
        if kind == 4:
            guess = left + up - corner
            value = min((left, up, corner), key=lambda near: abs(guess - near))
        else:
            value = (0, left, up, (left + up) // 2)[kind]
        line[i] = (line[i] + value) & 255
    return line
