"""A broken environment of a command gives one line and a nonzero exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from errno import EFBIG, ENOSPC
from pathlib import Path

import pytest
from test_commands import fails

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
RAISED = ["raise SystemExit(0)", "exit()", "raise Own('gone')", "raise GeneratorExit"]


def as_a_process(here: Path, *words: str, code: str = "", **environment: str) -> subprocess.CompletedProcess:
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment}
    program = code + "import sys; from sparse_rl.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=here, env=merged, capture_output=True, text=True, timeout=300, errors="replace")


# ---- user code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", RAISED)
def test_a_reward_file_that_ends_the_program(end: str, here: Path, capsys: pytest.CaptureFixture) -> None:
    (here / "ends.py").write_text(REWARD.format("pass", "pass") + end)
    output = fails(capsys, "train", "grpo.yaml", "--dry-run", "rewards=['ends.py:reward']")
    assert "rewards: reward 'ends.py:reward' cannot be imported: " in output
    assert "accuracy: " in fails(capsys, "eval", "eval.yaml", "accuracy=ends.py:reward")
    assert "keep: " in fails(capsys, "train", "distill.yaml", "--dry-run", "keep=ends.py:reward")


@pytest.mark.parametrize("end", RAISED)
def test_a_reward_class_that_ends_the_program(end: str, here: Path, capsys: pytest.CaptureFixture) -> None:
    (here / "made.py").write_text(REWARD.format("pass", end))
    text = fails(capsys, "train", "grpo.yaml", "--dry-run", "rewards=['made.py:Made']")
    assert "reward 'made.py:Made' cannot be made: " in text


@pytest.mark.parametrize("end", RAISED)
def test_a_reward_that_exits_while_scoring_is_an_error(end: str, here: Path, capsys: pytest.CaptureFixture) -> None:
    (here / "judge.py").write_text(REWARD.format(end, "pass"))
    assert "accuracy: reward raised " in fails(capsys, "eval", "eval.yaml", "accuracy=judge.py:reward", "samples=1")
    output = fails(capsys, "train", "distill.yaml", "keep=judge.py:reward", "data.synthetic.size=4")
    assert "the reward reward raised " in output
    assert main(["train", "grpo.yaml", "rewards=['judge.py:reward']", f"output_dir={here / 'grpo'}"]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "a reward function raised (of: reward)" in line


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("no"), GeneratorExit()])
def test_other_exceptions_that_end_a_command(
    error: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    session = Session()
    session.folder = tmp_path

    def work() -> int:
        raise error

    assert guarded(work, session) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"sparse-rl: unexpected {type(error).__name__}") and output.count("\n") == 1


# ---- environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROCESS_NUMBERS)
@pytest.mark.parametrize("value", ["x", "", "-1", "1.5", "²", "9" * 30])
def test_an_environment_variable_that_is_not_a_number(
    name: str, value: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv(name, value)
    assert f"the environment variable {name} is '{value}'" in fails(capsys, "train", "grpo.yaml", "--dry-run")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536; the largest port is 65535"),
    ],
)
def test_numbers_that_cannot_be(
    variables: dict[str, str], says: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert says in fails(capsys, "doctor")


def test_a_deleted_working_directory(tmp_path: Path) -> None:
    removed = tmp_path / "gone"
    removed.mkdir()
    done = as_a_process(removed, "doctor", code="import os; os.rmdir(os.getcwd()); ")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("sparse-rl: error: the working directory cannot be used")
        and "\n" not in done.stderr[:-1]
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_our_characters(encoding: str, here: Path) -> None:
    words = ["train", "grpo.yaml", "--dry-run", "output_dir=日本"]
    done = as_a_process(here, *words, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "into \\u65e5\\u672c" in done.stdout
    assert "Traceback" not in as_a_process(here, "train", "日本", PYTHONIOENCODING=encoding).stderr


# ---- files and pipes -----------------------------------------------------------------------------------------------


def test_a_file_that_may_not_grow(capsys: pytest.CaptureFixture) -> None:
    def work() -> int:
        raise OSError(EFBIG, os.strerror(EFBIG), "out/metrics.jsonl")

    assert guarded(work, Session()) == 1
    output = capsys.readouterr().err
    assert output.startswith("sparse-rl: stopped: a file has reached its size limit") and output.count("\n") == 1
    assert "out/metrics.jsonl" in output


@pytest.mark.parametrize("number", [EFBIG, ENOSPC])
def test_a_full_disk_is_not_blamed_on_an_option(number: int, capsys: pytest.CaptureFixture) -> None:
    """A full disk is reported as such. A library that fails to write later finds its file closed, and the error must
    not blame an option."""

    def work() -> int:
        with refusals():
            try:
                raise OSError(number, os.strerror(number), "data.arrow")
            except OSError:
                raise ValueError("I/O operation on closed file")  # noqa: B904
        return 0

    assert guarded(work, Session()) == 1
    output = capsys.readouterr().err
    assert output.startswith("sparse-rl: stopped: ") and "data.arrow" in output and output.count("\n") == 1


def test_a_run_with_a_closed_output_pipe(here: Path, capsys: pytest.CaptureFixture) -> None:
    def work() -> int:
        raise BrokenPipeError

    session = Session()
    assert guarded(work, session) == 1 and capsys.readouterr().err == ""  # as in `sparse-rl doctor | head -1`
    session.folder = here / "out"
    assert guarded(work, session) == 1
    assert capsys.readouterr().err == "sparse-rl: stopped: the reader of the output has exited\n"


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machines", [1, 2])
def test_more_processes_than_any_machine_holds(machines: int, here: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["train", "sft.yaml", "--dry-run", f"launch.machines={machines}", "launch.main_process_ip=here"]
    output = fails(capsys, *words, f"launch.processes={10**9}")
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
def test_an_error_names_a_few(words: list[str], here: Path, capsys: pytest.CaptureFixture) -> None:
    wide = ", ".join(f'"column_{number}": 1' for number in range(100))
    (here / "wide.jsonl").write_text(f"{{{wide}}}\n")
    assert main(words) == 2
    _, sign, output = capsys.readouterr().err.partition("sparse-rl: error: ")
    assert sign and len(output.replace(str(here), "")) <= 300


def test_the_nearest_recipes(capsys: pytest.CaptureFixture) -> None:
    output = fails(capsys, "train", "grpo")
    assert "grpo" in output.partition("shipped recipes: ")[2] or "did you mean" in output
    assert len(list_recipes()) > 10
