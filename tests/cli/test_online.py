"""Online precision from the command line: calibrate, maps, kept hotness, knobs, probe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_cli import refuse, run
from dynaexq.traffic import TrafficProfile

TEXT = "The quick brown fox jumps over the lazy dog. " * 30
PAIR = ("--high", "bf16", "--low", "int2", "--expert-memory", "12M")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_profile_drives_a_map_a_ranking_and_a_state(store: Path, text: Path, tmp_path: Path) -> None:
    profile, state = tmp_path / "profile.json", tmp_path / "state.json"
    made = json.loads(
        run(
            "calibrate", str(store), "--text", str(text), "-o", str(profile), "--max-tokens", "200", "--json", "-"
        ).stdout
    )
    assert made["tokens"] == 200
    assert made["mode"] == "full"
    assert 0 < made["hottest_share"][0] < made["hottest_share"][2] <= 1
    assert json.loads(profile.read_text())["routed"] == 200 * 6 * 4

    common = ("evaluate", str(store), "--text", str(text), "--max-tokens", "300", "--json", "-", *PAIR)
    mapped = json.loads(run(*common, "--mode", "static-map", "--map", str(profile)).stdout)
    assert mapped["mode"] == "static-map"
    assert mapped["promotions"] == mapped["bytes_moved"] == 0
    assert 0.2 < mapped["hot_share_high"] < 1
    assert mapped["experts_high"] == sum(mapped["slots"].values()) > 0
    assert mapped["expert_bytes"] <= 12 << 20

    # int2 versions of this model are 30 KiB in 32 KiB blocks, bf16 ones fill theirs
    assert mapped["padding_bytes"] == (192 - mapped["experts_high"]) * 2048

    online = json.loads(run(*common, "--mode", "dynaexq", "--state", str(state), "--tune", "alpha=0.5").stdout)
    assert online["promotions"] > 0
    assert online["waits"] == 0
    assert TrafficProfile.model_validate_json(state.read_text()).routed == (online["tokens"] + 1) * 6 * 4
    again = json.loads(run(*common, "--mode", "dynaexq", "--state", str(state)).stdout)
    assert again["promotions"] < online["promotions"]
    assert again["hot_share_high"] > online["hot_share_high"]

    plain = json.loads(run(*common, "--mode", "no-hysteresis", "--ranking", str(profile)).stdout)
    assert plain["mode"] == "no-hysteresis"

    link = tmp_path / "link.json"
    link.symlink_to(state)
    run(*common, "--mode", "dynaexq", "--state", str(link))
    assert link.is_symlink()

    state.write_text(state.read_text()[:-5])
    warned = run(*common, "--mode", "dynaexq", "--state", str(state))
    assert "state.json is no whole traffic profile" in " ".join(warned.stderr.split())
    assert json.loads(warned.stdout)["promotions"] == online["promotions"]


def test_uniform_takes_the_best_tier_that_fits(store: Path, text: Path) -> None:
    common = ("evaluate", str(store), "--text", str(text), "--max-tokens", "20", "--mode", "uniform", "--json", "-")
    assert json.loads(run(*common, "--expert-memory", "12M").stdout)["tier"] == "int2"
    assert json.loads(run(*common).stdout)["tier"] == "bf16"


def test_options_that_conflict_or_do_nothing_stop_the_start(store: Path, text: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("{}")
    generate = ("generate", str(store), "--prompt", "a")
    for code, words, arguments in (
        (2, "go together", ("--mode", "static-map")),
        (2, "go together", ("--map", str(profile))),
        (2, "not there, or no regular file", ("--mode", "static-map", "--map", str(tmp_path / "none.json"), *PAIR)),
        (5, "is no whole traffic profile", ("--mode", "static-map", "--map", str(profile), *PAIR)),
        (5, "is no whole traffic profile", ("--mode", "dynaexq", "--ranking", str(profile), *PAIR)),
        (2, "--state goes with --mode dynaexq", ("--mode", "full", "--state", str(tmp_path / "s.json"))),
        (2, "--tune goes with --mode dynaexq", ("--mode", "full", "--tune", "alpha=0.5")),
        (2, "not a file in an existing directory", ("--mode", "dynaexq", "--state", str(tmp_path / "no" / "s.json"))),
        (2, "does nothing in mode 'no-hysteresis'", ("--mode", "no-hysteresis", "--tune", "margin=1")),
        (2, "was never a traffic profile", ("--mode", "dynaexq", "--state", str(text))),
        (2, "no regular file", ("--mode", "dynaexq", "--state", "/dev/null")),
        (2, "File name too long", ("--mode", "dynaexq", "--state", "x" * 300)),
        (2, "is a model's directory", ("--mode", "dynaexq", "--state", str(store / "s.json"))),
        (6, "not 100000 spare blocks and one more", ("--mode", "dynaexq", *PAIR, "--tune", "spare=100000")),
        (2, "the first must be above 0", ("--mode", "dynaexq", "--tune", "interval=0.01")),
        (2, "every_windows does nothing here", ("--mode", "dynaexq", "--tune", "every_windows=2")),
        (2, "with a name of signal, alpha", ("--mode", "dynaexq", "--tune", "speed=2")),
    ):
        refuse(*generate, *arguments, code=code, words=words)
    both = str(tmp_path / "both.json")
    refuse(*generate, "--mode", "dynaexq", "--state", both, "--json", both, code=2, words="given for another option")
    evaluate = ("evaluate", str(store), "--text", str(text), "--mode", "dynaexq")
    refuse(*evaluate, "--tune", "prefill_weight=2", code=2, words="every pass is a prefill")
    calibrate = ("calibrate", str(store), "--text", str(text))
    refuse(*calibrate, "-o", both, "--json", both, code=2, words="given for another option")
    refuse(*calibrate, "-o", str(store / "p.json"), code=2, words="is a model's directory")
    refuse(*calibrate, "-o", str(text), "--force", code=2, words="given for another option")
    refuse(*calibrate, "-o", str(profile), code=2, words="exists; --force replaces it")
    refuse(*calibrate, code=2, words="give an --output")
    refuse(*calibrate[:2], "-o", str(tmp_path / "p.json"), code=2, words="give at least one --text")
    refuse(*calibrate, "-o", str(tmp_path / "p.json"), "--signal", "luck", code=2, words="unknown hotness signal")
    assert profile.read_text() == "{}"
    run(*calibrate, "-o", str(profile), "--force", "--max-tokens", "10")
    assert TrafficProfile.model_validate_json(profile.read_text()).routed == 10 * 6 * 4


def test_probe_measures_a_store_and_a_directory(store: Path, tmp_path: Path) -> None:
    found = json.loads(run("probe", str(store), "--size", "4M", "--no-kernels", "--json", "-").stdout)
    assert found["store"] is True
    assert found["link"]["nbytes"] >= 4 << 20
    assert found["background_bytes_per_second"] == pytest.approx(0.8 * found["link"]["bytes_per_second"])
    assert "kernels" not in found
    found = json.loads(run("probe", str(tmp_path), "--size", "4M", "--no-kernels", "--json", "-").stdout)
    assert found["store"] is False
    assert found["memory"]["read"] > 0 < found["memory"]["copy"]
    assert not list(tmp_path.iterdir())
    refuse("probe", str(tmp_path / "none"), code=2, words="is no directory")
    refuse("probe", str(tmp_path), "--size", "1", code=2, words="too little to measure")
    refuse("probe", str(tmp_path), "--size", "100T", code=6, words="give less")


def test_probe_tells_what_the_kernels_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaexq.cli.probe.KERNEL_BYTES", 1 << 20)  # 8 experts of each tier all the same
    monkeypatch.setattr("dynaexq.plan.ceilings.BURST_SECONDS", 0.0)
    done = run("probe", str(tmp_path), "--size", "1M", "--json", "-")
    kernels = json.loads(done.stdout)["kernels"]
    assert set(kernels) == {"instructions", "threads", "team", "activations", "tiers"}
    assert list(kernels["tiers"]) == ["int2", "int4", "int8", "bf16"]
    for name, tier in kernels["tiers"].items():
        assert tier["bytes_per_second"] > 0 < tier["operations_per_second"]
        assert f"): {name} {tier['bytes_per_second'] / 1e9:.1f} GB/s at one token" in done.stderr
    monkeypatch.setattr("dynaexq.cli.probe.KERNEL_BYTES", 1 << 50)
    refuse("probe", str(tmp_path), "--size", "1M", code=6, words="--no-kernels leaves them out")
