"""The next token of a sequence from its logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dynaexq.engine.candidates import draw_place, draw_token
from dynaexq.engine.requests import Alternative, Constraint, Request, Sampling, ScoredEvent, TokenEvent


class Warper(Protocol):
    """Changes to the logits of one sequence, [vocabulary]."""

    def penalize(self, seen: list[int], logits: torch.Tensor) -> torch.Tensor:
        """What repetition calls for after the tokens `seen`."""

    def cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the temperature, with what top_k, top_p and min_p cut off at minus infinity."""


WarperFactory = Callable[[Sampling], Warper]


class Sampler:
    """Chooses the tokens of one sequence. The same seed, prompt and logits give the same tokens."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        make_warper: WarperFactory,
        constraint: Constraint | None = None,
    ) -> None:
        self._sampling = sampling
        self._constraint = constraint
        self._warper = make_warper(sampling)
        self._ids = list(prompt)
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is all there is to it, so that many sequences can be answered at once."""
        return self._sampling.greedy and self._constraint is None

    @property
    def complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._constraint is not None and self._constraint.complete

    def choose(self, logits: torch.Tensor) -> TokenEvent:
        """The next token, from logits float32 [vocabulary]."""
        sampling = self._sampling
        scores = logits.clone()
        for token, value in sampling.bias.items():
            scores[token] += value
        for token, count in self._counts.items() if sampling.presence or sampling.frequency else ():
            scores[token] -= sampling.presence + sampling.frequency * count
        if self._constraint is not None:
            scores = self._constraint.mask(scores)
        if sampling.repetition != 1.0:
            scores = self._warper.penalize(self._ids, scores)
        token = int(scores.argmax()) if sampling.temperature == 0 else self._draw(scores)
        self._ids.append(token)
        self._counts[token] += 1
        if self._constraint is not None:
            self._constraint.accept(token)
        if sampling.logprobs is None:
            return TokenEvent(token)
        return _with_logprobs(token, logits, sampling.logprobs)

    def _draw(self, scores: torch.Tensor) -> int:
        token = draw_token(scores, self._sampling, self._generator)
        if token is not None:
            return token
        return draw_place(torch.softmax(self._warper.cut(scores), -1).numpy(), self._generator)


def score_prompt(request: Request, place: int, logits: torch.Tensor) -> ScoredEvent:
    """What logits [count, vocabulary] of the prompt's tokens from `place` on say of those that follow them."""
    assert request.scores is not None
    first = [TokenEvent(request.prompt[0])] if place == 0 and request.scores.start == 0 else []
    targets = request.prompt[place + 1 : place + 1 + len(logits)]
    rows = zip(targets, logits, strict=False)  # nothing follows the last
    return ScoredEvent((*first, *(_with_logprobs(target, row, request.scores.alternatives) for target, row in rows)))


def _with_logprobs(token: int, logits: torch.Tensor, count: int) -> TokenEvent:
    logprobs = torch.log_softmax(logits, -1)
    best = torch.topk(logprobs, count)
    alternatives = tuple(
        Alternative(other, value) for other, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    return TokenEvent(token, float(logprobs[token]), alternatives)
