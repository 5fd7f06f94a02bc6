"""Continuous batching: sequences join and leave between steps, prompts come in chunks beside running answers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from dynaexq.core import MemoryLimitError
from dynaexq.engine.admission import check_request
from dynaexq.engine.base import SlotModel
from dynaexq.engine.reports import EngineCounts, EngineOptions, Observer, StepReport
from dynaexq.engine.requests import (
    EngineClosedError,
    Event,
    Finish,
    FinishEvent,
    QueueFullError,
    Request,
    TokenEvent,
)
from dynaexq.engine.sampler import Sampler, WarperFactory, score_prompt
from dynaexq.engine.scheduler import Chunk, WaitingQueue, plan_chunks
from dynaexq.engine.sequence import Sequence, SequenceView, finish_waiting
from dynaexq.engine.slots import SlotTable
from dynaexq.engine.token_scheduler import TokenScheduler
from dynaexq.traffic.recorder import TokenRun


class Engine:
    """Serves requests on one model: on a thread of its own once started, or by hand through `step`.

    `submit`, `cancel`, `counts` and `drain` may be called from any thread.
    """

    def __init__(
        self,
        model: SlotModel,
        make_warper: WarperFactory,
        options: EngineOptions | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        scheduler: TokenScheduler | None = None,
    ) -> None:
        """`scheduler` decides which sequences a step takes one token of, where experts are cached; else all."""
        self.model = model
        self.scheduler = scheduler
        self.options = options or EngineOptions()
        self.options.check()
        self.observer = observer
        self._make_warper, self._clock = make_warper, clock
        self._table = SlotTable(model.slots, model.cuts, self.options.reuse)
        self._running: list[Sequence] = []
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards everything below
        self._queue = WaitingQueue()
        self._submitted: dict[int, float] = {}
        self._cancelled: deque[int] = deque()
        self._counts = EngineCounts()
        self._draining = self._closed = False

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            OptionError: sampling options out of range, an empty prompt, a token that is not there.
            TooLongError, QueueFullError, EngineClosedError: it will not be served.
        """
        check_request(request, self.model, self.options)
        with self._changed:
            if not self.taking:
                raise EngineClosedError("the engine is shutting down")
            if len(self._queue) >= self.options.queue:
                raise QueueFullError(f"{len(self._queue)} requests are waiting, which is the limit")
            self._queue.push(request)
            self._submitted[request.number] = self._clock()
            self._counts.submitted += 1
            self._changed.notify_all()

    def cancel(self, request: Request) -> None:
        """End a request within one step, wherever it is; nothing if it has ended."""
        with self._changed:
            self._cancelled.append(request.number)
            self._changed.notify_all()

    def counts(self) -> EngineCounts:
        """A moment's view."""
        with self._changed:
            return replace(
                self._counts,
                waiting=len(self._queue),
                running=len(self._running),
                slots_free=self._table.free,
                finished=dict(self._counts.finished),
            )

    def sequences(self) -> list[SequenceView]:
        """What runs at the moment."""
        now = self._clock()
        return [each.view(now) for each in list(self._running)]

    @property
    def ended(self) -> bool:
        """Whether nothing is served any more, and never will be."""
        return self._closed

    @property
    def taking(self) -> bool:
        """Whether requests are taken."""
        return not (self._draining or self._closed)

    def start(self) -> None:
        """Serve on a thread of the engine's own from now on."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._serve, name="dynaexq-engine", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Take no more requests; those taken go on to their end."""
        with self._changed:
            self._draining = True

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._end_all(Finish.CANCELLED)

    def step(self) -> bool:
        """One step: cancel, admit, chunks of prompts, one token of running sequences. False: nothing to do."""
        start = self._clock()
        self._drop_cancelled()
        self._admit()
        if not self._running:
            return False
        decoding = [each for each in self._running if each.next is not None]
        if self.scheduler:
            decoding = self.scheduler.choose(decoding)
        prompts = [each for each in self._running if each.next is None]
        chunk = self.options.chunk if self.model.chunked else None
        progress = [(each.done, len(each.request.prompt)) for each in prompts]
        chunks = plan_chunks(progress, len(decoding), self.options.step_tokens, chunk)
        prompt_tokens = sum(piece.end - piece.start for _, piece in chunks)
        runs = [TokenRun(each.request.number, 1, False) for each in decoding]
        runs += [TokenRun(prompts[i].request.number, piece.end - piece.start, True) for i, piece in chunks]
        try:
            with self.model.window(prefill=prompt_tokens > len(decoding), runs=runs):
                decoded = self._decode(decoding)
                firsts = [(prompts[i], piece, self._prefill(prompts[i], piece)) for i, piece in chunks]
            computed = self._clock()
        except MemoryLimitError:
            raise  # a limit that was passed once stays passed: there is no going on
        except Exception as error:  # a model's failure must not end the server
            self._end_all(Finish.FAILED, error)
            return True
        if decoded is not None:
            self._choose(decoding, decoded)
        for each, piece, logits in firsts:
            if piece.end == len(each.request.prompt):
                if each.request.max_tokens == 0:
                    self._finish(each, Finish.LENGTH)
                else:
                    self._sample(each, logits)
        self._counts.steps += 1
        if self.observer:
            self.observer.on_step(StepReport(self._clock() - start, computed - start, prompt_tokens, len(decoding)))
        return True

    def _serve(self) -> None:
        def awake() -> bool:
            return bool(self._closed or self._queue or self._running or self._cancelled)

        try:
            with torch.inference_mode():
                while True:
                    with self._changed:
                        self._changed.wait_for(awake)
                        if self._closed:
                            return
                    self.step()
        except BaseException as error:
            with self._changed:
                self._closed = True
            if isinstance(error, MemoryLimitError):  # whoever started the engine checks the memory himself
                self._end_all(Finish.FAILED, error)
                return
            self._end_all(Finish.FAILED, EngineClosedError(f"the engine has stopped: {error}"))
            raise

    def _drop_cancelled(self) -> None:
        with self._changed:
            numbers = set(self._cancelled)
            self._cancelled.clear()
            waiting = [request for number in numbers if (request := self._queue.remove(number))]
        for request in waiting:
            self._drop(request, Finish.CANCELLED)
        for each in [each for each in self._running if each.request.number in numbers]:
            self._finish(each, Finish.CANCELLED)

    def _admit(self) -> None:
        while self._table.free:
            request = self._next_waiting()
            if request is None:
                return
            with self._changed:
                submitted = self._submitted.pop(request.number)
            reuse = self._table.take(() if request.scores else request.prompt)
            if reuse.slot is not reuse.source:
                self.model.copy(reuse.source.number, reuse.slot.number, reuse.length)
            if self.scheduler:
                self.scheduler.begin(request, reuse)
            sampler = Sampler(request.sampling, request.prompt, self._make_warper, request.constraint)
            start, length = self._clock(), reuse.length
            self._running.append(Sequence(request, reuse.slot, sampler, submitted, start, length, length))

    def _next_waiting(self) -> Request | None:
        """Take the request that is admitted next out of the queue."""
        with self._changed:
            if not self._queue:
                return None
            if self.scheduler is None or self.scheduler.options.admit_window == 1:
                return self._queue.pop()
            waiting = self._queue.first(self.scheduler.options.admit_window)
        chosen = self.scheduler.admit(waiting, self._table, self._running)
        with self._changed:
            return self._queue.remove(chosen.number)

    def _decode(self, sequences: list[Sequence]) -> torch.Tensor | None:
        if not sequences:
            return None
        tokens = [each.next for each in sequences if each.next is not None]
        pasts = [len(each.slot.tokens) for each in sequences]
        logits = self.model.decode([each.slot.number for each in sequences], pasts, torch.tensor(tokens))
        for each, token in zip(sequences, tokens, strict=True):
            each.slot.tokens.append(token)
        return logits

    def _prefill(self, each: Sequence, piece: Chunk) -> torch.Tensor:
        request, slot = each.request, each.slot.number
        at_once = self.options.score_tokens if request.scores else piece.end - piece.start
        for start in range(piece.start, piece.end, at_once):
            tokens = request.prompt[start : min(start + at_once, piece.end)]
            ids = torch.tensor(tokens)
            wanted = 0 if request.scores is None else start + len(tokens) - max(start, request.scores.start - 1)
            if wanted > 0:
                scored = self.model.score(slot, start, ids, min(wanted, len(tokens)))
                self._tell(request, score_prompt(request, start + len(tokens) - len(scored), scored))
                logits = scored[-1]
            else:
                logits = self.model.prefill(slot, start, ids)
            each.slot.tokens.extend(tokens)
        each.done = piece.end
        return logits

    def _choose(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        largest = logits.numpy().argmax(-1).tolist()  # a twentieth of torch's time
        for row, each in enumerate(sequences):
            if each.sampler.greedy:
                self._take(each, TokenEvent(largest[row]))
            else:
                self._sample(each, logits[row])

    def _sample(self, each: Sequence, logits: torch.Tensor) -> None:
        try:
            event = each.sampler.choose(logits)
        except Exception as error:  # a grammar that has no way on, logits that are no numbers
            self._finish(each, Finish.FAILED, error)
        else:
            self._take(each, event)

    def _take(self, each: Sequence, event: TokenEvent) -> None:
        """A token was chosen: report it, or end the sequence."""
        request = each.request
        if event.token in request.stop_tokens:
            return self._finish(each, Finish.STOP)
        if each.first is None:
            each.first = self._clock()
        each.generated += 1
        each.next = event.token
        self._tell(request, event)
        if each.generated == request.max_tokens:
            self._finish(each, Finish.LENGTH)
        elif each.sampler.complete:
            self._finish(each, Finish.STOP)

    def _finish(self, each: Sequence, reason: Finish, error: Exception | None = None) -> None:
        self._running.remove(each)
        if reason is Finish.FAILED:
            each.slot.tokens.clear()  # who knows what the slot holds
        self._table.release(each.slot)
        self._report(each.request, each.finish(reason, self._clock(), error))

    def _drop(self, request: Request, reason: Finish) -> None:
        """A request ends that never ran."""
        with self._changed:
            waited = self._clock() - self._submitted.pop(request.number)
        self._report(request, finish_waiting(request, reason, waited))

    def _end_all(self, reason: Finish, error: Exception | None = None) -> None:
        for each in list(self._running):
            self._finish(each, reason, error)
        while self._closed:
            with self._changed:
                if not self._queue:
                    return
                request = self._queue.pop()
            self._drop(request, reason)

    def _report(self, request: Request, event: FinishEvent) -> None:
        if self.scheduler:
            self.scheduler.end(request)
        with self._changed:
            self._counts.finished[event.reason.value] += 1
        self._tell(request, event)
        if self.observer:
            self.observer.on_finish(event)

    def _tell(self, request: Request, event: Event) -> None:
        try:
            request.listener(event)
        except Exception:  # whoever asked is gone
            self.cancel(request)
