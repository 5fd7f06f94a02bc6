"""What the native expert kernels reach on this machine, each beside the speed of reading memory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dynaexq.core import ExpertShape, MemoryLimitError, ModelShape, encode_handle
from dynaexq.device import CpuDevice
from dynaexq.formats import ExpertFormat, VersionLayout, tier_format
from dynaexq.formats.base import base_tier
from dynaexq.kernels import ExpertsCall, ExpertsKernel, LayerFunctions
from dynaexq.kernels.gates import GateFunction
from dynaexq.kernels.native import NativeKernel
from dynaexq.plan.memory import MIB, format_bytes
from dynaexq.plan.process import available_memory
from dynaexq.residency.arena import ExpertArena
from dynaexq.store.noise import RandomVersions, open_stream

EXPERT, TOP_K = ExpertShape(2048, 768), 8
"""The experts measured unless told otherwise, and how many each token goes to: those of a 30B model."""

ARENA_BYTES = 256 * MIB
"""Well above last-level caches, so that weights come from memory."""

BURST_SECONDS = 0.01
"""A call is repeated for about this long before the next thing has its turn."""

Seconds = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Work:
    """What to measure beside one token: `batches` of tokens on one expert, and a prefill (0 tokens: none).

    The prefill goes to `prefill_experts` experts, or all where there are fewer.
    """

    batches: tuple[int, ...] = (4, 8, 32, 64)
    prefill_tokens: int = 512
    prefill_experts: int = 128
    rounds: int = 15


@dataclass(frozen=True)
class Spread:
    """Over rounds: the median, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Seconds) -> Spread:
        """Spread of `values` [rounds]."""
        low, median, high = np.percentile(values, (10, 50, 90)).tolist()
        return cls(median, low, high)


@dataclass(frozen=True)
class Streaming:
    """Seconds of a call that reads every weight once; its bytes per second of weights, scales and offsets.

    `share_of_read` is the median of each round's share of `read_bytes_per_second` in that round.
    """

    seconds: Spread
    bytes_per_second: Spread
    read_bytes_per_second: Spread
    share_of_read: Spread

    @classmethod
    def of(cls, seconds: Seconds, nbytes: int, read_seconds: Seconds, read_bytes: int) -> Streaming:
        """From the seconds [rounds] of calls over `nbytes`, and of reading `read_bytes`."""
        speed, read = nbytes / seconds, read_bytes / read_seconds
        return cls(Spread.of(seconds), Spread.of(speed), Spread.of(read), Spread.of(speed / read))


@dataclass(frozen=True)
class KernelSpeed:
    """One format and activation mode: a layer at one token, and operations per second of `batches` and a prefill."""

    tier: str
    group_size: int
    activations: str
    one_token: Streaming
    batches: dict[int, Spread]
    prefill: Spread | None


