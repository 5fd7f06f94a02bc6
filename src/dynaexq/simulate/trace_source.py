"""The model that a trace is of, as far as a simulation needs it: shapes, sizes of versions, what they lose."""

from __future__ import annotations

import re
from pathlib import Path

from dynaexq.core import ExpertShape, ModelShape, OptionError, SideFileError
from dynaexq.formats import ExpertFormat, VersionLayout, tier_format
from dynaexq.formats.base import DEFAULT_GROUP_SIZE
from dynaexq.residency import VersionSource
from dynaexq.store import ExpertStore
from dynaexq.store.sensitivity import Sensitivity
from dynaexq.traffic.trace import TraceHead


class TracedModel:
    """Versions of the model that a trace is of, without bytes; what they lose is not known."""

    sensitivity: Sensitivity | None = None

    def __init__(self, head: TraceHead, expert: ExpertShape, group_size: int = DEFAULT_GROUP_SIZE) -> None:
        self.shape = ModelShape(head.layers, head.experts, expert)
        self.fingerprint, self._group_size = head.fingerprint, group_size

    def format(self, tier: str) -> ExpertFormat:
        """Format of a tier. Raises OptionError for an unknown one."""
        return tier_format(tier, self._group_size)

    def require_tier(self, tier: str) -> None:
        """All are there."""

    def read_into(self, key: object, tier: str, destination: object) -> None:
        """Nothing is read."""

    def missing_files(self) -> list[str]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing is open."""


def open_source(head: TraceHead, store: Path | None, expert: str | None) -> VersionSource:
    """The store a trace is of, or as much as the trace says itself.

    Args:
        expert: HIDDENxINTERMEDIATE, where neither says how large an expert is.

    Raises:
        StoreError, SideFileError: the store is missing, damaged, or of another model.
        OptionError: nobody says how large experts are, or two do.
    """
    if store is not None:
        if expert is not None:
            raise OptionError("--expert does nothing beside --store, which says how large experts are; leave it out")
        opened = ExpertStore.open(store)
        shape = opened.shape
        same = (shape.layers, shape.experts) == (head.layers, head.experts)
        if not same or head.fingerprint not in ("", opened.fingerprint):
            raise SideFileError(f"the trace is of another model than the store {store}")
        return opened
    if expert is not None:
        if head.hidden and head.intermediate:
            known = f"{head.hidden}x{head.intermediate}"
            raise OptionError(f"--expert {expert}: the trace says how large experts are, {known}; leave it out")
        return TracedModel(head, parse_expert(expert))
    if not (head.hidden and head.intermediate):
        raise OptionError("the trace does not say how large experts are; add --store DIR or --expert 2048x768")
    return TracedModel(head, ExpertShape(head.hidden, head.intermediate))


def version_bytes(source: VersionSource, tier: str) -> int:
    """Of an expert at a tier, padding included."""
    return VersionLayout.of(source.format(tier), source.shape.expert).extent_bytes


def parse_expert(text: str) -> ExpertShape:
    """The size of an expert, HIDDENxINTERMEDIATE. Raises OptionError."""
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None or not all(int(size) % 32 == 0 for size in match.groups()):
        raise OptionError(f"--expert {text}: write HIDDENxINTERMEDIATE, both multiples of 32, such as 2048x768")
    return ExpertShape(int(match[1]), int(match[2]))
