"""`dynaexq simulate --mode expertflow`: from a recorded run to knobs that can be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.test_cli import refuse, run
from dynaexq.core import ModelShape
from dynaexq.predictor.files import PredictorFile, PredictorHead
from dynaexq.store import ExpertStore
from dynaexq.traffic.trace import TraceReader

FLOW = ("--mode", "expertflow", "--tier", "int2", "--expert-memory", "2M", "--link", "0.5")
COMPUTE = ("--compute", "start=2,token=0.1,read=10")


@pytest.fixture(scope="module")
def watched(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with what routers were given."""
    path = tmp_path_factory.mktemp("watched") / "run.parquet"
    options = ("--prompt", "reverse: a b c d", "--max-new-tokens", "16", "--record", str(path), "--record-hidden")
    run("generate", str(store), "--mode", "static", "--tier", "int2", *options)
    assert TraceReader.open(path).has_hidden
    return path


def make_predictor(path: Path, shape: ModelShape, routers: bool) -> Path:
    """One that has learned nothing."""
    head = PredictorHead(
        fingerprint="", layers=shape.layers, experts=shape.experts, hidden=shape.expert.hidden, top_k=4, width=4,
        middle=8, reach=2, window=8, ahead=4, routers=routers, looks_back=False,
    )  # fmt: skip
    zeros = {name: np.zeros(size, np.float32) for name, size in head.shapes.items()}
    PredictorFile(head, zeros).save(path)
    return path


def test_a_recorded_run_reads_ahead(watched: Path, store: Path, tmp_path: Path) -> None:
    hidden = {}
    file = make_predictor(tmp_path / "p.safetensors", ExpertStore.open(store).shape, routers=False)
    for name in ("average", "pregate", str(file)):
        more = ("--store", str(store)) if name == "pregate" else ()
        shown = run("simulate", str(watched), *FLOW, *COMPUTE, "--predictor", name, *more).stdout
        assert "read ahead: " in shown and "% of reading hidden" in shown
        cache = json.loads(
            run("simulate", str(watched), *FLOW, *COMPUTE, "--predictor", name, *more, "--json", "-").stdout
        )["cache"]
        assert {
            "late", "useful", "wasted", "cancelled", "recall", "precision", "horizon", "loads", "loads_ahead", "hidden",
        } <= set(cache)  # fmt: skip
        hidden[name] = cache["recall"]
    assert hidden["pregate"] > hidden["average"]
    known = json.loads(run("simulate", str(watched), *FLOW, *COMPUTE, "--accuracy", "1", "--json", "-").stdout)
    assert known["cache"]["recall"] == known["cache"]["precision"] == 1


def test_knobs_of_reading_ahead_are_swept_and_used(recorded: Path, tmp_path: Path) -> None:
    configs, whole = tmp_path / "best", tmp_path / "s.json"
    sweep = ("--sweep", "lookahead=0,1,4", "--sweep", "threshold=0.01,0.3", "--sweep", "standing_share=0,0.5")
    shown = run("simulate", str(recorded), *FLOW, *COMPUTE, *sweep, "--jobs", "2", "--configs", str(configs), "--best",
                "1", "--json", str(whole)).stdout  # fmt: skip
    assert "% of needs met" in shown
    runs = json.loads(whole.read_text())["runs"]
    assert len(runs) == 12 and not any("error" in each for each in runs)
    ahead = {look: [each["cache"]["loads_ahead"] for each in runs if each["settings"]["lookahead"] == look]
             for look in ("0", "4")}  # fmt: skip
    assert max(ahead["0"]) == 0 < max(ahead["4"])
    best = json.loads((configs / "best-1.json").read_text())
    assert best["predictor"] == "average" and len(best["tune"]) == 3
    answer = run("generate", "--demo", "--prompt", "copy: a b", "--config", str(configs / "best-1.json"), "--json", "-")
    found = json.loads(answer.stdout)
    assert found["mode"] == "expertflow" and found["text"]
    accuracies = ("--sweep", "accuracy=0.5,1", "--jobs", "1", "--json", "-")
    runs = json.loads(run("simulate", str(recorded), *FLOW, *COMPUTE, *accuracies).stdout)["runs"]
    assert runs[0]["wait_seconds"] > runs[1]["wait_seconds"]


def test_a_sweep_asks_routers_where_a_predictor_does(watched: Path, store: Path, tmp_path: Path) -> None:
    sweep = ("--sweep", "predictor=average,pregate", "--store", str(store), "--jobs", "1")
    configs = ("--configs", str(tmp_path / "best"), "--json", "-")
    found = json.loads(run("simulate", str(watched), *FLOW, *COMPUTE, *sweep, *configs).stdout)
    average, pregate = found["runs"]
    assert pregate["cache"]["recall"] > average["cache"]["recall"]
    best = json.loads((tmp_path / "best" / "best-1.json").read_text())
    assert best["predictor"] == found["front"][0]["settings"]["predictor"]


def test_refusals(recorded: Path, watched: Path, store: Path, tmp_path: Path) -> None:
    base = ("simulate", str(recorded), *FLOW, *COMPUTE)
    seen = ("simulate", str(watched), *FLOW, *COMPUTE)
    shape = ExpertStore.open(store).shape
    asking = str(make_predictor(tmp_path / "asking.safetensors", shape, routers=True))
    plain = str(make_predictor(tmp_path / "plain.safetensors", shape, routers=False))
    for arguments, words in (
        ((*seen, "--predictor", "pregate"), "--predictor pregate asks the model's routers; add --store DIR"),
        ((*seen, "--predictor", asking), "asks the model's routers; add --store DIR"),
        ((*base, "--predictor", plain), "looks at hidden states, which the trace does not have; record one with"),
        ((*base, "--sweep", "predictor=average,pregate"), "--predictor pregate looks at hidden states"),
        ((*base, "--predictor", "psychic"), "--predictor psychic: not average or pregate"),
        ((*base, "--predictor", "average", "--accuracy", "0.9"), "exclude each other"),
        ((*base, "--accuracy", "2"), "--accuracy 2 is not in"),
        ((*base, "--sweep", "accuracy=high"), "--sweep accuracy=high: write a share"),
        ((*base, "--accuracy", "0.5", "--sweep", "accuracy=0.5,1"), "--accuracy does nothing beside --sweep accuracy"),
        ((*base, "--accuracy", "0.5", "--sweep", "threshold=0.5,0.6"), "threshold does nothing beside --accuracy"),
        ((*base, "--tune", "lookahead=1", "--sweep", "lookahead=0,1"), "--tune lookahead does nothing beside"),
        ((*base, "--sweep", "lookahead=0,-1"), "lookahead -1 is not in"),
        ((*base, "--sweep", "accuracy=0.5,1", "--configs", str(tmp_path / "best")), "--configs writes what can be run"),
        (("simulate", str(recorded), *FLOW[:-2], *COMPUTE), "say --link GB/s"),
    ):
        refuse(*arguments, code=2, words=words)
    (tmp_path / "broken").write_text("none at all, and long enough")
    refuse(*seen, "--predictor", str(tmp_path / "broken"), code=5, words="is damaged or cut short")
