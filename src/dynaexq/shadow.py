"""The shadow signal: sampled tokens also run on another version of an expert, and the difference says what it loses.

A probe is a version of one expert, next to the one in force on the ladder, read into a scratch block. While it is
shown, windows that the expert's tokens pass through layer by layer (prompts, mostly) compute a few of them on both, and
the mean gate-weighted energy of the difference, times the layer's sensitivity, is what one selection loses by the lower
of the two. It corrects what calibration on other texts said, and the next update of levels undoes an exchange that it
speaks against. The result of the pass itself never depends on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dynaexq.core import ExpertKey, StoreError, encode_handle
from dynaexq.kernels import ExpertsCall, ExpertsKernel
from dynaexq.policy.hotness import Scores
from dynaexq.residency.arena import VersionSource
from dynaexq.residency.versions import VersionedExperts

TOKENS_PER_SAMPLE = 32
"""A window computes one token in so many of a probe's layer once more, at most: less than 1 % of its work."""

ENOUGH = 64
"""Selections that settle a probe."""

PRIOR = 64.0
"""Selections that what calibration said counts for."""

PATIENCE = 64
"""Updates after which a probe that no token comes to is given up."""


class Probe(NamedTuple):
    """Another version of an expert: its handle word, that of the version in force, and the border of the ladder that
    they are compared across."""

    key: ExpertKey
    border: int
    word: int
    beside: int


@dataclass
class ShadowCounts:
    """What the shadow did: probes that told something, selections computed twice, experts that went to the other side
    of a border after they were measured across it, and measured differences over expected ones (smoothed)."""

    probes: int = 0
    selections: int = 0
    turned: int = 0
    ratio: float = 1.0


class Shadow:
    """One probe at a time. `look` is called on the token path, all else by the control thread."""

    def __init__(
        self, experts: VersionedExperts, source: VersionSource, drops: Scores, sensitivity: np.ndarray[Any, Any]
    ) -> None:
        """`drops`: see Ladder, corrected in place; `sensitivity`: nats per energy by layer, float64 [layers]."""
        self.counts = ShadowCounts()
        self.shown: Probe | None = None
        self._experts, self._source, self._drops, self._sensitivity = experts, source, drops, sensitivity
        self._told = drops.copy()
        self._probed: Scores = np.zeros(drops.shape)
        self._found: deque[tuple[Probe, int, float]] = deque()
        self._samples, self._energy, self._age, self._began = 0, 0.0, 0, 0
        self._leaving: int | None = None
        self._since: dict[ExpertKey, tuple[int, int]] = {}  # measured experts: border, and their level then

    def look(self, probe: Probe, call: ExpertsCall, kernel: ExpertsKernel) -> None:
        """Compute some of a pass's tokens on the version in force and on the probe's; note how far they are apart."""
        rows, places = torch.where(call.ids == probe.key.expert)
        count = min(len(rows), -(-len(call.hidden) // TOKENS_PER_SAMPLE))
        if count == 0 or int(call.words[probe.key.expert]) != probe.beside:
            return
        rows, places = rows[:count], places[:count]
        others = call.words.copy()
        others[probe.key.expert] = probe.word
        ids, gates = call.ids[rows, places].unsqueeze(1), call.weights[rows, places].unsqueeze(1)
        hidden = call.hidden[rows]
        here, there = (
            kernel.forward(ExpertsCall(hidden, ids, gates, words, call.functions)) for words in (call.words, others)
        )
        self._found.append((probe, count, float((here - there).to(torch.float32).square().sum())))

    def step(self, hotness: Scores) -> None:
        """Take in what was found, end a probe that is settled, and begin the next by `hotness` [layers, experts]."""
        self._collect()
        if self.shown is not None:
            self._age += 1
            moved = self._experts.entries[self.shown.key].epoch != self._began
            if self._samples < ENOUGH and self._age < PATIENCE and not moved:
                return
            if not moved:
                self._settle(self.shown)
            self._withdraw()
        if self._leaving is None or self._experts.handles.drained(self._leaving):
            self._leaving = None
            self._begin(hotness)

    def _begin(self, hotness: Scores) -> None:
        """Show a version next to that in force of the expert that most depends on, and was probed least."""
        experts, levels = self._experts, self._experts.levels()
        borders = np.arange(len(self._drops))[:, None, None]
        beside = borders == levels  # the border below, and above where another version has to be read anyway
        if not experts.keep_low:
            beside |= borders == levels - 1
        worth = np.where(beside, hotness * self._told / (1.0 + self._probed) ** 2, 0.0)
        border, layer, expert = (int(place) for place in np.unravel_index(worth.argmax(), worth.shape))
        if worth[border, layer, expert] <= 0:
            return
        key = ExpertKey(layer, expert)
        level = border if levels[key] > border else border + 1
        self._probed[border, layer, expert] += 1
        offset = experts.scratch_offset
        if experts.keep_low:
            offset = experts.entries[key].blocks[level] or 0
        else:
            try:
                nbytes = experts.layouts[level].extent_bytes
                self._source.read_into(key, experts.tiers[level], experts.arena.host_view(offset, nbytes))
            except StoreError:
                return  # transitions report a store that fails
        self._samples, self._energy, self._age = 0, 0.0, 0
        self._began = experts.entries[key].epoch
        self.shown = Probe(key, border, encode_handle(level, offset), self._word_of(key))

    def _withdraw(self) -> None:
        """Show it no more. Who opens a window from here on does not see it; who saw it drains with this epoch."""
        self.shown = None
        self._leaving = self._experts.handles.publish(0, self._word_of(ExpertKey(0, 0)))

    def _word_of(self, key: ExpertKey) -> int:
        """The word in force, which only the control thread changes."""
        window, words = self._experts.handles.pin()
        word = int(words[self._experts.shape.index(key)])
        self._experts.handles.release(window)
        return word

    def _collect(self) -> None:
        while self._found:
            probe, count, energy = self._found.popleft()
            if probe == self.shown:
                self._samples += count
                self._energy += energy
                self.counts.selections += count

    def _settle(self, probe: Probe) -> None:
        if self._samples == 0 or not np.isfinite(self._energy):
            return
        place = (probe.border, *probe.key)
        told = self._told[place]
        measured = self._sensitivity[probe.key.layer] * self._energy
        self._drops[place] = (PRIOR * told + measured) / (PRIOR + self._samples)
        self.counts.probes += 1
        if told > 0 and measured > 0:
            change = np.log(measured / self._samples / told) - np.log(self.counts.ratio)
            self.counts.ratio *= float(np.exp(0.1 * change))
        self._since[probe.key] = probe.border, self._experts.entries[probe.key].level

    def note_wanted(self, wanted: np.ndarray[Any, np.dtype[np.int8]]) -> None:
        """The levels wanted next [layers, experts]: counts experts that a measurement sends across its border."""
        for key, (border, level) in self._since.items():
            self.counts.turned += bool((wanted[key] <= border) != (level <= border))
        self._since = {}
