"""`dynaexq probe`: how fast memory, the link to the store and the kernels are here."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dynaexq.cli.options import JsonOption
from dynaexq.cli.output import check_json_target, reports_errors, stderr, write_json
from dynaexq.core import MemoryLimitError, OptionError
from dynaexq.launch import cache_directory
from dynaexq.plan.memory import MIB, format_bytes
from dynaexq.plan.probe import TOKENS, KernelSpeeds, measure_disk, measure_kernels, measure_memory, measure_store
from dynaexq.plan.process import available_memory
from dynaexq.plan.sizes import parse_size
from dynaexq.policy.pace import LINK_SHARE
from dynaexq.store import MANIFEST_NAME, ExpertStore
from dynaexq.tuning import GIGABYTE

KERNEL_BYTES = 128 * MIB
"""Of experts at one tier, and of the buffer that is read beside them."""


@reports_errors
def probe(
    place: Annotated[
        Path | None,
        typer.Argument(help="A store to read, or a directory to write a file into. [default: the cache directory]"),
    ] = None,
    size: Annotated[str, typer.Option(help="Bytes to move in each measurement.")] = "256M",
    kernels: Annotated[bool, typer.Option("--kernels/--no-kernels", help="Measure the expert kernels too.")] = True,
    json_target: JsonOption = None,
) -> None:
    """Measure memory bandwidth, the link that expert versions come over (and what follows for background copies), and
    what the expert kernels reach.

    Examples:

      dynaexq probe ./store

      dynaexq probe /mnt/ssd --size 1G --no-kernels --json -
    """
    check_json_target(json_target)
    nbytes = parse_size(size, "--size")
    if nbytes < MIB:
        raise OptionError(f"--size {size}: too little to measure; give at least 1M")
    if 2 * nbytes > available_memory():
        raise MemoryLimitError(f"--size {size}: two buffers of it are more than the memory available; give less")
    if kernels and available_memory() < 2 * KERNEL_BYTES:
        raise MemoryLimitError(
            f"the kernels are measured with {format_bytes(2 * KERNEL_BYTES)}, more than the memory available; "
            "--no-kernels leaves them out"
        )
    target = cache_directory() if place is None else place
    if place is None:
        target.mkdir(parents=True, exist_ok=True)
    elif not place.is_dir():
        raise OptionError(f"{place} is no directory")
    memory = measure_memory(nbytes)
    is_store = (target / MANIFEST_NAME).exists()
    link = measure_store(ExpertStore.open(target), nbytes) if is_store else measure_disk(target, nbytes)
    rate = LINK_SHARE * link.bytes_per_second
    how = "direct" if link.direct_io else "buffered: this file system has no direct I/O"
    stderr.print(f"memory: read {memory.read / GIGABYTE:.1f} GB/s, copy {memory.copy / GIGABYTE:.1f} GB/s")
    speed = f"{link.bytes_per_second / GIGABYTE:.2f} GB/s, checked"
    stderr.print(f"link: {speed}, over {format_bytes(link.nbytes)} of {target} ({how})")
    stderr.print(f"background copies: {rate / GIGABYTE:.2f} GB/s, {100 * LINK_SHARE:.0f} % of the link, unless tuned")
    reached = measure_kernels(KERNEL_BYTES) if kernels else None
    if reached:
        _print_kernels(reached)
    if json_target:
        speeds = {"memory": asdict(memory), "link": asdict(link), "background_bytes_per_second": rate}
        more = {"kernels": asdict(reached)} if reached else {}
        write_json(json_target, {"place": str(target), "store": is_store, **speeds, **more})


def _print_kernels(reached: KernelSpeeds) -> None:
    threads = f"{reached.threads} thread{'s' if reached.threads > 1 else ''}"
    for name, tier in reached.tiers.items():
        stderr.print(
            f"kernels ({reached.instructions}, {threads}): {name} {tier.bytes_per_second / GIGABYTE:.1f} GB/s at one "
            f"token ({100 * tier.share_of_read:.0f} % of reading), {tier.operations_per_second / 1e9:.0f} GOP/s at "
            f"{TOKENS} tokens"
        )
