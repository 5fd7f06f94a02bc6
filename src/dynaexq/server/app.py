"""The HTTP application."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from dynaexq import __version__
from dynaexq.server import admin, errors, responses, traces
from dynaexq.server.completions import make_router
from dynaexq.server.limits import Gate, Limits
from dynaexq.server.metrics import Metrics
from dynaexq.server.service import Service
from dynaexq.server.state import StateView

DASHBOARD = Path(__file__).parent / "dashboard" / "index.html"


def create_app(
    service: Service, metrics: Metrics, limits: Limits, view: StateView, origins: Sequence[str] = ()
) -> FastAPI:
    """All endpoints over one running model. `origins`: web pages that may ask (CORS); none by default."""
    app = FastAPI(title="DynaExq", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(make_router(service))
    app.include_router(responses.make_router(service))
    app.include_router(admin.make_router(view.runtime))
    app.include_router(traces.make_router(view))
    errors.install(app)
    app.add_middleware(Gate, limits=limits)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    def ready() -> Response:
        """Whether requests are taken; `degraded` where they are, but something is wrong."""
        return JSONResponse(view.describe_status(), 200 if service.engine.taking else 503)

    @app.get("/state")
    def state() -> dict[str, Any]:
        """What the dashboard shows."""
        return view.describe()

    @app.get("/", response_class=FileResponse)
    async def dashboard() -> Path:
        """The page; what it shows, it asks for like everybody."""
        return DASHBOARD

    @app.get("/metrics")
    def prometheus() -> Response:
        """Counters and gauges."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app
