"""Answering a file of prompts: runs that die, and go on."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal

import pytest
from support.prompt_files import Files, prompts, run

from glmspec.core.errors import RequestError
from glmspec.runtime import answers, generate
from glmspec.runtime.adaptive import Adaptive
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all


@pytest.fixture(scope="module")
def engine(tiny_engines) -> Engine:
    return Engine(tiny_engines)


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


class Dies:
    """Stands in for `answer_all`: the run ends after so many answers."""

    def __init__(self, after: int, how) -> None:
        self.left, self.how, self.answered = after, how, 0

    def __call__(self, engine, requests, finished):
        def counted(at, job):
            finished(at, job)
            self.answered += 1
            self.left -= 1
            if not self.left:
                self.how()

        return answer_all(engine, requests, counted)


def raises(error: BaseException):
    def do() -> None:
        raise error

    return do


def killed_after(engines, files, count: int) -> None:
    generate.answer_all = Dies(count, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(engines, files)


@pytest.mark.parametrize("how", ["killed", "interrupted", "failed", "disk full"])
def test_what_was_answered_is_kept_and_gone_on_with(tiny_engines, files, monkeypatch, how):
    prompts(files)
    statistics = files.output.with_name("stats.json")
    run(tiny_engines, files, statistics=statistics)
    expected, pooled = files.read(), json.loads(statistics.read_text())
    whole = pooled.pop("this_run")
    files.output.write_text("older\n")
    unfinished = files.output.with_name(".out.jsonl.unfinished")
    errors = {"interrupted": KeyboardInterrupt(), "failed": RuntimeError("a fault"), "disk full": None}
    if how == "killed":
        process = multiprocessing.get_context("fork").Process(target=killed_after, args=(tiny_engines, files, 3))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    else:
        error = errors[how] or OSError(errno.ENOSPC, "No space left on device", str(files.output))
        with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
            patch.setattr(generate, "answer_all", Dies(3, raises(error)))
            run(tiny_engines, files)
        if how != "failed":
            assert str(caught.value).startswith(f"{files.output}: ")
            assert "3 of 7 answers are kept; go on with --resume" in str(caught.value)
    assert files.output.read_text() == "older\n"
    assert len(unfinished.read_text().splitlines()) == 1 + 3
    with pytest.raises(RequestError, match=f"^{unfinished}: left by an interrupted run; go on with --resume"):
        run(tiny_engines, files)
    count = Dies(100, None)
    monkeypatch.setattr(generate, "answer_all", count)
    run(tiny_engines, files, resume=True, statistics=statistics)
    assert files.read() == expected and count.answered == 4
    found = json.loads(statistics.read_text())
    assert (whole["num_prompts"], found.pop("this_run")["num_prompts"]) == (7, 4)
    assert found == pooled
    assert not unfinished.exists()


@pytest.mark.parametrize("change", ["prompts", "settings", "drafter", "a setting of a line"])
def test_going_on_with_something_else_is_refused(tiny_engines, files, monkeypatch, change):
    prompts(files)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate, "answer_all", Dies(2, raises(KeyboardInterrupt())))
        run(tiny_engines, files)
    before = files.output.with_name(".out.jsonl.unfinished").read_bytes()
    other = {"settings": {"temperature": 1.0}, "drafter": {"drafter": "dflash2"}}.get(change, {})
    if change == "prompts":
        prompts(files, 6)
    if change == "a setting of a line":
        files.source.write_text(files.source.read_text().replace('"max_tokens": 21', '"max_tokens": 20'))
    with pytest.raises(RequestError, match="left by a run with other prompts, settings or engines"):
        run(tiny_engines, files, resume=True, **other)
    assert files.output.with_name(".out.jsonl.unfinished").read_bytes() == before


@pytest.mark.parametrize("change", [
    ("verification", "block"), ("adaptive", Adaptive(threshold=0.5)), ("drafter_name", "another"),
    ("sha256", lambda path: "other engines"), ("producer", lambda kind: "another version"),
])  # fmt: skip
def test_a_run_is_known_by_its_engine_too(engine, monkeypatch, change):
    before, (name, value) = generate.fingerprint(engine, []), change
    monkeypatch.setattr(engine if hasattr(engine, name) else generate, name, value)
    assert generate.fingerprint(engine, []) != before


def test_what_was_typed_is_written_whatever_ends_the_run(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), answers.kept_answers(out, "print", None, False) as kept:
        kept.add(0, "{}")
        raise KeyboardInterrupt
    assert out.read_text() == "{}\n" and os.listdir(tmp_path) == ["out"]


def test_a_line_that_was_being_written_is_answered_again(tiny_engines, files, monkeypatch):
    prompts(files, 4)
    run(tiny_engines, files)
    expected = files.read()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate, "answer_all", Dies(2, raises(KeyboardInterrupt())))
        run(tiny_engines, files)
    unfinished = files.output.with_name(".out.jsonl.unfinished")
    unfinished.write_bytes(unfinished.read_bytes()[:-9])
    run(tiny_engines, files, resume=True)
    assert files.read() == expected


def test_there_must_be_a_run_to_go_on_with(tiny_engines, files):
    prompts(files, 2)
    with pytest.raises(RequestError, match="--resume: there is no interrupted run to go on with"):
        run(tiny_engines, files, resume=True)
    assert sorted(files.source.parent.iterdir()) == [files.source]


def test_two_runs_for_one_file_never_meet(tiny_engines, files, monkeypatch):
    prompts(files, 2)

    def meanwhile() -> None:
        with pytest.raises(RequestError, match="another run is writing it"):
            run(tiny_engines, files)

    monkeypatch.setattr(generate, "answer_all", Dies(1, meanwhile))
    run(tiny_engines, files)
    assert len(files.read()) == 2


def test_a_file_that_is_mounted_keeps_the_answers_itself(tiny_engines, files, monkeypatch):
    """What lies beside it may be gone with its container."""
    prompts(files, 4)
    run(tiny_engines, files)
    expected = files.read()
    monkeypatch.setattr(answers, "is_fixed", lambda path: path == files.output)
    files.output.write_text("older\n" * 1000)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate, "answer_all", Dies(2, raises(KeyboardInterrupt())))
        run(tiny_engines, files)
    assert len(files.output.read_text().splitlines()) == 1 + 2
    with pytest.raises(RequestError, match="left by an interrupted run"):
        run(tiny_engines, files)
    run(tiny_engines, files, resume=True)
    assert files.read() == expected
    run(tiny_engines, files)
    assert files.read() == expected and sorted(files.source.parent.iterdir()) == [files.source, files.output]


def test_standard_output_gets_answers_in_order_as_they_come(tiny_engines, files, monkeypatch, capsys):
    prompts(files, 5)
    run(tiny_engines, files)
    expected, files.output = files.read(), None
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate, "answer_all", Dies(4, raises(KeyboardInterrupt())))  # the first is the longest
        run(tiny_engines, files)
    assert capsys.readouterr().out == ""
    run(tiny_engines, files)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
