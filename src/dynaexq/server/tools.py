"""Functions that a model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from dynaexq.integrations.grammar import ANY_OBJECT
from dynaexq.server.schemas import Body, SamplingBody

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TEMPLATE_VARIABLES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "return_dict",
    "tokenize",
    "tools",
}
"""Those that the server sets."""

FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
TemplateVariable = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,64}$")]


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema, which `strict` enforces."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def check_parameters(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        """Arguments have names."""
        if parameters is not None and parameters.get("type", "object") != "object":
            raise ValueError("parameters must be the schema of an object")
        return parameters

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema of arguments."""
        return NO_PARAMETERS if self.parameters is None else {**ANY_OBJECT, **self.parameters}

    def as_template(self) -> dict[str, Any]:
        """The form that chat templates take."""
        function = self.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": function}


class FunctionChoice(Body):
    """The function that must be called."""

    name: str


class ConversationBody(SamplingBody):
    """What chats and responses share: variables of the template, and tools, which each writes in its own way."""

    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[TemplateVariable, bool | int | str] = Field(default_factory=dict)

    @property
    def functions(self) -> Sequence[Function]:
        """What may be called."""
        raise NotImplementedError

    @property
    def choice(self) -> Literal["auto", "none", "required"] | FunctionChoice | None:
        """Whether something must be called."""
        raise NotImplementedError

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice == "required" or isinstance(self.choice, FunctionChoice)

    @property
    def callable_functions(self) -> list[Function]:
        """Those that the choice leaves."""
        choice = self.choice
        return [each for each in self.functions if not isinstance(choice, FunctionChoice) or each.name == choice.name]

    @model_validator(mode="after")
    def check_tools(self) -> Self:
        """Refuse options that conflict or would do nothing."""
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if not names and (self.choice or self.parallel_tool_calls is not None):
            raise ValueError("tool_choice and parallel_tool_calls go with tools")
        if isinstance(self.choice, FunctionChoice) and self.choice.name not in names:
            raise ValueError(f"tool_choice names '{self.choice.name}', which is none of the tools")
        if self.forces_call and self.form is not None:
            raise ValueError("tool_choice that forces a call goes with no format of the answer and no guided_regex")
        if TEMPLATE_VARIABLES & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs cannot set {', '.join(sorted(TEMPLATE_VARIABLES))}")
        return self
