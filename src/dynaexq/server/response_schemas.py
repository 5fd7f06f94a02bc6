"""The body of POST /v1/responses: a conversation as a row of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator

from dynaexq.server.chat_schemas import MAX_MESSAGES, call_as_template, template_role
from dynaexq.server.schemas import AnswerFormat, Body, JsonFormat, NamedSchema, TextFormat
from dynaexq.server.tools import MAX_TOOLS, ConversationBody, Function, FunctionChoice

Status = Literal["in_progress", "completed", "incomplete"] | None
Nothing = Annotated[list[Any], Field(max_length=0)]
Message = dict[str, Any]


class TextPart(Body):
    """A piece of text; what an answer carried beside it comes back with it, and is not looked at."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Nothing = Field(default_factory=list)
    logprobs: Nothing | None = None


class ThoughtPart(Body):
    """A piece of thoughts."""

    type: Literal["reasoning_text"]
    text: str


TextParts = Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]


class MessageItem(Body):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | TextParts
    id: str | None = None
    status: Status = None


class ReasoningItem(Body):
    """What the model thought, in full: summaries and encrypted thoughts are of no use to it."""

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtPart], Field(min_length=1, max_length=MAX_MESSAGES)]
    summary: Nothing = Field(default_factory=list)
    encrypted_content: None = None
    id: str | None = None
    status: Status = None


class CallItem(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status = None


class CallOutputItem(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | TextParts
    id: str | None = None
    status: Status = None


def _item_type(item: Any) -> Any:
    """Messages may go without a type."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_item_type, "item_type", "an item is a message, reasoning, function_call or function_call_output"),
]


class ResponseTool(Function):
    """A tool."""

    type: Literal["function"]


class ResponseToolChoice(FunctionChoice):
    """A tool that must be called."""

    type: Literal["function"]


class NamedSchemaFormat(AnswerFormat, NamedSchema):
    """JSON of one schema."""

    type: Literal["json_schema"]

    @property
    def form(self) -> dict[str, Any]:
        """The schema."""
        return self.schema_


class TextOptions(Body):
    """How the answer's text is written."""

    format: Annotated[TextFormat | JsonFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None


class ResponsesBody(ConversationBody):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    store: Literal[False] | None = None
    previous_response_id: None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    @field_validator("store", "previous_response_id", mode="before")
    @classmethod
    def check_store(cls, value: Any) -> Any:
        """There is no store."""
        if value is True or isinstance(value, str):
            raise ValueError("this server keeps no responses; give the whole conversation as input, with store: false")
        return value

    @property
    def format(self) -> AnswerFormat | None:
        """Of the answer's text."""
        return None if self.text is None else self.text.format

    @property
    def functions(self) -> Sequence[Function]:
        """What may be called."""
        return self.tools or []

    @property
    def choice(self) -> Literal["auto", "none", "required"] | FunctionChoice | None:
        """Whether something must be called."""
        return self.tool_choice

    def messages(self) -> list[Message]:
        """The conversation as chat templates take it: what the model thought, said and called in a row is one turn."""
        told = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        turns: list[Message] = []
        for item in items:
            if isinstance(item, CallOutputItem):
                turns.append({"role": "tool", "content": _join(item.output), "tool_call_id": item.call_id})
            elif isinstance(item, MessageItem) and item.role != "assistant":
                turns.append({"role": template_role(item.role), "content": _join(item.content)})
            else:
                _add_to_turn(turns, item)
        return told + turns


def _add_to_turn(turns: list[Message], item: MessageItem | ReasoningItem | CallItem) -> None:
    """In the order of a turn: thoughts, text, calls. What would come before something that is there begins a turn."""
    turn = turns[-1] if turns and turns[-1]["role"] == "assistant" else {}
    begun = bool(turn.get("content") or turn.get("tool_calls"))
    if not turn or isinstance(item, ReasoningItem) or (begun and isinstance(item, MessageItem)):
        turn = {"role": "assistant", "content": ""}
        turns.append(turn)
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = "".join(part.text for part in item.content)
    elif isinstance(item, MessageItem):
        turn["content"] = _join(item.content)
    else:
        turn.setdefault("tool_calls", []).append(call_as_template(item.call_id, item.name, item.arguments))


def _join(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
