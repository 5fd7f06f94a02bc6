"""A server that only answers `GET /state`, with whatever a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Json = dict[str, Any]
MIB = 1 << 20


class Reply(NamedTuple):
    """What a path answers."""

    body: str | bytes
    kind: str = "application/json"
    status: int = 200


class StateServer(ThreadingHTTPServer):
    """`answer` maps a path and the given key (None: no key) to a reply; `paths` is what was asked for."""

    daemon_threads = True

    def __init__(self, answer: Callable[[str, str | None], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.paths = answer, set[str]()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: StateServer

    def do_GET(self) -> None:
        self.server.paths.add(self.path)
        given = self.headers.get("Authorization")
        body, kind, status = self.server.answer(self.path, given.removeprefix("Bearer ") if given else None)
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serve_states(answer: Callable[[str, str | None], Reply]) -> Iterator[StateServer]:
    """A server in a thread."""
    with StateServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(30)


def reply_state(state: Json) -> Reply:
    """A state as an answer."""
    return Reply(json.dumps(state))


def make_state(layers: int = 6, experts: int = 32, polls: int = 0, **changes: Any) -> Json:
    """A server in `dynaexq` mode, `polls` seconds and 7 promotions a second later.

    An expert is at the high tier where (layer + expert) % 3 is 1; layer 3, expert 17 moves and has hotness 1.8.
    """
    rows = ["".join("0" if (layer + expert) % 3 == 1 else "1" for expert in range(experts)) for layer in range(layers)]
    high = sum(row.count("0") for row in rows)
    hotness = [[(expert * 7 + layer) % 11 / 5 for expert in range(experts)] for layer in range(layers)]
    hotness[3][17] = 1.8
    return {
        "model": "demo",
        "version": "0.1.0",
        "uptime_seconds": 4000.0 + polls,
        "status": "ready",
        "problems": [],
        "mode": "dynaexq",
        "paused": False,
        "tiers": [
            {"name": "int8", "bits": 8.25, "experts": high, "bytes": 5 * MIB},
            {"name": "int4", "bits": 4.5, "experts": layers * experts - high, "bytes": 4 * MIB},
        ],
        "map": rows,
        "moving": [[3, 17], [1, 2]],
        "pinned": [[2, 4, "high"], [4, 9, "low"]],
        "hotness": hotness,
        "memory": {
            "limit": 700 * MIB,
            "used": 612 * MIB,
            "parts": {"process": 400 * MIB, "dense weights": 200 * MIB, "experts": 12 * MIB},
        },
        "expert_memory": {"bytes": 9 * MIB, "least": 7 * MIB, "most": 12 * MIB},
        "slots": [14 * layers],
        "transitions": {
            "promotions": 1000 + 7 * polls,
            "demotions": 900 + 7 * polls,
            "evictions": 1900,
            "deferred": 12,
            "failed": 0,
            "bytes_moved": 3 * MIB * polls,
            "waits": 0,
            "wait_seconds": 0.0,
            "in_flight": 2,
            "reclaiming": 1,
            "link_limit": 64.0 * MIB,
        },
        "hot_share_high": 0.83,
        "hot_share_high_by_layer": [0.5 + 0.4 * (layer % 2) for layer in range(layers)],
        "requests": {
            "waiting": 3,
            "running": 2,
            "slots": 4,
            "room": 4096,
            "finished": {"stop": 120, "length": 14, "cancelled": 2, "failed": 0},
        },
        "sequences": [
            {"number": 12, "state": "prefill", "prompt": 100, "done": 64, "generated": 0, "most": 128, "seconds": 1.2},
            {"number": 11, "state": "decode", "prompt": 80, "done": 80, "generated": 32, "most": 64, "seconds": 2.5},
        ],
        "speed": {
            "seconds": 60.0,
            "tokens_per_second": 74.25,
            "prompt_tokens_per_second": 812.0,
            "ttft": {"p50": 0.132, "p99": 0.84},
            "tpot": {"p50": 0.0131, "p99": 0.021},
            "step": None,
        },
        **changes,
    }
