"""A running server at a glance, as JSON: what the dashboard and `dynaexq top` show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dynaexq import __version__
from dynaexq.runtime import ExpertRuntime, Trace
from dynaexq.server.pace import Pace
from dynaexq.server.service import Service

Json = dict[str, Any]
TIER_DIGITS = "0123456789"


Record = Callable[[Path], Trace]
"""Begins to write what routers choose into a file."""


class StateView:
    """Looks at a server from any thread; what it says of one moment may differ by what happened in between."""

    def __init__(self, service: Service, runtime: ExpertRuntime, pace: Pace, record: Record | None = None) -> None:
        """`record` begins a trace; None: there is no memory for one."""
        self.runtime, self.record = runtime, record
        self._service, self._pace = service, pace
        self._start = time.monotonic()

    def describe_status(self) -> Json:
        """`ready`, `degraded` (serving, but there are problems), or `shutting down`."""
        problems = self.runtime.problems()
        working = "degraded" if problems else "ready"
        return {"status": working if self._service.engine.taking else "shutting down", "problems": problems}

    def describe(self) -> Json:
        """Everything."""
        engine, counts = self._service.engine, self._service.engine.counts()
        return {
            "model": self._service.name,
            "version": __version__,
            "uptime_seconds": time.monotonic() - self._start,
            **self.describe_status(),
            **self._describe_experts(),
            **describe_steering(self.runtime),
            **self._describe_moves(),
            "memory": {
                "limit": self.runtime.budget.limit,
                "used": self.runtime.budget.used,
                "parts": self.runtime.budget.parts,
            },
            "requests": {
                "waiting": counts.waiting,
                "running": counts.running,
                "slots": engine.model.slots,
                "room": engine.model.room,
                "finished": counts.finished,
            },
            "sequences": [asdict(view) for view in engine.sequences()],
            "steps": self._pace.describe_steps(),
            "scheduling": engine.scheduler.describe() if engine.scheduler else None,
            "speed": self._pace.describe(),
        }

    def _describe_experts(self) -> Json:
        experts, shares = self.runtime.experts, self.runtime.shares
        shape = experts.shape
        in_force = np.minimum(experts.handles.formats(), len(experts.formats)).reshape(shape.layers, shape.experts)
        counts = np.bincount(in_force.ravel().astype(np.int64), minlength=len(experts.formats)).tolist()
        absent = [
            {"name": "not loaded", "bits": 0.0, "experts": each, "bytes": 0, "traffic": None}
            for each in counts[len(experts.formats) :]
        ]
        counts = counts[: len(experts.formats)]
        traffic = [None] * len(counts) if shares is None else [round(share, 4) for share in shares.by_tier]
        tiers = zip(experts.formats, experts.layouts, counts, traffic, strict=True)
        return {
            "tiers": [
                {
                    "name": fmt.name,
                    "bits": 8 * layout.payload_bytes / shape.expert.weights,
                    "experts": count,
                    "bytes": count * layout.extent_bytes,
                    "traffic": share,
                }
                for fmt, layout, count, share in tiers
            ]
            + absent,
            "map": ["".join(TIER_DIGITS[index] for index in row) for row in in_force.tolist()],
            "cache": self.runtime.describe_cache(),
            "hot_share_high": self.runtime.hot_share_high,
            "hot_share_high_by_layer": shares and [round(share, 4) for share in shares.raised_by_layer],
        }

    def _describe_moves(self) -> Json:
        control, counters = self.runtime.control, asdict(self.runtime.counters)
        if control is None:
            still = {"in_flight": 0, "reclaiming": 0, "link_limit": None}
            nothing: Json = {"moving": [], "hotness": None, "slots": [], "signals": None}
            return {**nothing, "transitions": {**counters, **still}}
        pipeline = control.pipeline
        moving = pipeline.moving
        return {
            "moving": [list(key) for key in moving],
            "hotness": np.round(control.hotness.scores, 2).tolist(),
            "slots": list(pipeline.border.wanted),
            "signals": control.signals.describe(),
            "transitions": {
                **counters,
                "in_flight": len(moving),
                "reclaiming": pipeline.waiting_blocks,
                "link_limit": pipeline.link.limit,
            },
        }


def describe_steering(runtime: ExpertRuntime) -> Json:
    """What people have asked of the control loop; the mode as it was started, where there is none."""
    control, nbytes = runtime.control, runtime.experts.expert_bytes
    if control is None:
        return {
            "mode": runtime.mode,
            "paused": False,
            "pinned": [],
            "expert_memory": {"bytes": nbytes, "wanted": nbytes, "least": nbytes, "most": nbytes},
        }
    steering, border = control.steering, control.pipeline.border
    moves = runtime.mode if steering.mode == "dynaexq" else steering.mode  # one of the modes that move versions
    return {
        "mode": moves,
        "paused": steering.paused,
        "pinned": [[*key, "high" if high else "low"] for key, high in steering.pins.items()],
        "expert_memory": {
            "bytes": nbytes,
            "wanted": border.wanted_bytes,
            "least": border.least_bytes,
            "most": border.most_bytes,
        },
    }
