"""Evaluation texts: plain files, or one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path

from dynaexq.core import OptionError

FIELDS = (
    ("text",),
    ("question", "answer"),
    ("prompt", "canonical_solution"),
    ("prompt", "answer"),
    ("problem", "answer"),
)
"""Known forms of a JSON line; the fields are joined in order."""

MAX_TEXT_BYTES = 1 << 30


def read_documents(path: Path) -> list[str]:
    """Documents of a text: one per line of a `.jsonl` file, else the whole file.

    Raises:
        OptionError: unreadable, too large, not UTF-8, empty, or JSON lines of an unknown form.
    """
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise OptionError(f"{path} is larger than {MAX_TEXT_BYTES >> 30} GiB")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise OptionError(f"{path} is empty")
    if path.suffix != ".jsonl":
        return [text]
    return [_document(line, path, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _document(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{path}, line {number}: not valid JSON ({error})") from error
    if isinstance(record, dict):
        for fields in FIELDS:
            if all(isinstance(record.get(field), str) for field in fields):
                joint = "" if fields == ("prompt", "canonical_solution") else "\n"
                return joint.join(record[field] for field in fields)
    known = " or ".join("+".join(fields) for fields in FIELDS)
    raise OptionError(f"{path}, line {number}: no text; known fields are {known}")
