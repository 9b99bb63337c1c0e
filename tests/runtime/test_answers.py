"""Answers that are kept for a later run: half a line is none, and another run's are refused."""

from __future__ import annotations

import pytest

from glmspec.core.errors import RequestError
from glmspec.runtime.answers import kept_answers


def die(output, answers: dict[int, str], resume: bool, half: bytes = b"") -> None:
    """A run that keeps these answers and dies; half: of a line that it had begun."""
    with pytest.raises(KeyboardInterrupt), kept_answers(output, "these", 3, resume) as kept:
        for at, line in answers.items():
            kept.add(at, line)
        raise KeyboardInterrupt
    with (output.parent / f".{output.name}.unfinished").open("ab") as file:
        file.write(half)


def test_a_run_that_dies_twice_keeps_the_answers_of_both(tmp_path):
    output = tmp_path / "out.jsonl"
    die(output, {2: "c"}, False, b'{"prompt": 1, "li')
    die(output, {0: "a"}, True, b'{"prompt"')
    with kept_answers(output, "these", 3, True) as kept:
        assert kept.lines == {0: "a", 2: "c"}
        kept.add(1, "b")
    assert output.read_text() == "a\nb\nc\n" and [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_answers_of_another_run_are_neither_used_nor_lost(tmp_path):
    output = tmp_path / "out.jsonl"
    die(output, {2: "c"}, False)
    for fingerprint, resume, said in (("those", True, "other prompts, settings"), ("these", False, "--resume")):
        with pytest.raises(RequestError, match=said), kept_answers(output, fingerprint, 3, resume):
            pass
    with kept_answers(output, "these", 3, True) as kept:
        assert kept.lines == {2: "c"}
