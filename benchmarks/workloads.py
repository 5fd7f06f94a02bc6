"""Three workloads as token windows, each window with the document it starts in."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dynaexq.evaluate import read_documents

SHIPPED = Path(__file__).parent.parent / "data"
WORKLOADS = {
    "text": (("wikitext2_valid_detok.txt",), ("english_heldout.txt",)),
    "math": (("gsm8k_test.jsonl",),),
    "code": (("humaneval.jsonl", "code_heldout.py.txt"), ("humaneval.jsonl",)),
}
"""Files of each workload: the first choice whose files are all there."""

ARTICLE = re.compile(r"^(?== [^=])", re.MULTILINE)
"""Where WikiText articles start: `= Title =`."""


ENDLESS = 20
"""A file of more windows than this that does not say where its documents end: each window counts as one."""


class Workload(NamedTuple):
    """Windows [count, tokens], and the document of each, [count]."""

    files: tuple[str, ...]
    windows: torch.Tensor
    documents: np.ndarray[Any, np.dtype[np.int64]]


def read_workloads(tokenizer: Any, extra: Path | None, windows: int, tokens: int) -> dict[str, Workload]:
    """`windows` windows of `tokens` tokens for each workload, spread evenly over its files."""
    return {name: _read(tokenizer, name, choices, extra, windows, tokens) for name, choices in WORKLOADS.items()}


def _read(
    tokenizer: Any, name: str, choices: tuple[tuple[str, ...], ...], extra: Path | None, count: int, tokens: int
) -> Workload:
    for files in choices:
        paths = [_find(file, extra) for file in files]
        if all(paths):
            break
        print(f"{name}: {', '.join(files)} is not shipped; give its directory with --texts", file=sys.stderr)
    ids: list[int] = []
    owner: list[int] = []
    for number, document in enumerate(each for path in paths if path for each in _documents(path)):
        found = tokenizer(document + "\n\n", verbose=False)["input_ids"]
        ids += found
        owner += [number] * len(found)
    starts = np.arange(len(ids) // tokens) * tokens
    starts = starts[np.unique(np.linspace(0, len(starts) - 1, min(count, len(starts))).astype(int))]
    windows = torch.stack([torch.tensor(ids[start : start + tokens]) for start in starts])
    documents, lengths = np.array(owner)[starts], np.bincount(owner)
    endless = lengths[documents] > ENDLESS * tokens
    return Workload(files, windows, np.where(endless, len(lengths) + np.arange(len(starts)), documents))


def _documents(path: Path) -> list[str]:
    texts = read_documents(path)
    return [each for text in texts for each in ARTICLE.split(text) if each.strip()]


def _find(file: str, extra: Path | None) -> Path | None:
    places = [SHIPPED / file] + ([extra / file] if extra else [])
    return next((place for place in places if place.exists()), None)
