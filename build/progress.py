"""Progress of long work, shown with rich on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


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

    def note(self, text: str) -> None:
        """Something the user should know and need not act on."""


class RichProgress(Progress):
    """Spinners and bars on stderr; one line a stage when stderr is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

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
        start = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bar(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            task = bar.add_task(escape(title), total=total)
            yield lambda name: bar.advance(task)
        self._done(title, start)

    def note(self, text: str) -> None:
        """A line on stderr."""
        self._console.print(f"note: {text}", markup=False, highlight=False)

    def _done(self, title: str, start: float) -> None:
        seconds = time.perf_counter() - start
        self._console.print(f"{escape(title)} [dim]{seconds:.1f} s[/dim]", highlight=False)
