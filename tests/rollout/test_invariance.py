"""The same prompts alone, batched and in another order give the same tokens and traces.

Rounding differs with the shape of a batch, so a decision that hangs on less than 1e-5 may go either way: at most one
sequence may differ, and then the first decision that differs must be such a tie. That is checked, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

import rollout.hf
from rollout import Rollout, SamplingConfig, make_engine
from rollout.sampling import sample
from sparse_rl.policies import POLICIES, Entries, Policy
from sparse_rl.trace import NEVER, EvictionTrace

TIE = 1e-5
LENGTHS = (1, 7, 16, 19, 33, 45)
ORDER = (4, 2, 0, 5, 3, 1)
TOKENS = 20
BUDGET = 16


@dataclass
class Decisions:
    """What one sequence, sampled alone, decided on: scores by (tokens seen, layer), and each step's logits and draw."""

    scores: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    draws: list[tuple[torch.Tensor, float | None]] = field(default_factory=list)


def listening(policy: Policy, decisions: Decisions) -> Policy:
    """The same policy, writing down what it scored: per head, positions and scores [Hkv, N]."""

    class Listening(type(policy)):  # type: ignore[misc]
        def score(self, layer: int, entries: Entries) -> torch.Tensor:
            scores = super().score(layer, entries)
            decisions.scores[int(entries.seen[0]), layer] = (entries.positions[0].clone(), scores[0].clone())
            return scores

    return Listening(**policy.parameters())


def sample_alone(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module, policy: Policy, prompt: list[int], sampling: SamplingConfig
) -> tuple[Rollout, Decisions]:
    decisions = Decisions()

    def listen(logits: torch.Tensor, sampling: SamplingConfig, uniform: torch.Tensor | None) -> tuple:
        decisions.draws.append((logits[0].clone(), None if uniform is None else float(uniform[0])))
        return sample(logits, sampling, uniform)

    with monkeypatch.context() as patch:
        patch.setattr(rollout.hf, "sample", listen)
        engine = make_engine("hf", model=model, policy=listening(policy, decisions))
        (alone,) = engine.generate([prompt], sampling)
    return alone, decisions


def same(a: Rollout, b: Rollout) -> bool:
    return a.completion_ids == b.completion_ids and torch.equal(a.trace.evict_at, b.trace.evict_at)


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def first_difference(alone: Rollout, other: Rollout, decisions: Decisions, temperature: float) -> float:
    """How near to a tie the first decision was that went another way, relative to what was compared."""
    length = min(len(alone.trace), len(other.trace))
    ours, theirs = (
        torch.where(r.trace.evict_at[..., :length] < length - 1, r.trace.evict_at[..., :length], NEVER)
        for r in (alone, other)
    )
    first_eviction = int(torch.where(ours == theirs, NEVER, torch.minimum(ours, theirs)).min())
    pairs = zip(alone.completion_ids, other.completion_ids, strict=False)
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
    if first_eviction <= len(alone.prompt_ids) + step:  # the compaction after `seen` tokens comes before token `seen`
        margins = []
        now_ours, now_theirs = ours == first_eviction, theirs == first_eviction
        layer = int((now_ours != now_theirs).any(dim=(1, 2)).nonzero()[0])  # later layers see another input
        positions, scores = decisions.scores[first_eviction, layer]
        for head in (now_ours != now_theirs)[layer].any(-1).nonzero()[:, 0].tolist():
            changed = (now_ours != now_theirs)[layer, head].nonzero()[:, 0]
            among = scores[head][torch.isin(positions[head], changed)]
            margins.append(relative(float(among.max()), float(among.min())))
        return max(margins)
    logits, uniform = decisions.draws[step]
    a, b = alone.completion_ids[step], other.completion_ids[step]
    if uniform is None:
        return relative(float(logits[a]), float(logits[b]))
    cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)
    return relative(float(cdf[min(a, b)]), uniform) if abs(a - b) == 1 else float("inf")


