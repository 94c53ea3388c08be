"""A schedule says when a compaction runs and how many entries are held. Its numbers equal a count one token at a time,
also if the budget grows."""

from __future__ import annotations

import pytest
import torch
from feeding import small_parameters
from policy_cases import SAMPLED

from sparse_rl.policies import make_policy
from sparse_rl.policies.schedule import EvictsBeforeAttending, GrowingSchedule, NeverEvicts, Schedule

KNOTS = [((0, 3), (10, 5), (20, 9)), ((7, 2), (9, 4), (30, 4)), ((5, 1), (12, 6))]
SCHEDULES = [
    *(Schedule(budget, period) for budget in (1, 7, 12) for period in (1, 2, 8)),
    *(GrowingSchedule(knots[0][1], period, knots) for knots in KNOTS for period in (1, 2, 8)),
    *(make_policy(name, **small_parameters(name, period=period)).schedule for name in SAMPLED for period in (1, 2, 8)),
    NeverEvicts(),
]
PROMPTS, STEPS = range(1, 40), 40


def count_by_the_rule(schedule: Schedule, prompt: int, fed: int) -> list[tuple[int, int, bool, int]]:
    """Count for each pass: (tokens seen, entries attended to, True if a compaction ran, entries held)."""
    rows, held, left = [], 0, None
    for seen in range(1, prompt + fed):
        held += 1
        attended = held
        ran = False
        if seen >= prompt and schedule.evicts:
            since_last = schedule.left(prompt, seen) if left is None else left
            ran = held >= since_last + schedule.period
        if ran:
            held = left = schedule.left(prompt, seen)
        rows.append((seen, attended, ran, held))
    return rows


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_schedule_equals_a_count_step_by_step(schedule: Schedule) -> None:
    for prompt in PROMPTS:
        rows = count_by_the_rule(schedule, prompt, STEPS)
        decoding, most_attended, left_before = 0, 0, 0
        for seen, attended, ran, held in rows:
            assert schedule.due(prompt, seen) == ran, (prompt, seen)
            assert schedule.held(prompt, seen) == held
            assert schedule.attended(prompt, seen) == attended
            left = schedule.left(prompt, seen)
            assert left >= left_before, "the number of kept entries fell"
            most_attended, left_before = max(most_attended, attended), left
            decoding = max(decoding, attended) if seen > prompt else 0
            assert most_attended == schedule.most_held(prompt, seen)
            assert decoding == schedule.most_decoding(prompt, seen) or seen <= prompt
        if schedule.peak is not None:
            assert schedule.peak == max(a for s, a, _, _ in rows if s > max(prompt, schedule.peak))
            assert schedule.most_held(prompt, 10**6) == max(prompt, schedule.peak)


def test_evicting_before_attending_never_exceeds_the_budget() -> None:
    """A prompt's queries attend to all tokens; its entries beyond the budget go at its end."""
    schedule = EvictsBeforeAttending(9)
    for prompt in PROMPTS:
        held = 0
        for seen in range(1, prompt + STEPS):
            attended = held + 1 if seen <= prompt else min(held + 1, 9)
            held = min(attended, 9) if seen >= prompt else attended
            assert schedule.attended(prompt, seen) == attended
            assert schedule.held(prompt, seen) == held
            assert schedule.due(prompt, seen) == (attended > held)
            assert schedule.most_held(prompt, seen) == (min(seen, max(prompt, 9)))
    assert schedule.peak == 9
    assert schedule.before_attending
    assert not Schedule(9).before_attending


@pytest.mark.parametrize("schedule", [*SCHEDULES, EvictsBeforeAttending(9)], ids=str)
@pytest.mark.parametrize("name", ["due", "held", "attended", "most_held", "most_decoding"])
def test_schedule_methods_give_equal_results_for_tensors_and_ints(schedule: Schedule, name: str) -> None:
    count = getattr(schedule, name)
    grid = torch.cartesian_prod(torch.arange(1, 30), torch.arange(1, 60))
    prompt, seen = grid[grid[:, 1] >= grid[:, 0]].unbind(1)
    expected = torch.tensor([int(count(p, s)) for p, s in zip(prompt.tolist(), seen.tolist(), strict=True)])
    assert torch.equal(torch.as_tensor(count(prompt, seen)).long().expand_as(expected), expected)


def test_schedules_report_if_they_evict_and_their_peak() -> None:
    assert Schedule(8).evicts
    assert not NeverEvicts().evicts
    assert Schedule(8, 3).peak == 11
    assert NeverEvicts().peak is None
    assert make_policy("lined").schedule.peak is None
    assert GrowingSchedule(3, 2, KNOTS[0]).peak == 11


def test_a_budget_is_linear_between_knots_and_rounded_down() -> None:
    schedule = GrowingSchedule(3, 1, KNOTS[0])
    assert [schedule.left(9, seen) for seen in (0, 4, 5, 9, 10, 12, 13, 20, 99)] == [3, 3, 4, 4, 5, 5, 6, 9, 9]


@pytest.mark.parametrize("entries", [(7, 7, 7), (7, 7, 8)])
def test_a_constant_budget_as_a_function_equals_the_constant(entries: tuple[int, ...]) -> None:
    """Control: a budget that grows by one entry differs."""
    function, constant = GrowingSchedule(7, 4, tuple(zip((0, 9, 30), entries, strict=True))), Schedule(7, 4)
    names = ("first", "left", "due", "held", "attended", "most_decoding", "most_held")
    counts = [
        [getattr(schedule, name)(*((p,) if name == "first" else (p, s))) for p in PROMPTS for s in range(p, p + STEPS)]
        for schedule in (function, constant)
        for name in names
    ]
    assert (counts[: len(names)] == counts[len(names) :]) == (len({*entries}) == 1)
