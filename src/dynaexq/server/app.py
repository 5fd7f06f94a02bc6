"""The HTTP application."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from dynaexq import __version__
from dynaexq.server import errors
from dynaexq.server.completions import make_router
from dynaexq.server.limits import Gate, Limits
from dynaexq.server.metrics import Metrics
from dynaexq.server.service import Service


def create_app(service: Service, metrics: Metrics, limits: Limits, origins: Sequence[str] = ()) -> FastAPI:
    """All endpoints over one running model. `origins`: web pages that may ask (CORS); none by default."""
    app = FastAPI(title="DynaExq", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(make_router(service))
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
    async def ready() -> Response:
        """Whether requests are taken."""
        taking = service.engine.taking
        return JSONResponse({"status": "ready" if taking else "shutting down"}, 200 if taking else 503)

    @app.get("/metrics")
    def prometheus() -> Response:
        """Counters and gauges."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app
