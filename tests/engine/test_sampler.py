"""One sequence's tokens: what each option does to them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from dynaexq.engine import Sampling, TokenEvent
from dynaexq.engine.sampler import Sampler
from dynaexq.integrations.transformers.sampling import TransformersWarper

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0, 2.5])


def sampler(prompt: tuple[int, ...] = (0,), **options: Any) -> Sampler:
    return Sampler(Sampling(**options), prompt, TransformersWarper)


def draw(count: int = 400, **options: Any) -> Counter[int]:
    chosen = sampler(seed=7, **options)
    return Counter(chosen.choose(LOGITS).token for _ in range(count))


def test_greedy_is_the_largest() -> None:
    assert sampler().choose(LOGITS) == TokenEvent(1)
    assert sampler().greedy
    for options in ({"temperature": 1.0}, {"bias": {0: 1.0}}, {"presence": 1.0}, {"repetition": 2.0}, {"logprobs": 0}):
        assert not sampler(**options).greedy  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    counts = draw(6_000, temperature=temperature)
    for token, share in enumerate(expected.tolist()):
        assert abs(counts[token] / 6_000 - share) < 0.025


def test_cuts() -> None:
    assert set(draw(temperature=1.0, top_k=2)) == {1, 5}
    assert set(draw(temperature=1.0, top_p=0.5)) == {1, 5}  # 0.44, and what reaches 0.5
    assert set(draw(temperature=1.0, min_p=0.5)) == {1, 5}  # e^-0.5 = 0.61, e^-1 = 0.37
    assert set(draw(4000, temperature=1.0)) == set(range(6))


def test_the_same_seed_gives_the_same_tokens() -> None:
    def tokens(seed: int | None) -> list[int]:
        chosen = sampler(temperature=1.0, seed=seed)
        return [chosen.choose(LOGITS).token for _ in range(40)]

    assert tokens(3) == tokens(3) != tokens(4)
    assert tokens(None) != tokens(None)


def test_bias_and_penalties() -> None:
    assert sampler(bias={4: 100.0}).choose(LOGITS).token == 4
    assert sampler(bias={1: -100.0}).choose(LOGITS).token == 5
    once = sampler(presence=0.6)
    assert [once.choose(LOGITS).token for _ in range(3)] == [1, 5, 1]  # 3, then 2.4 < 2.5, then 2.4 > 1.9
    often = sampler(frequency=0.6)
    assert [often.choose(LOGITS).token for _ in range(5)] == [1, 5, 1, 2, 5]
    assert sampler((1, 1), repetition=1.5).choose(LOGITS).token == 5  # the prompt counts: 3 / 1.5
    assert sampler((1, 1), presence=2.0, frequency=2.0).choose(LOGITS).token == 1  # and here it does not


def test_logprobs_are_those_of_the_model() -> None:
    event = sampler(bias={4: 100.0}, temperature=2.0, logprobs=2).choose(LOGITS)
    expected = torch.log_softmax(LOGITS, -1)
    assert event.token == 4 and event.logprob == pytest.approx(float(expected[4]))
    assert [other.token for other in event.alternatives] == [1, 5]
    assert [other.logprob for other in event.alternatives] == pytest.approx([float(expected[1]), float(expected[5])])
    assert sampler(logprobs=0).choose(LOGITS).alternatives == ()
