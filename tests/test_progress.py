"""A command on a terminal shows one progress row for each stage that is running (such as training, and sampling within
it), below the printed lines. Without a terminal it draws nothing.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time

import pytest
from terminal import Screen as Terminal
from terminal import Seen, terminal

from sparse_rl import progress
from sparse_rl.progress import stage

MESSAGE = "sparse-rl: warning: a line that is printed while there are rows"


def shown(seen: io.StringIO, columns: int = 100) -> list[str]:
    """Return the lines that a terminal shows after the output `seen`."""
    screen = Terminal(columns)
    screen.write(seen.getvalue().replace("\n", "\r\n"))
    return [line for line in screen.shown() if line]


def refresh() -> None:
    """Draw the rows now."""
    progress.screen.drawn.refresh()


def test_a_row_shows_stage_count_times_and_message():
    """The time left is estimated from the steps since the row appeared: a resumed run begins at step 6 of 10."""
    with terminal() as seen, stage("training", total=10, unit="step", done=6) as row:
        refresh()
        assert re.fullmatch(r"training [━╸╺]+ 6/10 steps 0:00:00 --:--", shown(seen)[0])
        for _ in range(2):
            time.sleep(0.05)
            row.advance()
        row.tell("reward 0.250 [bold]")
        with stage("sampling", total=1, unit="sequence"):
            refresh()
            first, second = shown(seen)
        assert re.fullmatch(r"training [━╸╺]+ 8/10 steps +0:00:00 00:0[01] reward 0.250 \[bold\]", first)
        assert re.fullmatch(r"sampling ━+ 0/1 sequence +0:00:00 --:--", second)
    assert shown(seen) == []


def test_printed_lines_appear_above_the_rows():
    """Also lines longer than the terminal. Of a library's bar with carriage returns only the last state appears."""
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
        assert progress.screen.rows == []


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


def test_an_ascii_terminal_gets_only_ascii_characters():
    """A command prints what its terminal cannot encode as escapes (console.configure)."""
    code = (
        "import sys; from sparse_rl.commands.console import configure; from sparse_rl.progress import screen, stage\n"
        "sys.stdout.isatty = lambda: True; configure(False)\n"
        "with stage('evaluating', total=9, unit='problem', done=3) as row:\n"
        "    row.tell('größer'); print('naïve'); screen.drawn.refresh()"
    )
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "xterm", "COLUMNS": "100"}
    written = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True, check=True).stdout
    text = written.decode("ascii")
    assert "3/9 problems" in text
    assert "na\\xefve" in text
    assert "gr\\xf6\\xdfer" in text


def test_only_rank_0_shows_progress(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with terminal() as seen, stage("training", total=2, unit="step") as row, stage("sampling", shown=False):
        row.advance()
    assert seen.getvalue() == ""
    assert row.done == 1


def test_a_forked_process_writes_as_if_there_were_no_rows(tmp_path):
    with terminal() as seen, stage("loading") as row:
        refresh()
        if (child := os.fork()) == 0:
            row.tell("from the child")
            before = seen.tell()
            print("from the child", flush=True)
            (tmp_path / "out").write_text(seen.getvalue()[before:])
            os._exit(0)
        os.waitpid(child, 0)
    assert (tmp_path / "out").read_text() == "from the child\n"


@pytest.mark.parametrize(("kind", "file"), [("dumb", Seen), ("xterm", io.StringIO)])
def test_no_row_is_drawn_without_a_terminal(kind, file):
    with terminal(kind=kind, file=file) as seen, stage("training", total=2, unit="step") as row:
        print(MESSAGE)
        row.advance()
    assert seen.getvalue() == f"{MESSAGE}\n"
