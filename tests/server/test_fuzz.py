"""Bodies made from the OpenAPI document, right and wrong: never a 500, and every error in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from dynaexq.engine import Engine
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.app import create_app
from dynaexq.server.limits import Limits
from dynaexq.server.metrics import Metrics
from dynaexq.server.service import Service
from support.typed_model import ByteTokenizer, TypedModel

METRICS = Metrics()
ENGINE = Engine(TypedModel("x"), lambda _: None, observer=METRICS)
APP = create_app(Service("demo", ENGINE, PromptEncoder(ByteTokenizer("<tool_call>")), 1), METRICS, Limits())
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    ENGINE.start()
    yield
    ENGINE.close()


@SCHEMA.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_body_breaks_the_server(case: Any) -> None:
    if isinstance(case.body, dict) and case.body.get("model"):
        case.body["model"] = "demo"  # or nothing would get past the name
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
