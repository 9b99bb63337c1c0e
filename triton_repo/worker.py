"""The thread that owns the engine: requests come in from any thread, deltas go out to their owners."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from glmspec.core.errors import GlmspecError, RequestError
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
                self._tell(sequence, delta)
        self._refuse_the_rest()

    def _tell(self, sequence: Sequence, delta: Delta) -> None:
        """Pass on a delta; a listener that raises loses its own request only."""
        listener = self._listeners[sequence]
        if sequence.finished:
            del self._listeners[sequence]
        try:
            listener.delta(sequence, delta)
        except Exception as error:
            self._listeners.pop(sequence, None)
            self._engine.abort(sequence)
            _fail(listener, GlmspecError(f"the answer could not be passed on: {error}"))

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
                _fail(listener, error)
            except Exception as error:
                _fail(listener, GlmspecError(f"the engine failed: {error}"))

    def _drop_cancelled(self) -> None:
        for sequence, listener in list(self._listeners.items()):
            if _is_cancelled(listener):
                self._engine.abort(sequence)
                del self._listeners[sequence]
                _fail(listener, Cancelled("the client went away"))

    def _fail_all(self, error: Exception) -> None:
        for sequence, listener in list(self._listeners.items()):
            self._engine.abort(sequence)
            _fail(listener, GlmspecError(f"the engine failed: {error}"))
        self._listeners.clear()

    def _refuse_the_rest(self) -> None:
        """Whoever handed in a request after `close`."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                _fail(item[1], GlmspecError("the engine is shutting down"))


def _is_cancelled(listener: Listener) -> bool:
    """A listener that cannot say is as good as gone."""
    try:
        return listener.cancelled()
    except Exception:
        return True


def _fail(listener: Listener, error: GlmspecError) -> None:
    """Tell a listener of its end. One that raises has nobody behind it."""
    with contextlib.suppress(Exception):
        listener.failed(error)
