"""Keys and values of one attention layer as they are kept: in the model's own numbers, or in fewer bytes."""

from __future__ import annotations

from typing import Any

import torch

from dynaexq.core import OptionError

KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
SMALLEST = 1e-30
"""Of an int8 row: what is smaller becomes zero."""


def kept_dtype(name: str | None, model: torch.dtype) -> torch.dtype:
    """The dtype that keys and values of a model are kept in; None is the model's own.

    Raises:
        OptionError: unknown, or wider than the model's own numbers.
    """
    if name is None:
        return model
    if name not in KV_DTYPES:
        raise OptionError(f"unknown kv-dtype '{name}'; known are {', '.join(KV_DTYPES)}")
    if KV_DTYPES[name].itemsize > model.itemsize:
        raise OptionError(f"--kv-dtype {name} is wider than the model's {model}; it would only take memory")
    return KV_DTYPES[name]


class Kept:
    """Numbers [slots, heads, room, width]; int8 with a scale [slots, heads, room] for each row of `width`.

    Rows are rounded as they are stored, to nearest and ties to even; float16 saturates. Indexes are those of torch.
    """

    def __init__(self, shape: tuple[int, ...], kept: torch.dtype) -> None:
        self.numbers = torch.zeros(shape, dtype=kept)
        self.scales = torch.zeros(shape[:-1]) if kept is torch.int8 else None

    def store(self, index: Any, rows: torch.Tensor) -> None:
        """Store rows [..., width] at an index of the first dimensions."""
        if self.scales is None:
            limit = torch.finfo(self.numbers.dtype).max
            self.numbers[index] = (rows if rows.dtype is self.numbers.dtype else rows.clamp(-limit, limit)).to(
                self.numbers.dtype
            )
            return
        rows = rows.float()
        largest = rows.abs().amax(-1)
        usable = (largest >= SMALLEST) & largest.isfinite()
        inverse = torch.where(usable, 127.0 / largest, 0.0)
        self.numbers[index] = (rows.nan_to_num() * inverse.unsqueeze(-1)).round().to(torch.int8)
        self.scales[index] = torch.where(usable, largest / 127.0, torch.where(largest < SMALLEST, 0.0, torch.nan))

    def load(self, index: Any, dtype: torch.dtype) -> torch.Tensor:
        """Rows at an index, in `dtype`: a view where they are kept in it."""
        numbers = self.numbers[index].to(dtype)
        return numbers if self.scales is None else numbers * self.scales[index].unsqueeze(-1).to(dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` rows of each head, from slot to slot."""
        for held in (self.numbers, self.scales):
            if held is not None:
                held[target, :, :length] = held[source, :, :length]
