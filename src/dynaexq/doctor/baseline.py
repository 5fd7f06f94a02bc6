"""Figures that were kept, to compare with: JSON, whole or not at all, never over something else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from dynaexq.core import OptionError, SideFileError
from dynaexq.doctor.checks import Finding
from dynaexq.doctor.figures import UNITS, Figures, Subject
from dynaexq.doctor.verdicts import ORDER, Status
from dynaexq.store.files import replace_atomically, write_all
from dynaexq.traffic.own_files import check_own_file

VERSION = 1
BEGINNING = b'{"dynaexq_baseline"'
MAX_BYTES = 1 << 20


class Change(NamedTuple):
    """A figure in the baseline and now (None: not known)."""

    name: str
    then: float | None
    now: float | None


class Baseline(BaseModel):
    """Figures, and how every check stood; `dynaexq_baseline` is the format's version, `taken` by which program."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    dynaexq_baseline: int = VERSION
    taken: str
    subject: Subject
    figures: dict[str, float]
    checks: dict[str, Status]

    @classmethod
    def of(cls, figures: Figures, findings: Sequence[Finding], program: str) -> Baseline:
        """Of now."""
        checks = {finding.name: finding.status for finding in findings}
        return cls(taken=program, subject=figures.subject, figures=dict(figures.known()), checks=checks)

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Read one.

        Raises:
            OptionError: it is not there, or cannot be read.
            SideFileError: it is damaged, or no baseline.
        """
        try:
            if not path.is_file():
                raise OptionError(f"--baseline {path}: not there, or no regular file; --save-baseline FILE makes one")
            with path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise OptionError(f"--baseline {path}: {error.strerror or error}") from error
        if len(text) > MAX_BYTES or not text.startswith(BEGINNING):
            raise SideFileError(f"{path} is no baseline; --save-baseline FILE makes one")
        try:
            found = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]).encode("unicode_escape").decode()
            where = f" at {place}" if place else ""
            raise SideFileError(f"{path} is damaged{where}: {first['msg']}; take a new baseline") from error
        found._check(path)
        return found

    def check_subject(self, subject: Subject, path: Path) -> None:
        """Raise SideFileError unless the baseline at `path` is of the same kind and model."""
        if self.subject.kind != subject.kind:
            raise SideFileError(f"{path} is a baseline of a {self.subject.kind}, and this is a {subject.kind}")
        if _model_of(self.subject) != _model_of(subject):
            raise SideFileError(f"{path} is a baseline of {_name(self.subject)}, and this is {_name(subject)}")

    def compare(self, figures: Figures) -> list[Change]:
        """All figures of either, in their order."""
        now = dict(figures.known())
        return [
            Change(name, self.figures.get(name), now.get(name)) for name in UNITS if name in self.figures or name in now
        ]

    def worse(self, findings: Sequence[Finding]) -> list[str]:
        """Checks that stand worse now; what was or is unknown cannot be compared."""
        return [
            finding.name
            for finding in findings
            if (then := self.checks.get(finding.name)) in ORDER
            and finding.status in ORDER
            and ORDER.index(finding.status) > ORDER.index(then)
        ]

    def save(self, path: Path) -> None:
        """Write it. Raises OptionError, see `check_target`; StoreError where writing fails."""
        check_target(path)
        first, *rest = json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False).splitlines()
        text = "\n".join([first + rest[0].strip(), *rest[1:]]) + "\n"  # begins with BEGINNING
        with replace_atomically(path) as descriptor:
            write_all(descriptor, text.encode())

    def _check(self, path: Path) -> None:
        if self.dynaexq_baseline != VERSION:
            raise SideFileError(
                f"{path} is a baseline of version {self.dynaexq_baseline}, this program reads {VERSION}; take a new one"
            )
        strange = [name for name in self.figures if name not in UNITS]
        if strange:
            raise SideFileError(f"{path} is damaged: it has a figure {strange[0]!r} that is not known")


def check_target(path: Path) -> None:
    """Raise OptionError unless a baseline can be written there: nothing but an earlier one is overwritten."""
    check_own_file(path, "--save-baseline", "baseline", BEGINNING)


def _model_of(subject: Subject) -> tuple[Any, ...]:
    return subject.model, subject.layers, subject.experts


def _name(subject: Subject) -> str:
    return f"{subject.model or 'an unknown model'!r}, {subject.layers} layers of {subject.experts} experts"
