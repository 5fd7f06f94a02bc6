"""Prompts as tokens: chat templates, and which tokens end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaexq.core import CheckpointError, OptionError
from dynaexq.engine import TooLongError

Message = dict[str, Any]

PIECE = 16_384
"""Characters that are encoded at once to see how long a text is."""

SPLIT_TOKENS = 8
MOST_BYTES = 4
"""Of a character, and so its tokens at most."""


class PromptEncoder:
    """A model's tokenizer, seen by the engine."""

    def __init__(self, tokenizer: Any, generation_config: Any = None) -> None:
        """`generation_config` may name more end tokens than the tokenizer does."""
        self.tokenizer = tokenizer
        ends = getattr(generation_config, "eos_token_id", None)
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stop_tokens = frozenset(int(token) for token in (*listed, *own))

    @property
    def has_template(self) -> bool:
        """Whether the model is one to chat with."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def check_length(self, texts: Sequence[str], room: int) -> None:
        """Raise TooLongError for texts that are surely more than `room` tokens, without encoding all of them, which
        takes hundreds of bytes a token."""
        if sum(len(text) for text in texts) * MOST_BYTES <= room:
            return
        count = 0
        for text in texts:
            for start in range(0, len(text), PIECE):
                tokens = self.tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)
                count += max(0, len(tokens) - SPLIT_TOKENS)  # a cut in the middle of a word may add some
                if count > room:
                    raise TooLongError(f"the prompt has more than {room} tokens; a sequence has room for {room}")

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text to continue. Raises OptionError for one without tokens."""
        tokens = tuple(self.tokenizer(text)["input_ids"])
        if not tokens:
            raise OptionError("the prompt is empty")
        return tokens

    def encode_chat(self, messages: Sequence[Message], tools: Any = None, **variables: Any) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the answer begins.

        Raises:
            OptionError: the model has no chat template.
            CheckpointError: the template fails.
        """
        if not self.has_template:
            raise OptionError("the model has no chat template; give a plain prompt")
        try:
            encoded = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=True, return_dict=True, **variables
            )
        except Exception as error:  # templates are programs that come with the model
            raise CheckpointError(f"the model's chat template fails: {error}") from error
        return tuple(encoded["input_ids"])

    def find_token(self, text: str) -> int | None:
        """The one token that stands for `text`, if there is one."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return int(tokens[0]) if len(tokens) == 1 else None

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special ones left out."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_all(self, tokens: list[int]) -> str:
        """Text of tokens, special ones too."""
        text: str = self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text
