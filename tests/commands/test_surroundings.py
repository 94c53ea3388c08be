"""If something around a command is broken (user code, environment variables, files, pipes), the command prints one
line and has a nonzero exit status.
"""

from __future__ import annotations

import os
import subprocess
import sys
from errno import EFBIG, ENOSPC
from pathlib import Path

import pytest
from test_commands import error_of

from sparse_rl.commands.console import PROCESS_NUMBERS, Session, guarded
from sparse_rl.commands.main import main
from sparse_rl.recipe import list_recipes
from trainer.arguments import refusals

REWARD = """
class Own(BaseException):
    pass

def reward(completions, **columns):
    {}

class Made:
    __name__ = "made"
    def __init__(self):
        {}
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)
"""
ENDS = ["raise SystemExit(0)", "exit()", "raise Own('gone')", "raise GeneratorExit"]


def run_command(workdir: Path, *words: str, code: str = "", **environment: str) -> subprocess.CompletedProcess:
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment}
    program = code + "import sys; from sparse_rl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, cwd=workdir, env=merged, capture_output=True, text=True, timeout=300, errors="replace"
    )


# ---- user code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_a_reward_file_that_exits_at_import_is_an_error(end: str, workdir: Path, capsys: pytest.CaptureFixture) -> None:
    (workdir / "ends.py").write_text(REWARD.format("pass", "pass") + end)
    output = error_of(capsys, "train", "grpo.yaml", "--dry-run", "rewards=['ends.py:reward']")
    assert "rewards: reward 'ends.py:reward' cannot be imported: " in output
    assert "accuracy: " in error_of(capsys, "eval", "eval.yaml", "accuracy=ends.py:reward")
    assert "keep: " in error_of(capsys, "train", "distill.yaml", "--dry-run", "keep=ends.py:reward")


@pytest.mark.parametrize("end", ENDS)
def test_a_reward_class_that_exits_when_it_is_created_is_an_error(
    end: str, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    (workdir / "made.py").write_text(REWARD.format("pass", end))
    text = error_of(capsys, "train", "grpo.yaml", "--dry-run", "rewards=['made.py:Made']")
    assert "reward 'made.py:Made' cannot be made: " in text


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.few(2)
def test_a_reward_that_exits_while_scoring_is_an_error(end: str, workdir: Path, capsys: pytest.CaptureFixture) -> None:
    (workdir / "judge.py").write_text(REWARD.format(end, "pass"))
    assert "accuracy: reward raised " in error_of(capsys, "eval", "eval.yaml", "accuracy=judge.py:reward", "samples=1")
    output = error_of(capsys, "train", "distill.yaml", "keep=judge.py:reward", "data.synthetic.size=4")
    assert "the reward reward raised " in output
    assert main(["train", "grpo.yaml", "rewards=['judge.py:reward']", f"output_dir={workdir / 'grpo'}"]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "a reward function (one of: reward) raised" in line


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("no"), GeneratorExit()])
def test_exceptions_that_would_end_python_silently_are_reported(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    session = Session()
    session.folder = tmp_path

    def work() -> int:
        raise error

    assert guarded(work, session) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"sparse-rl: unexpected {type(error).__name__}")
    assert output.count("\n") == 1


