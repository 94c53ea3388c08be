"""The page docs/python.md: its code runs as it stands, on one process and on two, and a training resumes exactly."""

from __future__ import annotations

import re
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest
from processes import ROOT, python
from safetensors.torch import load_file

from sparse_rl.errors import UserError
from sparse_rl.models.directory import saved_policy

PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", "## Data\n" + PAGE, re.M | re.S))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
GRPO = ("Data", "Train: GRPO")


def run(folder: Path, *names: str, launcher: tuple[str, ...] = (), **changed: str) -> str:
    """Run blocks of the page as one script, in this process unless a launcher is given, and return its errors.

    changed : old text -> new text in the blocks
    """
    script = "".join(BLOCKS[name] for name in names)
    for old, new in changed.items():
        assert old in script
        script = script.replace(old, new)
    folder.mkdir(exist_ok=True)
    if launcher:
        (folder / "script.py").write_text(script)
        process: subprocess.CompletedProcess = python(*launcher, "script.py", cwd=folder, timeout=1200)
        return process.stderr if process.returncode else ""
    with chdir(folder):
        try:
            exec(compile(script, "script", "exec"), {})
        except UserError as error:
            return str(error)
    return ""


def test_sampling_on_the_page_is_replayed_exactly():
    names: dict = {}
    for name in ("Data", "Sample", "Verify"):
        exec(compile(BLOCKS[name], name, "exec"), names)
    assert len(names["rollouts"]) == 4
    assert min(rollout.trace.retention() for rollout in names["rollouts"]) < 0.9  # tokens were evicted


@pytest.mark.slow
def test_the_whole_page_runs(tmp_path):
    assert BLOCKS.keys() == {"Data", *re.findall("^## (.*)", PAGE, re.M)} - {"Modules of your own"}
    assert not run(tmp_path, *BLOCKS)
    for place in ("grpo/model", "grpo/checkpoint-3", "distil/checkpoint-2"):
        policy = saved_policy(tmp_path / place)
        assert policy is not None and policy.config.as_block()["budget"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["one process", "two processes"])
def test_a_script_resumes_exactly(launcher, tmp_path):
    """Control: the weights change after the checkpoint. What would not be exact is refused in one line."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert not run(whole, *GRPO, launcher=launcher, **{"max_steps=2": "max_steps=3"})
    assert not run(parts, *GRPO, launcher=launcher)
    assert "resume_from_checkpoint, or choose another output_dir" in run(parts, *GRPO, launcher=launcher)
    resumed = {"\ntrainer.train()\n": "\n"}
    refused = (
        ('"budget": 40', '"budget": 36', "cache.budget was 40 and is now 36"),
        ("64, seed=1", "64, seed=3", "rows of train_dataset was"),
        ('"bf16": False', '"bf16": False, "seed": 5', "seed was 42 and is now 5"),
    )
    for old, new, wrong in refused[: 1 if launcher else None]:
        assert wrong in run(parts, *GRPO, "Resume", launcher=launcher, **resumed, **{old: new})
    assert not run(parts, *GRPO, "Resume", launcher=launcher, **resumed)
    left, right, early = (
        load_file(folder / f"grpo/checkpoint-{step}/model.safetensors")
        for folder, step in ((whole, 3), (parts, 3), (parts, 2))
    )
    assert all((left[name] == right[name]).all() for name in left)
    assert any((left[name] != early[name]).any() for name in left)


@pytest.mark.slow
def test_distillation_runs_on_two_processes(tmp_path):
    assert not run(tmp_path, "Data", "Train: distillation", launcher=TORCHRUN)
    assert saved_policy(tmp_path / "distil/checkpoint-2") is not None


OWN = "def mine(completions, **columns):\n    return [0.0 for _ in completions]\n"
RECIPE = "import sparse_rl.recipe\n"
USED = {  # module of the user -> (script, text of its error, or None if it must run)
    "trainer": [("from trainer import DistillTrainer\n", "'trainer' ({file})"), (RECIPE, "{file} hides")],
    "rollout": [("import trainer\n", "{file} hides the package rollout of sparse-rl, which trainer needs; rename")],
    "rewards": [
        ("import trainer\nfrom rewards import mine\n", None),
        (RECIPE, "{file} hides the package rewards of sparse-rl, which sparse_rl.recipe needs; rename"),
    ],
    "recipes": [
        (
            "from recipes import mine\nfrom sparse_rl.models.directory import model_directory\n"
            "from sparse_rl.recipe import load_recipe\nassert load_recipe('quickstart/grpo')\n"
            "assert model_directory('quickstart/model') != 'quickstart/model'\n",
            None,
        )
    ],
}


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("name", USED)
def test_a_module_of_the_user_hides_no_package_unnoticed(name, form, tmp_path):
    file = tmp_path / (f"{name}.py" if form == "file" else f"{name}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(OWN)
    for script, wrong in USED[name]:
        (tmp_path / "script.py").write_text(script)
        process = python("script.py", cwd=tmp_path)
        last = process.stderr.strip().rpartition("\n")[2]
        assert process.returncode == (wrong is not None), process.stderr
        assert wrong is None or wrong.format(file=file) in last


def test_importing_trainer_is_light(tmp_path):
    heavy = "{'torch', 'transformers', 'trl'} & {*sys.modules}"
    code = f"import sys, trainer; assert not {heavy}; sys.modules['torch'] = sys; assert {heavy}"  # a control
    assert not python("-c", code, cwd=tmp_path).returncode
