"""What this process and this machine have: resident memory, peaks, limits (Linux)."""

from __future__ import annotations

import re
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident memory this process ever had (VmHWM), in bytes."""
    return _status("VmHWM")


def available_memory() -> int:
    """Bytes this process could still take: the system's available memory, within its control group."""
    meminfo = Path("/proc/meminfo").read_text()
    free = int(re.findall(r"MemAvailable:\s+(\d+) kB", meminfo)[0]) * 1024
    return min([free, *_control_group_room()])


def _status(field: str) -> int:
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def _control_group_room() -> list[int]:
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return [max(0, int(Path(limit).read_text()) - int(Path(usage).read_text()))]
        except (OSError, ValueError):  # no such hierarchy, or "max"
            continue
    return []