def check_same(alone: list[tuple[Rollout, Decisions]], others: list[Rollout], temperature: float, what: str) -> None:
    differing = [i for i, ((a, _), b) in enumerate(zip(alone, others, strict=True)) if not same(a, b)]
    assert len(differing) <= 1, f"{what}: sequences {differing} differ"
    for i in differing:
        margin = first_difference(alone[i][0], others[i], alone[i][1], temperature)
        assert margin <= TIE, f"{what}: sequence {i} differs where the choice was clear by {margin:.1e}"


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model_name", ["qwen3", "stories260K"])
@pytest.mark.parametrize("policy_name", POLICIES)
def test_company_changes_nothing(
    policy_name: str,
    model_name: str,
    temperature: float,
    model_of: Callable,
    policy_of: Callable,
    prompts_of: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompts = model_of(model_name), prompts_of(model_name, LENGTHS)
    policy = policy_of(policy_name, budget=BUDGET, window=4, period=3)
    sampling = SamplingConfig(max_tokens=TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    alone = [sample_alone(monkeypatch, model, policy, prompt, sampling) for prompt in prompts]

    engine = make_engine("hf", model=model, policy=policy)
    check_same(alone, engine.generate(prompts, sampling), temperature, "batched")
    reordered = engine.generate([prompts[i] for i in ORDER], sampling)
    check_same(alone, [reordered[ORDER.index(i)] for i in range(len(prompts))], temperature, "in another order")


@pytest.fixture
def recorded(
    model_of: Callable, policy_of: Callable, prompts_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> tuple[Rollout, Decisions]:
    sampling = SamplingConfig(max_tokens=TOKENS, temperature=1.0, seed=5, ignore_eos=True)
    policy = policy_of("morphkv", budget=BUDGET, window=4, period=3)
    return sample_alone(monkeypatch, model_of("qwen3"), policy, prompts_of("qwen3", [33])[0], sampling)


def other_token(rollout: Rollout, step: int, token: int) -> Rollout:
    return replace(rollout, completion_ids=[*rollout.completion_ids[:step], token, *rollout.completion_ids[step + 1 :]])


def swapped_eviction(alone: Rollout, decisions: Decisions, rank: int) -> tuple[Rollout, float]:
    """Head 0 of layer 0 drops its `rank`-th best in place of the first that it dropped; and the margin of the two."""
    seen = min(n for n, _ in decisions.scores)
    positions, scores = (t[0] for t in decisions.scores[seen, 0])
    evict_at = alone.trace.evict_at.clone()
    head = evict_at[0, 0]
    competing = positions < seen - 4
    dropped = (head[positions] == seen) & competing
    drop = positions[dropped][0]
    keep = positions[~dropped & competing][scores[~dropped & competing].argsort(descending=True)][rank]
    margin = relative(float(scores[positions == drop]), float(scores[positions == keep]))
    head[drop], head[keep] = NEVER, seen
    return replace(alone, trace=EvictionTrace(evict_at)), margin


def test_a_clear_choice_is_no_tie(recorded: tuple[Rollout, Decisions]) -> None:
    """The controls: a token or an eviction that was decided clearly is refused, and so are two differing sequences."""
    alone, decisions = recorded
    for step, token in ((0, (alone.completion_ids[0] + 1) % 64), (9, (alone.completion_ids[9] + 7) % 64)):
        with pytest.raises(AssertionError, match="clear"):
            check_same([recorded], [other_token(alone, step, token)], 1.0, "control")

    swapped, _ = swapped_eviction(alone, decisions, rank=0)
    # The sequences went on to differ in their last token: the eviction came first, and is what is judged.
    differing = other_token(swapped, TOKENS - 1, (alone.completion_ids[-1] + 1) % 64)
    with pytest.raises(AssertionError, match="clear"):
        check_same([recorded], [differing], 1.0, "control")
    with pytest.raises(AssertionError, match="sequences"):
        check_same([recorded] * 2, [differing] * 2, 1.0, "control")


def test_a_tie_is_a_tie(recorded: tuple[Rollout, Decisions]) -> None:
    """One sequence that differs where the choice hung on less than 1e-5 passes: tokens and evictions."""
    alone, decisions = recorded
    token = alone.completion_ids[3]
    logits = decisions.draws[3][0]
    cdf = logits.double().softmax(-1).cumsum(-1)
    neighbour = token + 1 if token < 63 else token - 1

    decisions.draws[3] = (logits, float(cdf[min(token, neighbour)]) * (1 + 1e-6))
    check_same([recorded], [other_token(alone, 3, neighbour)], 1.0, "tie")

    level = logits.clone()
    level[(token + 5) % 64] = level[token] * (1 + 1e-6)
    decisions.draws[3] = (level, None)
    check_same([recorded], [other_token(alone, 3, (token + 5) % 64)], 0.0, "tie")

    swapped, margin = swapped_eviction(alone, decisions, rank=0)
    assert margin > TIE
    seen = min(n for n, _ in decisions.scores)
    positions, scores = decisions.scores[seen, 0]
    decisions.scores[seen, 0] = (positions, torch.ones_like(scores) + 1e-6 * torch.rand_like(scores))
    check_same([recorded], [other_token(swapped, TOKENS - 1, 0)], 1.0, "tie")
