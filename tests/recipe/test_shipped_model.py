"""The shipped model is made by its recipe and found by its name, and is less accurate under the budget of the shipped
recipes than with a full cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout import SamplingConfig, make_engine
from sparse_rl.data.synthetic import RunningSum, grade
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import load_config, load_model, load_tokenizer, untrained_model
from sparse_rl.recipe import load_recipe

SHIPPED = Path(__file__).parents[2] / "recipes/quickstart/model"


def accuracy(folder: str, problems: int, **policy: object) -> float:
    """Return a model's accuracy on calibration problems, sampled under a policy."""
    tokenizer, data = load_tokenizer(folder), RunningSum().rows("calibration", problems, seed=1000)
    engine = make_engine("hf", model=load_model(folder), policy=policy, max_batch=problems)
    rollouts = engine.generate([prompt_ids(row["prompt"], tokenizer) for row in data], SamplingConfig(152, seed=0))
    texts = tokenizer.batch_decode([r.completion_ids for r in rollouts], skip_special_tokens=True)
    return sum(grade(text, row["answer"]) for text, row in zip(texts, data, strict=True)) / problems


def test_the_name_of_the_shipped_model_works_in_any_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(model_directory("quickstart/model")).samefile(SHIPPED)
    users_folder = tmp_path / "quickstart/model"
    users_folder.mkdir(parents=True)
    assert model_directory("quickstart/model") == "quickstart/model", "a folder of the user has priority"
    assert model_directory("quickstart/grpo") == "quickstart/grpo"
    assert model_directory("a/b") == "a/b"


def test_the_shipped_model_is_accurate_only_with_a_full_cache():
    """So GRPO has room to improve the model."""
    cache = load_recipe("quickstart/grpo").cache
    assert accuracy(str(SHIPPED), 64, policy="full") > 0.9
    assert 0.1 < accuracy(str(SHIPPED), 64, **cache.as_block()) < 0.5


def test_an_untrained_model_has_the_shipped_shape_and_weights_of_its_seed():
    for seed in (0, 3):
        weights, expected = untrained_model(str(SHIPPED), seed).state_dict(), RunningSum.untrained(seed).state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    other, text = untrained_model(str(SHIPPED), 1).state_dict(), RunningSum().rows("train", 1, seed=0)[0]["prompt"]
    assert not torch.equal(other["model.norm.weight"], load_model(str(SHIPPED)).state_dict()["model.norm.weight"])
    assert load_tokenizer(str(SHIPPED))(text)["input_ids"] == RunningSum.tokenizer()(text)["input_ids"]


@pytest.mark.slow
def test_the_recipe_reproduces_the_shipped_model(tmp_path):
    """Bit for bit on a machine with the same arithmetic; elsewhere a model of the same accuracy."""
    command = [sys.executable, "-m", "sparse_rl.cli", "train", "quickstart/sft", f"output_dir={tmp_path / 'sft'}"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    trained = tmp_path / "sft/model"
    assert load_config(str(trained)).to_dict() == load_config(str(SHIPPED)).to_dict() | {"_name_or_path": str(trained)}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (trained / name).read_text() == (SHIPPED / name).read_text(), name
    ours, theirs = (load_model(str(folder)).state_dict() for folder in (trained, SHIPPED))
    if not all(torch.equal(ours[name], theirs[name]) for name in theirs):
        assert min(accuracy(str(trained), 256, policy="full"), accuracy(str(SHIPPED), 256, policy="full")) > 0.9
