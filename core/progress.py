"""Progress of long work: bars on a terminal; elsewhere a line a stage, and one now and then while a stage lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from glmspec.core.units import size_text

EVERY_S = 30.0  # between lines of a stage that goes on, where there is no bar to look at


class Progress:
    """Silent; the base for those that show something."""

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A piece of work with no steps to count."""
        yield

    @contextmanager
    def steps(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A piece of work of `total` steps; call the yielded function after each, with its name."""
        yield lambda name: None

    def doing(self, what: str) -> None:
        """Says what the stage or step that goes on is busy with."""

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A piece of work over `total` bytes; call the yielded function, from any thread, with those done since."""
        yield lambda size: None

    def note(self, text: str) -> None:
        """Tells the user what they should know and need not act on."""
        self.say(f"note: {text}")

    def say(self, text: str) -> None:
        """Writes a line about what was done."""

    def detail(self, text: str) -> None:
        """Writes a line that only those who look for a fault want to read."""

    def show(self, table: Any) -> None:
        """Shows a summary, one of rich's tables, beside the result."""


class RichProgress(Progress):
    """On stderr. quiet: nothing. verbose: details too. log: a file that gets all of it, with the time, and is appended
    to. every: seconds between lines of a stage that goes on. Raises OSError for a log that can't be opened."""

    def __init__(
        self, *, quiet: bool = False, verbose: bool = False, log: Path | None = None, every: float = EVERY_S
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._verbose, self._every = verbose, every
        self._log = log.open("a", encoding="utf-8", buffering=1) if log else None
        self._bar: Bar | None = None

    def close(self) -> None:
        """Close the log."""
        if self._log:
            self._log.close()

    def log(self, text: str) -> None:
        """Writes lines to the log alone, each with the time (UTC). Raises OSError naming a log that is full."""
        if self._log:
            now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            try:
                self._log.write("".join(f"{now} {line}\n" for line in text.splitlines()))
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._log.name) from None

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Shows a spinner with the time, then a line with the seconds it took."""
        with self._work(title, None):
            yield

    @contextmanager
    def steps(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """Shows a bar with time left, then a line with the seconds it took."""
        with self._work(title, total, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as (bar, task):

            def advance(name: str) -> None:
                bar.advance(task)
                self.log(f"{title}: {name} done")

            yield advance

    def doing(self, what: str) -> None:
        """Shows it beside the title of the bar."""
        if self._bar:
            for task in self._bar.tasks:
                self._bar.update(task.id, description=escape(f"{task.fields['title']}: {what}"))

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Shows a bar with bytes, speed and time left, then a line with the seconds and the speed."""
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with self._work(title, total, *columns, volume=total) as (bar, task):
            yield lambda size: bar.advance(task, size)

    @contextmanager
    def _work(
        self, title: str, total: int | None, *columns: ProgressColumn, volume: int = 0
    ) -> Iterator[tuple[Bar, TaskID]]:
        start, ended = time.perf_counter(), threading.Event()
        shown = (SpinnerColumn(), TextColumn("{task.description}"), *columns, TimeElapsedColumn())
        seen = self._console.is_terminal and not self._console.quiet
        self.log(f"{title}: begins")
        with Bar(*shown, console=self._console, transient=True, disable=not seen) as bar:
            task = bar.add_task(escape(title), total=total, title=title)
            self._bar = bar
            if not seen or self._log:
                threading.Thread(target=self._tell, args=(bar, seen, bool(volume), ended), daemon=True).start()
            try:
                yield bar, task
            finally:
                ended.set()
                self._bar = None
        self._done(title, time.perf_counter() - start, volume)

    def _tell(self, bar: Bar, seen: bool, bytes_: bool, ended: threading.Event) -> None:
        """A line now and then until the work has ended. seen: there is a bar, so only the log gets it."""
        while not ended.wait(self._every):
            text = _how_far(bar.tasks[0], bytes_)
            self.log(text)
            if not seen:
                self._console.print(text, markup=False, highlight=False)

    def say(self, text: str) -> None:
        """Writes a line to stderr and to the log."""
        self.log(text)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Writes a line to the log, and to stderr for those who asked for more."""
        self.log(text)
        if self._verbose:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True, style="dim")

    def show(self, table: Any) -> None:
        """Shows it on stderr, and as text in the log."""
        self._console.print(table, highlight=False)
        if self._log:
            plain = Console(width=160, no_color=True, highlight=False)
            with plain.capture() as taken:
                plain.print(table)
            self.log(taken.get())

    def _done(self, title: str, seconds: float, volume: int = 0) -> None:
        speed = f", {size_text(volume / seconds)}/s" if volume > 1e9 else ""
        self.log(f"{title} {seconds:.1f} s{speed}")
        self._console.print(f"{escape(title)} [dim]{seconds:.1f} s{speed}[/dim]", highlight=False)


def _how_far(task: Task, bytes_: bool) -> str:
    """Where work stands, in a line: its name, how much of it is done, the time it has taken."""
    words = task.fields["title"] if not task.description else task.description.replace("\\[", "[")
    if task.total and bytes_:
        words += f": {task.completed / 1e9:.2f} of {task.total / 1e9:.2f} GB"
    elif task.total:
        words += f": {task.completed:.0f} of {task.total:.0f}"
    return f"{words}, {task.elapsed or 0:.0f} s so far"
