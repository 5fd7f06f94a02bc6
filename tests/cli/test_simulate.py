"""`dynaexq simulate`: from a recorded run to settings that can be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_cli import refuse, run
from dynaexq.traffic.trace import TraceReader

COMPUTE = ("--compute", "start=1,token=0.1,read=10")
PAIR = ("--high", "int8", "--low", "int2", "--expert-memory", "12M")
SWEEP = ("--link", "1", *COMPUTE, "--jobs", "1", "--sweep", "alpha=0.8,0.9")


def test_a_recorded_run_is_simulated(recorded: Path) -> None:
    result = json.loads(
        run("simulate", str(recorded), "--high", "int8", "--low", "int2", "--expert-memory", "12M", "--link", "1",
            *COMPUTE, "--json", "-").stdout
    )  # fmt: skip
    assert result["tokens"] == TraceReader.open(recorded).tokens and result["expert_bytes"] <= 12 << 20
    assert 0 < result["raised"] < 1 and result["ttft"]["mean"] > 0 and result["costs"]["decode"]["start"] == 0.001
    shown = run("simulate", str(recorded), "--mode", "static", "--tier", "int4", *COMPUTE).stdout
    assert "int4 100.0 %" in shown and "0 promotions" in shown


def test_a_sweep_goes_on_where_it_ended_and_gives_configurations(recorded: Path, tmp_path: Path) -> None:
    results, configs = tmp_path / "runs.jsonl", tmp_path / "best"
    common = ["simulate", str(recorded), "--high", "int8", "--low", "int2", "--link", "1", *COMPUTE, "--jobs", "1"]
    common += ["--results", str(results), "--sweep", "expert-memory=5M,8M,12M"]
    first = run(*common)
    assert "below the floor" in first.stderr and len(results.read_text().splitlines()) == 4
    before = results.read_text().splitlines()[1:]
    more = run(*common, "--sweep", "alpha=0.5,0.9", "--configs", str(configs), "--json", str(tmp_path / "s.json"))
    assert "expert-memory=12M, alpha=0." in more.stdout
    assert len(results.read_text().splitlines()) == 10 and results.read_text().splitlines()[1:4] == before
    whole = json.loads((tmp_path / "s.json").read_text())
    assert len(whole["runs"]) == 6 and 0 < len(whole["front"]) <= 4
    best = json.loads((configs / "best-1.json").read_text())
    assert best["expert_memory"] == "12M" and best["high"] == "int8" and best["tune"][0].startswith("alpha=")
    chosen = ("--config", str(configs / "best-1.json"))
    assert (
        json.loads(run("generate", "--demo", "--prompt", "copy: a b", *chosen, "--json", "-").stdout)["mode"]
        == "dynaexq"
    )
    slower = [each.replace("start=1", "start=2") for each in common]
    assert "of a sweep over another trace" in " ".join(run(*slower, code=5).stderr.split())


def test_refusals(recorded: Path, tmp_path: Path) -> None:
    base = ("simulate", str(recorded), *PAIR)
    static = ("--mode", "static", "--tier", "int4", *COMPUTE)
    linked = (*base, *COMPUTE, "--link", "1")
    for arguments, code, words in (
        ((*base, *COMPUTE), 2, "say --link GB/s, or --probe FILE"),
        ((*base, *COMPUTE, "--link", "0"), 2, "gigabytes per second"),
        ((*base, "--link", "1", "--compute", "fast"), 2, "--compute fast"),
        ((*linked, "--sweep", "speed=1"), 2, "write NAME=VALUE"),
        ((*linked, "--sweep", "alpha=0.8,2"), 2, "--sweep alpha=2: alpha 2.0 is not in"),
        ((*linked, "--sweep", "alpha=0.8,0.80"), 2, "given twice"),
        ((*linked, "--sweep", "link=1,2"), 2, "--link does nothing beside --sweep link"),
        ((*linked, "--tune", "alpha=0.7", "--sweep", "alpha=0.8,0.9"), 2, "--tune alpha does nothing beside"),
        ((*linked, "--results", "x"), 2, "--results goes with --sweep"),
        ((*linked, "--best", "2"), 2, "--best goes with --configs"),
        ((*linked, "--latency", "inf"), 2, "no copy would end"),
        ((*linked, "--fit", str(recorded)), 2, "--fit does nothing beside --compute"),
        ((*linked, "--expert", "64x32", "--store", "x"), 2, "--expert does nothing beside --store"),
        ((*linked, "--expert", "64x32"), 2, "the trace says how large experts are, 256x128"),
        (("simulate", str(tmp_path / "no.parquet"), *static), 5, "not there"),
        (("simulate", str(recorded), *static, "--high", "int8"), 2, "--high does"),
    ):
        refuse(*arguments, code=code, words=words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--results", "a.svg", "--plot", "a.svg"), "--plot a.svg: the same file is given for another option"),
        (("--plot", "picture"), "--plot picture: name a file that ends in .png or .svg"),
        (("--plot", "picture.txt"), "ends in .png or .svg"),
        (("--json", "mine.json", "--fit", "mine.json"), "--json mine.json: the same file"),
        (("--configs", "mine.json"), "--configs mine.json: not a directory"),
        (("--configs", "kept"), "kept/best-1.json holds no options"),
        (("--configs", "new", "--drive", "replay"), "--configs goes with --drive thread"),
    ],
)
def test_no_file_is_overwritten_that_is_not_its_own(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "mine.json").write_text("mine")
    (tmp_path / "kept" / "best-1.json").write_text("mine")
    refuse("simulate", str(recorded), *PAIR, *SWEEP, *arguments, code=2, words=words)
    assert (tmp_path / "mine.json").read_text() == (tmp_path / "kept" / "best-1.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "mine.json"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("predicted_kl", ..., "'predicted_kl'"),
        ("tokens_per_second", "x", "line 2: tokens_per_second is 'x'"),
        ("tokens_per_second", float("nan"), "line 2: tokens_per_second is nan"),
    ],
)
def test_damaged_results_are_refused(recorded: Path, tmp_path: Path, name: str, value: object, words: str) -> None:
    results = tmp_path / "runs.jsonl"
    command = ("simulate", str(recorded), *PAIR, *SWEEP, "--results", str(results))
    run(*command)
    head, first, *rest = results.read_text().splitlines()
    line = json.loads(first) | {name: value}
    if value is ...:
        del line[name]
    results.write_text("\n".join([head, json.dumps(line), *rest]))
    refuse(*command, code=5, words=words)


def test_results_of_another_map_are_refused_and_a_map_is_in_its_configurations(
    recorded: Path, store: Path, tmp_path: Path
) -> None:
    profile, configs = tmp_path / "map.json", tmp_path / "best"
    for text, more in (("reverse: a b c " * 30, ()), ("def f(x): return x " * 30, ("--force",))):
        (tmp_path / "t.txt").write_text(text)
        run("calibrate", str(store), "--text", str(tmp_path / "t.txt"), "-o", str(profile), *more)
        command = ["simulate", str(recorded), "--mode", "static-map", "--map", str(profile), "--high", "bf16"]
        command += ["--low", "int2", *COMPUTE, "--jobs", "1", "--sweep", "expert-memory=8M,12M"]
        command += ["--results", str(tmp_path / "runs.jsonl"), "--configs", str(configs)]
        if not more:
            run(*command)
            assert json.loads((configs / "best-1.json").read_text())["map"] == str(profile)
            run(
                "generate",
                str(store),
                "--prompt",
                "hi",
                "--max-new-tokens",
                "2",
                "--config",
                str(configs / "best-1.json"),
            )
    refuse(*command, code=5, words="of a sweep over another trace")
