"""Ceilings of the kernels: what is measured on, and that the numbers belong together. No speed is asserted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertShape, MemoryLimitError, OptionError, decode_handle
from dynaexq.formats import decode, tier_format
from dynaexq.kernels import make_kernel
from dynaexq.plan import ceilings
from dynaexq.plan.ceilings import (
    RandomExperts,
    Reading,
    Spread,
    Streaming,
    Work,
    batch_calls,
    measure_experts,
    one_token_calls,
    prefill_call,
    time_rounds,
)
from dynaexq.plan.probe import measure_kernels

SHAPE = ExpertShape(256, 128)
KIB = 1 << 10


@pytest.fixture(autouse=True)
def short_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "BURST_SECONDS", 1e-5)


@pytest.mark.parametrize("tier", ["int1", "int2", "int4", "int8", "bf16"])
def test_every_expert_has_memory_of_its_own_and_weights_of_a_sane_size(tier: str) -> None:
    experts = RandomExperts(tier_format(tier), SHAPE, 300 * KIB, least=5)
    extent = experts.layouts[0].extent_bytes
    count = experts.shape.experts
    assert count >= 5 and 300 * KIB <= count * extent == experts.expert_bytes
    assert count == 5 or (count - 1) * extent < 300 * KIB
    blocks = [experts.block(decode_handle(int(word))) for word in experts.words]
    starts = sorted(block.data_ptr() for block in blocks)
    assert starts == list(range(starts[0], starts[0] + count * extent, extent))
    assert len({bytes(block.numpy()) for block in blocks}) == count
    for matrix in decode(blocks[-1], experts.formats[0], SHAPE):
        assert matrix.isfinite().all()
        assert float(matrix.std()) == pytest.approx(matrix.shape[1] ** -0.5, rel=0.2)
    experts.close()


@pytest.mark.parametrize("tier", ["int2+2", "int4+4"])
def test_nested_experts_bring_what_they_refine_along(tier: str) -> None:
    experts = RandomExperts(tier_format(tier), SHAPE, 1, least=3)
    handles = [decode_handle(int(word)) for word in experts.words]
    offsets = [handle.offset for handle in handles] + [handle.residual for handle in handles]
    assert len(set(offsets)) == 6
    for handle in handles:
        for matrix in experts.weights(handle):
            assert float(matrix.std()) == pytest.approx(matrix.shape[1] ** -0.5, rel=0.4)
    experts.close()


def test_calls_reach_every_expert_and_none_too_soon() -> None:
    experts = RandomExperts(tier_format("int4"), SHAPE, 1, least=11)
    routed = torch.cat([call.ids.flatten() for call in one_token_calls(experts, 4)]).tolist()
    assert len(routed) == len(set(routed)) == 8
    alone = batch_calls(experts, 3)
    assert {tuple(call.ids.flatten().tolist()) for call in alone} == {(expert,) * 3 for expert in range(11)}
    prefill = prefill_call(experts, 50, 6, 4)
    assert prefill.ids.shape == (50, 4) and prefill.hidden.shape == (50, 256)
    assert len(prefill.ids.unique()) == 6
    assert all(len(set(ids)) == 4 for ids in prefill.ids.tolist())
    found = make_kernel("native", experts, "fp32").forward(prefill)
    expected = make_kernel("reference", experts).forward(prefill)
    assert torch.allclose(found, expected, atol=1e-5) and expected.abs().max() > 0.01


def test_tasks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(ceilings, "BURST_SECONDS", 0.0)
    seconds = time_rounds({name: lambda name=name: order.append(name) for name in "ABC"}, 3)
    assert "".join(order) == "AABBCC" + "ABC" * 3
    assert all(len(each) == 3 and (each > 0).all() for each in seconds.values())


def test_shares_follow_from_bytes_and_seconds() -> None:
    found = Streaming.of(np.array([1.0, 2.0, 4.0]), 8, np.array([0.5, 1.0, 4.0]), 8)
    assert found.seconds.median == 2.0
    assert found.bytes_per_second.median == 4.0
    assert found.read_bytes_per_second.median == 8.0
    assert found.share_of_read == Spread.of(np.array([0.5, 0.5, 1.0]))
    assert Spread.of(np.arange(11.0)) == Spread(5.0, 1.0, 9.0)


@pytest.mark.parametrize("activations", ["int8", "fp32"])
def test_a_format_is_measured(activations: str) -> None:
    experts = RandomExperts(tier_format("int2", 32), SHAPE, 200 * KIB, least=8)
    reading = Reading(200 * KIB)
    assert float(reading.read()) == 50 * KIB
    work = Work((2, 4), 16, rounds=3)
    found = measure_experts(experts, activations, reading, 4, work)
    assert (found.tier, found.group_size, found.activations) == ("int2", 32, activations)
    assert found.prefill is not None
    assert list(found.batches) == [2, 4]
    stream = found.one_token
    for spread in (*found.batches.values(), found.prefill, stream.seconds, stream.share_of_read):
        assert 0 < spread.low <= spread.median <= spread.high
    assert stream.bytes_per_second.median == pytest.approx(4 * 3 * 256 * 128 * 3 / 8 / stream.seconds.median)
    assert measure_experts(experts, activations, reading, 4, replace(work, prefill_tokens=0)).prefill is None


def test_a_probe_names_the_machine_and_every_tier_that_serves() -> None:
    found = measure_kernels(100 * KIB, SHAPE, 2)
    assert found.instructions and found.threads >= 1
    assert found.team in ("openmp", "own")
    assert list(found.tiers) == ["int2", "int4", "int8", "bf16"]
    for tier in found.tiers.values():
        assert tier.bytes_per_second > 0 and tier.share_of_read > 0 and tier.operations_per_second > 0


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "available_memory", lambda: 1000)
    with pytest.raises(MemoryLimitError, match=r"needs 1.0 MiB at once, 1000 B are available"):
        Reading(1 << 20)
    with pytest.raises(MemoryLimitError, match="are available"):
        RandomExperts(tier_format("int4"), SHAPE, 1 << 20)
    with pytest.raises(OptionError, match="group size 128 does not divide"):
        RandomExperts(tier_format("int4", 128), ExpertShape(96, 128))
