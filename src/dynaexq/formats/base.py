"""What a tier is: the number format of one expert version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dynaexq.core import OptionError

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64


class ExpertWeights(NamedTuple):
    """One expert in plain form: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class ExpertFormat:
    """A number format. `group_size` inputs share one scale (and offset); 0 for bf16, which has neither.

    Quantised weights are `scale * code + offset` with unsigned codes, or `scale * code` with codes in
    -127..127 when `symmetric`. Scale and offset are float16.

    A nested format refines a version of `base_bits` bits and holds what that one lacks only, see nested.py. One with
    `down_bits` has as many in the down matrix, whose errors go to the output as they are, and `bits` in gate and up.
    """

    name: str
    bits: int
    group_size: int
    symmetric: bool
    base_bits: int = 0
    down_bits: int = 0

    @property
    def matrices(self) -> tuple[ExpertFormat, ExpertFormat, ExpertFormat]:
        """Formats of gate, up and down."""
        if not self.down_bits:
            return self, self, self
        gate = replace(self, down_bits=0)
        return gate, gate, ExpertFormat(self.name, self.down_bits, self.group_size, self.down_bits == SYMMETRIC_BITS)

    @property
    def quantized(self) -> bool:
        return self.group_size > 0

    @property
    def meta_bytes(self) -> int:
        """Bytes of scales and offsets of one group of 8 rows."""
        return 0 if not self.quantized or self.base_bits else 16 if self.symmetric else 32

    @property
    def shift(self) -> int:
        """By how many bits a nested format moves its base's codes up."""
        return self.bits // 2


SYMMETRIC_BITS = 8
TIERS: dict[str, tuple[int, int, int]] = {
    "int1": (1, 0, 0),
    "int2": (2, 0, 0),
    "int2d3": (2, 0, 3),
    "int2d4": (2, 0, 4),
    "int3": (3, 0, 0),
    "int3d4": (3, 0, 4),
    "int4": (4, 0, 0),
    "int2+2": (2, 2, 0),
    "int4d8": (4, 0, 8),
    "int8": (8, 0, 0),
    "int4+4": (4, 4, 0),
    "bf16": (16, 0, 0),
}
"""Known tiers from the smallest up: name -> (bits, bits of the base it is nested in, bits of the down matrix where they
are others). int1 exists to stress quality, not to serve."""


def base_tier(name: str) -> str | None:
    """The tier that tier `name` is nested in; None for a tier that stands alone."""
    base = TIERS[name][1]
    return f"int{base}" if base else None


def require_standing(name: str) -> None:
    """Raise OptionError for a tier that cannot be served by itself."""
    base = base_tier(name)
    if base is not None:
        raise OptionError(f"tier {name} refines {base} versions while a model runs: it goes with mode 'dynaexq'")


def with_bases(tiers: Iterable[str]) -> tuple[str, ...]:
    """`tiers`, each nested one after the one it is nested in."""
    return tuple(dict.fromkeys(name for tier in tiers for name in (base_tier(tier), tier) if name))


def tier_format(name: str, group_size: int = DEFAULT_GROUP_SIZE) -> ExpertFormat:
    """The format of tier `name`.

    Raises:
        OptionError: unknown tier or group size.
    """
    if name not in TIERS:
        raise OptionError(f"unknown tier '{name}'; known tiers are {', '.join(TIERS)}")
    bits, base, down = TIERS[name]
    if name == "bf16":
        return ExpertFormat(name, bits, 0, True)
    if group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise OptionError(f"unknown group size {group_size}; known group sizes are {sizes}")
    return ExpertFormat(name, bits, group_size, bits == SYMMETRIC_BITS, base, down)


def tier_rank(name: str) -> int:
    """Position of a tier in the order of precision, int1 lowest."""
    return list(TIERS).index(name)
