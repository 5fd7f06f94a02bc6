"""The types everybody shares. Read this page first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

BLOCK_BYTES = 4096
"""Unit of extents on disk and of blocks in an arena: fit for direct I/O, and the unit of handle words."""


class ExpertKey(NamedTuple):
    """One expert: index among the model's MoE layers (not all layers), and index within the layer."""

    layer: int
    expert: int


@dataclass(frozen=True)
class ExpertShape:
    """Geometry of a gated expert: gate and up are [intermediate, hidden], down is [hidden, intermediate]."""

    hidden: int
    intermediate: int

    @property
    def weights(self) -> int:
        """Number of weights in one expert."""
        return 3 * self.hidden * self.intermediate


@dataclass(frozen=True)
class ModelShape:
    """The expert part of a model: how many MoE layers, experts in each, and the shape of each expert."""

    layers: int
    experts: int
    expert: ExpertShape

    def expert_keys(self) -> list[ExpertKey]:
        """All experts, layer by layer."""
        return [ExpertKey(layer, expert) for layer in range(self.layers) for expert in range(self.experts)]

    def index(self, key: ExpertKey) -> int:
        """Position of `key` in handle tables and in `expert_keys()`."""
        return key.layer * self.experts + key.expert

    @property
    def weights(self) -> int:
        """Number of expert weights in the model."""
        return self.layers * self.experts * self.expert.weights


@dataclass(frozen=True)
class Window:
    """One forward pass: the handle words it runs on from start to end, and the slot that pins them."""

    slot: int


class Residency(Enum):
    """State of one expert (dynaexq paper, section 1), at two tiers or more."""

    RESIDENT_LO = "handle on the lowest tier, nothing moving"
    PROMOTING = "a higher version in transfer, handle still on the lower one"
    RESIDENT_HI = "handle above the lowest tier, nothing moving"
    DEMOTING = "a lower version in transfer, handle still on the higher one"
    EVICTING = "handle switched, the old version's block waits for windows that may still read it"


LEGAL_MOVES = {
    Residency.RESIDENT_LO: {Residency.PROMOTING, Residency.EVICTING},
    Residency.PROMOTING: {Residency.RESIDENT_HI, Residency.EVICTING, Residency.RESIDENT_LO},
    Residency.RESIDENT_HI: {Residency.PROMOTING, Residency.DEMOTING, Residency.EVICTING},
    Residency.DEMOTING: {Residency.EVICTING, Residency.RESIDENT_HI},
    Residency.EVICTING: {Residency.RESIDENT_HI, Residency.RESIDENT_LO},
}
"""From -> to. A transfer that fails goes back to where it came from; a low version that changes its place is evicted
from the old one."""


NO_BLOCK = (1 << 28) - 1
MAX_ARENA_BYTES = NO_BLOCK * BLOCK_BYTES
"""What the 28 bits of a block number can reach: 1 TiB."""


class Handle(NamedTuple):
    """A decoded handle word: index into the format table, byte offset of the version in the arena.

    Of a nested format, `offset` is that of the version it refines, and `residual` that of what it adds.
    """

    format_index: int
    offset: int
    residual: int | None = None


def encode_handle(format_index: int, offset: int, residual: int | None = None) -> int:
    """The 64-bit handle word of a version.

    Word: format (8 bits) | base block (28 bits) | residual block (28 bits), blocks in units of 4 KiB from the
    arena's start; an all-ones residual means none.
    """
    assert 0 <= format_index < 256
    return format_index << 56 | _block(offset) << 28 | (NO_BLOCK if residual is None else _block(residual))


def _block(offset: int) -> int:
    block, rest = divmod(offset, BLOCK_BYTES)
    assert rest == 0 and 0 <= block < NO_BLOCK
    return block


def decode_handle(word: int) -> Handle:
    """Inverse of `encode_handle`."""
    residual = word & NO_BLOCK
    return Handle(
        word >> 56,
        (word >> 28 & NO_BLOCK) * BLOCK_BYTES,
        None if residual == NO_BLOCK else residual * BLOCK_BYTES,
    )


class DynaExqError(Exception):
    """Base of all errors a user can meet. The text says what is wrong, where, and the way out."""

    exit_code = 1


class OptionError(DynaExqError):
    """Options that are unknown, conflict, or would do nothing."""

    exit_code = 2


class CheckpointError(DynaExqError):
    """The input checkpoint is incomplete, inconsistent or unreadable."""

    exit_code = 3


class UnsupportedModelError(DynaExqError):
    """The model's experts cannot be served through DynaExq."""

    exit_code = 4


class FormatError(CheckpointError):
    """Weights that a number format cannot hold."""


class StoreError(DynaExqError):
    """A prepared store is incomplete, damaged, or belongs to something else."""

    exit_code = 5


class SideFileError(StoreError):
    """A traffic profile or a version map is damaged, or belongs to something else; the store is not to blame."""


class MemoryLimitError(DynaExqError):
    """The memory limit is below what the run needs."""

    exit_code = 6


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit
