"""The sweep of `dynaexq simulate`: run what is missing, then say, draw and write down which runs nothing beats."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from dynaexq.cli.configuration import read_configuration
from dynaexq.cli.output import progress_bar, stderr, write_json
from dynaexq.cli.simulate_view import print_costs
from dynaexq.core import OptionError, SideFileError
from dynaexq.plan.memory import format_bytes
from dynaexq.predictor.choice import NAMES
from dynaexq.simulate.pareto import find_front, loss_of, make_configuration
from dynaexq.simulate.plot import plot_sweep
from dynaexq.simulate.sweep import Settings, SweepJob, SweepResults, run_sweep
from dynaexq.store import MANIFEST_NAME


class SweepOutput(NamedTuple):
    """Where results go: runs to go on with, the `best` few settings as files of `configs`, a picture, JSON."""

    results: Path | None
    configs: Path | None
    best: int
    plot: Path | None
    json_target: str | None


def sweep_and_report(job: SweepJob, runs: list[Settings], jobs: int, output: SweepOutput) -> None:
    """Run what `output.results` does not have, and report. Raises OptionError where no run could be had."""
    kept = SweepResults(output.results, _identify(job))
    print_costs(job.costs)
    with progress_bar() as progress:
        run_sweep(job, runs, kept, jobs, lambda done, total: progress("runs", done, total))
    found = kept.of(runs)
    front = find_front(found)
    if output.json_target != "-":
        for place, result in enumerate(front, 1):
            print(f"{place}. {_describe(result['settings'])}: {_summarise(result)}")
    for result in found:
        if "error" in result:
            stderr.print(f"{_describe(result['settings'])}: {result['error']}")
    if not front:
        raise OptionError("none of the runs could be had")
    if output.plot is not None:
        plot_sweep(found, output.plot)
    if output.configs is not None:
        for path in _write_configurations(job, front[: output.best], output.configs):
            stderr.print(f"wrote {path}")
    if output.json_target:
        write_json(output.json_target, {"runs": found, "front": front, "costs": job.costs.model_dump()})


def check_configurations(target: Path) -> None:
    """Raise OptionError unless the best settings can be written into the directory `target`, over nothing else."""
    try:
        if not target.resolve().parent.is_dir() or (target.exists() and not target.is_dir()):
            raise OptionError(f"--configs {target}: not a directory, nor a new one in an existing one")
        for path in target.glob("best-*.json"):
            try:
                read_configuration(path)
            except OptionError as error:
                raise OptionError(
                    f"--configs {target}: {error}; it is not overwritten, name another directory"
                ) from None
    except OSError as error:
        raise OptionError(f"--configs {target}: {error.strerror or error}") from error


def _identify(job: SweepJob) -> str:
    """Of everything that decides results but the settings of a run."""
    options = asdict(replace(job.options, profile=None))
    predictor = job.options.predictor
    files = [job.trace, job.options.profile, job.store and job.store / MANIFEST_NAME]
    files.append(None if predictor in (None, *NAMES) else Path(predictor))
    whole = [*map(_digest, files), job.expert, job.costs.model_dump(), options]
    return hashlib.blake2b(json.dumps(whole, default=str).encode(), digest_size=16).hexdigest()


def _digest(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SideFileError(f"cannot read {path}: {error.strerror or error}") from error


def _write_configurations(job: SweepJob, front: list[dict[str, Any]], target: Path) -> list[Path]:
    options = job.options
    fixed = {
        "mode": options.mode,
        "tier": options.tier,
        "high": options.high,
        "low": options.low,
        "expert_memory": str(options.expert_memory) if options.expert_memory else None,
        "predictor": options.predictor,
        "map": None if options.profile is None else str(options.profile.resolve()),
        "tune": [f"{name}={value}" for name, value in options.tune.items()],
    }
    written = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for place, result in enumerate(front, 1):
            configuration = json.dumps(make_configuration(result["settings"], fixed), indent=2)
            written.append(target / f"best-{place}.json")
            written[-1].write_text(configuration + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--configs {target}: {error.strerror or error}") from error
    return written


def _describe(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _summarise(result: dict[str, Any]) -> str:
    quality = (
        f"{'share at the lowest tier' if result['predicted_kl'] is None else 'predicted KL'} {loss_of(result):.4g}"
    )
    if result.get("cache"):
        quality = f"{100 * result['cache']['hit_rate']:.1f} % of needs met"
    return (
        f"{quality}, {result['tokens_per_second']:.1f} tokens/s, "
        f"{format_bytes(result['expert_bytes'])} of experts, {format_bytes(result['bytes_moved'])} moved"
    )