# ---- environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROCESS_NUMBERS)
@pytest.mark.parametrize("value", ["x", "", "-1", "1.5", "²", "9" * 30])
def test_environment_variables_that_are_not_valid_process_numbers_are_refused(
    name: str, value: str, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    assert f"the environment variable {name} is '{value}'" in error_of(capsys, "train", "grpo.yaml", "--dry-run")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; the largest port is 65535"),
    ],
)
def test_impossible_process_numbers_in_the_environment_are_refused(
    variables: dict[str, str],
    message: str,
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in error_of(capsys, "doctor")


def test_a_deleted_working_directory_gives_one_line_and_status_2(tmp_path: Path) -> None:
    removed = tmp_path / "gone"
    removed.mkdir()
    process = run_command(removed, "doctor", code="import os; os.rmdir(os.getcwd()); ")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("sparse-rl: error: the working directory cannot be used")
    assert "\n" not in process.stderr[:-1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.slow
def test_characters_that_the_terminal_lacks_are_escaped(encoding: str, workdir: Path) -> None:
    """A name in Japanese is printed as escapes if the output's encoding is ASCII or Latin-1."""
    words = ["train", "grpo.yaml", "--dry-run", "output_dir=日本"]
    process = run_command(workdir, *words, PYTHONIOENCODING=encoding)
    assert process.returncode == 0, process.stderr
    assert "into \\u65e5\\u672c" in process.stdout
    assert "Traceback" not in run_command(workdir, "train", "日本", PYTHONIOENCODING=encoding).stderr


# ---- files and pipes -----------------------------------------------------------------------------------------------


def test_a_file_at_its_size_limit_is_reported_with_its_name(capsys: pytest.CaptureFixture) -> None:
    def work() -> int:
        raise OSError(EFBIG, os.strerror(EFBIG), "out/metrics.jsonl")

    assert guarded(work, Session()) == 1
    output = capsys.readouterr().err
    assert output.startswith("sparse-rl: stopped: a file has reached its size limit")
    assert output.count("\n") == 1
    assert "out/metrics.jsonl" in output


@pytest.mark.parametrize("number", [EFBIG, ENOSPC])
def test_a_full_disk_is_not_blamed_on_an_option(number: int, capsys: pytest.CaptureFixture) -> None:
    """After a failed write, a library may raise a ValueError about its closed file, inside a block in which errors are
    blamed on the user's options (`refusals`). The full disk is reported nevertheless."""

    def work() -> int:
        with refusals():
            try:
                raise OSError(number, os.strerror(number), "data.arrow")
            except OSError:
                raise ValueError("I/O operation on closed file")  # noqa: B904
        return 0

    assert guarded(work, Session()) == 1
    output = capsys.readouterr().err
    assert output.startswith("sparse-rl: stopped: ")
    assert "data.arrow" in output
    assert output.count("\n") == 1


def test_a_closed_output_pipe_is_reported_only_by_a_run(workdir: Path, capsys: pytest.CaptureFixture) -> None:
    """`sparse-rl doctor | head -1` closes the pipe; the command then ends silently. A command with a run directory
    reports the closed pipe."""

    def work() -> int:
        raise BrokenPipeError

    session = Session()
    assert guarded(work, session) == 1
    assert capsys.readouterr().err == ""
    session.folder = workdir / "out"
    assert guarded(work, session) == 1
    assert capsys.readouterr().err == "sparse-rl: stopped: the reader of the output has exited\n"


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", [1, 2])
def test_more_than_256_processes_on_a_machine_are_refused(
    machines: int, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["train", "sft.yaml", "--dry-run", f"launch.machines={machines}", "launch.main_process_ip=here"]
    output = error_of(capsys, *words, f"launch.processes={10**9}")
    assert f"launch.processes: {10**9 // machines:,} processes on each machine are too many; at most 256" in output


@pytest.mark.parametrize(
    "words",
    [
        ["train", "zzzz"],
        ["train", "z" * 200],
        ["train", "grpo.yaml", "zzzz=1"],
        ["train", "grpo.yaml", "cache.policy=zzzz"],
        ["train", "grpo.yaml", "cache.zzzz=1"],
        ["train", "grpo.yaml", "rewards=[zzzz]"],
        ["train", "grpo.yaml", "data.zzzz=1"],
        ["train", "grpo.yaml", "data={path: wide.jsonl}"],
        ["eval", "eval.yaml", "tasks={a: {path: wide.jsonl}}"],
        ["train", "grpo.yaml", "--dry-run", "lora={target_modules: [zzzz]}"],
        ["train", "grpo.yaml", "kind=zzzz"],
        ["keys", "zzzz"],
        ["zzzz"],
    ],
    ids=" ".join,
)
def test_an_error_that_lists_names_has_at_most_300_characters(
    words: list[str], workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    wide = ", ".join(f'"column_{number}": 1' for number in range(100))
    (workdir / "wide.jsonl").write_text(f"{{{wide}}}\n")
    assert main(words) == 2
    _, prefix, output = capsys.readouterr().err.partition("sparse-rl: error: ")
    assert prefix
    assert len(output.replace(str(workdir), "")) <= 300


def test_an_unknown_recipe_gives_the_nearest_names(capsys: pytest.CaptureFixture) -> None:
    output = error_of(capsys, "train", "grpo")
    assert "grpo" in output.partition("shipped recipes: ")[2] or "did you mean" in output
    assert len(list_recipes()) > 10
