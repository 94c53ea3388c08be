"""Of the files in a user's working directory, only the rewards that a recipe names are imported. Modules there with the
names of our packages do not replace ours.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, python

from sparse_rl.data.synthetic import RunningSum

OURS = ("sparse_rl", "rollout", "trainer", "rewards")
CONSOLE_SCRIPT = "import sys\nfrom sparse_rl.cli import main\nsys.exit(main())\n"  # as pip writes project.scripts
HOSTILE = "raise SystemExit(f'imported {__name__} from the working directory')\n"
REWARD = """
import trainer  # ours, wherever it stands
from helping import SHARE

def digits(completions, **columns):
    assert hasattr(trainer, "__path__")
    return [SHARE * sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    RunningSum.save_untrained(folder, 0)
    return folder


@pytest.fixture
def place(tmp_path, model):
    """Make a working directory with a recipe that names the user's rewards in every supported way."""
    here = tmp_path / "here"
    (here / "package").mkdir(parents=True)
    for name in ("mine.py", "trainer.py", "package/inner.py"):
        (here / name).write_text(REWARD.replace("digits", f"digits_of_{Path(name).stem}"))
    (here / "helping.py").write_text("SHARE = 0.5\n")
    (here / "package/__init__.py").write_text("")
    (here / "package/helping.py").write_text("from package import __file__\nSHARE = 0.25\n")
    (tmp_path / "sparse-rl").write_text(CONSOLE_SCRIPT)
    recipe: dict[str, Any] = {
        "kind": "grpo",
        "model": str(model),
        "output_dir": str(tmp_path / "run"),
        "dtype": "float32",
        "data": {"synthetic": {"task": "running_sum", "size": 64}},
        "cache": {"policy": "streaming", "budget": 16, "period": 4},
        "rewards": ["mine:digits_of_mine", "trainer.py:digits_of_trainer", "package.inner:digits_of_inner", "boxed"],
        "rollout": {"engine": "hf"},
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 12,
        "save_steps": 0,
    }
    (here / "grpo.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return here


def write_hostile_modules(here: Path, names: tuple[str, ...], form: str = "file") -> None:
    """Write a module for each name that must not be imported. trainer.py exists already: it holds a reward."""
    for name in names:
        file = here / (f"{name}.py" if form == "file" else f"{name}/__init__.py")
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(HOSTILE)


@pytest.fixture
def run(place):
    """run(*words of Python's command line, path=PYTHONPATH, further environment) runs Python in the
    working directory."""

    def start(*words: str, path: str = str(ROOT), **environment: str) -> subprocess.CompletedProcess:
        return python(*words, cwd=place, PYTHONPATH=path, **environment)

    return start


WAYS_TO_START = {
    "the console script": (("../sparse-rl",), OURS),
    # Python finds a user's `sparse_rl` before ours. We cannot prevent this; python -P does.
    "python -m": (("-m", "sparse_rl.cli"), OURS[1:]),
    "python -P -m": (("-P", "-m", "sparse_rl.cli"), OURS),
}


@pytest.mark.parametrize(
    ("way", "form"),
    [
        ("the console script", "file"),
        pytest.param("the console script", "folder", marks=pytest.mark.slow),
        pytest.param("python -m", "file", marks=pytest.mark.slow),
        ("python -P -m", "folder"),
    ],
)
@pytest.mark.slow
def test_modules_in_the_working_directory_do_not_replace_ours(way, form, place, run):
    """The hostile modules raise an error if they are imported."""
    words, names = WAYS_TO_START[way]
    write_hostile_modules(place, names, form)
    process = run(*words, "train", "grpo.yaml", "--dry-run")
    assert process.returncode == 0, process.stderr
    assert process.stderr == "", process.stderr
    assert "digits_of_mine × 1, digits_of_trainer × 1, digits_of_inner × 1, boxed × 1" in process.stdout, process.stdout


def test_a_path_that_names_the_working_directory_comes_last(place, run):
    """PYTHONPATH=:more names it by an empty entry. Control: plain Python imports the hostile module."""
    write_hostile_modules(place, OURS[1:])
    for path in (f"{place}:{ROOT}", f":{ROOT}"):
        process = run("../sparse-rl", "--help", path=path)
        assert process.returncode == 0, process.stderr
        assert "COMMAND" in process.stdout, process.stderr
    control = run("-c", "import rollout", path=f"{place}:{ROOT}")
    assert "imported rollout from the working directory" in control.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_launched_processes_do_not_import_hostile_modules(stage, place, run):
    write_hostile_modules(place, OURS)
    process = run("../sparse-rl", "train", "grpo.yaml", "launch.processes=2", f"launch.zero_stage={stage}")
    assert process.returncode == 0, process.stderr
    assert (place.parent / "run/model/model.safetensors").is_file()


@pytest.mark.slow
def test_processes_of_accelerate_do_not_import_hostile_modules(place, run):
    write_hostile_modules(place, OURS[1:])
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1")
    launcher += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "29655")
    process = run(*launcher, "-m", "sparse_rl.cli", "train", "grpo.yaml", "launch.processes=2")
    assert process.returncode == 0, process.stderr
    assert (place.parent / "run/model/model.safetensors").is_file()


@pytest.mark.slow
def test_processes_of_vllm_do_not_import_hostile_modules(place, run):
    """vLLM caches what its process finds out about the model's class, so the test has a cache folder of its own."""
    pytest.importorskip("vllm")
    write_hostile_modules(place, OURS)
    words = ("rollout", "grpo.yaml", "--problems", "2", "rollout.engine=vllm")
    process = run("../sparse-rl", *words, VLLM_CACHE_ROOT=str(place.parent / "cache"))
    assert process.returncode == 0, process.stderr
    assert "working directory" not in process.stdout + process.stderr
