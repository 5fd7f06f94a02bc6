"""A store of the embedded model whose versions are fitted to texts that no benchmark evaluates on."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.workloads import SHIPPED
from dynaexq.evaluate import read_documents
from dynaexq.launch import EMBEDDED_MODEL

SKIPPED_CHARACTERS = 300_000
"""At the head of a shipped text, which benchmarks read: calibration takes what comes after."""

CHARACTERS = 120_000
TOKENS = 16_384
"""Of each text, at most."""


def make_calibrated_store(directory: Path, tiers: str, tokens: int = TOKENS) -> Path:
    """Calibrate on `tokens` of English, mathematics and code, and prepare `tiers` for it; both in `directory`."""
    texts = []
    for name, text in _read_texts().items():
        texts += ["--text", str(directory / f"{name}.txt")]
        (directory / f"{name}.txt").write_text(text)
    inputs, store = directory / "inputs", directory / "calibrated"
    _run("calibrate", str(EMBEDDED_MODEL), *texts, "--max-tokens", str(tokens), "--inputs", str(inputs))
    _run("prepare", str(EMBEDDED_MODEL), "-o", str(store), "--tiers", tiers, "--calibration", str(inputs))
    return store


def _read_texts() -> dict[str, str]:
    english, mathematics = (
        "\n\n".join(read_documents(SHIPPED / name))[SKIPPED_CHARACTERS:][:CHARACTERS]
        for name in ("english_heldout.txt", "gsm8k_test.jsonl")
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    code = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(library.glob("*.py"))[:20])
    return {"english": english, "mathematics": mathematics, "code": code[:CHARACTERS]}


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dynaexq", *arguments], check=True)
