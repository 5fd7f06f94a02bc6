import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import (
    BLOCK_BYTES,
    MAX_ARENA_BYTES,
    NO_BLOCK,
    ExpertKey,
    ExpertShape,
    ModelShape,
    decode_handle,
    encode_handle,
    round_up,
)


@given(st.integers(0, 255), st.integers(0, NO_BLOCK - 1))
def test_handle_words_round_trip(format_index: int, block: int) -> None:
    word = encode_handle(format_index, block * BLOCK_BYTES)
    assert 0 <= word < 1 << 64
    assert decode_handle(word) == (format_index, block * BLOCK_BYTES, None)
    assert word & NO_BLOCK == NO_BLOCK  # no residual


@given(st.integers(0, 255), st.integers(0, NO_BLOCK - 1), st.integers(0, NO_BLOCK - 1))
def test_handle_words_of_nested_versions_round_trip(format_index: int, base: int, rest: int) -> None:
    word = encode_handle(format_index, base * BLOCK_BYTES, rest * BLOCK_BYTES)
    assert 0 <= word < 1 << 64
    assert decode_handle(word) == (format_index, base * BLOCK_BYTES, rest * BLOCK_BYTES)


@pytest.mark.parametrize("bad", [(0, 1), (0, MAX_ARENA_BYTES), (256, 0), (-1, 0)])
def test_handle_words_refuse_what_they_cannot_hold(bad: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        encode_handle(*bad)


def test_indexes_follow_the_order_of_keys() -> None:
    shape = ModelShape(3, 5, ExpertShape(64, 32))
    assert [shape.index(key) for key in shape.expert_keys()] == list(range(15))
    assert shape.index(ExpertKey(2, 4)) == 14
    assert shape.weights == 15 * 3 * 64 * 32


def test_round_up() -> None:
    assert [round_up(value, 8) for value in (0, 1, 8, 9)] == [0, 8, 8, 16]
