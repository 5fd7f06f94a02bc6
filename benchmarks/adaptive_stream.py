"""Workloads in a row, and intervals over the documents of their phases."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import Workload
from dynaexq.evaluate.divergence import Scores, compare_models
from dynaexq.evaluate.intervals import bootstrap_mean
from dynaexq.integrations.transformers import runtime_of


def score_models(
    reference: Any, models: dict[str, Any], workloads: dict[str, Workload], batch: int, title: str
) -> tuple[dict[str, Scores], dict[str, list[int]]]:
    """Scores of all models over all workloads in a row, and bytes that each has moved after every forward pass."""
    moved: dict[str, list[int]] = {name: [] for name in models}

    def progress(done: int, total: int) -> None:
        for name, model in models.items():
            moved[name].append(runtime_of(model).counters.bytes_moved)
        print(f"{title}: {done}/{total} windows", file=sys.stderr)

    windows = torch.cat([each.windows for each in workloads.values()])
    return compare_models(reference, models, windows, batch, progress), moved


class Stream:
    """The windows of all workloads in a row: which belong to which phase and document."""

    def __init__(self, workloads: dict[str, Workload], batch: int) -> None:
        self.batch = batch
        counts = [len(each.documents) for each in workloads.values()]
        edges = np.cumsum([0, *counts])
        self.phases = {
            name: np.arange(start, end) for name, start, end in zip(workloads, edges, edges[1:], strict=False)
        }
        offsets = np.cumsum([0] + [int(each.documents.max()) + 1 for each in workloads.values()])
        pairs = zip(workloads.values(), offsets, strict=False)
        self.documents = np.concatenate([each.documents + offset for each, offset in pairs])

    @property
    def parts(self) -> dict[str, Any]:
        """Windows by what is reported: the stream, its phases, and the second half of each phase, warmed up."""
        halves = {f"{name} warm": windows[len(windows) // 2 :] for name, windows in self.phases.items()}
        return {"stream": np.arange(len(self.documents)), **self.phases, **halves}

    def interval(self, sums: Any, tokens: Any, windows: Any) -> dict[str, float]:
        """Mean per token and its 95 % interval over the documents of `windows`."""
        _, owner = np.unique(self.documents[windows], return_inverse=True)
        return bootstrap_mean(np.bincount(owner, sums[windows]), np.bincount(owner, tokens[windows]))._asdict()

    def summary(self, scores: Scores) -> dict[str, Any]:
        """Loss and KL of one variant, by part."""
        losses, divergences, tokens = scores.arrays()
        return {
            part: {
                "loss": self.interval(losses, tokens, windows),
                "kl": self.interval(divergences, tokens, windows),
            }
            for part, windows in self.parts.items()
        }

    def paired(self, scores: Scores, other: Scores) -> dict[str, Any]:
        """Loss and KL of `scores` minus those of `other`, by part: negative where `scores` is better."""
        losses, divergences, tokens = scores.arrays()
        other_losses, other_divergences, _ = other.arrays()
        return {
            part: {
                "loss": self.interval(losses - other_losses, tokens, windows),
                "kl": self.interval(divergences - other_divergences, tokens, windows),
            }
            for part, windows in self.parts.items()
        }
