import threading

import numpy as np
import pytest

from dynaexq.native import HandleTable


def test_a_window_keeps_its_words_while_publishes_go_on() -> None:
    table = HandleTable(3)
    table.publish(1, 7)
    words = np.empty(3, np.uint64)
    slot = table.pin(words)
    epoch = table.publish(1, (1 << 64) - 1)
    assert words.tolist() == [0, 7, 0]
    assert table.load(1) == (1 << 64) - 1
    assert not table.drained(epoch)
    table.release(slot)
    assert table.drained(epoch)


def test_later_windows_do_not_hold_up_an_earlier_publish() -> None:
    table = HandleTable(1)
    old = table.pin(np.empty(1, np.uint64))
    epoch = table.publish(0, 1)
    table.pin(np.empty(1, np.uint64))
    assert not table.drained(epoch)
    table.release(old)
    assert table.drained(epoch)
    assert table.live_windows() == 1


def test_misuse_is_an_error() -> None:
    table = HandleTable(2)
    with pytest.raises(IndexError):
        table.load(2)
    with pytest.raises(IndexError):
        table.publish(5, 1)
    with pytest.raises(IndexError):
        table.release(0)
    with pytest.raises(IndexError):
        table.pin(np.empty(3, np.uint64))
    slots = [table.pin(np.empty(2, np.uint64)) for _ in range(64)]
    with pytest.raises(RuntimeError, match="too many windows"):
        table.pin(np.empty(2, np.uint64))
    for slot in slots:
        table.release(slot)
    assert table.live_windows() == 0


def test_no_window_sees_a_block_after_it_was_reclaimed() -> None:
    """A writer moves handles on and poisons what drained; readers must never see poison."""
    blocks = np.ones(64, np.uint64)
    table = HandleTable(8)
    for index in range(8):
        table.publish(index, index)
    stop, errors = threading.Event(), []

    def read() -> None:
        words = np.empty(8, np.uint64)
        while not stop.is_set():
            slot = table.pin(words)
            if not blocks[words].all():
                errors.append(words.copy())
            table.release(slot)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    free = list(range(8, 64))
    retired: list[tuple[int, int]] = []
    for step in range(20_000):
        index, block = step % 8, free.pop()
        blocks[block] = 1
        old = table.load(index)
        retired.append((table.publish(index, block), old))
        while retired and (table.drained(retired[0][0]) or not free):
            if table.drained(retired[0][0]):
                free.append(retired[0][1])
                blocks[retired.pop(0)[1]] = 0
    stop.set()
    for reader in readers:
        reader.join()
    assert not errors
