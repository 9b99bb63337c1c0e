"""The engine's thread: every listener hears exactly one end, whatever happens to its request or its engine."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from glmspec.core.errors import GlmspecError, RequestError
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import LENGTH, Answer, Delta, Request
from glmspec.triton_repo.worker import Cancelled, Listener, Worker

PATIENCE_S = 60  # for a machine under load; nothing here takes a second
SHORT_S = 1  # for what does not come while a finding stands


class Ear:
    """A listener that writes down what it hears. gone: makes the client go away. once: called on the first delta."""

    def __init__(self, once=lambda: None) -> None:
        self.answer, self.errors, self.ends = Answer(), [], 0
        self.ended, self.started, self.gone = threading.Event(), threading.Event(), threading.Event()
        self._once = once

    @property
    def listener(self) -> Listener:
        return Listener(self._delta, self._failed, self.gone.is_set)

    def _delta(self, sequence, delta: Delta) -> None:
        assert not self.ended.is_set(), "a delta after the end"
        self.answer.add(delta)
        if not self.started.is_set():
            self.started.set()
            self._once()
        if delta.finish_reason:
            self._end()

    def _failed(self, error: GlmspecError) -> None:
        self.errors.append(error)
        self._end()

    def _end(self) -> None:
        self.ends += 1
        self.ended.set()

    def wait(self) -> Ear:
        assert self.ended.wait(PATIENCE_S), "no end was heard"
        return self


class FakeSequence:
    def __init__(self, request: Request) -> None:
        self.left, self.finished = request.max_tokens, False


class FakeEngine:
    """One token a step for the first `seats` requests. Refuses max_tokens 0. trouble: what a step raises, by its
    number. gate: holds steps back while it is closed."""

    def __init__(self, seats: int = 2) -> None:
        self.seats, self.queue, self.aborted, self.steps = seats, [], [], 0
        self.trouble: dict[int, Exception] = {}
        self.gate, self.stepping = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def busy(self) -> bool:
        return bool(self.queue)

    def add(self, request: Request) -> FakeSequence:
        if not request.max_tokens:
            raise RequestError("max_tokens: found 0, expected at least 1")
        self.queue.append(FakeSequence(request))
        return self.queue[-1]

    def abort(self, sequence: FakeSequence) -> None:
        self.aborted.append(sequence)
        self.queue.remove(sequence)

    def step(self) -> list[tuple[FakeSequence, Delta]]:
        self.stepping.set()
        assert self.gate.wait(PATIENCE_S)
        self.steps += 1
        if self.steps in self.trouble:
            raise self.trouble[self.steps]
        gained = []
        for sequence in self.queue[: self.seats]:
            sequence.left -= 1
            sequence.finished = sequence.left == 0
            gained.append((sequence, Delta((7,), "x", LENGTH if sequence.finished else None)))
        self.queue = [one for one in self.queue if not one.finished]
        return gained


@pytest.fixture
def fake():
    return FakeEngine()


@pytest.fixture
def worker(fake):
    made = Worker(fake)
    yield made
    fake.gate.set()
    made.close()


def ask(worker: Worker, max_tokens: int, ear: Ear | None = None) -> Ear:
    ear = ear or Ear()
    worker.submit(Request(prompt_ids=(1,), max_tokens=max_tokens), ear.listener)
    return ear


def test_an_answer_ends_once_with_everything_before_it(worker):
    ears = [ask(worker, count).wait() for count in (1, 2, 5)]
    assert [(ear.answer.tokens, ear.answer.finish_reason) for ear in ears] == [
        ([7] * count, LENGTH) for count in (1, 2, 5)
    ]
    assert [(ear.ends, ear.errors) for ear in ears] == [(1, [])] * 3


def test_a_refused_request_hears_why_and_nobody_else(worker):
    good, bad, last = ask(worker, 3), ask(worker, 0), ask(worker, 1)
    for ear in (good, bad, last):
        ear.wait()
    assert [str(error) for error in bad.errors] == ["max_tokens: found 0, expected at least 1"]
    assert (bad.ends, good.errors, last.errors) == (1, [], [])


def test_cancelled_while_running(worker, fake):
    ear = Ear()
    ear._once = ear.gone.set  # goes away after the first delta
    ask(worker, 1000, ear).wait()
    assert [type(error) for error in ear.errors] == [Cancelled]
    assert (ear.ends, ear.answer.tokens, len(fake.aborted), fake.queue) == (1, [7], 1, [])
    assert ask(worker, 2).wait().answer.tokens == [7, 7]


def test_cancelled_while_queued(worker, fake):
    fake.gate.clear()
    first = [ask(worker, 3), ask(worker, 3)]
    assert fake.stepping.wait(PATIENCE_S)
    queued, behind = ask(worker, 3), ask(worker, 3)
    queued.gone.set()
    fake.gate.set()
    assert [type(error) for error in queued.wait().errors] == [Cancelled]
    assert (queued.ends, queued.answer.tokens) == (1, [])
    for ear in (*first, behind):
        assert (ear.wait().answer.tokens, ear.ends) == ([7] * 3, 1)


def test_a_step_that_fails_takes_its_requests_down_and_not_the_worker(worker, fake):
    fake.gate.clear()
    fake.trouble = {2: RuntimeError("out of memory"), 3: ValueError("again")}
    ears = [ask(worker, 5)]
    assert fake.stepping.wait(PATIENCE_S)
    ears += [ask(worker, 5) for _ in range(3)]  # two running and two waiting in the second step
    fake.gate.set()
    for ear in ears:
        assert [str(error) for error in ear.wait().errors] == ["the engine failed: out of memory"]
    assert type(ears[0].errors[0]) is GlmspecError  # not the client's fault
    assert ([len(ear.answer.tokens) for ear in ears], len(fake.aborted), fake.queue) == ([1, 0, 0, 0], 4, [])
    assert str(ask(worker, 5).wait().errors[0]) == "the engine failed: again"
    assert ask(worker, 2).wait().answer.tokens == [7, 7]
    assert all(ear.ends == 1 for ear in ears)


def test_close_finishes_what_was_handed_in(fake):
    worker = Worker(fake)
    fake.gate.clear()
    ears = [ask(worker, count) for count in (4, 1, 0, 9, 2, 2)]
    closing = threading.Thread(target=worker.close)
    closing.start()
    fake.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and not worker._thread.is_alive()
    assert [(ear.ends, len(ear.answer.tokens)) for ear in ears] == [(1, count) for count in (4, 1, 0, 9, 2, 2)]


def test_close_of_an_idle_worker_returns(fake):
    worker = Worker(fake)
    worker.close()
    assert not worker._thread.is_alive()
    assert fake.steps <= 1


def test_nothing_runs_while_there_is_nothing_to_do(worker, fake):
    ask(worker, 1).wait()
    steps = fake.steps
    assert not threading.Event().wait(0.05)
    assert fake.steps == steps


# With the real engine.


@pytest.fixture(scope="module")
def engine(tiny_engines) -> Engine:
    return Engine(tiny_engines)


@pytest.fixture
def real(engine):
    made = Worker(engine)
    yield made
    made.close()
    assert engine.scheduler.pool.free == engine.limits.num_pages - 1
    assert not engine.busy


def request(engine: Engine, text: str = "Count: 1, 2,", **fields) -> Request:
    fields = {"max_tokens": 12, "ignore_eos": True, **fields}
    return Request(prompt_ids=tuple(engine.tokenizer.encode(text)), **fields)


def test_requests_from_many_threads_are_each_answered_as_alone(engine, oracle):
    requests = [request(engine, text * (1 + at)) for at, text in enumerate(["def f(", "a b c ", "| x |", "é", "0"] * 2)]
    expected = [oracle.answer(one)[0] for one in requests]
    worker, ears = Worker(engine), [Ear() for _ in requests]
    threads = [
        threading.Thread(target=worker.submit, args=(one, ear.listener))
        for one, ear in zip(requests, ears, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.close()
    assert [ear.answer for ear in ears] == expected
    assert all((ear.ends, ear.errors) == (1, []) for ear in ears)


def test_cancelling_more_than_run_at_once_leaves_the_engine_free(engine, real):
    """Case E40: while running and while queued, then a normal request."""
    ears = [Ear() for _ in range(2 * engine.limits.max_num_seqs)]
    for ear in ears:
        real.submit(request(engine, max_tokens=1000), ear.listener)
    assert ears[0].started.wait(PATIENCE_S)
    for ear in ears:
        ear.gone.set()
    assert all([type(error) for error in ear.wait().errors] == [Cancelled] for ear in ears)
    ear, normal = Ear(), request(engine)
    real.submit(normal, ear.listener)
    ear.wait()
    assert all(one.ends == 1 for one in (*ears, ear))


def test_a_failing_verifier_fails_the_requests_and_the_next_one_is_served(engine, real, oracle, monkeypatch):
    def broken(inputs):
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.verifier, "run", broken)
        ear = Ear()
        real.submit(request(engine), ear.listener)
        assert [str(error) for error in ear.wait().errors] == ["the engine failed: no more memory"]
    ear = Ear()
    real.submit(request(engine), ear.listener)
    ear.wait()
    assert ear.answer == oracle.answer(request(engine))[0]


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0}, {"stop": ("",)}, {"prompt_ids": ()}, {"prompt_ids": (99999,)}, {"prompt_ids": (1,) * 5000}],
)
def test_what_the_engine_refuses_ends_once(engine, real, fields):
    ear = Ear()
    real.submit(replace(request(engine), **fields), ear.listener)
    assert [type(error) for error in ear.wait().errors] == [RequestError]
    assert ear.ends == 1


# Nothing may end the thread: every later request would wait forever while the server reports ready.


def still_serves(worker: Worker) -> bool:
    return ask(worker, 1).ended.wait(SHORT_S)


@pytest.mark.parametrize("which", ["delta", "cancelled"])
def test_a_listener_that_raises_takes_down_its_own_request_only(fake, which):
    """For instance a response sender or is_cancelled that raises inside Triton's stub."""

    def broken(*_):
        raise RuntimeError("response factory is gone")

    ear = Ear()
    worker = Worker(fake)
    worker.submit(Request(prompt_ids=(1,), max_tokens=3), replace(ear.listener, **{which: broken}))
    assert still_serves(worker)
    assert len(ear.wait().errors) == 1  # and it hears that it has ended
    worker.close()
    assert not fake.busy  # the engine has forgotten it too


