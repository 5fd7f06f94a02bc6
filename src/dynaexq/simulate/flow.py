"""Mode `expertflow` in virtual time: the engine's own decisions (policy/foresight.py), reads over one link.

A pass runs layer by layer. A layer waits until all that it needs is there, and then takes its share of what the pass
takes: unlike the engine's, it computes nothing while it waits. Reads follow each other in the order in which they
begin; what a layer waits for begins before whatever is read ahead, and what has begun is not stopped.
"""

from __future__ import annotations

import numpy as np

from dynaexq.core import ModelShape
from dynaexq.device.virtual import VirtualClock, VirtualLink
from dynaexq.policy.caching import Places
from dynaexq.policy.foresight import CacheMind
from dynaexq.policy.horizon import ReadSums
from dynaexq.residency.loading import LoadCounters
from dynaexq.residency.transitions import Counters
from dynaexq.simulate.feed import Asked


class SimulatedFlow:
    """Experts of `nbytes` each, some of them resident, others read when they are needed or before."""

    def __init__(
        self, shape: ModelShape, mind: CacheMind, nbytes: int, clock: VirtualClock, link: VirtualLink, in_flight: int
    ) -> None:
        """Reads go over `link`; of those ahead, `in_flight` at most have begun and not ended."""
        assert mind.foresight is not None
        self.map, self.foresight = mind.map, mind.foresight
        self.counters, self.loads = Counters(), LoadCounters()
        self._shape, self._nbytes, self._clock, self._link = shape, nbytes, clock, link
        self._in_flight = in_flight
        self._ahead: set[int] = set()
        self._making_room = False
        self._computed = self._waited = 0.0

    @property
    def expert_bytes(self) -> int:
        """See VirtualCache."""
        return self.map.capacity * self._nbytes

    @property
    def busy_seconds(self) -> float:
        """See VirtualCache."""
        return self.loads.seconds

    def run(self, asked: Asked, start: float, seconds: float) -> float:
        """See VirtualCache."""
        self._pass_until(start)
        self._link.busy_since(start)  # it need not remember what was before
        experts, each = self._shape.experts, seconds / self._shape.layers
        for layer in range(self._shape.layers):
            counts = asked.counts[layer * experts : (layer + 1) * experts]
            hidden = None if asked.hidden is None else asked.hidden[:, layer].astype(np.float32)
            needed = self.foresight.look_at(layer, counts, asked.tokens, hidden)
            for group in self.map.split(layer * experts + needed):
                self._bring(layer, group)
                computed = each * len(group) / len(needed)
                self._pass_until(self._clock.now + computed)
                self._computed += computed
        self.map.unpin()
        return self._clock.now

    def describe(self) -> dict[str, float]:
        """See VirtualCache; by the names of the engine (residency.cache.CachedExperts)."""
        return {
            **self.map.describe(),
            **self.loads.describe(self.counters.wait_seconds),
            **self.foresight.describe(),
        }

    def _bring(self, layer: int, places: Places) -> None:
        """Wait until experts of a layer are resident."""
        start, loads = self._clock.now, self.loads
        sums = ReadSums(loads.loads, loads.seconds, self.map.wasted)
        self.foresight.horizon.follow(layer, self._computed, self._waited, sums)
        self._making_room = True
        while not self.map.fits(places):
            self._pass_until(self._link.next_end)
        self._making_room = False
        missing, victims = self.map.need(places)
        self.counters.evictions += len(victims)
        for place in missing.tolist():
            self._begin(place)
        self.foresight.wish(layer, self.map)
        self._read_ahead()
        while self.map.loading[places].any():
            self._pass_until(self._link.next_end)
        self._computed, self._waited = 0.0, self._clock.now - start
        self.counters.waits += self._waited > 0
        self.counters.wait_seconds += self._waited

    def _pass_until(self, until: float) -> None:
        """Let time pass, in which reads end and others begin."""
        while self._link.next_end <= until:
            self._clock.reach(self._link.next_end)
            for each in self._link.completed():
                self._end(each.ticket)
            self._read_ahead()
        self._clock.reach(until)

    def _read_ahead(self) -> None:
        while not self._making_room and len(self._ahead) < self._in_flight:
            if (found := self.foresight.take(self.map)) is None:
                return
            place, victims = found
            self.counters.evictions += len(victims)
            self._ahead.add(place)
            self._begin(place)

    def _begin(self, place: int) -> None:
        self._link.submit(place, self._nbytes, _copy_nothing)

    def _end(self, place: int) -> None:
        self.map.admit(np.array([place]))
        self.counters.bytes_moved += self._nbytes
        self.loads.loads += 1
        self.loads.ahead += place in self._ahead
        self.loads.seconds = self._link.busy_seconds
        self._ahead.discard(place)


def _copy_nothing() -> None:
    """There are no bytes."""
