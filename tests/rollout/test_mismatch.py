"""The mismatch between a cache's samples and the dense model, and the growing budget that is proposed from it."""

from __future__ import annotations

import pytest
import torch
from dense_matched import dense_logprobs
from tiny import model_of, policy_of, prompts_of

from rollout import SamplingConfig, make_engine
from rollout.measure.mismatch import Bin, Scored, bin_edges, bins, holds, propose, score
from sparse_rl.commands.mismatch import search

PROMPTS, TOKENS = (3, 12, 30), 40


@pytest.mark.parametrize(("name", "temperature"), [("full", 1.0), ("streaming", 1.0), ("gkv", 0.7)])
def test_ratios_are_those_of_the_dense_model(name: str, temperature: float) -> None:
    """Under a full cache, ratio and acceptance are 1. Control: under a small cache they are not."""
    model, prompts = model_of("quickstart"), prompts_of("quickstart", PROMPTS)
    policy = policy_of(name, budget={"tokens": [10, 40], "entries": [12, 24]}, sinks=1, window=4, period=4)
    sampling = SamplingConfig(TOKENS, temperature=temperature, seed=1, ignore_eos=True)
    rollouts = make_engine("hf", model=model, policy=policy).generate(prompts, sampling)
    parts = [score(model, rollout, temperature) for rollout in rollouts]
    for rollout, scored in zip(rollouts, parts, strict=True):
        prompt, fed = len(rollout.prompt_ids), len(rollout.trace) - 1
        with torch.no_grad():
            ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1].double() / temperature
            expected = logits.log_softmax(-1).gather(-1, ids[0, prompt:, None])[:, 0]
        sampled = torch.tensor(rollout.model_logprobs, dtype=torch.float64)
        assert torch.allclose(scored.ratio.log(), expected - sampled, atol=1e-4)
        assert scored.seen.tolist() == list(range(prompt, fed + 1))
        attended = [prompt, *(policy.schedule.attended(prompt, n) for n in range(prompt + 1, fed + 1))]
        assert scored.entries.tolist() == attended
    joined = Scored.joined(parts)
    assert bool((joined.acceptance <= 1 + 1e-5).all())
    assert bool(((joined.acceptance - 1).abs() < 1e-4).all()) is (name == "full")
    assert bool(((joined.ratio - 1).abs() < 1e-3).all()) is (name == "full")
    if temperature == 1.0:
        with torch.no_grad():
            (replayed,) = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace) for r in rollouts[:1]]
        assert torch.allclose(replayed, torch.tensor(rollouts[0].model_logprobs), atol=1e-4)


def test_acceptance_is_the_mean_of_the_ratio_cut_at_1() -> None:
    """Over many samples of one token: E[min(ratio, 1)] = sum of min(p_full, p_small). The ratio itself has mean 1."""
    model, (prompt,) = model_of("quickstart"), prompts_of("quickstart", (60,))
    policy = policy_of("streaming", budget=12, sinks=1, period=4)
    rollouts = make_engine("hf", model=model, policy=policy).generate([prompt] * 300, SamplingConfig(2, seed=3))
    second = [
        score(model, r, 1.0)
        for r in rollouts
        if len(r.completion_ids) == 2 and r.completion_ids[0] == rollouts[0].completion_ids[0]
    ]
    ratios, acceptance = torch.stack([s.ratio[1] for s in second]), torch.stack([s.acceptance[1] for s in second])
    assert float(acceptance.std()) < 1e-5
    error = float(ratios.clamp(max=1).std()) / len(ratios) ** 0.5
    assert float(ratios.clamp(max=1).mean()) == pytest.approx(float(acceptance[0]), abs=4 * error + 1e-4)


def table(needs: dict[int, list[float]], edges: list[int]) -> dict[int, list[Bin | None]]:
    """Return bins with these 5th percentiles of the acceptance."""
    return {
        budget: [
            Bin(start, start + 1, 99, 1.0, 1.0, 0.0, value, 1.0, 1.0) if value >= 0 else None
            for start, value in zip(edges, values, strict=False)
        ]
        for budget, values in needs.items()
    }


