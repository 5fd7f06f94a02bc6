"""POST /admin/...: what an operator may change while the server runs. The gate lets nobody in without the admin key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field

from dynaexq.control import ControlLoop
from dynaexq.core import ExpertKey, OptionError
from dynaexq.plan.sizes import parse_size
from dynaexq.runtime import ExpertRuntime
from dynaexq.server.schemas import WholeBody
from dynaexq.server.state import Json, describe_steering
from dynaexq.steering import Steering

MAX_PINS = 65536

Number = Annotated[int, Field(strict=True, ge=0)]
Place = tuple[Number, Number]
"""MoE layer and expert."""

Places = Annotated[list[Place], Field(min_length=1, max_length=MAX_PINS)]


class EmptyBody(WholeBody):
    """POST /admin/pause, resume and save: nothing, or an empty object."""


class ModeBody(WholeBody):
    """POST /admin/mode."""

    mode: str


class PinBody(WholeBody):
    """POST /admin/pin."""

    experts: Places
    tier: Literal["high", "low"]


class UnpinBody(WholeBody):
    """POST /admin/unpin."""

    experts: Places


class MemoryBody(WholeBody):
    """POST /admin/expert-memory: bytes, or a size such as "10G"."""

    bytes: Number | Annotated[str, Field(strict=True, max_length=32)]


def make_router(runtime: ExpertRuntime) -> APIRouter:
    """Orders to the control loop of `runtime`. Each answers with what is in force, or with a 400 that says why not."""
    router = APIRouter(prefix="/admin")

    def control() -> ControlLoop:
        if runtime.control is None:
            raise OptionError(f"the mode is '{runtime.mode}', in which no version moves; there is nothing to change")
        return runtime.control

    def steer(change: Callable[[Steering], None]) -> Json:
        control().steer(change)
        return describe_steering(runtime)

    @router.post("/pause")
    def pause(body: EmptyBody | None = None) -> Json:
        """Start no transition until resumed."""
        return steer(lambda steering: steering.pause(True))

    @router.post("/resume")
    def resume(body: EmptyBody | None = None) -> Json:
        """Move versions again."""
        return steer(lambda steering: steering.pause(False))

    @router.post("/mode")
    def switch(body: ModeBody) -> Json:
        """dynaexq, static-map (the hottest of now, for good) or static (all low)."""
        return steer(lambda steering: steering.switch(body.mode))

    @router.post("/pin")
    def pin(body: PinBody) -> Json:
        """Hold experts at a tier."""
        return steer(lambda steering: steering.pin(_keys(body.experts), body.tier == "high"))

    @router.post("/unpin")
    def unpin(body: UnpinBody) -> Json:
        """Leave experts to traffic again."""
        return steer(lambda steering: steering.unpin(_keys(body.experts)))

    @router.post("/expert-memory")
    def resize(body: MemoryBody) -> Json:
        """Use less expert memory, or up to what the start planned."""
        nbytes = parse_size(body.bytes, "bytes") if isinstance(body.bytes, str) else body.bytes
        return steer(lambda steering: steering.resize(nbytes))

    @router.post("/save")
    def save(body: EmptyBody | None = None) -> Json:
        """Save hotness to the file of --state now."""
        control().save_hotness()
        return describe_steering(runtime)

    return router


def _keys(places: list[Place]) -> list[ExpertKey]:
    return [ExpertKey(*place) for place in places]
