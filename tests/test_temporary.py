"""A command keeps its temporary files in one folder, and deletes the folder at its end. A killed command cannot, so the
next command deletes that folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_rl.temporary import FOLDER, LOCK

ROOT = Path(__file__).parents[1]
PRINTS_FOLDER = "from sparse_rl.temporary import temporary_folder; print(temporary_folder(), flush=True);"
PRINTS_FOLDER_AND_WAITS = PRINTS_FOLDER + "import sys; sys.stdin.readline();"
STARTS_A_CHILD_AND_WAITS = PRINTS_FOLDER_AND_WAITS.replace(
    "import sys", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
)


def start(place: Path, code: str, *words: str) -> subprocess.Popen:
    """Start a Python program whose temporary folder is made in `place`."""
    inherited = {key: value for key, value in os.environ.items() if key != FOLDER}
    environment = inherited | {"TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def printed_folder(process: subprocess.Popen) -> Path:
    """Return the folder that a program prints, which is its temporary folder."""
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_temporary_folder_is_removed_with_its_command(tmp_path: Path) -> None:
    running = start(tmp_path, PRINTS_FOLDER_AND_WAITS)
    folder = printed_folder(running)
    assert [*tmp_path.iterdir()] == [folder]
    running.communicate("\n")  # the program ends
    assert [*tmp_path.iterdir()] == []


def test_the_next_start_removes_folders_of_killed_commands(tmp_path: Path) -> None:
    """The next start removes folders of killed commands, and keeps those of running commands and of other programs."""
    (tmp_path / "sparse-rl-of-another").mkdir()
    (tmp_path / "sparse-rl-linked").symlink_to(tmp_path / "sparse-rl-of-another")
    killed = [start(tmp_path, PRINTS_FOLDER_AND_WAITS) for _ in range(3)]
    running = start(tmp_path, PRINTS_FOLDER_AND_WAITS)
    killed_folders, running_folder = [printed_folder(process) for process in killed], printed_folder(running)
    (killed_folders[0] / "data").mkdir()
    for process in killed:
        process.kill()
        process.wait()
    assert all(folder.is_dir() for folder in killed_folders)
    start(tmp_path, PRINTS_FOLDER).communicate()
    names = {"sparse-rl-of-another", "sparse-rl-linked", running_folder.name}
    assert {file.name for file in tmp_path.iterdir()} == names
    running.communicate("\n")


def test_a_process_that_outlives_its_command_keeps_the_folder(tmp_path: Path) -> None:
    """While a child of a killed command runs, the next command keeps the folder; after the child's end it is
    deleted."""
    parent = start(tmp_path, STARTS_A_CHILD_AND_WAITS, PRINTS_FOLDER_AND_WAITS)
    folder = printed_folder(parent)
    assert printed_folder(parent) == folder  # the child's output
    parent.kill()
    parent.wait()
    start(tmp_path, PRINTS_FOLDER).communicate()
    assert (folder / LOCK).is_file()
    parent.communicate("\n")  # the child ends
    start(tmp_path, PRINTS_FOLDER).communicate()
    assert [*tmp_path.iterdir()] == []


def test_a_program_that_replaces_the_command_keeps_the_folder(tmp_path: Path) -> None:
    """By exec, a command becomes another program in the same process, as `serve` becomes the server. While this program
    runs, the next command does not delete its folder.
    """
    becomes = PRINTS_FOLDER + "import os, sys; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    program = "import sys; sys.stdin.readline(); from sparse_rl.temporary import *; remove_temporary_folder()"
    running = start(tmp_path, becomes, program)
    folder = printed_folder(running)
    start(tmp_path, PRINTS_FOLDER).communicate()
    assert [*tmp_path.iterdir()] == [folder]
    running.communicate("\n")
    assert [*tmp_path.iterdir()] == []


def test_files_of_a_killed_run_are_removed_later(tmp_path: Path) -> None:
    """The next command removes the files of a killed run; here these are the datasets that a launcher of several
    training processes keeps for them.
    """
    code = (
        "import os, signal; from trainer.once import once, remembered\n"
        "with remembered(): once('x', lambda: 'kept' * 1000); os.kill(os.getpid(), signal.SIGKILL)"
    )
    start(tmp_path, code).communicate()
    assert sum(file.is_file() and file.name != LOCK for file in tmp_path.rglob("*")) == 1
    start(tmp_path, PRINTS_FOLDER).communicate()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("package", ["sparse_rl", "rollout", "trainer", "rewards"])
def test_all_temporary_files_go_into_the_commands_folder(package: str) -> None:
    """No line of the package makes a temporary file without `dir=`, which names the command's folder."""
    own_place = re.compile(r"(?:mkdtemp|mkstemp|TemporaryDirectory|TemporaryFile)\((?!.*dir=)|DefaultLogsSpecs\(\)")
    files = [file for file in (ROOT / package).rglob("*.py") if file.name != "temporary.py"]
    lines = [(file, line) for file in files for line in file.read_text().splitlines()]
    assert [f"{file}: {line}" for file, line in lines if own_place.search(line)] == []
