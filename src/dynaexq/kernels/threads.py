"""How many threads the kernels use: torch's number, within what this process may run on."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits


@functools.cache
def usable_cores() -> int:
    """Cores of this process: its affinity, and the CPU quota of its control group (fixed at the first call)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such hierarchy, or "max"
        return cores


def thread_count() -> int:
    """Threads of a kernel call: what torch uses (OMP_NUM_THREADS, set_num_threads), never more than cores."""
    return min(torch.get_num_threads(), usable_cores())


def keep_numpy_single() -> None:
    """Keep numpy's products on the thread that asks: a pool of its own fights the kernels' for cores, and turns what
    predictors ask of routers between layers from a fifth of a millisecond into two. For the whole process."""
    threadpool_limits(1, user_api="blas")


def limit_torch_threads() -> None:
    """Keep torch itself from running more threads than cores, which a CPU quota does not tell it."""
    torch.set_num_threads(thread_count())
