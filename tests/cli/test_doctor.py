"""`dynaexq doctor` over a server that reads ahead, servers that are made up, and traces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from dynaexq.cli.app import app
from dynaexq.formats import VersionLayout
from dynaexq.llm import LLM
from dynaexq.server.metrics import Metrics
from dynaexq.store import ExpertStore
from support.serving import request, serve_app
from support.state_server import Reply, make_state, reply_state, serve_states

KEY = "a key"
TEXTS = ("reverse: a b c d e f", "sort: d e f g", "There are many boxes with coins.", "def f(x):")
MADE_UP: dict[str, Any] = {
    "mode": "expertflow",
    "slots": [],
    "hotness": None,
    "moving": [],
    "pinned": [],
    "hot_share_high_by_layer": None,
    "tiers": [
        {"name": "int4", "bits": 4.5, "experts": 64, "bytes": 1 << 20},
        {"name": "not loaded", "bits": 0, "experts": 128, "bytes": 0},
    ],
    "steps": {"count": 1000, "seconds": 10.0},
}
WELL: dict[str, Any] = {
    "capacity": 64, "hits": 9000, "misses": 1000, "hit_rate": 0.9, "late": 100, "useful": 900, "wasted": 50,
    "loads": 1200, "loads_ahead": 1000, "load_seconds": 1.5, "hidden": 0.9, "queued": 1, "reading": 2, "in_flight": 4,
    "recall": 0.9, "precision": 0.8, "predicted": 9000, "horizon": 2, "cancelled": 3, "threshold": 0.5,
    "standing_share": 0.0,
}  # fmt: skip


def run(*arguments: str, code: int = 0, **env: str) -> Any:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "160", "DYNAEXQ_API_KEY": None, **env})
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refuse(*arguments: str, words: str, code: int = 2) -> None:
    result = run(*arguments, code=code)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and words in line, line


def statuses(*arguments: str) -> dict[str, str]:
    return {check["name"]: check["status"] for check in json.loads(run(*arguments, "--json", "-").stdout)["checks"]}


@pytest.fixture(scope="module")
def server(embedded_store: Path) -> Iterator[str]:
    """A server that reads ahead and has answered."""
    opened = ExpertStore.open(embedded_store)
    memory = 60 * VersionLayout.of(opened.format("int4"), opened.shape.expert).extent_bytes
    metrics = Metrics()
    options: dict[str, Any] = {"mode": "expertflow", "tier": "int4", "expert_memory": memory}
    with LLM(str(embedded_store), slots=4, context=256, observer=metrics, **options) as llm:
        metrics.watch(llm.engine, llm.launch.runtime)
        with serve_app(llm, metrics) as port:
            for stream in [llm.submit(llm.encoder.encode(text), 40) for text in TEXTS]:
                stream.wait()
            yield f"http://127.0.0.1:{port}"


def read_metrics(url: str) -> dict[str, Any]:
    """By name: the type, and the values by labels."""
    text = request(int(url.rpartition(":")[2]), "GET", "/metrics").body
    families = [family for family in text_string_to_metric_families(text) if "cache" in family.name]
    return {
        family.name.removeprefix("dynaexq_cache_"): (
            family.type,
            {tuple(sample.labels.values()): sample.value for sample in family.samples},
        )
        for family in families
    }


def test_what_a_cache_does_is_in_state_and_metrics(server: str) -> None:
    port = int(server.rpartition(":")[2])
    state = request(port, "GET", "/state").json
    cache, metrics = state["cache"], read_metrics(server)
    counters = ("hits", "misses", "late", "useful", "wasted", "cancelled", "predicted", "predicted_right")
    for name in (*counters, "load_seconds"):
        assert metrics[name] == ("counter", {(): cache[name]}), name
    ahead = cache["loads_ahead"]
    assert metrics["loads"] == ("counter", {("ahead",): ahead, ("need",): cache["loads"] - ahead})
    gauges = {"hidden_share": "hidden", "horizon_layers": "horizon", "reads_queued": "queued", "blocks": "capacity"}
    gauges |= {"reads_going_on": "reading", "recall": "recall", "precision": "precision"}
    for metric, name in gauges.items():
        assert metrics[metric] == ("gauge", {(): cache[name]}), name
    assert cache["loads"] > 0 and cache["reading"] == 0 and 0 < cache["recall"] <= 1
    assert cache["predicted_right"] <= cache["predicted"] and cache["late"] <= cache["misses"]
    assert state["steps"]["count"] > 10 and state["steps"]["seconds"] > state["transitions"]["wait_seconds"]
    queue = state["speed"]["queue"]
    assert queue is None or (queue["count"] <= len(TEXTS) and queue["p50"] <= queue["p99"])


def test_modes_that_read_on_need_have_no_predictions(embedded_store: Path) -> None:
    metrics = Metrics()
    options: dict[str, Any] = {"mode": "lfu", "tier": "int4", "expert_memory": 4 << 20}
    with LLM(str(embedded_store), slots=1, context=128, observer=metrics, **options) as llm:
        metrics.watch(llm.engine, llm.launch.runtime)
        llm.generate(TEXTS[0], max_tokens=4)
        with serve_app(llm, metrics) as port:
            found, url = read_metrics(f"http://127.0.0.1:{port}"), f"http://127.0.0.1:{port}"
            assert {"hits", "misses", "loads", "load_seconds", "hidden_share", "blocks"} <= set(found)
            assert not {"recall", "precision", "horizon_layers", "predicted", "cancelled"} & set(found)
            assert {"hits", "hidden", "latency", "link", "failures", "queue", "tail", "memory"} == set(statuses(url))


def test_a_live_server_is_examined(server: str) -> None:
    text = run(server).stdout
    assert text.startswith("demo  expertflow, int4  6 MoE layers of 32 experts\n")
    result = json.loads(run(server, "--json", "-").stdout)
    assert (result["kind"], result["model"], result["mode"], result["tier"]) == ("server", "demo", "expertflow", "int4")
    checks = {check["name"]: check for check in result["checks"]}
    assert set(checks) == {
        "prediction", "hits", "hidden", "late", "waste", "latency", "link", "failures", "queue", "tail", "memory",
    }  # fmt: skip
    assert checks["failures"]["status"] == "good" and checks["failures"]["advice"] == ""
    assert checks["queue"]["status"] == "unknown" and "at least 20 are needed" in checks["queue"]["text"]
    figures = result["figures"]
    assert set(result["units"]) == set(figures) and result["units"]["load_seconds"] == "s"
    assert checks["hits"]["figures"]["hit_rate"] == figures["hit_rate"]
    assert figures["needs"] == pytest.approx(figures["needs_per_step"] * figures["steps"])
    assert result["baseline"] is None


def test_a_baseline_goes_round(server: str, tmp_path: Path) -> None:
    kept, copy = tmp_path / "b.json", tmp_path / "c.json"
    assert f"figures in {kept}" in run(server, "--save-baseline", str(kept)).stderr
    assert json.loads(kept.read_text())["dynaexq_baseline"] == 1
    text = run(server, "--baseline", str(kept), "--save-baseline", str(copy)).stdout
    assert "then: expertflow, int4" in text and "no check is worse than then" in text
    result = json.loads(run(server, "--baseline", str(kept), "--json", "-").stdout)["baseline"]
    assert result["worse"] == [] and result["subject"]["model"] == "demo"
    assert result["figures"]["capacity"] == {"then": 60, "now": 60}
    assert json.loads(copy.read_text())["checks"] == json.loads(kept.read_text())["checks"]


def test_what_became_worse_is_named_and_strict_says_so_in_the_exit_code(tmp_path: Path) -> None:
    kept = str(tmp_path / "b.json")
    with serve_states(lambda *_: reply_state(make_state(**MADE_UP, cache=WELL))) as server:
        well = statuses(server.url, "--strict", "--save-baseline", kept)
        assert well["prediction"] == well["hits"] == well["hidden"] == well["waste"] == "good"
    ill = {**WELL, "recall": 0.3, "wasted": 700, "hits": 3000, "misses": 7000}
    with serve_states(lambda *_: reply_state(make_state(**MADE_UP, cache=ill))) as server:
        run(server.url)
        shown = run(server.url, "--baseline", kept, "--strict", code=1)
        assert "worse than then: prediction, hits, waste" in shown.stdout and shown.stderr == ""
        assert "try `--tune threshold=0.7`" in shown.stdout
        result = json.loads(run(server.url, "--baseline", kept, "--strict", "--json", "-", code=1).stdout)
        assert result["baseline"]["figures"]["recall"] == {"then": 0.9, "now": 0.3}


def test_servers_that_say_less_leave_checks_unknown() -> None:
    cache = {"capacity": 64, "hits": 9000, "misses": 1000, "hit_rate": 0.9}
    state = {**MADE_UP, "mode": "lfu", "steps": None, "cache": cache}
    with serve_states(lambda *_: reply_state(make_state(**state))) as server:
        found = statuses(server.url)
    assert found["hits"] == "good" and found["hidden"] == found["link"] == found["latency"] == "unknown"


def test_servers_that_move_versions(tmp_path: Path) -> None:
    with serve_states(lambda *_: reply_state(make_state(steps={"count": 1000, "seconds": 10.0}))) as server:
        found = statuses(server.url)
    assert found["transitions"] == found["waits"] == found["reclaim"] == found["choice"] == "good"


def test_a_trace_is_examined(recorded: Path, tmp_path: Path) -> None:
    assert set(statuses(str(recorded)).values()) == {"unknown"}  # it is short
    long, kept = str(tmp_path / "long.parquet"), str(tmp_path / "b.json")
    geometry = ("--layers", "2", "--experts", "32", "--top-k", "4", "--tokens", "4000", "--zipf", "0")
    assert CliRunner().invoke(app, ["trace", "synth", "-o", long, *geometry]).exit_code == 0
    assert statuses(long)["routing"] == "bad"
    assert "no predictor of the past will help" in run(long, "--strict", "--save-baseline", kept, code=1).stdout
    assert json.loads(run(long, "--baseline", kept, "--json", "-").stdout)["baseline"]["worse"] == []
    refuse(str(recorded), "--baseline", kept, words="and this is 'moe-21m', 6 layers of 32 experts", code=5)


def test_baselines_that_do_not_fit(server: str, recorded: Path, tmp_path: Path) -> None:
    other, damaged, notes = tmp_path / "other.json", tmp_path / "damaged.json", tmp_path / "notes.txt"
    with serve_states(lambda *_: reply_state(make_state(model="other"))) as elsewhere:
        run(elsewhere.url, "--save-baseline", str(other))
    refuse(server, "--baseline", str(other), words=f"{other} is a baseline of 'other', 6 layers of 32", code=5)
    refuse(str(recorded), "--baseline", str(other), words=f"{other} is a baseline of a server, and this", code=5)
    damaged.write_text(other.read_text()[:200])
    refuse(server, "--baseline", str(damaged), words=f"{damaged} is damaged", code=5)
    notes.write_text("notes")
    refuse(server, "--baseline", str(notes), words=f"{notes} is no baseline", code=5)
    refuse(server, "--save-baseline", str(notes), words=f"{notes}: it is there, and was never a baseline")
    refuse(server, "--baseline", str(tmp_path / "no.json"), words="not there, or no regular file")
    assert notes.read_text() == "notes"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:8000"], "'127.0.0.1:8000' is neither a server's address nor a trace; give http://HOST:PORT or"),
        (["file:///etc/passwd"], "'file:///etc/passwd' is not a server's address"),
        (["--baseline", "b.json", "--save-baseline", "b.json"], "the same file is given for another option"),
        (["--save-baseline", "b.json", "--json", "b.json"], "--json b.json: the same file is given for another"),
        (["--save-baseline", "no/b.json"], "not a file in an existing, writable directory"),
        (["a.parquet", "--api-key", "k"], "--api-key does nothing with a trace; leave it out"),
        (["http://h:1", "--api-key", " "], "the API key is empty or cannot be sent"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse(*arguments, words=words)


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    refuse(str(tmp_path / "no.parquet"), words="no.parquet: not there, or no regular file", code=5)
    (tmp_path / "a.parquet").write_bytes(os.urandom(100))
    refuse(str(tmp_path / "a.parquet"), words="a.parquet is no whole Parquet file", code=5)


def test_a_key_is_sent_and_never_needed_for_a_trace(recorded: Path) -> None:
    def answer(_: str, key: str | None) -> Reply:
        return reply_state(make_state()) if key == KEY else Reply("{}", status=401)

    with serve_states(answer) as server:
        run(server.url, "--api-key", KEY)
        run(server.url, DYNAEXQ_API_KEY=KEY)
        refuse(server.url, words=f"{server.url} wants a key; give --api-key or set DYNAEXQ_API_KEY")
        assert server.paths == {"/state"}
    run(str(recorded), DYNAEXQ_API_KEY=KEY)


def test_what_a_server_says_is_no_markup_and_moves_no_cursor() -> None:
    with serve_states(lambda *_: reply_state(make_state(model="[red]x[/]\x1b[2J", mode="\x9b2J"))) as server:
        text = run(server.url).stdout
    assert "[red]x[/]?[2J  ?2J" in text and not set(text) & set("\x1b\x9b")
