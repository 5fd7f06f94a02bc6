"""Traces with hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaexq.evaluate import read_documents
from dynaexq.llm import LLM

TEXT = Path(__file__).parents[2] / "data" / "gsm8k_test.jsonl"


@pytest.fixture(scope="session")
def hidden_trace(embedded_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of ten requests of the embedded model."""
    path = tmp_path_factory.mktemp("hidden") / "run.parquet"
    with LLM(str(embedded_store), slots=2, context=160, mode="full", trace=path, trace_hidden=True) as llm:
        text = llm.encoder.encode("\n\n".join(read_documents(TEXT))[:4000])
        for stream in [llm.submit(text[64 * each : 64 * each + 48], 80) for each in range(10)]:
            stream.wait()
    return path
