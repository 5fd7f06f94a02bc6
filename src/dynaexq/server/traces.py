"""POST /admin/trace: what routers choose from now on, for a while, as a file."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.background import BackgroundTask

from dynaexq.core import OptionError
from dynaexq.server.schemas import WholeBody
from dynaexq.server.state import StateView

MAX_SECONDS = 600.0


class TraceBody(WholeBody):
    """How long to record."""

    seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]


def make_router(view: StateView) -> APIRouter:
    """The endpoint; one recording at a time. The gate lets nobody in without the admin key."""
    router, runtime = APIRouter(prefix="/admin"), view.runtime

    @router.post("/trace", response_class=FileResponse)
    async def trace(body: TraceBody) -> FileResponse:
        """Record for so many seconds; the answer is a trace (docs/traces.md)."""
        if view.record is None:
            raise OptionError("the server runs under --memory, where no trace was planned for: start it with --record")
        if runtime.trace is not None:
            raise OptionError("this run is being recorded already; wait, or read the file of --record when it ends")
        directory = Path(tempfile.mkdtemp(prefix="dynaexq-trace-"))
        try:
            recorder = runtime.trace = view.record(directory / "trace.parquet")
            try:
                await asyncio.sleep(body.seconds)
            finally:
                runtime.trace = None
                await asyncio.to_thread(recorder.close)
            if recorder.problem is not None:
                raise OptionError(recorder.problem)
            if not (directory / "trace.parquet").exists():
                raise OptionError(f"no request ran in {body.seconds:g} seconds, so there is nothing to record")
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        remove = BackgroundTask(shutil.rmtree, directory, ignore_errors=True)
        return FileResponse(directory / "trace.parquet", filename="trace.parquet", background=remove)

    return router
