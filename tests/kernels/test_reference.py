from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from dynaexq.core import OptionError
from dynaexq.device import CpuDevice
from dynaexq.formats import encode
from dynaexq.formats.codec import decode
from dynaexq.kernels import ExpertsCall, LayerFunctions, make_kernel
from dynaexq.residency import BudgetTracker, ResidentExperts
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from support.files import silent
from support.sources import SHAPE, RandomSource
from tests.residency.test_resident import mixed_tiers

TOKENS, TOP_K = 11, 2


def gate(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, -1)
    return F.silu(first) * second


@pytest.fixture
def experts(random_source: RandomSource, tmp_path: Path) -> ResidentExperts:
    prepare_store(random_source, tmp_path / "store", PrepareOptions(("int4", "bf16"), 32, "rtn"), silent)
    store = ExpertStore.open(tmp_path / "store")
    store.require_tier("int4")
    store.require_tier("bf16")
    resident = ResidentExperts(store, mixed_tiers(), CpuDevice(), BudgetTracker(1 << 20))
    resident.load(lambda done, total: None)
    return resident


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_mixed_tiers_equal_token_by_token_arithmetic(
    experts: ResidentExperts, random_source: RandomSource, biased: bool, interleaved: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, SHAPE.expert.hidden) * 0.1
    ids = torch.stack([torch.randperm(SHAPE.experts)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K)
    bias_up = torch.randn(SHAPE.experts, 2 * SHAPE.expert.intermediate) if biased else None
    bias_down = torch.randn(SHAPE.experts, SHAPE.expert.hidden) if biased else None
    function = (lambda x: gate(torch.cat((x[..., ::2], x[..., 1::2]), -1))) if interleaved else gate
    window, words = experts.handles.pin()
    layer = 1
    call = ExpertsCall(
        hidden,
        ids,
        weights,
        words[layer * SHAPE.experts : (layer + 1) * SHAPE.experts],
        LayerFunctions(function, interleaved, bias_up, bias_down),
    )
    found = make_kernel("reference", experts).forward(call)
    experts.handles.release(window)
    tiers = mixed_tiers()
    expected = torch.zeros_like(hidden)
    for token in range(TOKENS):
        for slot in range(TOP_K):
            key = SHAPE.expert_keys()[layer * SHAPE.experts + int(ids[token, slot])]
            fmt = experts.formats[experts.format_index[tiers[key]]]
            version = decode(encode(random_source.read(key), fmt, SHAPE.expert, "rtn").block, fmt, SHAPE.expert)
            first, second = version.gate @ hidden[token], version.up @ hidden[token]
            if bias_up is not None:
                bias = bias_up[key.expert]
                half = SHAPE.expert.intermediate
                first = first + (bias[::2] if interleaved else bias[:half])
                second = second + (bias[1::2] if interleaved else bias[half:])
            result = version.down @ (F.silu(first) * second)
            if bias_down is not None:
                result = result + bias_down[key.expert]
            expected[token] += weights[token, slot] * result
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_token_does_not_depend_on_its_batch(experts: ResidentExperts) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, SHAPE.expert.hidden) * 0.1
    ids, weights = torch.randint(0, SHAPE.experts, (TOKENS, 1)), torch.ones(TOKENS, 1)
    window, words = experts.handles.pin()
    functions = LayerFunctions(gate, False, None, None)
    kernel = make_kernel("reference", experts)

    def run(rows: slice) -> torch.Tensor:
        return kernel.forward(ExpertsCall(hidden[rows], ids[rows], weights[rows], words[: SHAPE.experts], functions))

    whole = run(slice(None))
    alone = torch.cat([run(slice(token, token + 1)) for token in range(TOKENS)])
    experts.handles.release(window)
    assert torch.allclose(whole, alone, atol=1e-4, rtol=1e-5)
    assert np.isfinite(whole.numpy()).all()


def test_unknown_kernel(experts: ResidentExperts) -> None:
    with pytest.raises(OptionError, match="unknown kernel 'cuda'; known kernels are native, reference"):
        make_kernel("cuda", experts)
