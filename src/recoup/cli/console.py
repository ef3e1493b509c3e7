"""Where the command line writes: data to stdout, messages and progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Console", "Progress"]

Progress = Callable[[int, int, str], None]
_WIDTH = 160  # of tables that go to a file or a pipe, where there is no terminal to ask


class Console:
    """The two streams of one run.

    Attributes:
        json: whether data is written as JSON, not as tables.
        quiet: whether messages and progress are left out; errors never are.
    """

    def __init__(self, *, json: bool, quiet: bool) -> None:
        self.json = json
        self.quiet = quiet

    def data(self, value: object, *text: RenderableType) -> None:
        """Writes the result: ``value`` as JSON, or ``text`` for people."""
        if self.json:
            sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
            return
        # Rich honours NO_COLOR, and writes no colour codes into a file.
        console = _rich(sys.stdout)
        for renderable in text:
            console.print(renderable, highlight=False)

    def plain(self, text: str) -> None:
        """Writes text as it is, without wrapping or markup."""
        sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def message(self, text: str) -> None:
        """Tells the user what happens."""
        if not self.quiet:
            sys.stderr.write(text + "\n")

    def error(self, text: str) -> None:
        """Tells the user what went wrong."""
        sys.stderr.write(f"recoup: {text}\n")

    @contextmanager
    def progress(self, title: str) -> Generator[Progress | None]:
        """A progress bar on stderr, as a callback ``(done, total, text)``; None if stderr is no terminal."""
        if self.quiet or not sys.stderr.isatty():
            yield None
            return
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
        with Bar(*columns, console=_rich(sys.stderr), transient=True) as bar:
            task = bar.add_task(title, total=None)

            def update(done: int, total: int, text: str) -> None:
                bar.update(task, completed=done, total=total, description=f"{title}: {text}" if text else title)

            yield update


def _rich(stream: Any) -> Any:
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, width=None if stream.isatty() else _WIDTH, soft_wrap=False)
