"""Real resident memory (VmHWM of a spawned child) on a checkpoint of more than 1 GiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.files import directory_bytes
from support.large_checkpoint import write_large_checkpoint

MIB = 1 << 20
PREAMBLE = """
import json, sys, torch
from pathlib import Path
from dynaexq.native import limit_malloc
limit_malloc()
from transformers.models.qwen3_moe import modeling_qwen3_moe
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, open_experts
from dynaexq.plan.process import peak_resident_bytes
from dynaexq.store import PrepareOptions, prepare_store
torch.set_num_threads(2)
imports = peak_resident_bytes()
"""
PREPARE = """
_, source = open_experts(Path(sys.argv[1]))
prepare_store(source, Path(sys.argv[2]), PrepareOptions(("int4",), 64, "als"), lambda *_: None)
print(json.dumps(peak_resident_bytes() - imports))
"""
LOAD = """
model = load_model(Path(sys.argv[2]), DynaExqConfig(mode="static", tier="int4"), torch.bfloat16)
after_load = peak_resident_bytes() - imports
with torch.inference_mode():
    model(torch.arange(32).unsqueeze(0))
print(json.dumps([after_load, peak_resident_bytes() - imports, runtime_of(model).experts.expert_bytes]))
"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("large")
    return write_large_checkpoint(base / "checkpoint"), base / "store"


def run(script: str, paths: tuple[Path, Path]) -> object:
    command = [sys.executable, "-c", PREAMBLE + script, *map(str, paths)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def test_preparing_and_loading_stay_within_their_memory(paths: tuple[Path, Path]) -> None:
    checkpoint, store = paths
    assert directory_bytes(checkpoint) > 1 << 30
    above_imports = run(PREPARE, paths)
    assert isinstance(above_imports, int)
    assert above_imports < 400 * MIB
    size = directory_bytes(store)
    after_load, after_forward, expert_bytes = run(LOAD, paths)  # type: ignore[misc]
    assert expert_bytes > 300 * MIB
    assert expert_bytes < after_load < 1.15 * size
    assert after_forward < 1.15 * size + 64 * MIB
    print(f"store {size / MIB:.0f} MiB; above imports: prepare {above_imports / MIB:.0f}, load {after_load / MIB:.0f}")
