"""Text generation with time stamps, streamed as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from dynaexq.core import CheckpointError, OptionError
from dynaexq.integrations.transformers.cache import cache_argument, make_cache


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedy at temperature 0."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `generate`."""
        if self.temperature == 0:
            return {"do_sample": False, "max_new_tokens": self.max_new_tokens}
        return {
            "do_sample": True,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0,
        }


@dataclass(frozen=True)
class Generation:
    """What came out. Decode speed counts the tokens after the first."""

    text: str
    tokens: int
    ttft_seconds: float
    tokens_per_second: float


def encode_prompt(tokenizer: Any, prompt: str, chat: bool, max_context: int, new_tokens: int) -> torch.Tensor:
    """Token ids [1, tokens] of a prompt, through the chat template if `chat`.

    Raises:
        CheckpointError: the chat template fails.
        OptionError: too long for the model's context.
    """
    if chat:
        messages = [{"role": "user", "content": prompt}]
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # templates are programs that come with the model
            raise CheckpointError(f"the model's chat template fails ({error}); --raw goes without it") from error
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    if ids.shape[1] + new_tokens > max_context:
        raise OptionError(
            f"the prompt has {ids.shape[1]} tokens; with --max-new-tokens {new_tokens} that passes the model's context "
            f"of {max_context} tokens"
        )
    return ids.to(torch.long)


def generate_text(
    model: Any, tokenizer: Any, ids: torch.Tensor, sampling: Sampling, emit: Callable[[str], None]
) -> Generation:
    """Generate from ids [1, tokens]; `emit` gets pieces of text as they are final."""
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    streamer = _TimedStreamer(tokenizer, emit)
    start = time.perf_counter()
    cache = {cache_argument(model): make_cache(model.config, ids.shape[1] + sampling.max_new_tokens)}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **cache, **sampling.options())
    times = streamer.times
    after_first = times[-1] - times[0] if len(times) > 1 else times[0] - start
    return Generation(
        text="".join(streamer.pieces),
        tokens=len(times),
        ttft_seconds=times[0] - start,
        tokens_per_second=max(1, len(times) - 1) / after_first,
    )


class _TimedStreamer(TextStreamer):  # type: ignore[misc]
    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self.pieces: list[str] = []
        self._emit = emit
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take one step's token (the first call brings the prompt)."""
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass text on."""
        self.pieces.append(text)
        self._emit(text)
