"""Two samplers of the same tokens may differ only in decisions that depend on less than 1e-5.

Rounding differs with the shape of a batch, and with the kernel. So at most one sequence may differ, and then the first
decisions that differ must be ties. To check this, the sequence is sampled again, alone, by the reference
engine, which records the scores that it compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from judging import trainer_gap
from tiny import directory_of, loaded

import rollout.hf
from rollout import Rollout, SamplingConfig, make_engine
from rollout.sampling import sample
from sparse_rl.policies import Entries, Policy
from sparse_rl.trace import NEVER

TIE = 1e-5


@dataclass
class Decisions:
    """Inputs of one sequence's decisions: scores by (tokens seen, layer), and each step's logits and uniform number."""

    scores: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    draws: list[tuple[torch.Tensor, float | None]] = field(default_factory=list)


def listening(policy: Policy, decisions: Decisions) -> Policy:
    """Return a copy of the policy that records its scores: per head, positions and scores [Hkv, N] of N entries."""

    class Listening(type(policy)):  # type: ignore[misc]
        def score(self, layer: int, entries: Entries) -> torch.Tensor:
            scores = super().score(layer, entries)
            decisions.scores[int(entries.seen[0]), layer] = (entries.positions[0].clone(), scores[0].clone())
            return scores

    return Listening(policy.config)


def sample_alone(
    model: torch.nn.Module, policy: Policy, prompt: list[int], sampling: SamplingConfig
) -> tuple[Rollout, Decisions]:
    """Return one rollout of the reference engine, and the inputs of its decisions."""
    decisions = Decisions()

    def listen(logits: torch.Tensor, sampling: SamplingConfig, uniform: torch.Tensor | None, forced: None) -> tuple:
        decisions.draws.append((logits[0].clone(), None if uniform is None else float(uniform[0])))
        return sample(logits, sampling, uniform)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.hf, "sample", listen)
        engine = make_engine("hf", model=model, policy=listening(policy, decisions))
        (alone,) = engine.generate([prompt], sampling)
    return alone, decisions


def same_decisions(a: Rollout, b: Rollout) -> bool:
    """Return True if two rollouts have the same completions and evictions."""
    return a.completion_ids == b.completion_ids and torch.equal(a.trace.evict_at, b.trace.evict_at)


def relative(a: float, b: float) -> float:
    """Return the relative difference of two numbers."""
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def first_difference(alone: Rollout, other: Rollout, decisions: Decisions, temperature: float) -> float:
    """Return how far the first decisions that differ are from a tie, relatively.

    A layer compacts after it has attended. So all decisions after the same number of seen tokens (the evictions of
    every layer and the next token) have the same inputs, and all of them are judged.
    """
    length = min(len(alone.trace), len(other.trace))
    ours, theirs = (
        torch.where(r.trace.evict_at[..., :length] < length - 1, r.trace.evict_at[..., :length], NEVER)
        for r in (alone, other)
    )
    eviction = int(torch.where(ours == theirs, NEVER, torch.minimum(ours, theirs)).min())
    pairs = zip(alone.completion_ids, other.completion_ids, strict=False)
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), NEVER)
    token = len(alone.prompt_ids) + step  # the tokens seen before this token was chosen
    margins = []
    if eviction <= token and eviction < NEVER:
        changed = (ours == eviction) != (theirs == eviction)
        for layer, head in changed.any(-1).nonzero().tolist():
            positions, scores = (t[head] for t in decisions.scores[eviction, layer])
            among = scores[torch.isin(positions, changed[layer, head].nonzero()[:, 0])]
            margins.append(relative(float(among.max()), float(among.min())))
    if token <= eviction and step < NEVER:
        logits, uniform = decisions.draws[step]
        a, b = alone.completion_ids[step], other.completion_ids[step]
        if uniform is None:
            margins.append(relative(float(logits[a]), float(logits[b])))
        else:
            cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)
            margins.append(relative(float(cdf[min(a, b)]), uniform) if abs(a - b) == 1 else float("inf"))
    return max(margins, default=float("inf"))


def check_same(
    wanted: Sequence[Rollout],
    others: Sequence[Rollout],
    alone: Callable[[int], tuple[Rollout, Decisions]],
    temperature: float,
    what: str,
) -> int:
    """Check that at most one sequence differs, and only by a tie; return the number of such sequences. `alone(i)`
    returns `sample_alone` of sequence i.
    """
    differing = [i for i, (a, b) in enumerate(zip(wanted, others, strict=True)) if not same_decisions(a, b)]
    assert len(differing) <= 1, f"{what}: sequences {differing} differ"
    for i in differing:
        judge, decisions = alone(i)
        for sampled in (wanted[i], others[i]):
            if not same_decisions(judge, sampled):
                margin = first_difference(judge, sampled, decisions, temperature)
                assert margin <= TIE, f"{what}: sequence {i} differs where the choice was clear by {margin:.1e}"
    return len(differing)


def replay_gap(rollouts: Sequence[Rollout], model: str | Path = "qwen2", temperature: float = 1.0) -> float:
    """Return the gap of a trainer that replays each rollout alone, for a directory or a family of `directory_of`."""
    return trainer_gap(loaded(model if isinstance(model, Path) else directory_of(model)), rollouts, temperature, 1)


def agrees_with_hf(
    policy: Policy,
    prompts: list[list[int]],
    sampling: SamplingConfig,
    sampled: dict[str, list[Rollout]],
    model: str | Path = "qwen2",
) -> None:
    """Check that tokens and evictions equal those of hf, except for ties, and that replay gaps are within 1e-5."""
    reference = loaded(model if isinstance(model, Path) else directory_of(model))
    expected = make_engine("hf", model=reference, policy=policy).generate(prompts, sampling)

    def alone(i: int) -> tuple[Rollout, Decisions]:
        return sample_alone(reference, policy, prompts[i], sampling)

    for label, rollouts in sampled.items():
        check_same(expected, rollouts, alone, sampling.temperature, label)
        assert [r.prompt_ids for r in rollouts] == [r.prompt_ids for r in expected]
        assert replay_gap(rollouts, model, sampling.temperature) <= 1e-5, label
