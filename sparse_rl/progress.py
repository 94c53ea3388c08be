"""Progress display: on a terminal one row per running stage, below all other output; elsewhere an occasional line.

    with stage("training", total=40, unit="step") as row:
        row.advance()
        row.tell("reward 0.250")

While rows are shown, all printed output appears above the rows, line by line. In a launch of several processes only the
first one shows rows.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

FIRST_SIGN = 20.0  # without a terminal: seconds until the first progress line; each further interval is twice as long
WIDE, NARROW = 80, 60  # terminal columns: from WIDE on the bar is long, below NARROW there is no bar
LONGEST = 40  # maximum characters of a stage's `what`, such as the path of a file


class Stage:
    """A running stage. `what` is the object of the stage, such as the file being loaded."""

    def __init__(self, name: str, what: str, total: int | None, unit: str, done: int) -> None:
        self.name, self.what, self.total, self.unit, self.done = name, what, total, unit, done
        self.told = ""
        self.first, self.start = done, time.monotonic()
        self.advanced = self.start

    def advance(self, by: int = 1) -> None:
        if by:
            self.done, self.advanced = self.done + by, time.monotonic()

    def tell(self, told: str) -> None:
        self.told = told

    def clock(self) -> str:
        """Return the estimated remaining time once units have finished; before that, the elapsed time."""
        now, units = time.monotonic(), self.done - self.first
        if self.total is None or units <= 0 or self.done >= self.total:
            return _clock(now - self.start)
        seconds_per_unit = (self.advanced - self.start) / units
        return f"{_clock(max(0.0, seconds_per_unit * (self.total - self.done) - (now - self.advanced)))} left"

    @property
    def label(self) -> str:
        what = self.what if len(self.what) <= LONGEST else f"...{self.what[3 - LONGEST :]}"  # keeps the end of a path
        return f"{self.name} {what}".rstrip()

    @property
    def count(self) -> str:
        return "" if self.total is None else f"{self.done}/{self.total} {self.unit}{'s' * (self.total != 1)}"

    def sign(self) -> str:
        return self.name if self.total is None else f"in {self.unit} {min(self.done + 1, self.total)}/{self.total}"


class Screen:
    """The rows of this process, drawn on `console`; by default on stdout, if stdout is a terminal when rows appear."""

    def __init__(self, console: Console | None = None) -> None:
        self.given = console
        self.rows: dict[Stage, Any] = {}  # row -> rich's task ID; None if the row is not drawn
        self.drawn: Progress | None = None
        self.lock = threading.RLock()
        self.over = threading.Event()
        self.in_command = False
        self._begin()

    @contextmanager
    def command(self) -> Iterator[None]:
        """Mark that a command runs in this block. Progress lines then give the time since the start of the command."""
        self._begin()
        self.in_command = True
        try:
            yield
        finally:
            self.in_command = False

    def _begin(self) -> None:
        self.start, self.wait = time.monotonic(), FIRST_SIGN
        self.next_sign = self.start + FIRST_SIGN

    def heard(self) -> None:
        """Stop the occasional progress lines, because the command prints output of its own from now on."""
        self.next_sign = float("inf")

    @contextmanager
    def show(self, row: Stage) -> Iterator[Stage]:
        with self.lock:
            if not self.rows:
                self._open()
            self.rows[row] = None if self.drawn is None else self.drawn.add_task("", total=row.total, row=row)
        try:
            yield row
        finally:
            with self.lock:
                number = self.rows.pop(row)
                if self.drawn is not None:
                    self.drawn.remove_task(number)
                if not self.rows:
                    self._close()

    def _open(self) -> None:
        if not self.in_command:
            self._begin()
        self.before = sys.stdout, sys.stderr
        console = self.given or _terminal()
        if console is None:
            self.over = threading.Event()
            threading.Thread(target=self._live, args=(self.over,), daemon=True).start()
            return
        self.drawn = _progress(console)
        self.drawn.start()
        sys.stdout = Above(self, sys.stdout)  # type: ignore[assignment]
        if _is_terminal(sys.stderr):
            sys.stderr = Above(self, sys.stderr)  # type: ignore[assignment]

    def _close(self) -> None:
        self.over.set()
        if self.drawn is None:
            return
        for name, stream in zip(("stdout", "stderr"), self.before, strict=True):
            current = getattr(sys, name)
            if isinstance(current, Above):
                current.end()
                setattr(sys, name, stream)
        self.drawn.stop()
        self.drawn = None

    def _live(self, over: threading.Event) -> None:
        """Print a progress line 20 s, 60 s, 140 s, ... after the start, until `over` is set."""
        while not over.wait(max(0.0, min(self.next_sign - time.monotonic(), FIRST_SIGN))):
            now = time.monotonic()
            with self.lock, suppress(OSError):  # stdout may be a closed pipe
                if now >= self.next_sign and self.rows:
                    print(f"{next(iter(self.rows)).sign()}, {now - self.start:.0f} s after the start", flush=True)
                    self.wait *= 2
                    self.next_sign = now + self.wait


class Above:
    """A stream that prints lines above a screen's rows, and passes text through unchanged when there are no rows.

    A library may keep this stream after the rows are gone. If a library overwrites a line by carriage returns, as
    progress bars do, only the line's last state is shown.
    """

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self.screen, self.stream, self.owner = screen, stream, os.getpid()
        self.waiting = ""

    def write(self, text: str) -> int:
        if os.getpid() != self.owner:  # a forked process has no rows
            return self.stream.write(text)
        with self.screen.lock:
            if self.screen.drawn is None:
                return self.stream.write(text)
            *lines, self.waiting = (self.waiting + text).split("\n")
            for line in lines:
                self._print(line)
            self.waiting = _last_state(self.waiting)
        return len(text)

    def end(self) -> None:
        """Print the text after the last newline, if any, as a line of its own."""
        if self.waiting.strip():
            self._print(self.waiting)
        self.waiting = ""

    def _print(self, line: str) -> None:
        encoding = self.stream.encoding or "utf-8"
        shown = _last_state(line).strip("\r").encode(encoding, "replace").decode(encoding)
        assert self.screen.drawn is not None
        self.screen.drawn.console.print(Text.from_ansi(shown) if "\x1b" in shown else Text(shown))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _last_state(line: str) -> str:
    """Return the text after the last carriage return that does not end the line."""
    return line[max(0, line.rfind("\r", 0, len(line.rstrip("\r")))) :]


class Quiet(Console):
    """A console that never hides the cursor, because a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()  # None if the process was started without the stream


