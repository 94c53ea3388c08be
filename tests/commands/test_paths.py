"""A run directory is accepted as a model, errors name the type of a wrong file, and no file is overwritten."""

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
from sparse_rl.metrics import runs_below
from sparse_rl.models.directory import model_directory, save_policy
from sparse_rl.policies import make_policy

VALIDATION = "validation={data: {synthetic: {task: running_sum, size: 9, split: evaluation}}, problems: 3, samples: 2}"
PATIENT = "rollout.progress=false"
HF = "rollout.engine=hf"


def answer(capsys, *arguments, status=0):
    """Return the stdout of a command, or its single line on stderr if the command fails."""
    assert main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert status == 0 or len(err.splitlines()) == 1, err
    return err.strip() if status else out


@pytest.fixture
def trained(here, model, capsys):
    """Provide run/, the directory of a GRPO run with held-out problems, whose model stores its cache settings."""
    recipe = read_recipe(parse(["train", "grpo.yaml", "output_dir=run", VALIDATION]))
    shutil.copytree(model, here / "run" / "model")
    save_policy(here / "run" / "model", make_policy(recipe.cache))
    (here / "run" / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
    (here / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return Path("run")


# ---- a run directory as a model ------------------------------------------------------------------------------------


def test_a_run_directory_resolves_to_its_model(trained, model, tmp_path):
    assert model_directory("run") == "run/model"
    for other in ("run/model", str(model), "nowhere", "org/name"):
        assert model_directory(other) == other
    (tmp_path / "own" / "model").mkdir(parents=True)
    for place in ("own", "own/model"):
        assert model_directory("own") == "own"
        (tmp_path / place / "config.json").write_text("{}")
    assert model_directory("own") == "own"  # a model that has a folder named `model`


@pytest.mark.parametrize("recipe", ["grpo.yaml", "eval.yaml", "sft.yaml", "distill.yaml"])
def test_every_model_of_a_recipe_may_be_a_run(trained, recipe):
    teacher = ["teacher=run"] if recipe == "distill.yaml" else []
    read = read_recipe(parse(["train", recipe, "model=run", *teacher]))
    assert read.model == "run/model" and (not teacher or read.teacher_model == "run/model")
    assert read.resolved() | {"model": "run"} != read.resolved()  # the saved settings, compared when a run is resumed


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


def test_a_run_directory_without_a_model_is_refused(trained, capsys):
    shutil.rmtree(trained / "model")
    says = answer(capsys, "train", "sft.yaml", "model=run", status=2)
    assert "run is the directory of a run that has left no model" in says and "--resume" in says


def test_eval_of_a_run_takes_its_held_out_problems(trained, capsys):
    """`eval` of a run samples the run's held-out problems as in training, under the model's stored cache; overrides are
    keys of an evaluation."""
    out = answer(capsys, "eval", "run", HF, PATIENT)
    assert "validation" in out and "streaming 16" in out and "3×2" in out and out.endswith("run/eval/eval.json\n")
    report = json.loads((trained / "eval" / "eval.json").read_text())
    recipe = report["recipe"]
    assert (recipe["model"], recipe["accuracy"], recipe["temperature"]) == ("run/model", "boxed", 1.0)
    assert (recipe["max_completion_length"], recipe["dtype"]) == (24, "float32")
    assert "full" in answer(capsys, "eval", "run", "cache=full", "output_dir=full", "samples=1", HF, PATIENT)
    again = answer(capsys, "eval", "run/eval", "--overwrite", PATIENT)  # repeat an evaluation with the same settings
    assert again.endswith("run/eval/eval.json\n")
    rows = json.loads((trained / "eval" / "eval.json").read_text())["rows"]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in report["rows"]]


def test_eval_without_problems_prints_the_key_to_set(trained, capsys):
    for override in ("validation=null", None):
        if override:
            recipe = read_recipe(parse(["train", "run/recipe.yaml", override]))
            (trained / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
        place = "run" if override else "run/model"
        says = answer(capsys, "eval", place, status=2)
        assert f"sparse-rl eval RECIPE model={place}" in says and "the problems to evaluate" in says


def test_a_run_directory_is_not_a_recipe(trained, capsys):
    assert "its recipe is run/recipe.yaml" in answer(capsys, "train", "run", status=2)


# ---- no file is overwritten ----------------------------------------------------------------------------------------


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
def test_files_of_an_earlier_call_are_not_overwritten(here, capsys, monkeypatch, words, place, first):
    """A second call that would overwrite files of the first call is refused before a model is loaded, unless
    overwriting is allowed."""
    words = [*words, PATIENT]
    answer(capsys, *words)
    before = contents(here)
    with monkeypatch.context() as patched:
        patched.setattr("sparse_rl.models.load.load_config", lambda *_: 1 / 0)
        says = answer(capsys, *words, "seed=1", status=2)
    assert f"{place} already holds {first}; add --overwrite to replace it" in says and contents(here) == before
    (here / place / "traces-00009.safetensors").write_text("of an earlier call")
    answer(capsys, *words, "seed=1", "--overwrite")
    assert contents(here) != before
    assert ("rollout" in words) != (here / place / "traces-00009.safetensors").exists()


def test_a_folder_with_only_traces_is_not_overwritten(here, capsys):
    (here / "there").mkdir()
    (here / "there" / "traces-00000.safetensors").write_text("of a call that was killed")
    says = answer(capsys, "rollout", "grpo.yaml", "--out", "there", status=2)
    assert "already holds traces-00000.safetensors" in says


def test_the_directory_of_a_training_is_never_overwritten(trained, capsys):
    before = contents(trained)
    for words in (["rollout", "grpo.yaml", "--out", "run"], ["eval", "eval.yaml", "output_dir=run"]):
        assert "run is the directory of a training" in answer(capsys, *words, "--overwrite", status=2)
    assert contents(trained) == before


# ---- types of files and folders ------------------------------------------------------------------------------------


def test_inspect_describes_runs_models_checkpoints_and_results(trained, here, capsys):
    answer(capsys, "rollout", "grpo.yaml", PATIENT, "--problems", "1")
    answer(capsys, "eval", "eval.yaml", "output_dir=score", PATIENT)
    (here / "empty").mkdir()
    shutil.copytree("run/model", "run/checkpoint-7")
    (here / "broken.yaml").write_text("a: [")
    (here / "list.yaml").write_text("[1]")
    (here / "broken.jsonl").write_text("{")
    (here / "picture.png").write_bytes(b"\x89PNG")
    traces = "out/rollouts/traces-00000.safetensors"
    for place, says in {
        "run": "a run of kind grpo, logged to step 1, with the model in run/model, which carries the cache",
        ".": "a folder of 1 run; sparse-rl plot . draws them",
        "run/model": "a model (qwen3), which carries the cache policy streaming",
        "run/checkpoint-7": "a checkpoint of step 7, from which train --resume can continue",
        "out/rollouts": f"1 file of traces; sparse-rl inspect {traces} describes "
        "the first; sparse-rl verify out/rollouts replays them",
        "score": "the results of an evaluation, 2 rows; sparse-rl plot score/eval.json draws them",
        "empty": "a folder without a run, a model or traces",
        "grpo.yaml": "a recipe of kind grpo; sparse-rl train grpo.yaml runs it",
        "eval.yaml": "a recipe of kind eval; sparse-rl eval eval.yaml runs it",
        "score/eval.json": "the results of an evaluation, 2 rows; sparse-rl plot score/eval.json draws them",
        "run/metrics.jsonl": "the metrics of a run, logged to step 1; sparse-rl plot run draws them",
        "run/model/cache_policy.json": "the cache policy that a model carries, streaming",
        "run/model/model.safetensors": "weights of the model in run/model",
        "out/rollouts/rollouts.json": "sampled the rollouts beside it; sparse-rl verify out/rollouts replays them",
        "out/rollouts/completions.jsonl": "lines of JSON, each with prompt, answer, completion, finish_reason",
        "broken.yaml": "damaged, or not of the type that its name says",
        "list.yaml": "damaged, or not of the type that its name says",
        "broken.jsonl": "damaged, or not of the type that its name says",
        "picture.png": "a file .png that sparse-rl cannot read",
    }.items():
        line = answer(capsys, "inspect", place)
        assert line.startswith(f"{place}: ") and says in line and line.count("\n") == 1, line
        assert "is not a file of traces: " in answer(capsys, "inspect", place, "--json", status=2)
    assert "traces, 2 layers" in answer(capsys, "inspect", traces)
    assert "pass@1" in answer(capsys, "plot", "score")


def test_plot_of_a_folder_draws_the_runs_below_it(here, capsys):
    logged = "".join(json.dumps({"step": i, "reward": 0.5, "replay/gap_mean": 1e-7}) + "\n" for i in (1, 2))
    for place in ("many/one", "many/two", "many/two/inner", "other/one"):
        (here / place).mkdir(parents=True)
        (here / place / "metrics.jsonl").write_text(logged)
    assert runs_below(Path("many")) == [Path("many/one"), Path("many/two"), Path("many/two/inner")]
    assert runs_below(Path("many/two")) == [Path("many/two")]  # a run directory is its own result
    drawn = answer(capsys, "plot", "many", "other/one", "--out", "all.svg").split()
    assert drawn == ["all.svg", "all_gap.svg"]
    assert all(label in Path("all.svg").read_text() for label in ("many/one", "many/two", "two/inner", "other/one"))
    assert answer(capsys, "plot", "many").split() == ["many/plots/learning.png", "many/plots/gap.png"]
    (here / "empty").mkdir()
    assert "empty is not the directory of a run and contains no runs" in answer(
        capsys, "plot", "many", "empty", status=2
    )


# ---- small words ---------------------------------------------------------------------------------------------------


def test_the_version(capsys):
    assert answer(capsys, "--version") == f"sparse-rl {__version__}\n"
