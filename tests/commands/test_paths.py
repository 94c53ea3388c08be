"""Wherever a model is wanted the directory of a run will do; what a file is, is said; and none is destroyed."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from rollout import make_engine
from sparse_rl import __version__
from sparse_rl.commands.arguments import read_recipe
from sparse_rl.commands.main import main, parse
from sparse_rl.models.directory import model_directory, save_policy
from sparse_rl.policies import make_policy

VALIDATION = "validation={data: {synthetic: {task: running_sum, size: 9, split: evaluation}}, problems: 3, samples: 2}"
PATIENT = "rollout.progress=false"
HF = "rollout.engine=hf"


def answer(capsys, *arguments, status=0):
    """What a command says on stdout, or where it fails the one line on stderr."""
    assert main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert status == 0 or len(err.splitlines()) == 1, err
    return err.strip() if status else out


@pytest.fixture
def trained(here, model, capsys):
    """run/, the directory of a GRPO run with held-out problems, whose model carries its cache."""
    recipe = read_recipe(parse(["train", "grpo.yaml", "output_dir=run", VALIDATION]))
    shutil.copytree(model, here / "run" / "model")
    save_policy(here / "run" / "model", make_policy(recipe.cache))
    recipe.save_resolved(here / "run" / "recipe.yaml")
    (here / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return Path("run")


# ---- a run where a model is wanted ---------------------------------------------------------------------------------


def test_a_run_stands_for_the_model_that_it_left(trained, model, tmp_path):
    assert model_directory("run") == "run/model"
    for other in ("run/model", str(model), "nowhere", "org/name"):
        assert model_directory(other) == other
    (tmp_path / "own" / "model").mkdir(parents=True)
    for place in ("own", "own/model"):
        assert model_directory("own") == "own"
        (tmp_path / place / "config.json").write_text("{}")
    assert model_directory("own") == "own"  # a model that has a folder of that name


@pytest.mark.parametrize("recipe", ["grpo.yaml", "eval.yaml", "sft.yaml", "distill.yaml"])
def test_every_model_of_a_recipe_may_be_a_run(trained, recipe):
    teacher = ["teacher=run"] if recipe == "distill.yaml" else []
    read = read_recipe(parse(["train", recipe, "model=run", *teacher]))
    assert read.model == "run/model" and (not teacher or read.teacher_model == "run/model")
    assert read.resolved() | {"model": "run"} != read.resolved()  # what is saved, and compared as it is resumed


def test_commands_take_a_run_for_a_model(trained, capsys):
    assert "qwen3, 2 layers" in answer(capsys, "train", "sft.yaml", "--dry-run", "model=run")
    assert "102,848 parameters" in answer(capsys, "doctor", "grpo.yaml", "model=run")
    assert "16 completions" in answer(capsys, "rollout", "grpo.yaml", "model=run", PATIENT)
    assert "streaming 16" in answer(capsys, "eval", "eval.yaml", "model=run", PATIENT)
    with contextlib.closing(make_engine("hf", model="run")) as engine:
        assert engine.policy.name == "streaming"


def test_serve_takes_a_run(trained, monkeypatch):
    served = []
    monkeypatch.setattr("rollout.vllm.serve.serve", lambda model, cache, **_: served.append(model))
    main(["serve", "run"])
    main(["serve", "run/model"])
    assert served == ["run/model", "run/model"]


def test_a_run_without_a_model_says_so(trained, capsys):
    shutil.rmtree(trained / "model")
    says = answer(capsys, "train", "sft.yaml", "model=run", status=2)
    assert "run is the directory of a run that has left no model" in says and "--resume" in says


def test_eval_of_a_run_takes_its_held_out_problems(trained, capsys):
    """Sampled as it was trained, under the cache that its model carries; overrides are an evaluation's."""
    out = answer(capsys, "eval", "run", HF, PATIENT)
    assert "validation" in out and "streaming 16" in out and "3×2" in out and out.endswith("run/eval/eval.json\n")
    found = json.loads((trained / "eval" / "eval.json").read_text())
    recipe = found["recipe"]
    assert (recipe["model"], recipe["accuracy"], recipe["temperature"]) == ("run/model", "boxed", 1.0)
    assert (recipe["max_completion_length"], recipe["dtype"]) == (24, "float32")
    assert "full" in answer(capsys, "eval", "run", "cache=full", "output_dir=full", "samples=1", HF, PATIENT)
    again = answer(capsys, "eval", "run/eval", "--overwrite", PATIENT)  # what an evaluation was asked, once more
    assert again.endswith("run/eval/eval.json\n")
    rows = json.loads((trained / "eval" / "eval.json").read_text())["rows"]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in found["rows"]]


def test_eval_of_what_names_no_problems_says_what_to_write(trained, capsys):
    for override in ("validation=null", None):
        if override:
            recipe = read_recipe(parse(["train", "run/recipe.yaml", override]))
            recipe.save_resolved(trained / "recipe.yaml")
        place = "run" if override else "run/model"
        says = answer(capsys, "eval", place, status=2)
        assert f"sparse-rl eval RECIPE model={place}" in says and "which problems" in says


def test_a_run_is_no_recipe(trained, capsys):
    assert "its recipe is run/recipe.yaml" in answer(capsys, "train", "run", status=2)


# ---- nothing is destroyed ------------------------------------------------------------------------------------------


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    ("words", "place", "first"),
    [
        (["rollout", "grpo.yaml"], "out/rollouts", "completions.jsonl"),
        (["rollout", "grpo.yaml", "--out", "there"], "there", "completions.jsonl"),
        (["eval", "eval.yaml"], "out", "eval.json"),
    ],
)
def test_what_an_earlier_call_wrote_is_kept(here, capsys, monkeypatch, words, place, first):
    """The second call is refused before a model is read, unless it may overwrite."""
    words = [*words, PATIENT]
    answer(capsys, *words)
    before = contents(here)
    with monkeypatch.context() as patched:
        patched.setattr("sparse_rl.models.load.load_config", lambda *_: 1 / 0)
        says = answer(capsys, *words, "seed=1", status=2)
    assert f"{place} already holds {first}; --overwrite replaces it" in says and contents(here) == before
    (here / place / "traces-00009.safetensors").write_text("of an earlier call")
    answer(capsys, *words, "seed=1", "--overwrite")
    assert contents(here) != before
    assert ("rollout" in words) != (here / place / "traces-00009.safetensors").exists()


def test_traces_alone_are_kept_too(here, capsys):
    (here / "there").mkdir()
    (here / "there" / "traces-00000.safetensors").write_text("of a call that was killed")
    says = answer(capsys, "rollout", "grpo.yaml", "--out", "there", status=2)
    assert "already holds traces-00000.safetensors" in says


def test_the_directory_of_a_training_is_never_overwritten(trained, capsys):
    before = contents(trained)
    for words in (["rollout", "grpo.yaml", "--out", "run"], ["eval", "eval.yaml", "output_dir=run"]):
        assert "run is the directory of a training" in answer(capsys, *words, "--overwrite", status=2)
    assert contents(trained) == before


# ---- small words ---------------------------------------------------------------------------------------------------


def test_the_version(capsys):
    assert answer(capsys, "--version") == f"sparse-rl {__version__}\n"
