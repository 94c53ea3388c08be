"""`sparse-rl calibrate` writes centres for which engines and recipes look, and which another model refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import QUICKSTART

from rollout import SamplingConfig, make_engine
from sparse_rl.commands.main import main
from sparse_rl.errors import UserError
from sparse_rl.models.centres import copy_centres, read_centres
from sparse_rl.models.directory import CENTRES_FILE
from sparse_rl.models.weights import file_fingerprints, weights_digest
from sparse_rl.policies import make_policy
from sparse_rl.recipe import load_recipe
from sparse_rl.trace import NEVER

CACHES = "cache={policy: h2o, budget: 40}", "cache={policy: triattention, budget: 40}"
POLICY = make_policy("triattention", budget=16, window=4, period=8)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the quickstart's model and its centres."""
    folder = tmp_path_factory.mktemp("calibrate")
    model = folder / "model"
    shutil.copytree(QUICKSTART, model)
    (folder / "text.txt").write_text("Q12+34+5=51. " * 40)
    assert main(["calibrate", str(model), str(folder / "text.txt"), "--tokens", "300"]) == 0
    return model


def test_an_engine_evicts_by_the_centres_in_the_models_directory(calibrated: Path) -> None:
    """Control: with the centres of another text it evicts other entries."""
    prompts, sampling = [list(range(3, 20))], SamplingConfig(30, temperature=0, ignore_eos=True)
    engine = make_engine("hf", model=calibrated, policy=POLICY)
    (sampled,) = engine.generate(prompts, sampling)
    assert bool((sampled.trace.evict_at < NEVER).any())
    again = make_engine("hf", model=engine.model, policy=POLICY)  # a live module, which has the centres in memory
    assert torch.equal(again.generate(prompts, sampling)[0].trace.evict_at, sampled.trace.evict_at)
    centres = read_centres(calibrated)
    engine.policy = POLICY.with_centres(type(centres)(-centres.centre, centres.size, centres.frequency))
    (other,) = engine.simulate(prompts, [sampled.completion_ids])
    assert not torch.equal(other.trace.evict_at, sampled.trace.evict_at)


def changed(calibrated: Path, folder: Path, how: str) -> Path:
    """Return a copy of the model's directory in which something was changed."""
    model = folder / "model"
    shutil.copytree(calibrated, model)
    config = json.loads((model / "config.json").read_text())
    match how:
        case "weights":
            weights = load_file(model / "model.safetensors")
            save_file({name: 1.1 * value for name, value in weights.items()}, model / "model.safetensors")
        case "rope":
            config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
            (model / "config.json").write_text(json.dumps(config))
        case "damage":
            (model / CENTRES_FILE).write_bytes((model / CENTRES_FILE).read_bytes()[:-8])
        case "absence":
            (model / CENTRES_FILE).unlink()
    return model


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("weights", "the file is of another model"),
        ("rope", "it was measured with RoPE"),
        ("damage", "cannot be used"),
        ("absence", "the policy triattention needs .*: sparse-rl calibrate"),
    ],
)
def test_centres_that_do_not_belong_to_the_model_are_refused(
    how: str, why: str, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = changed(calibrated, tmp_path, how)
    with pytest.raises(UserError, match=why):
        make_engine("hf", model=model, policy=POLICY)
    words = ["train", "quickstart/grpo", f"model={model}", "cache={policy: triattention, budget: 40}", "--dry-run"]
    assert main([*words, f"output_dir={tmp_path / 'run'}"]) == 2
    assert "calibrate" in capsys.readouterr().err


def test_a_trained_model_gets_the_centres_under_which_it_was_trained(calibrated: Path, tmp_path: Path) -> None:
    """Control: the file of the starting model is refused for the trained one."""
    trained = changed(calibrated, tmp_path, "weights")
    before = (trained / CENTRES_FILE).read_bytes()
    with pytest.raises(UserError, match="another model"):
        read_centres(trained)
    copy_centres(str(calibrated), trained, POLICY)
    own, others = read_centres(trained), read_centres(calibrated)
    assert all(torch.equal(value, vars(others)[name]) for name, value in vars(own).items())
    assert (trained / CENTRES_FILE).read_bytes() != before


def test_centres_leave_a_model_the_same_for_all_other_policies(calibrated: Path) -> None:
    """Control: to a recipe with triattention its centres are an input that must not change."""
    assert weights_digest(str(calibrated)) == weights_digest(str(QUICKSTART))
    assert file_fingerprints(str(calibrated), weights=True) == file_fingerprints(str(QUICKSTART), weights=True)
    files = [load_recipe("quickstart/grpo", [f"model={calibrated}", cache]).input_files() for cache in CACHES]
    assert [file["centres"][0] for file in files] == [None, str(calibrated / CENTRES_FILE)]


def test_centres_that_fit_are_replaced_only_if_it_is_asked_for(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Control: damaged centres are measured again without a question."""
    (tmp_path / "other.txt").write_text("7+7+7=21! " * 40)
    damaged, whole = (changed(calibrated, tmp_path / how, how) for how in ("damage", "nothing"))
    before = (whole / CENTRES_FILE).read_bytes()
    assert main(["calibrate", str(whole), str(tmp_path / "other.txt")]) == 2
    assert "--replace" in capsys.readouterr().err
    assert (whole / CENTRES_FILE).read_bytes() == before
    for words in ([str(whole), "--replace"], [str(damaged)]):
        assert main(["calibrate", *words, str(tmp_path / "other.txt")]) == 0
        assert (Path(words[0]) / CENTRES_FILE).read_bytes() != before


@pytest.mark.slow
def test_grpo_leaves_a_model_with_the_centres(calibrated: Path, tmp_path: Path) -> None:
    words = ["train", "quickstart/grpo", f"model={calibrated}", f"output_dir={tmp_path}/run"]
    cache = "cache={policy: triattention, budget: 40, window: 4, period: 8}"
    steps = ["max_steps=2", "save_steps=1"]
    small = ["num_generations=4", "per_device_train_batch_size=8", "max_completion_length=48", "validation=null"]
    assert main([*words, *steps, cache, *small, "rollout.engine=hf"]) == 0
    for name in ("model", "checkpoint-1"):
        assert torch.equal(read_centres(tmp_path / "run" / name).centre, read_centres(calibrated).centre)
    engine = make_engine("hf", model=tmp_path / "run/model", policy=POLICY)
    (sampled,) = engine.generate([list(range(3, 20))], SamplingConfig(30, ignore_eos=True))
    assert bool((sampled.trace.evict_at < NEVER).any())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{model}", "{folder}/absent.txt"], "absent.txt cannot be read"),
        (["{model}", "{folder}/short.txt"], "at least 100 are needed"),
        (["nobody/nothing", "{folder}/short.txt"], "is no directory"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    words: list[str], why: str, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Callable
) -> None:
    (tmp_path / "short.txt").write_text("Q1+2=")
    places = {"model": changed(calibrated, tmp_path, "absence"), "folder": tmp_path}
    assert main(["calibrate", *(word.format(**places) for word in words)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert why in line
