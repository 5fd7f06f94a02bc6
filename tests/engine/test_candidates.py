"""The short way to a token chooses among the same tokens, as likely, as Transformers' processors over all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.engine import Sampling
from dynaexq.engine.candidates import draw, narrow
from dynaexq.integrations.transformers.sampling import TransformersWarper


@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    temperature=st.sampled_from([0.2, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.1]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_candidates_are_those_of_transformers(
    seed: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(seed)) * spread
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = torch.softmax(TransformersWarper(sampling).cut(logits), -1)
    candidates = narrow(logits, sampling)
    if candidates is None:
        return
    found = torch.zeros_like(expected)
    found[candidates.ids] = torch.softmax(candidates.logits, -1)
    # sums of thousands of shares in another order: a token at the very edge of top_p may fall on either side
    assert (found - expected).abs().sum() < 1e-3
    assert ((found > 0) != (expected > 0)).sum() <= (2 if top_p < 1 else 0)


def test_the_short_way_is_taken_where_it_can_be() -> None:
    peaked, flat = torch.randn(3000) * 8, torch.zeros(3000)
    for cuts in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert narrow(peaked, Sampling(temperature=1.0, **cuts)) is not None
    assert narrow(peaked, Sampling(temperature=1.0)) is None
    assert narrow(peaked, Sampling(temperature=1.0, top_k=2999)) is None
    assert narrow(flat, Sampling(temperature=1.0, min_p=0.1)) is None


def test_what_cannot_be_chosen_never_is() -> None:
    logits, generator = torch.full((50,), -torch.inf), torch.Generator().manual_seed(0)
    logits[[7, 21]] = torch.tensor([0.0, 1.0])
    drawn = [draw(logits, generator) for _ in range(400)]
    assert set(drawn) == {7, 21} and 0.6 < drawn.count(21) / 400 < 0.85
    for broken in (torch.nan, torch.inf):
        logits[3] = broken
        with pytest.raises(ValueError, match="no numbers"):
            draw(logits, generator)
