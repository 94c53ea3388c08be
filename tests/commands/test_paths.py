"""A run directory is accepted as a model, errors name the type of a wrong file, and no file is overwritten."""

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


def output_of(capsys, *arguments, status=0):
    """Return the stdout of a command, or its single line on stderr if the command fails."""
    assert main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert status == 0 or len(err.splitlines()) == 1, err
    return err.strip() if status else out


@pytest.fixture
def trained(workdir, model, capsys):
    """Provide run/, the directory of a GRPO run with held-out problems, whose model stores its cache settings."""
    recipe = read_recipe(parse(["train", "grpo.yaml", "output_dir=run", VALIDATION]))
    shutil.copytree(model, workdir / "run" / "model")
    save_policy(workdir / "run" / "model", make_policy(recipe.cache))
    (workdir / "run" / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
    (workdir / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    return Path("run")


def test_a_run_directory_stands_for_its_model(trained, model, tmp_path):
    assert model_directory("run") == "run/model"
    for unchanged in ("run/model", str(model), "nowhere", "org/name"):
        assert model_directory(unchanged) == unchanged
    (tmp_path / "own" / "model").mkdir(parents=True)
    for place in ("own", "own/model"):
        assert model_directory("own") == "own"
        (tmp_path / place / "config.json").write_text("{}")
    assert model_directory("own") == "own"  # a model that has a folder named `model`


@pytest.mark.parametrize("recipe", ["grpo.yaml", "eval.yaml", "sft.yaml", "distill.yaml"])
def test_model_and_teacher_of_a_recipe_may_be_a_run_directory(trained, recipe):
    teacher = ["teacher=run"] if recipe == "distill.yaml" else []
    recipe_read = read_recipe(parse(["train", recipe, "model=run", *teacher]))
    assert recipe_read.model == "run/model"
    assert not teacher or recipe_read.teacher_model == "run/model"
    assert recipe_read.resolved() | {"model": "run"} != recipe_read.resolved()


def test_commands_accept_a_run_directory_as_a_model(trained, capsys):
    assert "qwen3, 2 layers" in output_of(capsys, "train", "sft.yaml", "--dry-run", "model=run")
    assert "102,848 parameters" in output_of(capsys, "doctor", "grpo.yaml", "model=run")
    assert "16 completions" in output_of(capsys, "rollout", "grpo.yaml", "model=run", PATIENT)
    assert "streaming 16" in output_of(capsys, "eval", "eval.yaml", "model=run", PATIENT)
    with contextlib.closing(make_engine("hf", model="run")) as engine:
        assert engine.policy.name == "streaming"


def test_serve_accepts_a_run_directory_as_a_model(trained, monkeypatch):
    served = []
    monkeypatch.setattr("rollout.vllm.serve.serve", lambda model, cache, *_: served.append(model))
    main(["serve", "run"])
    main(["serve", "run/model"])
    assert served == ["run/model", "run/model"]


def test_a_run_directory_without_a_model_is_refused(trained, capsys):
    shutil.rmtree(trained / "model")
    message = output_of(capsys, "train", "sft.yaml", "model=run", status=2)
    assert "run is the directory of a run that has left no model" in message
    assert "--resume" in message


def test_eval_of_a_run_uses_its_held_out_problems(trained, capsys):
    out = output_of(capsys, "eval", "run", HF, PATIENT)
    assert "validation" in out
    assert "streaming 16" in out
    assert "3×2" in out
    assert out.endswith("run/eval/eval.json\n")
    report = json.loads((trained / "eval" / "eval.json").read_text())
    recipe = report["recipe"]
    assert (recipe["model"], recipe["accuracy"], recipe["temperature"]) == ("run/model", "boxed", 1.0)
    assert (recipe["max_completion_length"], recipe["dtype"]) == (24, "float32")
    assert "full" in output_of(capsys, "eval", "run", "cache=full", "output_dir=full", "samples=1", HF, PATIENT)
    repeated = output_of(capsys, "eval", "run/eval", "--overwrite", PATIENT)
    assert repeated.endswith("run/eval/eval.json\n")
    rows = json.loads((trained / "eval" / "eval.json").read_text())["rows"]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in report["rows"]]


def test_eval_of_a_run_without_problems_says_which_command_to_use(trained, capsys):
    for override in ("validation=null", None):
        if override:
            recipe = read_recipe(parse(["train", "run/recipe.yaml", override]))
            (trained / "recipe.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
        place = "run" if override else "run/model"
        message = output_of(capsys, "eval", place, status=2)
        assert f"sparse-rl eval RECIPE model={place}" in message
        assert "the problems to evaluate" in message


def test_a_run_directory_is_not_a_recipe(trained, capsys):
    assert "its recipe is run/recipe.yaml" in output_of(capsys, "train", "run", status=2)


def contents(folder):
    """Return the bytes of all files in a folder, by their paths."""
    return {file.relative_to(folder): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    ("words", "place", "existing_file"),
    [
        (["rollout", "grpo.yaml"], "out/rollouts", "completions.jsonl"),
        (["rollout", "grpo.yaml", "--out", "there"], "there", "completions.jsonl"),
        (["eval", "eval.yaml"], "out", "eval.json"),
    ],
)
def test_files_of_an_earlier_call_are_not_overwritten(workdir, capsys, monkeypatch, words, place, existing_file):
    words = [*words, PATIENT]
    output_of(capsys, *words)
    before = contents(workdir)
    with monkeypatch.context() as patched:
        patched.setattr("sparse_rl.models.load.load_config", lambda *_: 1 / 0)
        message = output_of(capsys, *words, "seed=1", status=2)
    assert f"{place} already holds {existing_file}; add" in message
    assert "--overwrite to replace it" in message
    assert contents(workdir) == before
    (workdir / place / "traces-00009.safetensors").write_text("of an earlier call")
    output_of(capsys, *words, "seed=1", "--overwrite")
    assert contents(workdir) != before
    assert ("rollout" in words) != (workdir / place / "traces-00009.safetensors").exists()


def test_a_folder_with_only_traces_is_not_overwritten(workdir, capsys):
    (workdir / "there").mkdir()
    (workdir / "there" / "traces-00000.safetensors").write_text("of a call that was killed")
    message = output_of(capsys, "rollout", "grpo.yaml", "--out", "there", status=2)
    assert "already holds traces-00000.safetensors" in message


def test_the_directory_of_a_training_is_never_overwritten(trained, capsys):
    before = contents(trained)
    for words in (["rollout", "grpo.yaml", "--out", "run"], ["eval", "eval.yaml", "output_dir=run"]):
        assert "run is the directory of a training" in output_of(capsys, *words, "--overwrite", status=2)
    assert contents(trained) == before


def test_plot_of_a_folder_draws_the_runs_in_it(workdir, capsys):
    logged = "".join(json.dumps({"step": i, "reward": 0.5, "replay/gap_mean": 1e-7}) + "\n" for i in (1, 2))
    for place in ("many/one", "many/two", "many/two/inner", "other/one"):
        (workdir / place).mkdir(parents=True)
        (workdir / place / "metrics.jsonl").write_text(logged)
    assert runs_below(Path("many")) == [Path("many/one"), Path("many/two"), Path("many/two/inner")]
    assert runs_below(Path("many/two")) == [Path("many/two")]  # a run directory is its own result
    drawn = output_of(capsys, "plot", "many", "other/one", "--out", "all.svg").split()
    assert drawn == ["all.svg", "all_gap.svg"]
    assert all(label in Path("all.svg").read_text() for label in ("many/one", "many/two", "two/inner", "other/one"))
    assert output_of(capsys, "plot", "many").split() == ["many/plots/learning.png", "many/plots/gap.png"]
    (workdir / "empty").mkdir()
    assert "empty is not the directory of a run and contains no runs" in output_of(
        capsys, "plot", "many", "empty", status=2
    )


def test_version_prints_the_version(capsys):
    assert output_of(capsys, "--version") == f"sparse-rl {__version__}\n"
