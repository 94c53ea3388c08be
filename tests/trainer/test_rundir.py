"""A run directory is never overwritten, and only whole checkpoints of the same world are resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_rl.recipe import RecipeError, make_recipe
from trainer.checkpoint import STATE_FILE
from trainer.rundir import check_world, checkpoint_of, read_metrics, refuse_used


def recipe_of(folder: Path, **more):
    mapping = {
        "kind": "grpo", "model": "m", "output_dir": str(folder), "data": {"path": "a.jsonl"}, "rewards": ["boxed"],
        "cache": {"policy": "streaming", "budget": 8}, **more,
    }  # fmt: skip
    return make_recipe(mapping)


def checkpoint(folder: Path, step: int, ranks: int = 1, whole: bool = True) -> Path:
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    for rank in range(ranks):
        (made / STATE_FILE.format(rank=rank)).write_bytes(b"")
    if whole:
        (made / "trainer_state.json").write_text("{}")
    return made


def test_a_used_directory_is_refused_and_a_clean_one_is_not(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    refuse_used(recipe)
    (tmp_path / "recipe.yaml").write_text("kind: grpo\n")  # a run that died before its first step
    refuse_used(recipe)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(RecipeError, match=r"holds an earlier run; continue it with --resume"):
        refuse_used(recipe)
    (tmp_path / "metrics.jsonl").unlink()
    checkpoint(tmp_path, 1)
    with pytest.raises(RecipeError, match=r"output_dir.*holds an earlier run"):
        refuse_used(recipe)


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    with pytest.raises(RecipeError, match="holds no whole checkpoint"):
        checkpoint_of(recipe, "newest")
    good = checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10, whole=False)  # killed while it was written
    checkpoint(tmp_path, 11, ranks=0)
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoint_of(recipe, "newest") == good == checkpoint_of(recipe, str(good))
    with pytest.raises(RecipeError, match=r"checkpoint-10 is not a whole checkpoint: it has no trainer_state\.json"):
        checkpoint_of(recipe, str(tmp_path / "checkpoint-10"))
    with pytest.raises(RecipeError, match=r"checkpoint-11 is not a whole checkpoint: it has no rollout_state_0\.pt"):
        checkpoint_of(recipe, str(tmp_path / "checkpoint-11"))


def test_another_number_of_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, 3, ranks=2)
    with pytest.raises(RecipeError, match=r"was written by 2 processes; resume with launch\.processes=2"):
        checkpoint_of(recipe_of(tmp_path), "newest")
    two = recipe_of(tmp_path, launch={"processes": 2})
    assert checkpoint_of(two, "newest").name == "checkpoint-3"
    with pytest.raises(RecipeError, match=r"launch\.processes.*is 2, but 1 processes were started"):
        check_world(two)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_world(two)


def test_a_torn_last_line_of_the_metrics_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"lora": {"r": 4}, "launch": {"zero_stage": 3}}, "LoRA under ZeRO-3"),
        ({"uniform_groups": "drop", "loss_type": "dapo"}, "drop needs beta 0"),
        ({"uniform_groups": "drop", "beta": 0.1}, "drop needs beta 0"),
        ({"validation": {"data": {"path": "b.jsonl", "thinking": False}}}, "must be as in data.thinking"),
    ],
)
def test_what_cannot_be_right_is_refused_in_the_recipe(tmp_path: Path, more: dict, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        recipe_of(tmp_path, **more)
    recipe_of(tmp_path, uniform_groups="drop", lora={"r": 4}, launch={"zero_stage": 2})  # the control
