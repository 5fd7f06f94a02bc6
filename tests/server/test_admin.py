"""What an operator sees and changes while requests run: nothing waits, nothing mixes, memory really goes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynaexq.cli.app import app
from dynaexq.core import SideFileError
from dynaexq.llm import LLM
from dynaexq.residency.versions import VersionedExperts
from dynaexq.server.limits import Limits
from dynaexq.server.metrics import Metrics
from dynaexq.traffic import TrafficProfile
from dynaexq.traffic.trace import TraceReader
from dynaexq.traffic.version_map import MapRecorder
from support.serving import Reply, request, serve_app, wait_for

API_KEY, ADMIN_KEY = "everybody", "operator"


class Running:
    """A server with an admin key."""

    def __init__(self, llm: LLM, port: int, state: Path) -> None:
        self.llm, self.port, self.state_file = llm, port, state

    @property
    def experts(self) -> VersionedExperts:
        experts = self.llm.launch.runtime.experts
        assert isinstance(experts, VersionedExperts)
        return experts

    def state(self) -> Any:
        reply = request(self.port, "GET", "/state", Authorization=f"Bearer {API_KEY}")
        assert reply.status == 200
        return reply.json

    def order(self, path: str, body: Any = b"") -> Reply:
        return request(self.port, "POST", f"/admin/{path}", body, Authorization=f"Bearer {ADMIN_KEY}")

    def tell(self, path: str, body: Any = b"") -> Any:
        reply = self.order(path, body)
        assert reply.status == 200, reply.body
        return reply.json

    def refuse(self, path: str, body: Any = b"") -> str:
        reply = self.order(path, body)
        assert reply.status == 400
        return str(reply.error["message"])

    def settle(self) -> None:
        """Wait until nothing moves and the pools are what they should be."""
        control = self.llm.launch.runtime.control
        assert control is not None
        border = control.pipeline.border
        wait_for(lambda: control.pipeline.idle and self.experts.pools[0].capacity == border.wanted[0])


@pytest.fixture(scope="module")
def running(embedded_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    metrics, state = Metrics(), tmp_path_factory.mktemp("admin") / "state.json"
    options: dict[str, Any] = {"mode": "dynaexq", "high": "int8", "low": "int2", "expert_memory": "12M", "state": state}
    with LLM(str(embedded_store), slots=2, context=256, observer=metrics, **options) as llm:
        metrics.watch(llm.engine, llm.launch.runtime)
        with serve_app(llm, metrics, Limits(API_KEY, admin_key=ADMIN_KEY)) as port:
            llm.generate("There are 7 boxes", max_tokens=8)
            yield Running(llm, port, state)
        llm.engine.close()
        llm.launch.runtime.close()
        llm.launch.runtime.experts.check_integrity()
        assert llm.launch.runtime.counters.waits == 0


def test_who_may(running: Running) -> None:
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {API_KEY}"}, 401), ({"Authorization": "x"}, 401)):
        assert request(running.port, "POST", "/admin/pause", b"", **headers).status == status
    assert request(running.port, "GET", "/state").status == 401
    assert request(running.port, "GET", "/").status == 200
    with serve_app(running.llm, Metrics()) as port:
        reply = request(port, "POST", "/admin/pause", b"")
        assert reply.status == 403 and reply.error["code"] == "no_admin_key"


def test_the_state_agrees_with_the_engine(running: Running) -> None:
    running.settle()
    state, shape = running.state(), running.experts.shape
    assert state["model"] == "demo" and state["mode"] == "dynaexq" and state["status"] == "ready"
    assert [tier["name"] for tier in state["tiers"]] == ["int8", "int2"]
    assert [len(state["map"]), len(state["map"][0])] == [shape.layers, shape.experts]
    high = running.experts.levels() == 0
    assert [[digit == "0" for digit in row] for row in state["map"]] == high.tolist()
    assert state["tiers"][0]["experts"] == high.sum() and 8.2 < state["tiers"][0]["bits"] < 8.3
    assert len(state["hotness"]) == shape.layers and sum(state["slots"]) == high.sum()
    assert 0 < state["hot_share_high"] < 1 and len(state["hot_share_high_by_layer"]) == shape.layers
    assert state["memory"]["used"] == running.llm.launch.runtime.budget.used <= state["memory"]["limit"]
    assert state["transitions"]["promotions"] == running.llm.launch.runtime.counters.promotions > 0
    assert state["requests"]["running"] == 0 and state["sequences"] == []
    assert state["speed"]["ttft"]["p50"] > 0 and state["speed"]["tokens_per_second"] > 0


def test_what_routers_choose_is_recorded_for_a_while(running: Running, tmp_path: Path) -> None:
    url, target = f"http://127.0.0.1:{running.port}", tmp_path / "now.parquet"
    assert "no request ran" in running.refuse("trace", {"seconds": 0.2})
    for body in ({"seconds": 0}, {"seconds": 601}, {"seconds": "x"}, {}):
        assert running.order("trace", body).status == 400
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            running.llm.generate("copy: a b c", max_tokens=8)

    talker = threading.Thread(target=talk)
    talker.start()
    arguments = ["trace", "fetch", url, "-o", str(target), "--seconds", "1"]
    try:
        result = CliRunner().invoke(app, [*arguments, "--admin-key", ADMIN_KEY])
    finally:
        stop.set()
        talker.join()
    assert result.exit_code == 0, result.output
    rows = next(TraceReader.open(target).batches())
    assert rows.prefill.any() and (~rows.prefill).any() and running.llm.launch.runtime.trace is None
    wrong = CliRunner().invoke(app, [*arguments, "--admin-key", API_KEY])
    assert wrong.exit_code == 2 and "does not take this admin key" in " ".join(wrong.output.split())


def test_running_requests_show(running: Running) -> None:
    stream = running.llm.submit(running.llm.encoder.encode("The "), 200)
    pieces = iter(stream)
    next(pieces)
    (sequence,) = running.state()["sequences"]
    assert sequence["state"] == "decode" and sequence["most"] == 200 and sequence["prompt"] == sequence["done"]
    pieces.close()  # type: ignore[attr-defined]


def test_pins(running: Running) -> None:
    control = running.llm.launch.runtime.control
    assert control is not None
    running.settle()
    high = (running.experts.levels() == 0)[2]
    cold, hot = int((~high).argmax()), int(high.argmax())
    assert running.tell("pin", {"experts": [[2, cold]], "tier": "high"})["pinned"] == [[2, cold, "high"]]
    running.tell("pin", {"experts": [[2, hot]], "tier": "low"})
    running.settle()
    assert (running.experts.levels() == 0)[2, [cold, hot]].tolist() == [True, False]
    running.llm.generate("copy: a b c", max_tokens=8)
    running.settle()
    assert (running.experts.levels() == 0)[2, [cold, hot]].tolist() == [True, False]
    everybody = [[2, expert] for expert in range(running.experts.shape.experts)]
    assert "experts of MoE layer 2 would be pinned high" in running.refuse(
        "pin", {"experts": everybody, "tier": "high"}
    )
    assert "no expert 99 of MoE layer 2" in running.refuse("pin", {"experts": [[2, 99]], "tier": "low"})
    assert "unpin them" in running.refuse("mode", {"mode": "static"})
    assert "is not pinned" in running.refuse("unpin", {"experts": [[2, cold], [3, 3]]})
    assert running.tell("unpin", {"experts": [[2, cold], [2, hot]]})["pinned"] == []


def test_memory_goes_and_comes_back_while_an_answer_runs(running: Running) -> None:
    memory = running.state()["expert_memory"]
    assert memory["least"] < memory["bytes"] == memory["most"]
    stream = iter(running.llm.submit(running.llm.encoder.encode("The "), 200))
    next(stream)
    for nbytes in (memory["least"], memory["most"], (memory["least"] + memory["most"]) // 2, memory["most"]):
        running.tell("expert-memory", {"bytes": nbytes})
        running.settle()
        running.experts.check_integrity()
        now = running.state()
        assert nbytes - 100_000 < now["expert_memory"]["bytes"] == now["expert_memory"]["wanted"] <= nbytes
        assert now["memory"]["parts"]["experts"] == now["expert_memory"]["bytes"]
        assert now["tiers"][0]["experts"] <= sum(now["slots"])
    stream.close()  # type: ignore[attr-defined]
    assert "this run can have" in running.refuse("expert-memory", {"bytes": "1G"})
    assert "this run can have" in running.refuse("expert-memory", {"bytes": 5})
    assert "is no size" in running.refuse("expert-memory", {"bytes": "much"})


def test_modes(running: Running, embedded_store: Path) -> None:
    assert running.tell("mode", {"mode": "static"})["mode"] == "static"
    running.settle()
    assert not (running.experts.levels() == 0).any()
    assert running.state()["expert_memory"]["bytes"] == running.state()["expert_memory"]["least"]
    low = running.llm.generate("reverse: a b c", max_tokens=16).tokens
    with LLM(str(embedded_store), slots=2, context=256, mode="static", tier="int2") as fixed:
        assert fixed.generate("reverse: a b c", max_tokens=16).tokens == low
    assert "switch it" in running.refuse("expert-memory", {"bytes": "12M"})
    assert "switch it" in running.refuse("pin", {"experts": [[0, 0]], "tier": "high"})
    running.tell("mode", {"mode": "static-map"})
    running.settle()
    fixed_map = running.state()["map"]
    assert any("0" in row for row in fixed_map)
    running.llm.generate("def f(x):", max_tokens=32)
    running.settle()
    assert running.state()["map"] == fixed_map
    assert "no mode 'full'" in running.refuse("mode", {"mode": "full"})
    assert running.tell("mode", {"mode": "dynaexq"})["mode"] == "dynaexq"
    running.settle()


def test_a_pause(running: Running) -> None:
    running.settle()
    assert running.tell("pause")["paused"] is True
    before = running.llm.launch.runtime.counters.promotions
    running.llm.generate("x = [i for i in range(10)]", max_tokens=32)
    assert "paused" in running.refuse("mode", {"mode": "static"})
    assert running.llm.launch.runtime.counters.promotions == before
    assert running.tell("resume")["paused"] is False


def test_hotness_is_saved_now(running: Running) -> None:
    running.llm.generate("copy: x", max_tokens=2)
    running.tell("save")
    assert TrafficProfile.read(running.state_file).routed > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("mode", {}),
        ("mode", {"mode": "static", "force": True}),
        ("pin", {"experts": [], "tier": "high"}),
        ("pin", {"experts": [[0]], "tier": "high"}),
        ("pin", {"experts": [[0, 0]], "tier": "int8"}),
        ("expert-memory", {"bytes": -1}),
        ("unpin", b"[1"),
        ("pin", {"experts": [[True, 1]], "tier": "high"}),
        ("pin", {"experts": [["0", 1]], "tier": "high"}),
        ("expert-memory", {"bytes": True}),
        ("expert-memory", {"bytes": "9" * 31}),
        ("expert-memory", {"bytes": "9" * 5000}),
        ("mode", b'{"mode": "\\ud800"}'),
        ("pause", {"please": True}),
        ("resume", b"x"),
    ],
)
def test_bad_orders(running: Running, path: str, body: Any) -> None:
    assert running.refuse(path, body)


def test_what_is_not_saved_or_recorded_is_said(
    embedded_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk answers go on; a recording with a hole would be none, so it ends."""
    options: dict[str, Any] = {"mode": "dynaexq", "high": "int8", "low": "int2", "expert_memory": "12M"}
    record = tmp_path / "map.jsonl"
    with (
        LLM(str(embedded_store), slots=1, context=128, record=record, **options) as llm,
        serve_app(llm, Metrics()) as port,
    ):
        llm.generate("copy: a", max_tokens=4)
        written = record.read_text()
        assert written.count("\n") >= 2  # line by line: a killed run has lost nothing

        def full(*_: Any) -> None:
            raise SideFileError("the disk is full")

        monkeypatch.setattr(MapRecorder, "note", full)
        with pytest.warns(UserWarning, match="not recorded any more"):
            assert len(llm.generate("copy: a b", max_tokens=8).tokens) > 0
        monkeypatch.undo()
        llm.generate("copy: a b c", max_tokens=8)
        assert record.read_text() == written
        (problem,) = request(port, "GET", "/ready").json["problems"]
        assert "not recorded" in problem


