"""Answers that must follow a grammar, through llguidance: JSON schemas, regular expressions, calls of functions."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher

from dynaexq.core import OptionError

MAX_GRAMMAR_BYTES = 64 << 10
SPACING: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,9}"}
"""Space between parts, but no end of it: a small model, once it has begun, goes on for ever."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}
TERMINALS = "TEXT: /(.|\\n)*/\nSPACE: /[ \\n]{0,2}/"

Form = dict[str, Any] | str
"""What an answer must be: a JSON schema, or a regular expression that matches all of it."""


class Thoughts(NamedTuple):
    """Tags of thoughts, which may come before an answer; where the prompt has `begun` them, they do."""

    opening: str
    closing: str
    begun: bool


class Calls(NamedTuple):
    """Functions that may be called: their names, and schemas of their arguments.

    A call stands between tags; without a closing one, calls are a JSON list to the end. `forced`: the answer is a call,
    or calls where `several` are allowed, and nothing else.
    """

    opening: str
    closing: str | None
    functions: dict[str, dict[str, Any]]
    forced: bool
    several: bool


class Grammars:
    """Makes constraints for the tokens of one model."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_tokens: frozenset[int]) -> None:
        """`vocabulary` is that of the logits, which may be padded. Raises OptionError for tokenizers of other kinds."""
        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer, vocabulary, sorted(stop_tokens) or None)
        except ValueError as error:
            raise OptionError(f"no grammar can be enforced with the model's tokenizer: {error}") from error
        self._tokenizer, self._vocabulary = tokenizer, vocabulary

    def start(
        self, form: Form | None, calls: Calls | None = None, thoughts: Thoughts | None = None
    ) -> MatcherConstraint:
        """A constraint for one answer: of a form, or calls, or either. Raises OptionError if it cannot be enforced."""
        parts = [] if form is None else [_named("form", form)]
        rules = [TERMINALS, *self._start_rules(thoughts)]
        if calls is None:
            rules.append("answer: @form")
        else:
            rules += self._call_rules(calls, free=form is None and not calls.forced)
            rules.append(f"answer: {_sequence(calls, form is not None)}")
            parts += [_named(f"arguments_{i}", schema) for i, schema in enumerate(calls.functions.values())]
        grammar = json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *parts]})
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise OptionError(f"the grammar is larger than {MAX_GRAMMAR_BYTES} bytes")
        matcher = LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            raise OptionError(f"the grammar cannot be enforced: {matcher.get_error()}")
        return MatcherConstraint(matcher, self._vocabulary)

    def _start_rules(self, thoughts: Thoughts | None) -> list[str]:
        if thoughts is None:
            return ["start: answer"]
        inner = self._text_up_to("thoughts", thoughts.closing)
        if thoughts.begun:
            return ["start: thoughts SPACE answer", inner]
        return [f"start: SPACE ({self._tag(thoughts.opening)} thoughts SPACE)? answer", inner]

    def _call_rules(self, calls: Calls, free: bool) -> list[str]:
        opening = self._text_up_to("opening", calls.opening) if free else f"opening: {self._tag(calls.opening)}"
        if calls.closing is not None:
            inner = f'"\\n" made "\\n" {self._tag(calls.closing)}'
        else:
            more = '(", " made)*' if calls.several else ""
            inner = f'" "? "[" made {more} "]"'
        made = [_literal(f'{{"name": "{name}", "arguments": ') for name in calls.functions]
        kinds = " | ".join(f'{begin} @arguments_{i} "}}"' for i, begin in enumerate(made))
        return [opening, f"call: opening {inner}", f"made: {kinds}"]

    def _text_up_to(self, rule: str, tag: str) -> str:
        """Any text, and the first such tag after it."""
        mark = self._tag(tag)
        return f"{rule}: TEXT {mark}" if mark.startswith("<[") else f"{rule}[lazy]: TEXT {mark}"

    def _tag(self, text: str) -> str:
        """Where one token stands for a tag, text that looks like it is not the tag."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else _literal(text)


def _sequence(calls: Calls, or_form: bool) -> str:
    repeats = calls.several and calls.closing is not None
    if calls.forced or or_form:
        return ('call ("\\n" call)*' if repeats else "call") + (" | @form" if or_form else "")
    return "call* TEXT" if repeats else "call | TEXT"


def _named(name: str, form: Form) -> dict[str, Any]:
    try:
        if isinstance(form, str):
            text = LLMatcher.grammar_from_regex(form)
        else:
            text = LLMatcher.grammar_from_json_schema(json.dumps(form), overrides=SPACING)
    except ValueError as error:
        raise OptionError(f"the grammar cannot be enforced: {error}") from error
    return {**json.loads(text)["grammars"][0], "name": name}


def _literal(text: str) -> str:
    return json.dumps(text)


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
