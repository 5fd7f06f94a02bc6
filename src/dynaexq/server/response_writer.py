"""Answers in the form of OpenAI's Responses: a row of items, and events that build it."""

from __future__ import annotations

import json
import time
import uuid

from dynaexq.server.answers import Piece, Usage
from dynaexq.server.errors import ApiError
from dynaexq.server.parsing import OutputParser, ToolCall
from dynaexq.server.writers import Json, PieceReader


class ResponseWriter:
    """See `writers.AnswerWriter`. Text goes to the item that is open; another kind of text closes it."""

    ending = ""

    def __init__(self, head: Json, parser: OutputParser) -> None:
        """`head`: the model, and what the request asked for."""
        self._head = {"id": _make_id("resp"), "object": "response", "created_at": int(time.time()), **head}
        self._reader = PieceReader(parser)
        self._items: list[Json] = []
        self._is_open = False
        self._cut_short = False
        self._sent = 0

    def begin(self) -> list[Json]:
        """Nothing is there yet."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def add(self, piece: Piece) -> list[Json]:
        """Text goes on, items begin and end."""
        events = []
        for part in self._reader.read(piece):
            if part.reasoning:
                events += self._say(part.reasoning, "reasoning")
            if part.content:
                events += self._say(part.content, "message")
            for call in part.calls:
                events += self._call(call)
        if piece.finish is not None:
            self._cut_short = piece.finish == "length"
            events += self._close(self._status)
        return events

    def end(self, usage: Usage) -> list[Json]:
        """The response."""
        return [self._event(f"response.{self._status}", response=self.whole(usage))]

    def fail(self, error: ApiError) -> list[Json]:
        """The error, and what there is of the response."""
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        closed = self._close("incomplete")
        failure = {"code": "server_error", "message": error.message}
        return [told, *closed, self._event("response.failed", response=self._response("failed", error=failure))]

    def frame(self, event: Json) -> str:
        """With its name."""
        return f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"

    def whole(self, usage: Usage) -> Json:
        """The response."""
        if self._cut_short:
            more: Json = {"incomplete_details": {"reason": "max_output_tokens"}}
        else:
            more = {"completed_at": int(time.time())}
        return self._response(self._status, usage=self._usage(usage), **more)

    @property
    def _status(self) -> str:
        return "incomplete" if self._cut_short else "completed"

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reader.thought_tokens},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _response(self, status: str, **more: object) -> Json:
        empty = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **empty, "status": status, "output": list(self._items), **more}

    def _event(self, kind: str, **values: object) -> Json:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **values}

    def _say(self, text: str, kind: str) -> list[Json]:
        events = []
        if not self._is_open or self._items[-1]["type"] != kind:
            events = [*self._close("completed"), *self._open(kind)]
        self._part["text"] += text
        return [*events, self._text_event("delta", delta=text)]

    def _open(self, kind: str) -> list[Json]:
        """A new item, empty but for one part, which is kept to be written to."""
        if kind == "message":
            item: Json = {"id": _make_id("msg"), "type": kind, "role": "assistant"}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": _make_id("rs"), "type": kind, "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        self._items.append({**item, "status": "in_progress", "content": [part]})
        self._is_open = True
        return [
            self._item_event("added", {**item, "status": "in_progress", "content": []}),
            self._event("response.content_part.added", **self._place, content_index=0, part={**part}),
        ]

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        self._items[-1]["status"] = status
        return [
            self._text_event("done", text=self._part["text"]),
            self._event("response.content_part.done", **self._place, content_index=0, part=self._part),
            self._item_event("done", self._items[-1]),
        ]

    def _call(self, call: ToolCall) -> list[Json]:
        """A call is known when all of it has come."""
        item = {"id": _make_id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        events = self._close("completed")
        self._items.append({**item, "arguments": call.arguments, "status": "completed"})
        kind = "response.function_call_arguments"
        return [
            *events,
            self._item_event("added", {**item, "arguments": "", "status": "in_progress"}),
            self._event(f"{kind}.delta", **self._place, delta=call.arguments),
            self._event(f"{kind}.done", **self._place, name=call.name, arguments=call.arguments),
            self._item_event("done", self._items[-1]),
        ]

    @property
    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    @property
    def _part(self) -> Json:
        part: Json = self._items[-1]["content"][0]
        return part

    def _text_event(self, step: str, **text: str) -> Json:
        kind = self._part["type"]
        more: Json = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"response.{kind}.{step}", **self._place, content_index=0, **text, **more)

    def _item_event(self, step: str, item: Json) -> Json:
        return self._event(f"response.output_item.{step}", output_index=len(self._items) - 1, item=item)


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