class Reading:
    """A buffer in huge pages to sum up, with as many threads as torch uses: how fast memory can be read."""

    def __init__(self, nbytes: int = ARENA_BYTES) -> None:
        """Raises MemoryLimitError when `nbytes` are not there."""
        self.nbytes = max(4, nbytes // 4 * 4)
        _check_available(self.nbytes)
        self._arena = CpuDevice().allocate(self.nbytes)
        self._values = self._arena.view(0, self.nbytes).view(torch.float32)
        self._values.fill_(1.0)

    def read(self) -> torch.Tensor:
        """Read the buffer once."""
        return self._values.sum()


class RandomExperts(ExpertArena):
    """Random experts of one format, each with memory of its own: at least `least`, and at least `nbytes` together.

    Of a nested format, experts bring what they refine along.
    """

    def __init__(self, fmt: ExpertFormat, shape: ExpertShape, nbytes: int = ARENA_BYTES, least: int = 1) -> None:
        """Raises MemoryLimitError when they do not fit, OptionError where `fmt` does not fit `shape`."""
        base = base_tier(fmt.name)
        formats = [fmt] if base is None else [fmt, tier_format(base, fmt.group_size)]
        sizes = [VersionLayout.of(each, shape).extent_bytes for each in formats]
        extent = sum(sizes)
        count = max(least, math.ceil(nbytes / extent))
        super().__init__(ModelShape(1, count, shape), formats)
        _check_available(count * extent)
        self.arena = CpuDevice().allocate(count * extent)
        versions = [RandomVersions(each, shape, 1.0, open_stream(place)) for place, each in enumerate(formats)]
        for expert in range(count):
            at = expert * extent
            for size, drawn in zip(sizes, versions, strict=True):
                self.arena.host_view(at, size)[:] = drawn.draw()
                at += size
        places = [expert * extent for expert in range(count)]
        handles = [(0, at) if base is None else (0, at + sizes[0], at) for at in places]
        self.words = np.array([encode_handle(*handle) for handle in handles], np.uint64)


def time_rounds(tasks: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Seconds]:
    """Seconds per call [rounds] of every task; each round gives all of them a turn of about BURST_SECONDS."""
    repeats = {}
    for name, task in tasks.items():
        task()
        repeats[name] = max(1, math.ceil(BURST_SECONDS / _time(task, 1)))
    found = {name: np.empty(rounds) for name in tasks}
    for number in range(rounds):
        for name, task in tasks.items():
            found[name][number] = _time(task, repeats[name])
    return found


def measure_experts(
    experts: RandomExperts, activations: str, reading: Reading, top_k: int = TOP_K, work: Work | None = None
) -> KernelSpeed:
    """Measure the native kernel on `experts`, in turns with `reading`. Needs `top_k` experts."""
    work = work or Work()
    kernel = NativeKernel(experts, activations)
    fmt, payload = experts.formats[0], sum(layout.payload_bytes for layout in experts.layouts)
    tasks = {"read": reading.read, "one token": rotate(kernel, one_token_calls(experts, top_k))}
    tasks |= {str(tokens): rotate(kernel, batch_calls(experts, tokens)) for tokens in work.batches}
    if work.prefill_tokens:
        tasks["prefill"] = rotate(kernel, [prefill_call(experts, work.prefill_tokens, work.prefill_experts, top_k)])
    seconds = time_rounds(tasks, work.rounds)
    operations = 2 * experts.expert.weights
    prefill = operations * work.prefill_tokens * top_k
    return KernelSpeed(
        tier=fmt.name,
        group_size=fmt.group_size,
        activations=activations,
        one_token=Streaming.of(seconds["one token"], top_k * payload, seconds["read"], reading.nbytes),
        batches={tokens: Spread.of(operations * tokens / seconds[str(tokens)]) for tokens in work.batches},
        prefill=Spread.of(prefill / seconds["prefill"]) if work.prefill_tokens else None,
    )


def one_token_calls(experts: RandomExperts, top_k: int) -> list[ExpertsCall]:
    """Layer calls of one token that together go to each expert at most once, in random order."""
    order = _shuffle(experts.shape.experts)
    return [_call(experts, order[None, at : at + top_k]) for at in range(0, len(order) - top_k + 1, top_k)]


def batch_calls(experts: RandomExperts, tokens: int) -> list[ExpertsCall]:
    """For each expert, in random order, a call that sends `tokens` tokens to it alone."""
    return [_call(experts, expert.expand(tokens, 1).clone()) for expert in _shuffle(experts.shape.experts)]


def prefill_call(experts: RandomExperts, tokens: int, used: int, top_k: int) -> ExpertsCall:
    """`tokens` tokens, each to `top_k` different experts of `used`, all equally likely."""
    order = _shuffle(experts.shape.experts)[:used]
    chosen = torch.rand(tokens, len(order), generator=_generator()).topk(top_k).indices
    return _call(experts, order[chosen])


def rotate(kernel: ExpertsKernel, calls: Iterable[ExpertsCall]) -> Callable[[], torch.Tensor]:
    """A task that makes the next of `calls` every time: what it reads was last read a whole turn ago."""
    turn = itertools.cycle(calls)
    return lambda: kernel.forward(next(turn))


def _call(experts: RandomExperts, ids: torch.Tensor) -> ExpertsCall:
    tokens, top_k = ids.shape
    hidden = torch.randn(tokens, experts.expert.hidden, generator=_generator())
    return ExpertsCall(hidden, ids, torch.full((tokens, top_k), 1 / top_k), experts.words, _FUNCTIONS)


def _swiglu(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, -1)
    return GateFunction().apply(first, second)


_FUNCTIONS = LayerFunctions(_swiglu, False, None, None, GateFunction())


def _shuffle(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _time(task: Callable[[], object], repeats: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(repeats):
        task()
    return (time.perf_counter() - start) / repeats


def _check_available(nbytes: int) -> None:
    free = available_memory()
    if nbytes > free:
        raise MemoryLimitError(f"measuring needs {format_bytes(nbytes)} at once, {format_bytes(free)} are available")
