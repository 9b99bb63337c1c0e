"""Progress of long work, shown with rich on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from glmspec.build.units import size_text


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
        """What the step that goes on is busy with."""

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A piece of work over `total` bytes; call the yielded function, from any thread, with those done since."""
        yield lambda size: None

    def note(self, text: str) -> None:
        """Something the user should know and need not act on."""


class RichProgress(Progress):
    """Spinners and bars on stderr; one line a stage when stderr is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._told: Callable[[str], None] | None = None

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """A spinner, then a line with the seconds it took."""
        start = time.perf_counter()
        with self._console.status(escape(title)):
            yield
        self._done(title, start)

    @contextmanager
    def steps(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar with time left, then a line with the seconds it took."""
        with self._bar(title, total, MofNCompleteColumn(), TimeRemainingColumn()) as (bar, task):
            self._told = lambda what: bar.update(task, description=escape(f"{title}: {what}"))
            yield lambda name: bar.advance(task)
            self._told = None

    def doing(self, what: str) -> None:
        """Beside the title of the bar."""
        if self._told:
            self._told(what)

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar with bytes, speed and time left, then a line with the seconds and the speed."""
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with self._bar(title, total, *columns, volume=total) as (bar, task):
            yield lambda size: bar.advance(task, size)

    @contextmanager
    def _bar(self, title: str, total: int, *columns: ProgressColumn, volume: int = 0) -> Iterator[tuple[Bar, TaskID]]:
        start = time.perf_counter()
        shown = (TextColumn("{task.description}"), BarColumn(), *columns)
        with Bar(*shown, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            yield bar, bar.add_task(escape(title), total=total)
        self._done(title, start, volume)

    def note(self, text: str) -> None:
        """A line on stderr."""
        self._console.print(f"note: {text}", markup=False, highlight=False)

    def _done(self, title: str, start: float, volume: int = 0) -> None:
        seconds = time.perf_counter() - start
        speed = f", {size_text(volume / seconds)}/s" if volume > 1e9 else ""
        self._console.print(f"{escape(title)} [dim]{seconds:.1f} s{speed}[/dim]", highlight=False)
