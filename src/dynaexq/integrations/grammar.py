"""Answers that must follow a grammar: JSON schemas and regular expressions, through llguidance."""

from __future__ import annotations

import json
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher

from dynaexq.core import OptionError

MAX_GRAMMAR_BYTES = 64 << 10
FORM: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,9}"}
"""Space between parts, but no end of it: a small model, once it has begun, goes on for ever."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Grammars:
    """Makes constraints for the tokens of one model."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_tokens: frozenset[int]) -> None:
        """`vocabulary` is that of the logits, which may be padded. Raises ValueError for tokenizers of another kind."""
        self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(stop_tokens) or None)
        self._vocabulary = vocabulary

    def json_schema(self, schema: dict[str, Any]) -> MatcherConstraint:
        """JSON that a schema describes. Raises OptionError for one that cannot be enforced."""
        text = json.dumps(schema)
        if len(text) > MAX_GRAMMAR_BYTES:
            raise OptionError(f"the JSON schema is larger than {MAX_GRAMMAR_BYTES} bytes")
        try:
            return self._start(LLMatcher.grammar_from_json_schema(text, overrides=FORM))
        except ValueError as error:
            raise OptionError(f"the JSON schema cannot be enforced: {error}") from error

    def regex(self, pattern: str) -> MatcherConstraint:
        """Text that a regular expression matches as a whole. Raises OptionError."""
        if len(pattern) > MAX_GRAMMAR_BYTES:
            raise OptionError(f"the regular expression is larger than {MAX_GRAMMAR_BYTES} bytes")
        return self._start(LLMatcher.grammar_from_regex(pattern))

    def _start(self, grammar: str) -> MatcherConstraint:
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise OptionError(f"the grammar cannot be enforced: {matcher.get_error()}")
        return MatcherConstraint(matcher, self._vocabulary)


class Delayed:
    """A constraint that begins after token `after`: a grammar for an answer, not for the thoughts before it."""

    def __init__(self, constraint: MatcherConstraint, after: int) -> None:
        self._constraint, self._after, self._begun = constraint, after, False

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with what cannot come next at minus infinity."""
        return self._constraint.mask(logits) if self._begun else logits

    def accept(self, token: int) -> None:
        """Go on by one token."""
        if self._begun:
            self._constraint.accept(token)
        self._begun = self._begun or token == self._after

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self._begun and self._constraint.complete


class MatcherConstraint:
    """See `engine.requests.Constraint`."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with what cannot come next at minus infinity."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.zeros(self._vocabulary, dtype=torch.bool)
        known = min(len(bits), self._vocabulary)
        allowed[:known] = torch.from_numpy(bits[:known].astype(np.bool_))
        return logits.masked_fill(~allowed, -torch.inf)

    def accept(self, token: int) -> None:
        """Go on by one token. Raises RuntimeError if it is not allowed."""
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"the grammar does not allow token {token}: {self._matcher.get_error()}")

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())
