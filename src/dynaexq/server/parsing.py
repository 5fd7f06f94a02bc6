"""What a model's text means: thoughts, tool calls, and the answer itself, as their tags come by."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dynaexq.engine.text import held_back


@dataclass(frozen=True)
class Tag:
    """Text from `opening` to `closing` is of `kind`; without a closing, to the end."""

    kind: str
    opening: str
    closing: str | None


THINK = Tag("reasoning", "<think>", "</think>")
HERMES_CALL = Tag("call", "<tool_call>", "</tool_call>")
MISTRAL_CALLS = Tag("call", "[TOOL_CALLS]", None)
CALL_TAGS = (HERMES_CALL, MISTRAL_CALLS)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_json(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Conventions:
    """How a model marks thoughts and tool calls, read off its chat template."""

    thinks: bool
    call: Tag | None

    @classmethod
    def of(cls, template: str | None) -> Conventions:
        """What a template mentions."""
        text = template if isinstance(template, str) else ""
        call = next((tag for tag in CALL_TAGS if tag.opening in text), None)
        return cls(THINK.closing is not None and THINK.closing in text, call)

    @property
    def marks(self) -> list[str]:
        """All texts of tags."""
        tags = ([THINK] if self.thinks else []) + ([self.call] if self.call else [])
        return [mark for tag in tags for mark in (tag.opening, tag.closing) if mark is not None]

    def thinks_first(self, prompt_end: str) -> bool:
        """Whether thoughts may come before an answer to a prompt that ends in `prompt_end`."""
        return self.thinks and not prompt_end.rstrip().endswith(str(THINK.closing))

    def has_begun(self, prompt_end: str) -> bool:
        """Whether a prompt that ends in `prompt_end` has opened the thoughts."""
        return self.thinks and prompt_end.rstrip().endswith(THINK.opening)

    def parser(self, prompt_end: str, tools: bool) -> OutputParser:
        """For an answer to a prompt that ends in `prompt_end`; calls are looked for where tools were offered."""
        tags = ([THINK] if self.thinks else []) + ([self.call] if tools and self.call else [])
        return OutputParser(tags, THINK if self.has_begun(prompt_end) else None)


@dataclass
class Parsed:
    """New text of an answer, new thoughts, new calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def extend(self, other: Parsed) -> None:
        """By what came after."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls


class OutputParser:
    """Splits text as it comes. What is no valid call stays text: nothing a model says is lost."""

    def __init__(self, tags: list[Tag], inside: Tag | None = None) -> None:
        self._tags, self._inside = tags, inside
        self._held = self._call = ""
        self._trims = {"content": _Trimmer(bool(tags)), "reasoning": _Trimmer(True)}
        self.called = False

    @property
    def thinking(self) -> bool:
        """Whether the next text is one of thoughts."""
        return self._inside is not None and self._inside.kind == "reasoning"

    def add(self, text: str) -> Parsed:
        """What is certain after more text."""
        return _merge(self.split(text))

    def finish(self) -> Parsed:
        """What is left at the end."""
        return _merge(self.split("", last=True))

    def split(self, text: str, last: bool = False) -> Iterator[Parsed]:
        """The same part by part: each is content, thoughts or calls. After the `last` text nothing is held back."""
        self._held += text
        more = True
        while more:
            parsed = Parsed()
            more = self._step(parsed)
            if parsed:
                yield parsed
        if last:
            yield from self._end()

    def _end(self) -> Iterator[Parsed]:
        parsed = Parsed()
        self._put(parsed, self._held)
        self._held = ""
        if self._inside is not None and self._inside.kind == "call":
            self._close_call(parsed, self._inside.opening, "")
        if parsed:
            yield parsed

    def _step(self, parsed: Parsed) -> bool:
        """Pass one tag by; False when none is complete."""
        inside = self._inside
        if inside is None:
            found = [(place, tag) for tag in self._tags if (place := self._held.find(tag.opening)) >= 0]
            if not found:
                return self._pass_on(parsed, [tag.opening for tag in self._tags])
            place, tag = min(found, key=lambda each: each[0])
            self._put(parsed, self._held[:place])
            self._held, self._inside = self._held[place + len(tag.opening) :], tag
            return True
        place = -1 if inside.closing is None else self._held.find(inside.closing)
        if place < 0:
            return self._pass_on(parsed, [] if inside.closing is None else [inside.closing])
        self._put(parsed, self._held[:place])
        self._held = self._held[place + len(inside.closing or "") :]
        if inside.kind == "call":
            self._close_call(parsed, inside.opening, str(inside.closing))
        self._inside = None
        return True

    def _pass_on(self, parsed: Parsed, awaited: list[str]) -> bool:
        keep = held_back(self._held, awaited)
        cut = len(self._held) - keep
        self._put(parsed, self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _put(self, parsed: Parsed, text: str) -> None:
        kind = "content" if self._inside is None else self._inside.kind
        if kind == "call":
            self._call += text
        elif kind == "reasoning":
            parsed.reasoning += self._trims[kind].add(text)
        else:
            parsed.content += self._trims[kind].add(text)

    def _close_call(self, parsed: Parsed, opening: str, closing: str) -> None:
        text, self._call = self._call, ""
        calls = parse_calls(text)
        if calls is None:
            parsed.content += self._trims["content"].add(f"{opening}{text}{closing}")
            return
        parsed.calls += calls
        self.called = True


def _merge(parts: Iterator[Parsed]) -> Parsed:
    whole = Parsed()
    for part in parts:
        whole.extend(part)
    return whole


class _Trimmer:
    """Drops space at the beginning, and holds space back until something follows it."""

    def __init__(self, active: bool) -> None:
        self._active, self._begun, self._space = active, False, ""

    def add(self, text: str) -> str:
        if not self._active:
            return text
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


def parse_calls(text: str) -> list[ToolCall] | None:
    """Calls in the text between their tags: an object or a list of objects with `name` and `arguments`; else None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return None
        arguments = each.get("arguments", each.get("parameters", {}))
        if isinstance(arguments, str):
            calls.append(ToolCall(each["name"], arguments))
        elif isinstance(arguments, dict):
            calls.append(ToolCall(each["name"], json.dumps(arguments, ensure_ascii=False)))
        else:
            return None
    return calls or None
