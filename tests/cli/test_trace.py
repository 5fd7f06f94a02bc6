"""`dynaexq trace`: recorded runs, looked at, cut, put together and made up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.test_cli import refuse, run
from dynaexq.traffic.trace import TraceReader


def test_a_run_is_recorded_and_looked_at(recorded: Path, tmp_path: Path) -> None:
    shown = run("trace", "info", str(recorded)).stdout
    assert "moe-21m, 6 MoE layers of 32 experts, 4 a token" in shown and "entropy" in shown
    geometry = ("--layers", "6", "--experts", "32", "--top-k", "4")
    run("trace", "synth", "-o", str(tmp_path / "s.parquet"), *geometry, "--tokens", "600")
    result = json.loads(run("trace", "info", str(recorded), str(tmp_path / "s.parquet"), "--json", "-").stdout)
    assert len(result["traces"]) == 2 and len(result["overlaps"]) == 2
    assert result["traces"][str(recorded)]["tokens"] == TraceReader.open(recorded).tokens
    run("trace", "slice", str(recorded), "-o", str(tmp_path / "d.parquet"), "--phase", "decode")
    assert not next(TraceReader.open(tmp_path / "d.parquet").batches()).prefill.any()
    run("trace", "merge", str(tmp_path / "d.parquet"), str(recorded), "-o", str(tmp_path / "m.parquet"))
    pytest.importorskip("matplotlib")
    run("trace", "plot", str(recorded), str(tmp_path / "s.parquet"), "-o", str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_traces_of_other_programs_come_in(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 6, (5, 3, 2))
    (tmp_path / "a.json").write_text(json.dumps(ids.tolist()))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"experts": token}) for token in ids.tolist()))
    rows = ["token,layer,expert0,expert1"]
    rows += [f"{t},{layer},{a},{b}" for t, token in enumerate(ids.tolist()) for layer, (a, b) in enumerate(token)]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    np.savez(tmp_path / "a.npz", ids=ids, weights=np.full(ids.shape, 0.5))
    for name in ("a.json", "a.jsonl", "a.csv", "a.npz"):
        target = tmp_path / f"{name}.parquet"
        more = ("--experts", "8", "--prompt", "2", "--expert", "64x32")
        run("trace", "import", str(tmp_path / name), "-o", str(target), *more)
        reader = TraceReader.open(target)
        (found,) = reader.batches()
        assert np.array_equal(found.ids, ids) and reader.head.experts == 8 and reader.head.hidden == 64
        assert found.window.tolist() == [0, 0, 1, 2, 3] and reader.has_weights is (name == "a.npz")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.json", "{}", "not a list of tokens"),
        ("x.json", "[", "no json of expert ids"),
        ("x.json", "[[[1, 2], [3]]]", "token or line 1: not a list of ids"),
        ("x.json", "[[[1]], [[1], [2]]]", "token or line 2: [2, 1] ids, where others have [1, 1]"),
        ("x.jsonl", "[[1]]\nnonsense", "line 2"),
        ("x.jsonl", "[[-1]]", "out of range"),
        ("x.csv", "a,b\n", "line 1 is not token,layer"),
        ("x.csv", "token,layer,expert0\n0,1,3\n", "line 2: layer 1 of token 0, where 0 comes next"),
        ("x.csv", "token,layer,expert0\n0,0,x\n", "line 2: not all numbers"),
        ("x.npz", "no zip", "no npz of expert ids"),
        ("x.npz", "", "no npz of expert ids"),
        ("x.csv", "token,layer,expert0\n0,0," + "1" * 200_000, "no csv of expert ids"),
        ("x.xml", "", "format 'xml' is unknown"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    code = 2 if "xml" in name else 5
    result = run("trace", "import", str(tmp_path / name), "-o", str(tmp_path / "t.parquet"), code=code)
    assert words in " ".join(result.stderr.split()) and not (tmp_path / "t.parquet").exists()


def test_refusals(recorded: Path, tmp_path: Path) -> None:
    for arguments, code, words in (
        (("trace", "merge", str(recorded), "-o", str(tmp_path / "x.parquet")), 2, "at least two"),
        (("trace", "slice", str(recorded), "-o", str(tmp_path / "x.parquet")), 2, "say which part"),
        (("trace", "slice", str(recorded), "-o", str(recorded), "--tokens", "3"), 2, "same file"),
        (("trace", "synth", "-o", str(tmp_path / "x.parquet"), "--layers", "3"), 2, "give --geometry, or"),
        (("trace", "info", str(recorded), str(recorded)), 2, "given twice"),
        (("generate", "--demo", "--prompt", "x", "--record", str(tmp_path / "x.txt")), 2, "ends in .parquet"),
    ):
        refuse(*arguments, code=code, words=words)
    (tmp_path / "c.json").write_text('{"speed": 3}')
    assert "has no option speed" in run("generate", "--demo", "--config", str(tmp_path / "c.json"), code=2).stderr
