"""Laws of every synthetic task: disjoint splits, rows that depend on the seed alone, and refusals of wrong settings."""

from itertools import combinations
from pathlib import Path

import pytest

from sparse_rl.data.config import DataConfig, SyntheticConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.synthetic import SPLITS, OneLiners, Retrieval, RunningSum, split_of
from sparse_rl.errors import UserError
from sparse_rl.recipe import load_recipe

# a task, and one that is so small that two seeds of a split share problems
TASKS = [(RunningSum(), RunningSum(n=5)), (OneLiners(cases=4), OneLiners(cases=2)), (Retrieval(2), Retrieval(1))]


@pytest.mark.parametrize(("task", "small"), TASKS, ids=str)
def test_splits_have_no_common_problem_for_any_seed(task, small):
    drawn = {split: {p for seed in range(3) for p in task.problems(split, 400, seed)} for split in SPLITS}
    assert all(split_of(problem) == split for split, problems in drawn.items() for problem in problems)
    assert not any(one & other for one, other in combinations(drawn.values(), 2))
    assert set(small.problems("train", 200, 0)) & set(small.problems("train", 200, 1))  # control


@pytest.mark.parametrize("task", [task for task, _ in TASKS], ids=str)
def test_rows_depend_on_the_seed_alone(task):
    first, worked = task.rows("train", 20, 3), task.rows("train", 20, 3, True)
    assert task.rows("train", 10, 3) == first[:10]
    assert task.rows("train", 20, 4) != first
    assert not any("completion" in row for row in first)
    assert [{**row, "completion": None} for row in first] == [{**row, "completion": None} for row in worked]
    with pytest.raises(UserError, match="unknown split 'test'; one of train, calibration, evaluation"):
        task.rows("test", 1, 0)


@pytest.mark.parametrize(
    ("keys", "task"),
    [
        ({"task": "one_liners", "cases": 2, "note_probability": 0.5}, OneLiners(2, 0.5)),
        ({"task": "retrieval", "facts": 4, "restated": 2, "filler": 1}, Retrieval(4, 2, 1)),
    ],
    ids=str,
)
def test_a_recipe_can_load_the_task(keys, task):
    config = DataConfig(synthetic=SyntheticConfig(size=3, split="evaluation", **keys))
    loaded = load_data(config, task.tokenizer(), require=("prompt", "completion")).to_list()
    assert loaded == task.rows("evaluation", 3, 0, True)


@pytest.mark.parametrize("task", [OneLiners, Retrieval])
def test_the_shipped_model_folder_equals_the_one_that_the_task_writes(task, tmp_path):
    shipped = Path(__file__).parents[2] / f"recipes/{'one_liners' if task is OneLiners else 'retrieval'}/model"
    task.save_untrained(tmp_path)
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == {file.name: file.read_text() for file in shipped.iterdir()}  # without weights


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "one_liners", "n": 4}, "n: is a key of the task running_sum; remove n"),
        ({"task": "running_sum", "cases": 2}, "cases: is a key of the task one_liners; remove cases"),
        ({"task": "one_liners", "cases": 7}, "cases: "),
        ({"task": "retrieval", "n": 4}, "n: is a key of the task running_sum; remove n"),
        ({"task": "running_sum", "facts": 4}, "facts: is a key of the task retrieval; remove facts"),
        ({"task": "retrieval", "facts": 101}, "facts: "),
        ({"task": "retrieval", "restated": 0}, "restated: "),
    ],
)
def test_wrong_settings_are_refused_by_their_key(wrong, message):
    with pytest.raises(UserError) as caught:
        SyntheticConfig(size=1, **wrong)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("recipe", ["one_liners/sft", "retrieval/short"])
def test_settings_that_need_running_sum_are_refused(recipe):
    with pytest.raises(UserError, match="stop_at_accuracy: can only grade answers to the task running_sum"):
        load_recipe(recipe, ["stop_at_accuracy=0.9"])
