"""Bodies made from the OpenAPI document, right and wrong: never a 500, and every error in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from dynaexq.engine import Engine
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.integrations.transformers.sampling import TransformersWarper
from dynaexq.server.app import create_app
from dynaexq.server.limits import Limits
from dynaexq.server.metrics import Metrics
from dynaexq.server.service import Service
from dynaexq.server.state import StateView
from support.serving import NoExperts
from support.typed_model import TypedModel, make_fast_tokenizer

METRICS = Metrics()
TOKENIZER = make_fast_tokenizer("<tool_call> </think>", ">", ["<tool_call>", "</tool_call>"])
ENGINE = Engine(TypedModel(TOKENIZER.encode("x"), len(TOKENIZER)), TransformersWarper, observer=METRICS)
SERVICE = Service("demo", ENGINE, PromptEncoder(TOKENIZER), 1)
APP = create_app(SERVICE, METRICS, Limits(), StateView(SERVICE, NoExperts(), METRICS.pace))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP).include(path_regex="^/(v1|health|metrics)")


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    ENGINE.start()
    yield
    ENGINE.close()


def reconcile(body: dict[str, Any]) -> None:
    """Mend what the document cannot say, or hardly a body would get past it."""
    body["model"] = "demo"
    for name in ("guided_regex", "stream_options", "top_logprobs", "max_tokens"):
        body.pop(name, None)
    if not body.get("tools"):
        body.pop("tool_choice", None)
        body.pop("parallel_tool_calls", None)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            message["content"] = message.get("content") or "x"
            others = {"assistant": ("tool_call_id",), "tool": ("tool_calls", "reasoning_content")}
            for name in others.get(str(message.get("role")), ("tool_calls", "reasoning_content", "tool_call_id")):
                message.pop(name, None)


@SCHEMA.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_no_body_breaks_the_server(case: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        reconcile(case.body)
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