EDGES = [10, 110, 210, 310]
MEASURED = {16: [0.9, 0.5, 0.1], 64: [0.9, 0.9, 0.5], 100: [0.95, 0.8, 0.9], 200: [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("measured", "threshold", "raised", "knots"),
    [
        (MEASURED, 0.7, [0, 0, 0], ((10, 16), (110, 64), (210, 100))),
        (MEASURED, 0.86, [0, 0, 0], ((10, 100), (110, 200))),  # 100 fails in the second bin, though 64 holds
        (MEASURED, 0.7, [0, 1, 0], ((10, 16), (110, 100))),
        (MEASURED, 0.05, [0, 0, 0], ((10, 16),)),
        ({**MEASURED, 16: [0.9, -1, 0.6], 64: [0.9] * 3}, 0.7, [0, 0, 0], ((10, 16), (110, 16), (210, 64))),
        (MEASURED, 1.1, [0, 0, 0], None),
        (MEASURED, 0.7, [0, 0, 2], ((10, 16), (110, 100), (210, 200))),  # no bin gets more than the largest
    ],
)
def test_a_proposal_has_in_each_bin_the_smallest_budget_that_holds(measured, threshold, raised, knots) -> None:
    """A budget counts if no larger one fails; it grows by at most an entry per token, so it may begin earlier."""
    budget = propose(table(measured, EDGES), EDGES, threshold, raised)
    assert (None if budget is None else budget.knots) == knots


@pytest.mark.parametrize(("least", "last"), [(100, "(10, 100), (110, 200)"), (128, "(10, 128), (110, 200)"), (999, "")])
def test_a_search_raises_earlier_bins_if_later_ones_have_the_largest_budget(least, last) -> None:
    """The last bin holds if the budget begins with `least` entries. Control: with 999, no budget does."""
    seen = torch.tensor([50.0, 150.0, 250.0], dtype=torch.float64)

    def scored(acceptance: list[float]) -> Scored:
        return Scored(seen, torch.ones(3), torch.tensor(acceptance), seen)

    tried = []

    def measured(policy) -> Scored:
        tried.append(policy.config.budget.knots)
        return scored([0.95, 0.95, 0.9 if tried[-1][0][1] >= least else 0.8])

    constant = {64: [0.9, 0.5, 0.5], 128: [0.9, 0.9, 0.5], 200: [0.95, 0.95, 0.9]}
    by_budget = {budget: bins(scored(acceptance), EDGES) for budget, acceptance in constant.items()}
    words = search(0.86, EDGES, by_budget, policy_of("gkv", budget=64, window=4, period=8), measured)
    assert len(set(tried)) == len(tried)
    assert ("this growing budget keeps it" in words) is bool(last)
    assert str(tried[-1]) == (f"({last})" if last else "((10, 200),)")


@pytest.mark.parametrize("count", [1, 4, 9])
def test_one_long_sequence_takes_no_bins_from_the_others(count: int) -> None:
    """Bins have about equal numbers of tokens: at most as many as a length has differ from an equal share."""
    ends = [60, 70, 80, 90] * 8 + [5000]
    some = [torch.arange(20.0, end, dtype=torch.float64) for end in ends]
    scored = [Scored(seen, seen / 5000, seen / 5000, seen) for seen in some]
    edges = bin_edges(scored, count)
    sizes = [one.tokens for one in bins(Scored.joined(scored), edges) if one is not None]
    assert len(sizes) == count
    assert all(abs(size - sum(map(len, some)) / count) <= len(ends) for size in sizes)
    assert bin_edges(scored[:1], 99) == list(range(20, 61))


def test_bins_hold_every_token_once() -> None:
    seen = torch.arange(7.0, 107, dtype=torch.float64)
    scored = Scored(seen, seen / 100, (seen / 107).sqrt(), seen + 1)
    edges = bin_edges([scored], 4)
    one_of_each = [one for one in bins(scored, edges) if one is not None]
    assert sum(one.tokens for one in one_of_each) == len(seen)
    assert [one.start for one in one_of_each] == edges[:-1]
    assert one_of_each[0].ratio_p5 == pytest.approx(0.08)
    assert [holds(one, 0.6) for one in one_of_each] == [False, False, True, True]
