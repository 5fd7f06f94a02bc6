"""Which requests can be served at all."""

from __future__ import annotations

from dynaexq.core import OptionError
from dynaexq.engine.base import SlotModel
from dynaexq.engine.reports import EngineOptions
from dynaexq.engine.requests import Request, TooLongError


def check_request(request: Request, model: SlotModel, options: EngineOptions) -> None:
    """Raise for a request that the model can never serve.

    Raises:
        OptionError: sampling options out of range, an empty prompt, a token that is not there, a prompt that cannot be
            scored.
        TooLongError: prompt and answer do not fit a sequence's room.
    """
    request.sampling.check(model.vocabulary)
    if not request.prompt or request.max_tokens < (0 if request.scores else 1):
        raise OptionError("a request needs a prompt, and at least one token to generate")
    if not 0 <= min(request.prompt) <= max(request.prompt) < model.vocabulary:
        raise OptionError(f"the prompt has tokens outside of the vocabulary of {model.vocabulary}")
    if request.scores and not model.chunked and len(request.prompt) > options.score_tokens:
        raise OptionError(
            f"this model computes prompts in one piece: only those of up to {options.score_tokens} tokens can "
            "be scored; ask without log-probabilities of the prompt"
        )
    needed = len(request.prompt) + request.max_tokens
    if needed > model.room:
        raise TooLongError(
            f"{len(request.prompt)} tokens of prompt and {request.max_tokens} of answer are {needed}; a sequence "
            f"has room for {model.room}"
        )
