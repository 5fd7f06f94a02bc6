"""The device in virtual time."""

from __future__ import annotations

from dynaexq.device.virtual import VirtualClock, VirtualDevice, VirtualLink, VirtualWake


def nothing() -> None:
    raise AssertionError("virtual copies copy nothing")


def test_copies_follow_each_other_over_the_link() -> None:
    clock = VirtualClock()
    link = VirtualLink(clock, 100.0, latency=0.5)
    for ticket, nbytes in enumerate((100, 50)):
        link.submit(ticket, nbytes, nothing)
    assert link.next_end == 1.5 and link.completed() == []
    clock.reach(1.5)
    assert [each.ticket for each in link.completed()] == [0] and link.next_end == 2.5
    clock.reach(4.0)
    assert [each.ticket for each in link.completed()] == [1] and link.busy_seconds == 2.5
    link.submit(2, 100, nothing)
    assert link.next_end == 5.5
    assert link.busy_since(2.0) == 0.5 and link.busy_since(4.0) == 0.0
    clock.reach(5.0)
    assert link.busy_since(4.0) == 1.0 and link.busy_since(4.5) == 0.5
    link.close()
    assert link.next_end == float("inf")


def test_waits_end_with_the_next_copy() -> None:
    clock = VirtualClock()
    link = VirtualLink(clock, 100.0)
    wake = VirtualWake(clock, link)
    assert not wake.wait(2.0) and clock.now == 2.0
    link.submit(0, 100, nothing)
    wake.set()
    assert wake.wait(9.0) and clock.now == 3.0
    clock.reach(1.0)
    assert clock.now == 3.0


def test_an_arena_has_offsets_and_no_memory() -> None:
    arena = VirtualDevice().allocate(1 << 40)
    assert arena.host_view(1 << 39, 1 << 30).nbytes == 1 << 30 and arena.view(0, 1 << 30).nbytes == 1 << 30
