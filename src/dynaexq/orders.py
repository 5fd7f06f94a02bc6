"""Calls that one thread asks another to make, and waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from dynaexq.core import DynaExqError, OptionError

LOOK_SECONDS = 0.005
"""How often whoever waits looks whether the other thread is still there."""


class Orders:
    """A queue of calls. `give` from any thread; `take` from the one that makes them."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is something to take."""
        self._wake = wake
        self._waiting: deque[tuple[Callable[[], None], Future[None]]] = deque()

    def give(self, action: Callable[[], None], thread: threading.Thread) -> None:
        """Have `thread` make a call; raises what it raises, and OptionError where the thread has ended."""
        done = Future[None]()
        self._waiting.append((action, done))
        self._wake()
        while not done.done():
            if not thread.is_alive():
                raise OptionError("versions move no more; the run is at its end")
            wait([done], LOOK_SECONDS)
        done.result()

    def take(self) -> bool:
        """Make the calls that were asked for; whether one of them went well."""
        made = False
        while self._waiting:
            action, done = self._waiting.popleft()
            try:
                action()
            except DynaExqError as error:
                done.set_exception(error)
            else:
                done.set_result(None)
                made = True
        return made
