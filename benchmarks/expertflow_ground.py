"""What `benchmarks.expertflow` runs on: stores, and prompts of the shipped texts."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.workloads import SHIPPED
from dynaexq.device import CpuDevice
from dynaexq.evaluate import read_documents
from dynaexq.formats import DEFAULT_QUANTIZER
from dynaexq.integrations.transformers.loading import load_tokenizer, open_experts
from dynaexq.integrations.transformers.random_model import describe_random_model
from dynaexq.launch import EMBEDDED_MODEL, cache_directory
from dynaexq.residency.arena import READERS
from dynaexq.simulate.trace_source import version_bytes
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from dynaexq.store.synthetic import write_synthetic

SYNTHETIC, EMBEDDED = "olmoe-1b-7b", "embedded"
MODELS = (SYNTHETIC, EMBEDDED)
TIERS, TIER = ("int4", "int2"), "int4"
LAYERS, QUICK_LAYERS = 6, 2
"""Of the synthetic model."""

TURNS = {SYNTHETIC: 1, EMBEDDED: 4}
"""Batches of prompts that a round answers, one after the other: the embedded model is fast."""

TEXTS = {"text": "english_heldout.txt", "math": "gsm8k_test.jsonl", "code": "humaneval.jsonl"}
MEMORY_DISK, ROOM = Path("/dev/shm"), 8 << 30
"""Where reads take next to no time, if so much is free."""

READ_BYTES = 512 << 20


@dataclass
class Ground:
    """A model to run: its store, a directory for files beside it, and what is known of it so far."""

    name: str
    root: Path
    directory: Path
    texts: dict[str, tuple[int, ...]]
    """Tokens to take prompts from; predictors learn from others."""
    predictors: dict[str, str] = field(default_factory=dict)
    """What `--predictor` takes, by name."""

    @property
    def store(self) -> ExpertStore:
        """Opened anew."""
        return ExpertStore.open(self.root)

    @property
    def expert_bytes(self) -> int:
        """Of a version at TIER."""
        return version_bytes(self.store, TIER)

    @property
    def experts(self) -> int:
        """Of all layers."""
        return self.store.shape.layers * self.store.shape.experts

    def take_prompts(self, first: int, count: int, length: int) -> list[tuple[int, ...]]:
        """Prompts `first` and so many more: of all texts in turn, each from its beginning on."""
        return [_cut(list(self.texts.values()), number, length) for number in range(first, first + count)]


def _cut(texts: Sequence[tuple[int, ...]], number: int, length: int) -> tuple[int, ...]:
    text, place = texts[number % len(texts)], number // len(texts)
    start = place % (len(text) // length) * length
    return text[start : start + length]


def read_texts(learn: bool) -> dict[str, tuple[int, ...]]:
    """Tokens of each text: the half that predictors learn from, or the other one."""
    tokenizer, found = load_tokenizer(EMBEDDED_MODEL), {}
    for name, file in TEXTS.items():
        ids = tuple(tokenizer("\n\n".join(read_documents(SHIPPED / file)), verbose=False)["input_ids"])
        half = len(ids) // 2
        found[name] = ids[half:] if learn else ids[:half]
    return found


@contextmanager
def make_ground(name: str, quick: bool) -> Iterator[Ground]:
    """Make the store of a model where reads are fast, and remove it in the end."""
    free = MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > ROOM
    place = MEMORY_DISK if free else cache_directory()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dynaexq-bench-", dir=place) as directory:
        root, start = Path(directory) / "store", time.perf_counter()
        if name == SYNTHETIC:
            layers = QUICK_LAYERS if quick else LAYERS
            model = describe_random_model(name, EMBEDDED_MODEL, "zipf", 0, num_hidden_layers=layers, vocab_size=4096)
            write_synthetic(model, root, PrepareOptions(TIERS, 64), lambda *_: None)
        else:
            options = PrepareOptions(TIERS, 64, "rtn" if quick else DEFAULT_QUANTIZER)
            prepare_store(open_experts(EMBEDDED_MODEL)[1], root, options, lambda *_: None)
        print(f"{name}: store made in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        yield Ground(name, root, Path(directory), read_texts(learn=False))


@contextmanager
def copy_to_disk(ground: Ground) -> Iterator[Path]:
    """The store once more where temporary files are, which is a disk more often than not."""
    with tempfile.TemporaryDirectory(prefix="dynaexq-bench-") as directory:
        yield Path(shutil.copytree(ground.root, Path(directory) / "store"))


def measure_reads(root: Path) -> float:
    """Bytes per second that a store gives to as many readers as a cache has."""
    store = ExpertStore.open(root)
    store.require_tier(TIER)
    nbytes, keys = version_bytes(store, TIER), list(store.shape.expert_keys())
    keys = keys[: max(READERS, READ_BYTES // nbytes)]
    arena = CpuDevice().allocate(READERS * nbytes)

    def read(reader: int) -> None:
        for key in keys[reader::READERS]:
            store.read_into(key, TIER, arena.host_view(reader * nbytes, nbytes))

    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(read, range(READERS)))
    seconds = time.perf_counter() - start
    store.close()
    return len(keys) * nbytes / seconds
