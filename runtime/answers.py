"""Where answers go as they come, so that a run that dies loses none that was finished.

For a file they are kept, a line each, in a hidden one beside it (`.OUT.unfinished`), from which a later run goes on;
the file itself is written at the end, in the prompts' order. A file that is mounted by itself, or whose folder may not
be written, keeps them itself until then. Standard output gets each as soon as those before it are there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from glmspec.core.errors import RequestError, os_error_text
from glmspec.core.files import is_fixed, naming, opened_alone, write_all, write_output


class PrintedAnswers:
    """Prints answers' lines on standard output, in the prompts' order."""

    def __init__(self) -> None:
        self._next, self._waiting = 0, {}

    def add(self, at: int, line: str) -> None:
        """Print what is in turn. at: the prompt's place. Raises `RequestError` when the output takes no more."""
        self._waiting[at] = line
        while self._next in self._waiting:
            try:
                print(self._waiting.pop(self._next), flush=True)
            except BrokenPipeError:
                raise  # its reader has read enough
            except OSError as error:
                raise RequestError(f"standard output: {error.strerror}; give --output") from None
            self._next += 1


class KeptAnswers:
    """Keeps answers' lines for a file. lines: those that are kept, by the prompt's place."""

    def __init__(self, descriptor: int, place: Path, output: Path) -> None:
        self.lines: dict[int, str] = {}
        self._descriptor, self._place, self._output = descriptor, place, output

    def begin(self, fingerprint: str) -> None:
        """Drop what an earlier run kept. fingerprint: of what is answered, and how."""
        self._cut(0)
        self._append({"unfinished": fingerprint})

    def resume(self, fingerprint: str) -> None:
        """Take over what an earlier run with this fingerprint kept. Raises `RequestError` when its was another."""
        (header, *answers), end = _read(self._descriptor)
        if header["unfinished"] != fingerprint:
            raise RequestError(
                f"{self._place}: left by a run with other prompts, settings or engines. Delete it, or give the same."
            )
        self.lines = {answer["prompt"]: answer["line"] for answer in answers}
        self._cut(end)  # a line that a dying run began

    def add(self, at: int, line: str) -> None:
        """Keep an answer's line. at: the prompt's place. Raises `OSError` naming the file that takes no more."""
        self._append({"prompt": at, "line": line})
        self.lines[at] = line

    def finish(self) -> None:
        """Write the kept lines to the file, in the prompts' order. Raises `OSError` naming it."""
        data = "".join(f"{self.lines[at]}\n" for at in sorted(self.lines)).encode()
        if self._place == self._output:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            with naming(self._output):
                write_all(self._descriptor, data)
                os.ftruncate(self._descriptor, len(data))
        else:
            write_output(self._output, data)

    def forget(self) -> None:
        """Remove what was kept until the file was whole."""
        if self._place == self._output:
            os.ftruncate(self._descriptor, 0)
        else:
            self._place.unlink(missing_ok=True)

    def _append(self, value: dict) -> None:
        data = memoryview(json.dumps(value).encode() + b"\n")
        with naming(self._output):
            while data:
                data = data[os.write(self._descriptor, data) :]

    def _cut(self, end: int) -> None:
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)


@contextmanager
def kept_answers(output: Path, fingerprint: str, count: int | None, resume: bool) -> Iterator[KeptAnswers]:
    """Answers for a file: written when the block ends, kept for `resume` when it fails. count: of the prompts; None
    where they are typed, which no later run can go on with: then the file is written whatever happens. Raises
    `RequestError` for an interrupted run that is neither resumed nor deleted, and while another run writes there."""
    output = output.resolve()  # through a link, not in its place
    place = output if is_fixed(output) else output.with_name(f".{output.name}.unfinished")
    with ExitStack() as stack:
        if resume and not place.exists():
            raise RequestError(f"{place}: --resume: there is no interrupted run to go on with")
        try:
            descriptor = stack.enter_context(opened_alone(place, wait=False))
        except BlockingIOError:
            raise RequestError(f"{output}: another run is writing it; wait for it, or choose another file") from None
        records, _ = _read(descriptor)
        if resume and not records:
            raise RequestError(f"{place}: --resume: there is no interrupted run to go on with")
        if len(records) > 1 and not resume:
            raise RequestError(f"{place}: left by an interrupted run; go on with --resume, or delete it")
        kept = KeptAnswers(descriptor, place, output)
        if resume:
            kept.resume(fingerprint)
        try:
            if not resume:
                kept.begin(fingerprint)
            yield kept
        except BaseException as error:
            if count is None:
                kept.finish()
            if count is None or not kept.lines:
                kept.forget()
                raise
            there = f"{len(kept.lines)} of {count} answers are kept; go on with --resume"
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"{output}: {there}") from None
            if isinstance(error, OSError) and error.filename == str(output):
                raise RequestError(f"{os_error_text(error)} {there}") from None
            raise
        kept.finish()
        if place != output:
            kept.forget()


def _read(descriptor: int) -> tuple[list[dict], int]:
    """The whole lines of a file of ours, the header first, and where they end; none of another file."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        records, end = [], 0
        for line in file:
            try:
                value = json.loads(line)
                whole = line.endswith(b"\n") and value.keys() == ({"prompt", "line"} if records else {"unfinished"})
            except (ValueError, AttributeError):
                break
            if not whole:
                break
            records.append(value)
            end += len(line)
    return records, end