def test_nothing_to_change_where_nothing_moves(embedded_store: Path) -> None:
    with (
        LLM(str(embedded_store), slots=1, context=64, mode="static", tier="int2") as llm,
        serve_app(llm, Metrics(), Limits(admin_key=ADMIN_KEY)) as port,
    ):
        reply = request(port, "POST", "/admin/pause", b"", Authorization=f"Bearer {ADMIN_KEY}")
        assert reply.status == 400 and "no version moves" in reply.error["message"]
        state = request(port, "GET", "/state").json
    assert state["hotness"] is None and state["slots"] == [] and len(state["tiers"]) == 1


@pytest.mark.filterwarnings("ignore:expert")
@pytest.mark.parametrize("fault", ["unlinked", "cut short"])
def test_a_store_that_goes_away_degrades(fault: str, embedded_store: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(embedded_store, tmp_path / "store"))
    options: dict[str, Any] = {"mode": "dynaexq", "high": "int8", "low": "int2", "expert_memory": "12M"}
    with LLM(str(store), slots=1, context=128, **options) as llm, serve_app(llm, Metrics()) as port:
        assert request(port, "GET", "/ready").json == {"status": "ready", "problems": []}
        for file in sorted((store / "experts").glob("*int8*")):
            if fault == "unlinked":
                file.unlink()
            else:
                os.truncate(file, 4096)
        assert len(llm.generate("def f(x):", max_tokens=24).tokens) == 24
        wait_for(lambda: request(port, "GET", "/ready").json["status"] == "degraded")
        ready = request(port, "GET", "/ready")
        assert ready.status == 200 and len(ready.json["problems"]) == 1
        assert ("gone" if fault == "unlinked" else "could not be moved") in ready.json["problems"][0]
        assert len(llm.generate("copy: a b", max_tokens=8).tokens) > 0
