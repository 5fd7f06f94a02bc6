from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

class HandleTable:
    """Fixed table of 64-bit handle words; see handles.hpp for the memory order."""

    def __init__(self, size: int) -> None: ...
    def __len__(self) -> int: ...
    def load(self, index: int) -> int: ...
    def publish(self, index: int, word: int) -> int:
        """Store one word atomically; return the epoch to pass to `drained` before reuse."""

    def pin(self, out: NDArray[np.uint64]) -> int:
        """Open a window: copy all words into `out` [size]; return its slot. RuntimeError past 64 windows."""

    def release(self, slot: int) -> None: ...
    def drained(self, epoch: int) -> bool: ...
    def live_windows(self) -> int: ...

def read_extent(fd: int, offset: int, destination: Any) -> tuple[int, int]:
    """Fill `destination` (writable uint8 [n]) from `fd`; return (bytes read, CRC-32C). OSError with errno."""

def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a uint8 array [n], continuing `crc`."""

def crc32c_portable(data: Any, crc: int = 0) -> int: ...
def choose_codes(
    rows: int,
    columns: int,
    left: int,
    upper: int,
    upper_stride: int,
    scale: int,
    offset: int,
    lowest: int,
    reach: int,
    codes: int,
    errors: int,
    threads: int,
) -> None:
    """Codes of a group at addresses, see fitting.hpp."""

def limit_malloc() -> None:
    """Keep glibc from hoarding freed memory (few arenas, low mmap and trim thresholds)."""

def instruction_sets() -> list[str]:
    """Kernel sets that this processor can run, best first, "scalar" last."""

def team_kind() -> str:
    """Whose threads the kernels use: "openmp" (the runtime that torch brought) or "own"."""

def normalize_rows(x: int, weight: int, epsilon: float, rows: int, width: int, out: int, threads: int) -> None:
    """RMSNorm of float32 rows at addresses; ValueError unless `width` is a multiple of 8."""

class LayerGate:
    """What a layer does between its matrices; biases are addresses of float32, 0 for none."""

    def __init__(
        self, clamped: bool, alpha: float, limit: float, interleaved: bool, gate_up_bias: int, down_bias: int
    ) -> None: ...

class ExpertLayers:
    """Experts in an arena, see experts.hpp. Addresses stay the caller's business."""

    def __init__(
        self,
        arena: int,
        arena_bytes: int,
        experts: int,
        hidden: int,
        intermediate: int,
        formats: list[tuple[int, int, int, tuple[int, int, int], tuple[int, int, int], int]],
        exact: bool,
        instructions: str,
    ) -> None:
        """`formats`: bits, group size, bits of the base (0: none), and offsets of gate, up and down in the version and
        in its base. ValueError where there is no kernel.
        """

    def forward(
        self,
        gate: LayerGate,
        words: NDArray[np.uint64],
        bfloat16: bool,
        hidden: int,
        ids: int,
        weights: int,
        tokens: int,
        top_k: int,
        out: int,
        threads: int,
        arrive: Callable[[], None] | None,
    ) -> None:
        """IndexError for an expert id or handle that points nowhere."""

class PackedLinear:
    """A dense layer over packed weights, see linear.hpp."""

    def __init__(
        self,
        weights: int,
        nbytes: int,
        bits: int,
        group: int,
        rows: int,
        columns: int,
        exact: bool,
        instructions: str,
    ) -> None: ...
    def forward(self, bfloat16: bool, x: int, tokens: int, bias: int, out: int, threads: int) -> None: ...

class DecoderLayer:
    """One decode step of a decoder layer, see decoder.hpp. Norms are (address, epsilon), projections (matrix, bias
    address); the caller keeps what they point to."""

    def __init__(
        self,
        *,
        hidden: int,
        before_attention: tuple[int, float],
        query: tuple[PackedLinear, int],
        key: tuple[PackedLinear, int],
        value: tuple[PackedLinear, int],
        output: tuple[PackedLinear, int],
        query_norm: tuple[int, float],
        key_norm: tuple[int, float],
        norm_by_head: bool,
        heads: int,
        kv_heads: int,
        width: int,
        scaling: float,
        before_experts: tuple[int, float],
        router: tuple[PackedLinear, int],
        expert_count: int,
        top_k: int,
        renormalize: bool,
        experts: ExpertLayers,
        gate: LayerGate,
    ) -> None: ...
    def step(
        self,
        *,
        sequences: tuple[int, int, int, int, int, int],
        cache: tuple[int, ...],
        words: NDArray[np.uint64],
        hidden: int,
        ids: int,
        weights: int,
        out: int,
        threads: int,
        routed: Callable[[int], None] | None,
        arrive: Callable[[int], None] | None,
    ) -> None: ...

class DecoderModel:
    """One decode step of a whole model, see model.hpp. The embedding is (values, scales, group or 0, rows)."""

    def __init__(
        self,
        *,
        hidden: int,
        embedding: tuple[int, int, int, int],
        layers: list[DecoderLayer],
        norm: tuple[int, float],
        head: tuple[PackedLinear, int],
    ) -> None: ...
    def step(
        self,
        *,
        sequences: tuple[int, int, int, int, int, int],
        caches: list[tuple[int, ...]],
        words: list[NDArray[np.uint64]],
        tokens: int,
        ids: int,
        weights: int,
        router_rows: int,
        logits: int,
        threads: int,
        routed: Callable[[int], None] | None,
        arrive: Callable[[int], None] | None,
    ) -> None: ...
