"""A long run under one memory limit while the workload shifts: `make soak` for ten minutes, here for seconds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dynaexq.integrations.transformers.random_model import describe_random_model
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.store import PrepareOptions
from dynaexq.store.synthetic import write_synthetic
from support.files import directory_bytes, silent

SECONDS = float(os.environ.get("DYNAEXQ_SOAK_SECONDS", "5"))
LIMIT = 1100 << 20
SHAPE = {
    "vocab_size": 32_768,  # a file of dense weights larger than what a plan has to spare
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

RUN = """
import json, sys, time
from pathlib import Path
import torch
from dynaexq.launch import Opened
from dynaexq.launch_options import LaunchOptions
from dynaexq.native import limit_malloc
from dynaexq.plan.memory import Workload

limit_malloc()
torch.set_num_threads(2)
store, state, limit, seconds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
opened = Opened(str(store))
options = LaunchOptions(mode="dynaexq", high="bf16", low="int4", memory=limit, dtype="bfloat16", state=state)
plan = opened.plan(options, Workload(8, 8, 1, 1, 2, kv_cache=False))
launch = opened.launch(options, plan, lambda *_: None)
generator = torch.Generator().manual_seed(0)
phases, windows, promotions, began = 0, 0, [], time.monotonic()
while phases < 3 or time.monotonic() - began < seconds:
    words = torch.randint(0, 256, (4,), generator=generator)  # a phase's prompts are made of few words
    with torch.inference_mode():
        for _ in range(15):
            ids = words[torch.randint(0, len(words), (1, 8), generator=generator)]
            launch.model(ids, use_cache=False, logits_to_keep=1)  # checks resident memory against the limit, too
            windows += 1
    phases += 1
    promotions.append(launch.runtime.counters.promotions)
    print("phase", phases, flush=True)
launch.runtime.close()
launch.runtime.experts.check_integrity()
launch.check_memory()
print(json.dumps({"phases": phases, "windows": windows, "by_phase": promotions, **launch.report()}))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("soak")
    tokenizer = Path(
        shutil.copytree(EMBEDDED_MODEL, base / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    )
    (tokenizer / "config.json").write_text(json.dumps({"vocab_size": SHAPE["vocab_size"]}))
    model = describe_random_model("qwen3-30b-a3b", tokenizer, **SHAPE)
    write_synthetic(model, base / "store", PrepareOptions(("int4", "bf16"), 64), silent)
    return base / "store"


def test_memory_stays_within_its_limit_while_the_workload_shifts(store: Path, tmp_path: Path) -> None:
    assert directory_bytes(store) > 1 << 30
    state = tmp_path / "state.json"
    command = [sys.executable, "-c", RUN, str(store), str(state), str(LIMIT)]
    result = run(command, SECONDS)
    assert result["rss_peak_bytes"] <= LIMIT == result["budget_bytes"]
    assert result["device_bytes_peak"] <= LIMIT
    assert 0 < result["experts_high"] < 384
    assert result["by_phase"] == sorted(result["by_phase"])
    assert result["by_phase"][-1] > result["by_phase"][0]
    assert result["failed"] == result["waits"] == 0
    print({key: result[key] for key in ("phases", "windows", "promotions", "bytes_moved", "rss_peak_bytes")})

    killed = subprocess.Popen([*command, "1e9"], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline()  # it serves, and moves experts
    killed.kill()
    killed.communicate()
    again = run(command, 0)
    assert again["rss_peak_bytes"] <= LIMIT
    assert again["failed"] == 0


def run(command: list[str], seconds: float) -> dict[str, Any]:
    done = subprocess.run([*command, str(seconds)], check=True, stdout=subprocess.PIPE, text=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
