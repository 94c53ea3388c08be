"""Settings of a synthetic task that another task has, or that are out of bounds, are refused by their key."""

from __future__ import annotations

import pytest

from sparse_rl.data.config import SyntheticConfig
from sparse_rl.errors import UserError
from sparse_rl.recipe import load_recipe


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
