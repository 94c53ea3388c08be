"""Rows of recorded rollouts are used with RecordedRollouts, and with groups of their size."""

from __future__ import annotations

import datasets
import pytest

from rollout.recorded import TOKENS, check_rows
from sparse_rl.errors import UserError

SAMPLE = {name: None for name in TOKENS["samples"][0]} if isinstance(TOKENS["samples"], list) else {}
RECORDED = datasets.Dataset.from_list([{"prompt_ids": [1, 2], "samples": [SAMPLE, SAMPLE]}], features=TOKENS)
PLAIN = datasets.Dataset.from_list([{"prompt": "1+1="}])


def test_rows_that_suit_the_engine_and_the_group_are_accepted() -> None:
    check_rows(RECORDED, True, 2)
    check_rows(PLAIN, False, 8)


@pytest.mark.parametrize(
    ("rows", "recorded", "samples", "key"),
    [(RECORDED, False, 2, "engine"), (PLAIN, True, 2, "engine"), (RECORDED, True, 4, "num_generations")],
    ids=["no recording engine", "no recorded rows", "another group size"],
)
def test_other_rows_are_refused(rows: datasets.Dataset, recorded: bool, samples: int, key: str) -> None:
    with pytest.raises(UserError) as error:
        check_rows(rows, recorded, samples)
    assert error.value.key == key
