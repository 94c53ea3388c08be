"""A command keeps its temporary files in one folder, which its processes share, and deletes the folder at its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_rl.temporary import FOLDER

ROOT = Path(__file__).parents[1]
PRINTS_FOLDER = "from sparse_rl.temporary import temporary_folder; print(temporary_folder(), flush=True);"
PRINTS_FOLDER_AND_WAITS = PRINTS_FOLDER + "import sys; sys.stdin.readline();"
STARTS_A_CHILD_AND_WAITS = PRINTS_FOLDER_AND_WAITS.replace(
    "import sys", "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
)


def start(place: Path, code: str, *words: str) -> subprocess.Popen:
    """Start a Python program whose temporary folder is made in `place`."""
    inherited = {key: value for key, value in os.environ.items() if key != FOLDER}
    environment = inherited | {"TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def printed_folder(process: subprocess.Popen) -> Path:
    """Return the folder that a program prints, which is its temporary folder."""
    return Path(process.stdout.readline().strip())


def test_a_temporary_folder_is_removed_with_its_command(tmp_path):
    running = start(tmp_path, PRINTS_FOLDER_AND_WAITS)
    folder = printed_folder(running)
    assert [*tmp_path.iterdir()] == [folder]
    running.communicate("\n")  # the program ends
    assert [*tmp_path.iterdir()] == []


def test_a_process_of_a_command_uses_the_commands_folder(tmp_path: Path) -> None:
    parent = start(tmp_path, STARTS_A_CHILD_AND_WAITS, PRINTS_FOLDER)
    folder = printed_folder(parent)
    assert printed_folder(parent) == folder  # the child's output
    assert [*tmp_path.iterdir()] == [folder]
    parent.communicate("\n")
    assert [*tmp_path.iterdir()] == []


def test_a_program_that_replaces_the_command_keeps_the_folder(tmp_path: Path) -> None:
    becomes = PRINTS_FOLDER + "import os, sys; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    program = "import sys; sys.stdin.readline(); from sparse_rl.temporary import *; remove_temporary_folder()"
    running = start(tmp_path, becomes, program)
    folder = printed_folder(running)
    assert [*tmp_path.iterdir()] == [folder]
    running.communicate("\n")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("package", ["sparse_rl", "rollout", "trainer", "rewards"])
def test_all_temporary_files_go_into_the_commands_folder(package):
    own_place = re.compile(r"(?:mkdtemp|mkstemp|TemporaryDirectory|TemporaryFile)\((?!.*dir=)|DefaultLogsSpecs\(\)")
    files = [file for file in (ROOT / package).rglob("*.py") if file.name != "temporary.py"]
    lines = [(file, line) for file in files for line in file.read_text().splitlines()]
    assert [f"{file}: {line}" for file, line in lines if own_place.search(line)] == []
