"""The thread that owns the engine: requests come in from any thread, deltas go out to their owners."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from glmspec.build.errors import GlmspecError, RequestError
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Delta, Request
from glmspec.runtime.sequence import Sequence


@dataclass(frozen=True)
class Listener:
    """Who hears about one request. delta: called after every step that adds something, with the sequence.
    failed: called once, instead, when it ends without an answer. cancelled: asked every step."""

    delta: Callable[[Sequence, Delta], None]
    failed: Callable[[GlmspecError], None]
    cancelled: Callable[[], bool]


class Cancelled(GlmspecError):
    """The client went away."""


class Worker:
    """Runs an engine's steps while there is work. Every listener hears exactly one end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[Request, Listener] | None] = queue.SimpleQueue()
        self._listeners: dict[Sequence, Listener] = {}
        self._open = True
        self._thread = threading.Thread(target=self._work, name="glmspec-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Hand in a request from any thread."""
        self._inbox.put((request, listener))

    def close(self) -> None:
        """Finish what was handed in, then stop."""
        self._inbox.put(None)
        self._thread.join()

    def _work(self) -> None:
        while self._open or self._engine.busy:
            self._receive()
            self._drop_cancelled()
            try:
                gained = self._engine.step()
            except Exception as error:  # a step that fails takes down its requests, not the server
                self._fail_all(error)
                continue
            for sequence, delta in gained:
                listener = self._listeners[sequence]
                if sequence.finished:
                    del self._listeners[sequence]
                listener.delta(sequence, delta)

    def _receive(self) -> None:
        """Take what has come; wait for something when the engine is idle."""
        while self._open:
            try:
                item = self._inbox.get(block=not self._engine.busy)
            except queue.Empty:
                return
            if item is None:
                self._open = False
                return
            request, listener = item
            try:
                self._listeners[self._engine.add(request)] = listener
            except RequestError as error:
                listener.failed(error)

    def _drop_cancelled(self) -> None:
        for sequence, listener in list(self._listeners.items()):
            if listener.cancelled():
                self._engine.abort(sequence)
                del self._listeners[sequence]
                listener.failed(Cancelled("the client went away"))

    def _fail_all(self, error: Exception) -> None:
        for sequence, listener in list(self._listeners.items()):
            self._engine.abort(sequence)
            listener.failed(GlmspecError(f"the engine failed: {error}"))
        self._listeners.clear()
