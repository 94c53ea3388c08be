"""A prompt gives the same tokens and evictions alone and in any batch, except for ties (tests/ties.py). The last tests
check that `check_same` allows ties alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_cases import SAMPLED
from ties import TIE, Decisions, check_same, relative, sample_alone
from tiny import model_of, policy_of, prompts_of

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.trace import NEVER, EvictionTrace

LENGTHS = (1, 7, 16, 19, 33, 45)
ORDER = (4, 2, 0, 5, 3, 1)
TOKENS = 20
BUDGET = 16


@pytest.mark.parametrize(
    ("model_name", "temperature"),
    [
        *(("qwen3", 1.0), ("quickstart", 0.0), ("stories260K", 1.0)),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("qwen3", 0.0), ("quickstart", 1.0))),
        pytest.param("stories260K", 0.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("policy_name", SAMPLED)
@pytest.mark.few(3)
def test_rows_do_not_depend_on_the_batch(policy_name: str, model_name: str, temperature: float) -> None:
    model, prompts = model_of(model_name), prompts_of(model_name, LENGTHS)
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=3)
    sampling = SamplingConfig(max_tokens=TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    alone = [sample_alone(model, policy, prompt, sampling) for prompt in prompts]

    engine = make_engine("hf", model=model, policy=policy)
    expected = [rollout for rollout, _ in alone]
    check_same(expected, engine.generate(prompts, sampling), alone.__getitem__, temperature, "batched")
    reordered = engine.generate([prompts[i] for i in ORDER], sampling)
    in_first_order = [reordered[ORDER.index(i)] for i in range(len(prompts))]
    check_same(expected, in_first_order, alone.__getitem__, temperature, "in another order")


@pytest.fixture
def recorded() -> tuple[Rollout, Decisions]:
    """Return a rollout, and the scores and logits that its choices compared."""
    sampling = SamplingConfig(max_tokens=TOKENS, temperature=1.0, seed=5, ignore_eos=True)
    policy = policy_of("morphkv", budget=BUDGET, window=4, period=3)
    return sample_alone(model_of("qwen3"), policy, prompts_of("qwen3", [33])[0], sampling)


def other_token(rollout: Rollout, step: int, token: int) -> Rollout:
    """Return a copy of the rollout with another token at one step."""
    return replace(rollout, completion_ids=[*rollout.completion_ids[:step], token, *rollout.completion_ids[step + 1 :]])


def swapped_eviction(alone: Rollout, decisions: Decisions, layer: int = 0) -> tuple[Rollout, float]:
    """Return a rollout in which head 0 exchanges its first dropped and its best kept entry, and their margin."""
    seen = min(n for n, _ in decisions.scores)
    positions, scores = (t[0] for t in decisions.scores[seen, layer])
    evict_at = alone.trace.evict_at.clone()
    head = evict_at[layer, 0]
    competing = positions < seen - 4
    dropped = (head[positions] == seen) & competing
    drop = positions[dropped][0]
    keep = positions[~dropped & competing][scores[~dropped & competing].argmax()]
    margin = relative(float(scores[positions == drop]), float(scores[positions == keep]))
    head[drop], head[keep] = NEVER, seen
    return replace(alone, trace=EvictionTrace(evict_at)), margin


def check(recorded: list[tuple[Rollout, Decisions]], others: list[Rollout], temperature: float) -> int:
    """Return the number of rollouts that differ by ties; raise an AssertionError for any other difference."""
    return check_same([rollout for rollout, _ in recorded], others, recorded.__getitem__, temperature, "control")


def test_differences_that_are_not_ties_are_refused(recorded: tuple[Rollout, Decisions]) -> None:
    """A changed token or eviction, and two sequences with such a difference."""
    alone, decisions = recorded
    for step, token in ((0, (alone.completion_ids[0] + 1) % 64), (9, (alone.completion_ids[9] + 7) % 64)):
        with pytest.raises(AssertionError, match="clear"):
            check([recorded], [other_token(alone, step, token)], 1.0)

    swapped, _ = swapped_eviction(alone, decisions)
    # The sequences also differ in their last token; the check judges the eviction, since it came first.
    differing = other_token(swapped, TOKENS - 1, (alone.completion_ids[-1] + 1) % 64)
    with pytest.raises(AssertionError, match="clear"):
        check([recorded], [differing], 1.0)
    with pytest.raises(AssertionError, match="sequences"):
        check([recorded] * 2, [differing] * 2, 1.0)


def test_a_difference_at_a_tie_is_accepted(recorded: tuple[Rollout, Decisions]) -> None:
    """A sampled or greedy token, or an eviction, whose scores differ by less than 1e-5. Control: a tie in layer 0 does
    not excuse a difference in layer 1."""
    alone, decisions = recorded
    token = alone.completion_ids[3]
    logits = decisions.draws[3][0]
    cdf = logits.double().softmax(-1).cumsum(-1)
    neighbour = token + 1 if token < 63 else token - 1

    decisions.draws[3] = (logits, float(cdf[min(token, neighbour)]) * (1 + 1e-6))
    assert check([recorded], [other_token(alone, 3, neighbour)], 1.0) == 1

    tied_logits = logits.clone()
    tied_logits[(token + 5) % 64] = tied_logits[token] * (1 + 1e-6)
    decisions.draws[3] = (tied_logits, None)
    assert check([recorded], [other_token(alone, 3, (token + 5) % 64)], 0.0) == 1

    swapped, margin = swapped_eviction(alone, decisions)
    assert margin > TIE
    seen = min(n for n, _ in decisions.scores)
    positions, scores = decisions.scores[seen, 0]
    decisions.scores[seen, 0] = (positions, torch.ones_like(scores) + 1e-6 * torch.rand_like(scores))
    assert check([recorded], [other_token(swapped, TOKENS - 1, 0)], 1.0) == 1

    swapped_in_two_layers, margin = swapped_eviction(swapped, decisions, layer=1)
    assert margin > TIE
    with pytest.raises(AssertionError, match="clear"):
        check([recorded], [swapped_in_two_layers], 1.0)
