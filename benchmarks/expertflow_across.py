"""How well routing of the embedded model is foreseen in and across workloads; and a predictor that learned them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.expertflow_ground import TEXTS, TIER, Ground, read_texts
from dynaexq.engine import EngineOptions
from dynaexq.launch import Opened
from dynaexq.llm import LLM
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.examples import gather_examples
from dynaexq.predictor.files import PredictorFile
from dynaexq.predictor.judging import judge_predictor
from dynaexq.predictor.training import TrainingOptions, train_predictor
from dynaexq.predictor.yardsticks import measure_recall
from dynaexq.traffic.trace import TraceReader

PROMPT, ANSWER, SLOTS = 128, 64, 4
MAX_TOKENS = 1 << 20
DISTANCES = (1, 4)
"""Layers ahead."""

YARDSTICKS = ("static", "average", "pregate")


class Effort(NamedTuple):
    """Prompts of each text that are recorded, and how often predictors go over them."""

    prompts: int
    epochs: int

    @classmethod
    def of(cls, quick: bool) -> Effort:
        """Little, or enough."""
        return cls(6, 1) if quick else cls(100, TrainingOptions.epochs)


def record_workloads(ground: Ground, effort: Effort) -> dict[str, Path]:
    """Traces with hidden states, by workload: of texts that prompts are not taken from."""
    paths = {name: ground.directory / f"{name}.parquet" for name in TEXTS}
    texts = read_texts(learn=True)
    for name, path in paths.items():
        if path.exists():
            continue
        options: dict[str, Any] = {"mode": "static", "tier": TIER, "trace": path, "trace_hidden": True}
        engine = EngineOptions(reuse=False)
        with LLM(str(ground.root), slots=SLOTS, context=PROMPT + ANSWER + 1, engine=engine, **options) as llm:
            llm.encoder.stop_tokens = frozenset()
            count = min(effort.prompts, len(texts[name]) // PROMPT)
            parts = [texts[name][PROMPT * each : PROMPT * (each + 1)] for each in range(count)]
            for stream in [llm.submit(part, ANSWER) for part in parts]:
                stream.wait()
    return paths


def train_on_all(ground: Ground, effort: Effort) -> Path:
    """A predictor's file that learned all workloads."""
    target = ground.directory / "trained.safetensors"
    if not target.exists():
        _train(list(record_workloads(ground, effort).values()), Opened(str(ground.root)).routers(), effort).save(target)
    return target


def run_across(ground: Ground, effort: Effort) -> dict[str, Any]:
    """Recall at DISTANCES of predictors that learned one workload, and of others, on held-out requests of each."""
    paths, routers = record_workloads(ground, effort), Opened(str(ground.root)).routers()
    trained = {name: _train([path], routers, effort) for name, path in paths.items()}
    found: dict[str, dict[str, list[float | None]]] = {name: {} for name in (*trained, *YARDSTICKS)}
    tokens = {}
    for judged, path in paths.items():
        reader = TraceReader.open(path)
        examples = gather_examples([reader], MAX_TOKENS)
        reader.close()
        tokens[judged] = len(examples.ids)
        for name, file in trained.items():
            recalls = judge_predictor(file, examples, routers).recall
            found[name][judged] = [recalls[distance - 1] for distance in DISTANCES]
        known = measure_recall(examples, routers, max(DISTANCES), lambda: None)
        for name in YARDSTICKS:
            found[name][judged] = [known[name][distance - 1] for distance in DISTANCES]
    return {"distances": list(DISTANCES), "tokens": tokens, "recall": found}


def _train(paths: list[Path], routers: Routers | None, effort: Effort) -> PredictorFile:
    readers = [TraceReader.open(path) for path in paths]
    examples = gather_examples(readers, MAX_TOKENS)
    for reader in readers:
        reader.close()
    options = TrainingOptions(epochs=effort.epochs)
    return train_predictor(examples, routers, options, None, lambda *_: None)
