"""If something around a command is broken (user code, environment variables, files, pipes), the command prints one
line and has a nonzero exit status.
"""

from __future__ import annotations

import os
import subprocess
from errno import EFBIG, ENOSPC
from pathlib import Path

import pytest
from processes import python
from test_commands import error_of

from sparse_rl.commands.console import Session, guarded
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
ENDS = ["raise SystemExit(0)", "exit()", "raise Own('gone')", "raise GeneratorExit", "import os; os._exit(0)"]


def run_command(workdir: Path, *words: str, code: str = "", **environment: str) -> subprocess.CompletedProcess:
    program = code + "import sys; from sparse_rl.cli import main; sys.exit(main(sys.argv[1:]))"
    return python("-c", program, *words, cwd=workdir, **environment)


@pytest.mark.parametrize("end", ENDS)
def test_a_reward_file_that_exits_at_import_is_an_error(end, workdir, capsys):
    (workdir / "ends.py").write_text(REWARD.format("pass", "pass") + end)
    output = error_of(capsys, "train", "grpo.yaml", "--dry-run", "rewards=['ends.py:reward']")
    assert "rewards: reward 'ends.py:reward' cannot be imported: " in output
    assert "accuracy: " in error_of(capsys, "eval", "eval.yaml", "accuracy=ends.py:reward")
    assert "keep: " in error_of(capsys, "train", "distill.yaml", "--dry-run", "keep=ends.py:reward")


@pytest.mark.parametrize("end", ENDS)
def test_a_reward_class_that_exits_when_it_is_created_is_an_error(end, workdir, capsys):
    (workdir / "made.py").write_text(REWARD.format("pass", end))
    text = error_of(capsys, "train", "grpo.yaml", "--dry-run", "rewards=['made.py:Made']")
    assert "reward 'made.py:Made' cannot be made: " in text


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.few(2)
def test_a_reward_that_exits_while_scoring_is_an_error(end, workdir, capsys):
    (workdir / "judge.py").write_text(REWARD.format(end, "pass"))
    assert "accuracy: reward raised " in error_of(capsys, "eval", "eval.yaml", "accuracy=judge.py:reward", "samples=1")
    output = error_of(capsys, "train", "distill.yaml", "keep=judge.py:reward", "data.synthetic.size=4")
    assert "keep: reward raised " in output
    output = error_of(capsys, "train", "grpo.yaml", "rewards=['judge.py:reward']", f"output_dir={workdir / 'grpo'}")
    assert "rewards: reward raised " in output


ENDS_OF_PROMPTS = """
def reward(completions, prompts, prompt_ends, **columns):
    assert {}(p.endswith(e) and e for p, e in zip(prompts, prompt_ends, strict=True))
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["eval", "eval.yaml", "accuracy=judge.py:reward", "samples=1"], id="eval"),
        pytest.param(["train", "grpo.yaml", "rewards=['judge.py:reward']"], id="train", marks=pytest.mark.slow),
    ],
)
def test_a_reward_gets_the_ends_of_the_prompts(words, workdir):
    (workdir / "judge.py").write_text(ENDS_OF_PROMPTS.format("all"))
    assert main([*words, f"output_dir={workdir / 'out'}"]) == 0


def test_a_selection_gets_the_ends_of_the_prompts(workdir, capsys):
    """Also the control of the test above: the opposite assertion fails."""
    (workdir / "denies.py").write_text(ENDS_OF_PROMPTS.format("not all"))
    output = error_of(capsys, "train", "distill.yaml", "keep=denies.py:reward", "data.synthetic.size=4")
    assert "keep: reward raised AssertionError" in output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK is '1' and WORLD_SIZE is '1', which no launcher sets; unset both"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2' and WORLD_SIZE is '2'"),
        ({"RANK": "x"}, "RANK is 'x' and WORLD_SIZE is '1'"),
    ],
)
def test_impossible_process_numbers_in_the_environment_are_refused(variables, message, workdir, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in error_of(capsys, "doctor")


def test_a_deleted_working_directory_gives_one_line_and_status_2(tmp_path):
    removed = tmp_path / "gone"
    removed.mkdir()
    process = run_command(removed, "doctor", code="import os; os.rmdir(os.getcwd()); ")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("sparse-rl: error: the working directory cannot be used")
    assert "\n" not in process.stderr[:-1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.slow
def test_characters_that_the_terminal_lacks_are_escaped(encoding, workdir):
    words = ["train", "grpo.yaml", "--dry-run", "output_dir=日本"]
    process = run_command(workdir, *words, PYTHONIOENCODING=encoding)
    assert process.returncode == 0, process.stderr
    assert "into \\u65e5\\u672c" in process.stdout
    assert "Traceback" not in run_command(workdir, "train", "日本", PYTHONIOENCODING=encoding).stderr


@pytest.mark.parametrize("number", [EFBIG, ENOSPC])
def test_a_full_disk_is_not_blamed_on_an_option(number, capsys):
    """After a failed write, a library may raise a ValueError about its closed file, inside `refusals`."""

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


def test_a_closed_output_pipe_is_reported_only_by_a_run(workdir, capsys):
    """`sparse-rl doctor | head -1` ends silently."""

    def work() -> int:
        raise BrokenPipeError

    session = Session()
    assert guarded(work, session) == 1
    assert capsys.readouterr().err == ""
    session.folder = workdir / "out"
    assert guarded(work, session) == 1
    assert capsys.readouterr().err == "sparse-rl: stopped: the reader of the output has exited\n"


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
def test_an_error_that_lists_names_has_at_most_300_characters(words, workdir, capsys):
    wide = ", ".join(f'"column_{number}": 1' for number in range(100))
    (workdir / "wide.jsonl").write_text(f"{{{wide}}}\n")
    assert main(words) == 2
    _, prefix, output = capsys.readouterr().err.partition("sparse-rl: error: ")
    assert prefix
    assert len(output.replace(str(workdir), "")) <= 300


def test_an_unknown_recipe_gives_the_nearest_names(capsys):
    output = error_of(capsys, "train", "grpo")
    assert "grpo" in output.partition("shipped recipes: ")[2] or "did you mean" in output
    assert len(list_recipes()) > 10
