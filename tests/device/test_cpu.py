"""Memory of the CPU device."""

from __future__ import annotations

from dynaexq.device import CpuDevice
from dynaexq.plan.process import resident_bytes

NBYTES = 64 << 20


def test_released_pages_leave_the_process_and_come_back_empty() -> None:
    arena = CpuDevice().allocate(NBYTES)
    arena.host_view(0, NBYTES)[:] = 7
    before = resident_bytes()
    arena.release(1 << 20, NBYTES - (2 << 20))
    assert before - resident_bytes() > NBYTES // 2
    edges = arena.host_view(0, NBYTES)
    assert edges[(1 << 20) - 1] == 7 and edges[1 << 20] == 0 and edges[-1] == 7
    edges[1 << 20] = 9
    assert int(arena.view(1 << 20, 1)[0]) == 9
    arena.close()
