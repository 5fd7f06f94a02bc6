"""What a tier is: the number format of one expert version."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    name: str
    bits: int
    group_size: int
    symmetric: bool

    @property
    def quantized(self) -> bool:
        return self.group_size > 0

    @property
    def meta_bytes(self) -> int:
        """Bytes of scales and offsets of one group of 8 rows."""
        return 0 if not self.quantized else 16 if self.symmetric else 32


TIERS: dict[str, tuple[int, bool]] = {
    "int1": (1, False),
    "int2": (2, False),
    "int4": (4, False),
    "int8": (8, True),
    "bf16": (16, True),
}
"""Known tiers from the smallest up: name -> (bits, symmetric). int1 exists to stress quality, not to serve."""


def tier_format(name: str, group_size: int = DEFAULT_GROUP_SIZE) -> ExpertFormat:
    """The format of tier `name`.

    Raises:
        OptionError: unknown tier or group size.
    """
    if name not in TIERS:
        raise OptionError(f"unknown tier '{name}'; known tiers are {', '.join(TIERS)}")
    bits, symmetric = TIERS[name]
    if name == "bf16":
        return ExpertFormat(name, bits, 0, symmetric)
    if group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise OptionError(f"unknown group size {group_size}; known group sizes are {sizes}")
    return ExpertFormat(name, bits, group_size, symmetric)


def tier_rank(name: str) -> int:
    """Position of a tier in the order of precision, int1 lowest."""
    return list(TIERS).index(name)
