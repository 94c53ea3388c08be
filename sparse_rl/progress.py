"""Progress shown while a command runs.

On a terminal, each running stage is a row of rich's display, below the printed lines. Without one, nothing is drawn. In
a launch of several processes only the first one shows rows.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

LONGEST = 40  # maximum characters of a stage's `what`, such as the path of a file


class Stage:
    """A running stage. `what` is the object of the stage, such as the file being loaded."""

    def __init__(self, name: str, what: str, total: int | None, unit: str, done: int) -> None:
        self.total, self.unit, self.done = total, unit, done
        short = what if len(what) <= LONGEST else f"...{what[3 - LONGEST :]}"  # keeps the end of a path
        self.label = f"{name} {short}".rstrip()
        self.drawn: tuple[Progress, Any] | None = None  # rich's display and its number of this row

    def advance(self, by: int = 1) -> None:
        self.done += by
        if self.drawn is not None and by:
            self.drawn[0].update(self.drawn[1], advance=by, count=self.count)

    def tell(self, told: str) -> None:
        if self.drawn is not None:
            self.drawn[0].update(self.drawn[1], told=told)

    @property
    def count(self) -> str:
        return "" if self.total is None else f"{self.done}/{self.total} {self.unit}{'s' * (self.total != 1)}"


class Screen:
    """The stages that this process shows, and rich's display of them."""

    def __init__(self) -> None:
        self.rows: list[Stage] = []
        self.console: Console | None = None  # one for all displays: a library may keep the stderr that it found
        self.drawn: Progress | None = None
        self.lock = threading.RLock()

    @contextmanager
    def show(self, row: Stage) -> Iterator[Stage]:
        with self.lock:
            if self.console is None or self.console.file is not sys.stdout:
                self.console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
            if self.drawn is None and self.console.is_interactive:
                self.drawn = _display(self.console)
                self.drawn.start()
            self.rows.append(row)
            if self.drawn is not None:
                fields: dict[str, Any] = {"completed": row.done, "count": row.count, "told": ""}
                row.drawn = self.drawn, self.drawn.add_task(row.label, total=row.total, **fields)
        try:
            yield row
        finally:
            with self.lock:
                self.rows.remove(row)
                if row.drawn is not None:
                    row.drawn[0].remove_task(row.drawn[1])
                    row.drawn = None
                if self.drawn is not None and not self.rows:
                    self.drawn.stop()
                    self.drawn = None


def _display(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(24 if console.width >= 80 else 8),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[told]}", markup=False, table_column=Column(no_wrap=True, overflow="crop", ratio=1)),
        console=console,
        transient=True,
        refresh_per_second=4,
        speed_estimate_period=24 * 3600,  # a step may take minutes
        redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        expand=True,
    )


def _forget_rows() -> None:
    """In a forked process, which has no rows: print to the streams themselves."""
    screen.__init__()  # type: ignore[misc]
    sys.stdout, sys.stderr = (getattr(one, "rich_proxied_file", one) for one in (sys.stdout, sys.stderr))


os.register_at_fork(after_in_child=_forget_rows)
screen = Screen()


@contextmanager
def stage(
    name: str, what: str = "", *, total: int | None = None, unit: str = "", done: int = 0, shown: bool = True
) -> Iterator[Stage]:
    """Show a stage, such as loading or training, until the end of the block.

    what : object of the stage, such as a file
    total, unit : number of units to do, and the unit's name in the singular; `done` units are done already
    shown : False hides the row; in a launch, every process but the first hides its rows
    """
    row = Stage(name, what, total, unit, done)
    visible = shown and rank() == 0
    with screen.show(row) if visible else nullcontext():
        yield row


# ---- single lines ----------------------------------------------------------------------------------------------------


def rank() -> int:
    """Return the rank of this process within its launch."""
    return int(os.environ.get("RANK", "0"))


def say(what: str, finding: str) -> None:
    """Print one line about a decision of this command, on rank 0 only."""
    if rank() == 0:
        print(f"{what}: {finding}", flush=True)


def warn(warning: str) -> None:
    """Print one line about an unwise setting, on rank 0 only."""
    if rank() == 0:
        print(f"sparse-rl: warning: {warning}", file=sys.stderr, flush=True)
