"""Recorded runs: what was high in which window, written and read back, and runs repeated to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertShape, ModelShape, OptionError, SideFileError, StoreError
from dynaexq.engine import Engine, EngineOptions, FinishEvent, Request, Sampling
from dynaexq.integrations.transformers.sampling import TransformersWarper
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.launch_options import LaunchOptions
from dynaexq.llm import LLM
from dynaexq.traffic.recorder import TokenRun
from dynaexq.traffic.version_map import MapHead, MapRecorder, RecordedMap, check_map_file

SHAPE, TIERS = ModelShape(2, 3, ExpertShape(64, 32)), ("int8", "int4", "int2")
HEAD = MapHead(fingerprint="f", tiers=TIERS, layers=2, experts=3, slots=(1, 2))
MAPS = np.random.default_rng(0).integers(0, 3, (7, 6))
OPTIONS: dict[str, Any] = {"mode": "dynaexq", "high": "int8", "low": "int2", "expert_memory": "9M"}


def write(path: Path, maps: Any = MAPS, head: MapHead = HEAD) -> Path:
    recorder = MapRecorder(path, head)
    for levels in maps:
        recorder.note(levels)
    recorder.close()
    return path


def test_maps_come_back_window_by_window(tmp_path: Path) -> None:
    path = write(tmp_path / "map.jsonl", [MAPS[0], MAPS[0], *MAPS])
    found = RecordedMap.load(path, "f", TIERS, SHAPE)
    for levels in (MAPS[0], MAPS[0], *MAPS):
        assert np.array_equal(found.next(), levels)
    with pytest.raises(StoreError, match="ends after 9 windows"):
        found.next()
    found.check_slots((1, 2))
    with pytest.raises(StoreError, match="recorded with 1 experts at int8, 2 experts at int4, this run has 2 experts"):
        found.check_slots((2, 1))


def test_what_is_no_map_of_this_run_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "map.jsonl")
    text = path.read_text()
    lines = text.splitlines()
    with pytest.raises(StoreError, match="another model"):
        RecordedMap.load(path, "g", TIERS, SHAPE)
    with pytest.raises(StoreError, match="give the same --high, --low"):
        RecordedMap.load(path, "f", ("int8", "int4", "int3"), SHAPE)
    for damaged in (
        "",
        "{}",
        "\n".join(lines[:-1]),
        "\n".join(lines)[:-3],
        "\n".join([lines[1], *lines]),
        text.replace("[[", "[[],["),
    ):
        path.write_text(damaged)
        with pytest.raises(StoreError, match="no whole version map"):
            RecordedMap.load(path, "f", TIERS, SHAPE)
    path.write_text("\n".join([lines[0], '{"window": 0, "to": [[6], [], []]}', '{"windows": 1}']))
    with pytest.raises(StoreError, match="not there"):
        RecordedMap.load(path, "f", TIERS, SHAPE).next()
    other = tmp_path / "notes.txt"
    other.write_text("dear diary")
    places = (other, "never a version map"), (tmp_path, "no regular file"), (tmp_path / "a/b", "existing")
    for place, message in places:
        with pytest.raises(OptionError, match=message):
            check_map_file(place)
    assert other.read_text() == "dear diary"


def test_options_that_conflict(tmp_path: Path) -> None:
    path = write(tmp_path / "map.jsonl")
    for options, message in (
        ({"mode": "static", "tier": "int4", "record": path}, "--record-map goes with"),
        ({"mode": "blocking", "replay": path}, "goes with --mode dynaexq"),
        ({"mode": "dynaexq", "replay": tmp_path / "none"}, "not there"),
        ({"mode": "dynaexq", "replay": path, "record": path}, "--record-map does nothing"),
        ({"mode": "dynaexq", "replay": path, "tune": {"alpha": 0.5}}, "alpha does nothing here"),
    ):
        with pytest.raises(OptionError, match=message):
            LaunchOptions(**options).check()


class WhoRan:
    """A model that notes, for every window, which sequences took part."""

    def __init__(self, model: Any) -> None:
        self._model, self.windows = model, []  # type: ignore[var-annotated]
        self.engine: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def window(self, prefill: bool, runs: Sequence[TokenRun]) -> AbstractContextManager[None]:
        @contextmanager
        def noted() -> Any:
            self.windows.append(set())
            with self._model.window(prefill, runs):
                yield

        return noted()

    def prefill(self, slot: int, past: int, tokens: torch.Tensor) -> Any:
        self.windows[-1].add(slot)
        return self._model.prefill(slot, past, tokens)

    def decode(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> Any:
        self.windows[-1].update(slots)
        return self._model.decode(slots, pasts, tokens)


def test_a_crowd_in_moving_maps_says_what_each_says_alone_in_the_same_maps(
    embedded_store: Path, tmp_path: Path
) -> None:
    recorded, count = tmp_path / "crowd.jsonl", 16
    prompts = [f"{word} {'a b c d e f g h ' * (1 + number % 5)}" for number, word in enumerate(["reverse:", "def"] * 8)]
    limits = EngineOptions(reuse=False)
    with LLM(str(embedded_store), slots=count, context=128, engine=limits, record=recorded, **OPTIONS) as llm:
        llm.engine.close()
        model = WhoRan(llm.engine.model)
        engine = Engine(model, TransformersWarper, limits)  # type: ignore[arg-type]
        encoded = [llm.encoder.encode(prompt) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]

        def listener(index: int) -> Any:
            def hear(event: Any) -> None:
                if not isinstance(event, FinishEvent):
                    answers[index].append(event.token)

            return hear

        with torch.inference_mode():
            for index, prompt in enumerate(encoded):
                engine.submit(Request(prompt, 12, listener(index), Sampling()))
                engine.step()
            while engine.step():
                pass
    head = MapHead.model_validate_json(recorded.read_text().splitlines()[0])
    shape = llm.launch.runtime.experts.shape
    reader = RecordedMap.load(recorded, head.fingerprint, head.tiers, shape)
    maps = [reader.next() for _ in range(reader.windows)]
    assert len(maps) == len(model.windows) and len({high.tobytes() for high in maps}) > 2
    for index in (0, 5, 11, 15):
        own = [high for high, slots in zip(maps, model.windows, strict=True) if index in slots]
        mine = write(tmp_path / f"{index}.jsonl", own, head)
        with LLM(str(embedded_store), slots=1, context=128, engine=limits, replay=mine, **OPTIONS) as alone:
            assert list(alone.submit(encoded[index], 12).wait().tokens) == answers[index]


def test_a_bad_map_leaves_the_store_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached store of a checkpoint is restored where it is damaged; a map that does not fit is no damage of it."""
    monkeypatch.setenv("DYNAEXQ_CACHE", str(tmp_path / "cache"))
    small = write(tmp_path / "map.jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SideFileError, match="another model"):
            LLM(str(EMBEDDED_MODEL), slots=1, context=64, replay=small, **OPTIONS)


def test_the_same_run_again(embedded_store: Path, tmp_path: Path) -> None:
    path, sampling = tmp_path / "run.jsonl", Sampling(temperature=0.8, seed=3)
    found = []
    for files in ({"record": path}, {"replay": path}):
        with LLM(str(embedded_store), slots=1, context=256, **files, **OPTIONS) as llm:
            prompt = llm.encoder.encode("def f(x):")
            found.append([llm.submit(prompt, 40, sampling=sampling).wait().tokens for _ in range(2)])
            assert llm.launch.runtime.counters.promotions > 0
    assert found[0] == found[1]
