import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.native import crc32c, crc32c_portable, read_extent


def test_checksum_of_the_standard_check_string() -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    assert crc32c(data) == crc32c_portable(data) == 0xE3069283


@given(st.binary(max_size=300), st.integers(0, 300))
def test_both_checksums_agree_and_continue(data: bytes, cut: int) -> None:
    whole = np.frombuffer(data, np.uint8)
    assert crc32c(whole) == crc32c_portable(whole)
    assert crc32c(whole[cut:], crc32c(whole[:cut])) == crc32c(whole)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 7), st.data())
def test_one_flipped_bit_changes_the_checksum(data: bytes, bit: int, draw: st.DataObject) -> None:
    flipped = np.frombuffer(data, np.uint8).copy()
    flipped[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << bit
    assert crc32c(flipped) != crc32c(np.frombuffer(data, np.uint8))


def test_reads_return_what_is_there_and_its_checksum(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    out = np.zeros(4000, np.uint8)
    assert read_extent(descriptor, 1000, out) == (4000, crc32c(data[1000:5000]))
    assert np.array_equal(out, data[1000:5000])
    assert read_extent(descriptor, 9000, out)[0] == 1000
    assert np.array_equal(out[:1000], data[9000:])
    os.close(descriptor)
    with pytest.raises(OSError) as error:
        read_extent(descriptor, 0, out)
    assert error.value.errno == errno.EBADF
