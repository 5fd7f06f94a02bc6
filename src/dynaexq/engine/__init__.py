"""Continuous batching: requests, slots, scheduling, sampling."""

from dynaexq.engine.base import SlotModel
from dynaexq.engine.engine import Engine
from dynaexq.engine.reports import EngineCounts, EngineOptions, Observer, StepReport
from dynaexq.engine.requests import (
    Alternative,
    Constraint,
    EngineClosedError,
    Event,
    Finish,
    FinishEvent,
    QueueFullError,
    RefusedError,
    Request,
    Sampling,
    ScoredEvent,
    Scores,
    TokenEvent,
    TooLongError,
)

__all__ = [
    "Alternative",
    "Constraint",
    "Engine",
    "EngineClosedError",
    "EngineCounts",
    "EngineOptions",
    "Event",
    "Finish",
    "FinishEvent",
    "Observer",
    "QueueFullError",
    "RefusedError",
    "Request",
    "Sampling",
    "ScoredEvent",
    "Scores",
    "SlotModel",
    "StepReport",
    "TokenEvent",
    "TooLongError",
]
