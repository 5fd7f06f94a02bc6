"""A model that says what a test wants it to say, byte by byte, with tokenizers to match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dynaexq.engine import Engine
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.integrations.transformers.sampling import TransformersWarper
from dynaexq.server.metrics import Metrics
from dynaexq.traffic.recorder import TokenRun
from support.serving import serve_engine

END = 256


class ByteTokenizer:
    """One token a byte, and one for the end; `template` is a chat template's text, which is only looked at."""

    eos_token_id = END

    def __init__(self, template: str, prompt_end: str = "") -> None:
        self.chat_template = template
        self.asked: list[dict[str, Any]] = []
        self._prompt_end = prompt_end

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **_: Any) -> list[int]:
        """Bytes."""
        return list(text.encode())

    def apply_chat_template(self, messages: Any, tools: Any, **variables: Any) -> dict[str, list[int]]:
        """Keeps what it was asked."""
        self.asked.append({"messages": messages, "tools": tools, **variables})
        return self(f"{messages[-1]['content']}{self._prompt_end}")

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Text."""
        return bytes(token for token in tokens if token < END).decode("utf-8", errors="replace")


def make_fast_tokenizer(
    template: str, prompt_end: str = "", tags: Sequence[str] = (), special: bool = False
) -> PreTrainedTokenizerFast:
    """The same in the form that grammars need. Each of the `tags` is one token, which may be a special one."""
    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = f"{{# {template} #}}{{{{ messages[-1].content }}}}{prompt_end}"
    return fast


class TypedModel:
    """See `engine.base.SlotModel`: every sequence says `script`, then ends."""

    chunked = cuts = True

    def __init__(self, script: Sequence[int], vocabulary: int = END + 1, slots: int = 2, room: int = 2048) -> None:
        self.script, self.vocabulary, self.slots, self.room = script, vocabulary, slots, room
        self._lengths: dict[int, int] = {}

    @contextmanager
    def window(self, prefill: bool, runs: Sequence[TokenRun]) -> Iterator[None]:
        """Nothing."""
        yield

    def prefill(self, slot: int, past: int, tokens: torch.Tensor) -> torch.Tensor:
        """The first byte comes after the prompt."""
        self._lengths[slot] = past + len(tokens)
        return self._say(0)

    def decode(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """The next byte of each."""
        return torch.stack([self._say(past - self._lengths[slot] + 1) for slot, past in zip(slots, pasts, strict=True)])

    def copy(self, source: int, target: int, length: int) -> None:
        """Nothing."""

    def _say(self, place: int) -> torch.Tensor:
        logits = torch.zeros(self.vocabulary)
        logits[self.script[place] if place < len(self.script) else END] = 1.0
        return logits


@contextmanager
def talk(script: str, tokenizer: Any) -> Iterator[openai.OpenAI]:
    """A client of a server whose model says `script`."""
    metrics = Metrics()
    vocabulary = END + 1 if isinstance(tokenizer, ByteTokenizer) else len(tokenizer)
    engine = Engine(TypedModel(tokenizer.encode(script), vocabulary), TransformersWarper, observer=metrics)
    engine.start()
    with serve_engine(engine, PromptEncoder(tokenizer), metrics) as port:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    engine.close()
