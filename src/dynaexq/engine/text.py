"""From tokens to text, as they come: pieces that are final, and stop strings that never show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MAX_PENDING = 32
"""Tokens whose text may still change: a character takes at most a few, unless it is none."""

Decode = Callable[[list[int]], str]


class TextDecoder:
    """Text of a growing row of tokens. A piece ends where no later token can change it: inside of a character nothing
    is said yet, and spaces depend on the token before."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """`before`: tokens of the prompt, whose last ones decide how the first piece begins."""
        self._decode = decode
        self._tokens = list(before)[-4:]
        self._start, self._read = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """Text that `token` makes final; empty where it completes nothing."""
        self._tokens.append(token)
        said = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if text.endswith("\ufffd") and len(self._tokens) - self._read < MAX_PENDING:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(said) :]

    def finish(self) -> str:
        """What is left, be it half a character."""
        said = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        self._start = self._read = len(self._tokens)
        return text[len(said) :]


class StopFinder:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """Text that is safe to show; once a stop string is `found`, what was before it and nothing more."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            shown, self._held = self._held[:place], ""
            return shown
        keep = held_back(self._held, self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, as no stop string came."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, awaited: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of the awaited strings begins."""

    def overlap(stop: str) -> int:
        return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

    return max((overlap(stop) for stop in awaited), default=0)


class AnswerText:
    """The text of one answer: tokens in, pieces out, cut at the first stop string."""

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._decoder = TextDecoder(decode, prompt)
        self._finder = StopFinder(stops)

    @property
    def stopped(self) -> str | None:
        """The stop string that was found: the request can be cancelled."""
        return self._finder.found

    def add(self, token: int) -> str:
        """Text to show after one more token."""
        return self._finder.add(self._decoder.add(token))

    def finish(self) -> str:
        """Text to show at the end."""
        shown = self._finder.add(self._decoder.finish())
        return shown if self.stopped is not None else shown + self._finder.finish()
