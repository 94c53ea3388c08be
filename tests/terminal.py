"""Terminals for tests: a fake terminal, a pseudo-terminal for a command, and the contents of a screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
COLUMNS = 100


class Seen(io.StringIO):
    """Collects the output of a command on a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def terminal(columns: int = 100, kind: str = "xterm", file: type[io.StringIO] = Seen) -> Iterator[Any]:
    """Make stdout and stderr a terminal within this block."""
    seen = file()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(seen), redirect_stderr(seen):
        patch.setenv("TERM", kind)
        patch.setenv("COLUMNS", str(columns))
        patch.delenv("NO_COLOR", raising=False)
        yield seen


class Screen:
    """The lines of a terminal that handles the output of rich. No line scrolls away."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0

    def write(self, text: str) -> None:
        place = 0
        while place < len(text):
            if code := CODE.match(text, place):
                self._obey(code[2], int(code[1]) if code[1].isdigit() else 1)
                place = code.end()
            else:
                self._put(text[place])
                place += 1

    def _obey(self, code: str, number: int) -> None:
        if code == "A":
            self.row -= number
            assert self.row >= 0
        elif code == "K":
            self.lines[self.row] = ""
        else:
            assert code in "mhl", f"this screen does not support the code {code}"  # colours; a hidden cursor

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self._go_down()
        else:
            if self.column == self.columns:
                self.column = 0
                self._go_down()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1

    def _go_down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def shown(self) -> list[str]:
        """Return the lines of the screen, without trailing spaces."""
        return [line.rstrip() for line in self.lines]


def environment() -> dict[str, str]:
    """Return environment variables for a command in another folder that imports the code under test."""
    paths = os.pathsep.join([os.getcwd(), *sys.path])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}


def watched(arguments: list[str], folder: Path) -> tuple[int, list[tuple[float, list[str]]]]:
    """Return the exit status of `sparse-rl ARGUMENTS`, and after each write the contents of its screen as (seconds,
    lines).
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    command = [sys.executable, "-P", "-m", "sparse_rl.cli", *arguments]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    start, screen, screens = time.monotonic(), Screen(), []
    with subprocess.Popen(command, cwd=folder, env=environment(), **streams) as process:  # type: ignore[call-overload]
        os.close(theirs)
        waiting = b""
        while True:
            try:
                waiting += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            whole = waiting[: waiting.rfind(b"\n") + 1] if waiting.rfind(b"\x1b") > len(waiting) - 8 else waiting
            screen.write(whole.decode(errors="ignore"))
            waiting = waiting[len(whole) :]
            screens.append((time.monotonic() - start, screen.shown()))
        screen.write(waiting.decode())
        screens.append((time.monotonic() - start, screen.shown()))
    os.close(ours)
    return process.returncode, screens
