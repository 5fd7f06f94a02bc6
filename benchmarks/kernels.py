"""Speed of the native kernels on this machine, all beside the speed of reading memory.

    python -m benchmarks.kernels [--quick] [--json FILE|-] [--readme FILE]

Experts of a 30B model (2048 x 768, 8 a token) at random weights, at least 128 of them and at least 256 MiB, and dense
layers (2048 -> 4096). Calls go round all of them, so one token reads its weights from memory. What is compared takes
turns; medians over rounds, with the 10th and 90th percentile in the JSON.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.machine import describe_run, pin_threads, publish
from dynaexq.formats import tier_format
from dynaexq.kernels.base import ACTIVATIONS
from dynaexq.kernels.dense import PackedMatrix, packed_bytes
from dynaexq.native import PackedLinear, instruction_sets, team_kind
from dynaexq.plan.ceilings import (
    ARENA_BYTES,
    EXPERT,
    TOP_K,
    RandomExperts,
    Reading,
    Spread,
    Streaming,
    Work,
    measure_experts,
    time_rounds,
)
from dynaexq.plan.memory import MIB
from dynaexq.tuning import GIGABYTE

TIERS = ("int1", "int2", "int3", "int4", "int2+2", "int8", "int4+4", "bf16")
GROUPS = (32, 64, 128)
QUICK_TIERS = ("int2", "int4", "int8")
UNEVEN = ("int2d3", "int2d4", "int3d4", "int4d8")
"""Measured with one group size."""

WORK = Work()
DENSE = ("int4", "int8", "bf16")
ROWS, COLUMNS, BATCH = 4096, 2048, 128
QUANTISED_ROWS = 64
"""Of a dense matrix; the others repeat them, as quantising would take longer than everything else."""

ROUNDS, QUICK_ROUNDS = 21, 7


@dataclass(frozen=True)
class DenseSpeed:
    """A dense layer at one token, and its operations per second at BATCH tokens."""

    dense: str
    activations: str
    one_token: Streaming
    batch: Spread


def measure_formats(quick: bool, reading: Reading) -> list[dict[str, Any]]:
    """All tiers, groups and activation modes, or the few of the quick form."""
    rows = []
    for tier in QUICK_TIERS if quick else (*TIERS, *UNEVEN):
        for group in (64,) if quick or tier in ("bf16", *UNEVEN) else GROUPS:
            fmt = tier_format(tier, group)
            experts = RandomExperts(fmt, EXPERT, ARENA_BYTES, WORK.prefill_experts)
            payload = sum(layout.payload_bytes for layout in experts.layouts)
            work = Work(rounds=QUICK_ROUNDS if quick else ROUNDS)
            for activations in ("int8",) if quick else ACTIVATIONS:
                print(f"{tier}, groups of {group}, {activations} activations", file=sys.stderr)
                speed = measure_experts(experts, activations, reading, TOP_K, work)
                bits = payload * 8 / EXPERT.weights
                size = {"bits_per_weight": bits, "experts": experts.shape.experts, "bytes": experts.expert_bytes}
                rows.append({**size, **asdict(speed)})
            experts.close()
    return rows


def measure_dense(dense: str, activations: str, reading: Reading, rounds: int) -> DenseSpeed:
    """PackedMatrix over as many matrices as fill ARENA_BYTES."""
    nbytes = packed_bytes(dense, ROWS, COLUMNS)
    matrices = _make_matrices(dense, activations, math.ceil(ARENA_BYTES / nbytes))
    tasks: dict[str, Callable[[], object]] = {"read": reading.read}
    for tokens in (1, BATCH):
        tasks[str(tokens)] = _rotate(matrices, torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(0)))
    seconds = time_rounds(tasks, rounds)
    return DenseSpeed(
        dense,
        activations,
        Streaming.of(seconds["1"], nbytes, seconds["read"], reading.nbytes),
        Spread.of(2 * ROWS * COLUMNS * BATCH / seconds[str(BATCH)]),
    )


def _make_matrices(dense: str, activations: str, count: int) -> list[PackedMatrix]:
    """Matrices [ROWS, COLUMNS], each with memory of its own."""
    weight = torch.randn(QUANTISED_ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * COLUMNS**-0.5
    seed = PackedMatrix(weight, dense, activations)
    matrices = []
    for _ in range(count):
        matrix = copy.copy(seed)
        matrix.rows, matrix.packed = ROWS, seed.packed.repeat(ROWS // QUANTISED_ROWS)
        matrix.native = PackedLinear(
            weights=matrix.packed.data_ptr(),
            nbytes=matrix.packed.nbytes,
            bits=matrix.format.bits,
            group=matrix.format.group_size,
            rows=ROWS,
            columns=COLUMNS,
            exact=activations == "fp32",
            instructions=instruction_sets()[0],
        )
        matrices.append(matrix)
    return matrices


def _rotate(matrices: list[PackedMatrix], x: torch.Tensor) -> Callable[[], object]:
    turn = itertools.cycle(matrices)
    return lambda: next(turn).multiply(x, None)


def render(result: dict[str, Any]) -> str:
    """The Markdown tables of a result."""
    shape = f"{EXPERT.hidden} x {EXPERT.intermediate}"
    batches = [f"{tokens}" for tokens in WORK.batches]
    head = ["experts", "activations", "us", "GB/s", "reading", "share", *batches, f"prefill {WORK.prefill_tokens}"]
    lines = [
        f"Experts of {shape}: a layer at one token ({TOP_K} experts), then GOP/s of tokens on one expert and of a "
        f"prefill over {WORK.prefill_experts} experts. {result['run']['cpu']}, {result['kernels']['instructions']}, "
        f"{result['run']['threads']} threads.",
        "",
        *_table(head, [[*_stream_cells(_name(row), row), *_batch_cells(row)] for row in result["experts"]]),
        "",
        f"Dense layers {COLUMNS} -> {ROWS}: at one token, then GOP/s at {BATCH}.",
        "",
        *_table(
            ["dense", "activations", "us", "GB/s", "reading", "share", f"{BATCH}"],
            [[*_stream_cells(row["dense"], row), _giga(row["batch"], 0)] for row in result["dense"]],
        ),
    ]
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    group = f", {row['group_size']}" if row["group_size"] else ""
    return f"{row['tier']}{group} ({row['bits_per_weight']:.2f} bits)"


def _stream_cells(name: str, row: dict[str, Any]) -> list[str]:
    stream = row["one_token"]
    return [
        name,
        row["activations"],
        f"{1e6 * stream['seconds']['median']:.0f}",
        _giga(stream["bytes_per_second"], 1),
        _giga(stream["read_bytes_per_second"], 1),
        f"{100 * stream['share_of_read']['median']:.0f} %",
    ]


def _batch_cells(row: dict[str, Any]) -> list[str]:
    return [*(_giga(spread, 0) for spread in row["batches"].values()), _giga(row["prefill"], 0)]


def _giga(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median'] / GIGABYTE:.{digits}f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---", "---", *["--:"] * (len(head) - 2)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three formats, one activation mode, few rounds")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the table between the markers of this file")
    arguments = parser.parse_args()
    pin_threads()
    reading = Reading(ARENA_BYTES)
    rounds, modes = (QUICK_ROUNDS, ("int8",)) if arguments.quick else (ROUNDS, ACTIVATIONS)
    dense = [asdict(measure_dense(name, mode, reading, rounds)) for name in DENSE for mode in modes]
    result = {
        "run": describe_run(),
        "kernels": {"instructions": instruction_sets()[0], "team": team_kind()},
        "setting": {"expert": asdict(EXPERT), "top_k": TOP_K, "arena_mib": ARENA_BYTES / MIB, "rounds": rounds},
        "experts": measure_formats(arguments.quick, reading),
        "dense": dense,
    }
    publish(result, render(result), "kernels", arguments.json, arguments.readme)


if __name__ == "__main__":
    main()
