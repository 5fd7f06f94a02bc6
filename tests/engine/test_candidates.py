"""The short way to a token chooses among the same tokens, as likely, as Transformers' processors over all of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.engine import Sampling
from dynaexq.engine.candidates import draw_place, draw_token
from dynaexq.integrations.transformers.sampling import TransformersWarper


def draws_at(monkeypatch: pytest.MonkeyPatch, aims: np.ndarray) -> None:  # type: ignore[type-arg]
    """The next random numbers are `aims`."""
    coming = iter(aims.tolist())
    monkeypatch.setattr("dynaexq.engine.candidates._random", lambda _: next(coming))


@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    temperature=st.sampled_from([0.2, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.1]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_shares_are_those_of_transformers(
    seed: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Drawn at evenly spaced places instead of random ones, every token comes up by its probability."""
    vocabulary, count = 400, 500
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = torch.softmax(TransformersWarper(sampling).cut(logits), -1).numpy()
    with pytest.MonkeyPatch.context() as patch:
        draws_at(patch, (np.arange(count) + 0.5) / count)
        tokens = [draw_token(logits, sampling, torch.Generator()) for _ in range(count)]
    if None in tokens:
        assert set(tokens) == {None} and (top_k or top_p < 1 or min_p)
        return
    counts = np.bincount(np.array(tokens, np.int64), minlength=vocabulary)
    # a token at the very edge of top_p may fall on either side, as sums are added up in another order
    assert np.abs(counts / count - expected).max() <= 1.01 / count + (2e-3 if top_p < 1 else 0)


def test_the_short_way_is_taken_where_it_can_be() -> None:
    peaked, flat, generator = torch.randn(3000) * 8, torch.zeros(3000), torch.Generator()
    for cuts in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {}):
        assert draw_token(peaked, Sampling(temperature=1.0, **cuts), generator) is not None  # type: ignore[arg-type]
    assert draw_token(peaked, Sampling(temperature=1.0, top_k=2999), generator) is None
    assert draw_token(flat, Sampling(temperature=1.0, min_p=0.1), generator) is not None
    wide = torch.linspace(0, 100, 3000)
    assert draw_token(wide, Sampling(temperature=1.0, top_p=0.9999999), generator) is None


def test_what_is_far_is_drawn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-13.0, 0.0, -14.0, -30.0])
    shares = torch.softmax(logits, -1).double().numpy()
    aims = np.array([0.5, shares[1] + shares[0] / 2, 1 - shares[3] - shares[2] / 2, 1 - 1e-16])
    draws_at(monkeypatch, aims)
    drawn = [draw_token(logits, Sampling(temperature=1.0), torch.Generator()) for _ in aims]
    assert drawn[:3] == [1, 0, 2] and drawn[3] in (2, 3)


def test_what_cannot_be_chosen_never_is() -> None:
    logits, generator = torch.full((50,), -torch.inf), torch.Generator().manual_seed(0)
    logits[[7, 21]] = torch.tensor([0.0, 1.0])
    for cuts in ({}, {"top_p": 0.99}, {"top_k": 3}):
        sampling = Sampling(temperature=1.0, **cuts)  # type: ignore[arg-type]
        drawn = Counter(draw_token(logits, sampling, generator) for _ in range(400))
        assert set(drawn) <= {7, 21, None} and (drawn[None] in (0, 400))
    assert {draw_place(torch.softmax(logits, -1).numpy(), generator) for _ in range(100)} == {7, 21}
    for broken in (torch.nan, torch.inf):
        logits[3] = broken
        with pytest.raises(ValueError, match="no numbers"):
            draw_token(logits, Sampling(temperature=1.0), generator)