def _terminal() -> Console | None:
    """Return a console on stdout if stdout is a terminal that can overwrite a line."""
    if not _is_terminal(sys.stdout) or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return None
    return Quiet(file=sys.stdout, force_terminal=True, soft_wrap=True, highlight=False, markup=False)


class Part(ProgressColumn):
    def __init__(self, part: Callable[[Stage], str], encoding: str, column: Column) -> None:
        super().__init__(column)
        self.part, self.encoding = part, encoding

    def render(self, task: Task) -> Text:
        return Text(self.part(task.fields["row"]).encode(self.encoding, "replace").decode(self.encoding))


class Bar(BarColumn):
    """The progress bar of a stage; the bar moves back and forth if the stage has no total."""

    def render(self, task: Task) -> ProgressBar:
        task.completed = task.fields["row"].done
        return super().render(task)


def _progress(console: Console) -> Progress:
    """Return rich's progress display, which draws each row as a task, four times a second."""

    def text(part: Callable[[Stage], str], **column: Any) -> ProgressColumn:
        return Part(part, console.encoding, Column(no_wrap=True, **column))

    bar = [Bar(24 if console.width >= WIDE else 8)] if console.width >= NARROW else []
    return Progress(
        text(lambda row: row.label),
        *bar,
        text(lambda row: row.count),
        text(Stage.clock),
        text(lambda row: row.told, overflow="crop", ratio=1),
        console=console,
        transient=True,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
        expand=True,
    )


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
    visible = shown and os.environ.get("RANK", "0") == "0"
    with screen.show(row) if visible else nullcontext():
        yield row
