"""A command on a terminal shows one progress row for each stage that is running (such as training, and sampling within
it), below the printed lines. Without a terminal it prints lines from time to time.
"""

from __future__ import annotations

import io
import os
import re
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from terminal import Screen as Terminal
from terminal import Seen, terminal

from sparse_rl import progress
from sparse_rl.progress import Above, Quiet, Screen, Stage, stage

MESSAGE = "sparse-rl: warning: a line that is printed while there are rows"


def shown(seen: io.StringIO, columns: int = 100) -> list[str]:
    """Return the lines that a terminal shows after the output `seen`."""
    screen = Terminal(columns)
    screen.write(seen.getvalue().replace("\n", "\r\n"))
    return [line for line in screen.shown() if line]


def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the clock of the rows by one that advances only when a test changes `now`, in seconds."""
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: time.now))
    return time


def refresh() -> None:
    """Draw the rows now."""
    assert progress.screen.drawn is not None
    progress.screen.drawn.refresh()


def test_a_row_shows_stage_count_time_left_and_message(monkeypatch):
    time = clock(monkeypatch)
    with terminal() as seen, stage("training", total=4, unit="step") as row:
        time.now += 30
        refresh()
        assert re.fullmatch(r"training ━+ 0/4 steps 0:30", shown(seen)[0])
        row.advance()
        row.tell("reward 0.250")
        with stage("sampling", total=1, unit="sequence"):
            time.now += 10
            refresh()
            first, second = shown(seen)
        # 3 steps of 30 s, less the 10 s that have passed
        assert re.fullmatch(r"training ━+╺━+ 1/4 steps +1:20 left reward 0.250", first)
        assert re.fullmatch(r"sampling ━+ 0/1 sequence 0:10", second)
    assert shown(seen) == []


def test_the_time_left_uses_the_steps_of_this_run(monkeypatch):
    """A resumed run begins at step 6 of 10. The time left is estimated from this run's steps alone, not from the steps
    before it.
    """
    time = clock(monkeypatch)
    row = Stage("training", "", 10, "step", 6)
    time.now += 3600
    assert row.clock() == "1:00:00"
    row.advance(2)
    assert row.clock() == "1:00:00 left"
    time.now += 5000
    assert row.clock() == "0:00 left"  # a step that takes longer than the earlier ones
    row.advance(2)
    assert row.clock() == "2:23:20"
    assert row.count == "10/10 steps"


def test_printed_lines_appear_above_the_rows():
    """Printed lines appear whole above the rows, even if they are longer than the terminal is wide. If a library prints
    a progress bar with carriage returns, only its last state appears.
    """
    long = "next:  sparse-rl " + 30 * "a_path/"
    with terminal() as seen, stage("loading", "quickstart/model"):
        print("rollouts: ", end="")
        print("hf engine [bold]")
        print(MESSAGE, file=sys.stderr)
        print(long)
        print("\rweights 10%\rweights 100%\n\x1b[31mred\x1b[0m", end="")
        refresh()
        *text, row = shown(seen)
    assert text == ["rollouts: hf engine [bold]", MESSAGE, long[:100], long[100:200], long[200:], "weights 100%"]
    assert row.startswith("loading quickstart/model ")
    assert shown(seen) == [*text, "red"]
    assert "\x1b[31mred" in seen.getvalue()
    assert "\x1b[?25l" not in seen.getvalue()  # the cursor is not hidden


def test_a_kept_stderr_writes_above_the_rows_of_later_stages_too():
    """A library may keep the `sys.stderr` that it found during one stage, and write to it during a later stage."""
    with terminal() as seen:
        with stage("loading"):
            library_stderr = sys.stderr
        print(MESSAGE, file=library_stderr)
        with stage("training"):
            print(MESSAGE, file=library_stderr)
            refresh()
            assert shown(seen)[:2] == [MESSAGE, MESSAGE]
            assert shown(seen)[2].startswith("training ")


def test_an_error_removes_all_rows():
    with terminal() as seen:
        with pytest.raises(ValueError, match="no"), stage("training", total=2, unit="step"), stage("sampling"):
            raise ValueError("no")
        assert shown(seen) == []
        assert sys.stdout is sys.stderr is seen
        assert progress.screen.rows == {}


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_row_is_one_line_on_every_terminal(width):
    """On terminals of 30, 60 and 200 columns, long texts are cut so that each row fits in one line."""
    loading = stage("loading", "/a/long/path/" * 9)
    with terminal(width) as seen, loading, stage("evaluating", total=1000, unit="problem") as row:
        row.tell("math500, streaming 1024")
        refresh()
        first, second = shown(seen, width)
    assert len(first) <= width
    assert first.startswith("loading .../")
    assert second.startswith("evaluating ")


def test_an_ascii_terminal_gets_only_ascii_characters(monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Quiet(file=file, force_terminal=True, width=50, markup=False)
    screen = Screen(console)
    row = Stage("evaluating", "", 9, "problem", 3)
    row.tell("größer, and longer than there is room for on a terminal of this width")
    with screen.show(row):
        print("naïve", file=Above(screen, file))
        screen.drawn.refresh()
    file.flush()
    written = file.buffer.getvalue().decode("ascii")
    assert "na?ve" in written
    assert "3/9 problems" in written
    assert "gr??er" in written


def test_only_rank_0_shows_progress(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with terminal() as seen, stage("training", total=2, unit="step") as row, stage("sampling", shown=False):
        row.advance()
    assert seen.getvalue() == ""
    assert row.done == 1


def test_a_forked_process_writes_as_if_there_were_no_rows(tmp_path):
    """A child process has no rows of its own: its line is written plainly, without codes that redraw rows."""
    screen = Screen(Console(file=io.StringIO()))
    with (tmp_path / "out").open("w") as file, screen.show(Stage("loading", "", None, "", 0)):
        above = Above(screen, file)
        if (child := os.fork()) == 0:
            above.write("from the child\n")
            file.flush()
            os._exit(0)
        os.waitpid(child, 0)
    assert (tmp_path / "out").read_text() == "from the child\n"


@pytest.mark.parametrize(("kind", "file"), [("dumb", Seen), ("xterm", io.StringIO)])
def test_no_row_is_drawn_without_a_terminal(monkeypatch, kind, file):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal(kind=kind, file=file) as seen, stage("training", total=2, unit="step") as row:
        print(MESSAGE)
        row.advance()
    assert seen.getvalue() == f"{MESSAGE}\n"


class Silence:
    """Replaces a `threading.Event`: each wait advances the clock, and the event is set after a number of waits."""

    def __init__(self, time: SimpleNamespace, waits: int) -> None:
        self.time, self.waits = time, waits

    def wait(self, timeout: float) -> bool:
        self.time.now += timeout
        self.waits -= 1
        return self.waits < 0


def test_a_command_without_a_terminal_prints_that_it_is_running(capsys, monkeypatch):
    """The command prints its stage and step 20, 60, 140 and 300 seconds after its start; the times count over all
    stages. Once the command has printed a line itself, no more such lines are printed.
    """
    time, screen = clock(monkeypatch), Screen()
    with screen.command():
        for row, signs in (
            (Stage("loading", "a model", None, "", 0), 1),
            (Stage("training", "", 9, "step", 2), 14),
        ):
            with screen.show(row):
                screen._live(Silence(time, signs))
        assert capsys.readouterr().out.splitlines() == [
            "loading, 20 s after the start",
            *(f"in step 3/9, {seconds} s after the start" for seconds in (60, 140, 300)),
        ]
        screen.heard()
        with screen.show(row):
            screen._live(Silence(time, 1000))
    assert capsys.readouterr().out == ""