def test_an_add_that_fails_fails_its_request_only(fake):
    worker, add = Worker(fake), fake.add

    def broken(request):
        fake.add = add
        raise MemoryError("no room")

    fake.add = broken
    assert ask(worker, 3).ended.wait(SHORT_S)
    assert still_serves(worker)


def test_a_step_that_fails_after_one_of_its_answers_ended(tiny_engines):
    """The ended sequence is never retired (abort skips it, retire was not reached): it is planned again, and its
    next delta finds no listener: KeyError in the thread."""
    engine = Engine(tiny_engines)
    gate, stepping, step = threading.Event(), threading.Event(), engine.step

    def gated():
        stepping.set()
        assert gate.wait(PATIENCE_S)
        return step()

    engine.step = gated
    worker = Worker(engine)
    ears = [Ear() for _ in range(4)]
    worker.submit(request(engine, max_tokens=1), ears[0].listener)
    assert stepping.wait(PATIENCE_S)
    worker.submit(request(engine, max_tokens=1), ears[1].listener)
    unlucky = request(engine, "unlucky")
    add = engine.add

    def spoil(one):
        sequence = add(one)
        if one is unlucky:
            sequence._ending.take = lambda tokens: (_ for _ in ()).throw(RuntimeError("no decoder"))
        return sequence

    engine.add = spoil
    worker.submit(unlucky, ears[2].listener)
    gate.set()
    for ear in ears[:3]:
        ear.wait()
    worker.submit(request(engine, max_tokens=1), ears[3].listener)
    assert ears[3].ended.wait(SHORT_S)
    assert engine.scheduler.pool.free == engine.limits.num_pages - 1
