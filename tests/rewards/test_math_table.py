"""The math reward judges two tables correctly: math_accepted.txt and math_rejected.txt, with lines `true answer =>
completion`. In math_pairs.txt, whose verdicts were written first, it accepts no wrong answer and refuses at
most 3 % of the right ones. `make test` judges an eighth of each table, and a quarter of the wrong pairs."""

from collections import Counter
from pathlib import Path

import pytest

from rewards.math import MathReward

FOLDER = Path(__file__).parent


def rows(table: str) -> list[tuple[str, str]]:
    """Return (gold answer, completion) of each line of a table; the completion is boxed unless it is
    marked by `text:`."""
    results = []
    ending = {"right": " | 1", "wrong": " | 0"}.get(table, "")
    name = "pairs" if ending else table
    for line in (FOLDER / f"math_{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#") and line.endswith(ending):
            gold, statement = line.removesuffix(ending).split(" => ")
            text = statement.removeprefix("text: ").replace(r"\n", "\n")
            results.append((gold, text if statement.startswith("text: ") else rf"So it is \boxed{{{statement}}}."))
    return results


@pytest.fixture(scope="module")
def math_reward() -> MathReward:
    return MathReward(timeout=20, workers=1)


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(("table", "reward"), [("accepted", 1.0), ("rejected", 0.0)])
@pytest.mark.few(2)
def test_every_line_of_the_table_has_its_reward(math_reward: MathReward, table: str, reward: float, part: int) -> None:
    golds, completions = zip(*rows(table)[part::8], strict=True)
    rewards = math_reward(list(completions), answer=list(golds))
    wrong = [f"{g} => {c}: {r}" for g, c, r in zip(golds, completions, rewards, strict=True) if r != reward]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(golds)}", *wrong])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("table", "every", "reward", "share"), [("wrong", 4, 0.0, 0.0), ("wrong", 1, 0.0, 0.0), ("right", 1, 1.0, 0.03)]
)
def test_pairs_that_were_written_first_are_judged_right(
    math_reward: MathReward, table: str, every: int, reward: float, share: float
) -> None:
    golds, completions = zip(*rows(table)[::every], strict=True)
    rewards = math_reward(list(completions), answer=list(golds))
    wrong = [f"{g} => {c}: {r}" for g, c, r in zip(golds, completions, rewards, strict=True) if r != reward]
    assert len(golds) > 150 / every
    assert len(wrong) <= share * len(golds), "\n".join([f"{len(wrong)} of {len(golds)}", *wrong])


def test_the_tables_are_large_and_have_no_duplicates() -> None:
    accepted, rejected = rows("accepted"), rows("rejected")
    assert min(len(accepted), len(rejected)) >= 500
    assert max(Counter(accepted + rejected).values()) == 1
