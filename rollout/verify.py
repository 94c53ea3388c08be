"""Checks the invariant on rollouts on disk: under replay, each sampled token has the log-prob that the sampler gave it.

Replayed log-probs are compared with `model_logprobs`, those before top-p, top-k and min-p at the sampling temperature,
and, where the tokens' supports are recorded, also with `logprobs`, within the supports. The larger gap counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollout.config import COMPLETIONS, Origin
from rollout.files import Part, RolloutFiles
from sparse_rl.attention import cache_shape, compute_exactly, replay_logprobs
from sparse_rl.attention.families import windows_of
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.models.load import model_fingerprint

BOUNDS = {"float32": 1e-5, "float16": 0.1, "bfloat16": 0.6}
"""Largest gap of a correct replay, by dtype (measurements: docs/numerics.md)."""
INEXACT = 1e-4  # largest gap in float32 when attention is not computed in float64
LOGITS = 2**28  # maximum number of logits in one forward pass
ROWS = 8  # maximum number of rows in one forward pass


@dataclass
class Gap:
    """Statistics of |replayed log-prob - sampled log-prob| over tokens, in nats.

    rollouts, tokens : number of compared rollouts, and of compared tokens
    beyond : number of tokens whose gap exceeds the bound
    largest, total : largest gap, and sum of all gaps
    line, token : place of the largest gap: line of completions.jsonl, from 1, and token of the completion, from 0
    """

    rollouts: int = 0
    tokens: int = 0
    beyond: int = 0
    largest: float = -1.0
    total: float = field(default=0.0, repr=False)
    line: int = 0
    token: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    def add(self, other: Gap) -> None:
        if other.largest > self.largest:
            self.largest, self.line, self.token = other.largest, other.line, other.token
        for name in ("rollouts", "tokens", "beyond", "total"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_numbers(self) -> dict[str, float]:
        names = ("rollouts", "tokens", "largest", "mean", "beyond", "line", "token")
        return {name: getattr(self, name) for name in names}


def default_bound(origin: Origin, dtype: str, device: str) -> float:
    """Return the largest gap that passes: the larger of the bounds of the sampler's dtype and the replay's `dtype`, and
    INEXACT if one of the two does not compute attention in float64 on a CPU.
    """
    bound = max(BOUNDS[origin.dtype], BOUNDS[dtype])
    return bound if origin.exact and device == "cpu" else max(bound, INEXACT)


def own_rounding(model: Any, files: RolloutFiles) -> float:
    """Return the largest difference between a float32 model and the same model in float64, over 8 rollouts: a sharp
    model amplifies its rounding, and two right computations of it can differ by this much.
    """
    shape, windows = cache_shape(model.config)[:2], windows_of(model.config)
    few = next(files.parts(*shape, windows)).rollouts[:8]
    temperature = files.origin.sampling.temperature
    with torch.no_grad():
        ours = replay_logprobs(model, few, temperature, truncated=True)
        exact = replay_logprobs(model.double(), few, temperature, truncated=True)
    model.float()
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, exact, strict=True))


def check_model(origin: Origin, config: Any, model: str) -> bool:
    """Return True if a model's configuration has the fingerprint of the model that sampled the rollouts. Raises
    UserError if the two models differ in family, shape or vocabulary.
    """
    ours, theirs = model_fingerprint(config), origin.made_by.get("model", "")
    shape, sampled = ours.rpartition("-")[0], theirs.rpartition("-")[0]
    if shape != sampled:
        raise UserError(f"{model} is {shape}, but these rollouts were sampled by {sampled}; name that model", "MODEL")
    if config.vocab_size != origin.vocabulary:
        wrong = f"{model} has {config.vocab_size} tokens, but the rollouts' model has {origin.vocabulary}"
        raise UserError(f"{wrong}; name the model that sampled them", "MODEL")
    return ours == theirs


def verify(model: Any, files: RolloutFiles, bound: float) -> Iterator[tuple[Path, Gap]]:
    """Replay all rollouts. Yields (file, statistics of its gaps) for each trace file, in order; if nothing could be
    evicted, for completions.jsonl, once per group of lines.

    model : a model on which `adopt` (sparse_rl/attention/interface.py) was called, in evaluation mode
    bound : largest allowed gap, in nats

    Raises UserError if the files are not valid (see `RolloutFiles.parts`) or a trace cannot be replayed, and
    NotFiniteError if the model gives NaN.
    """
    compute_exactly(files.origin.exact)
    for part in files.parts(*cache_shape(model.config)[:2], windows_of(model.config)):
        yield part.file, _gap(model, part, files.origin, bound)


def _gap(model: Any, part: Part, origin: Origin, bound: float) -> Gap:
    sums = Gap()
    longest = max(len(r.trace) for r in part.rollouts)
    rows = min(max(LOGITS // (longest * model.config.vocab_size), 1), ROWS)
    with torch.no_grad():
        replayed = replay_logprobs(model, part.rollouts, origin.sampling.temperature, rows, truncated=True)
    for line, (rollout, ours) in enumerate(zip(part.rollouts, replayed, strict=True), start=part.line):
        within = rollout.logprobs if origin.sampling.records_support else rollout.model_logprobs
        theirs = torch.tensor([rollout.model_logprobs, within]).T
        gaps = (ours.cpu() - theirs).abs().double().amax(-1)
        largest, token = gaps.max(0)
        if not math.isfinite(largest):
            place = f"token {int(token)} of the completion in line {line} of {COMPLETIONS}"
            raise NotFiniteError(f"in replay, the log-prob of {place} is not a finite number: the model gives NaN")
        beyond, total = int((gaps > bound).sum()), float(gaps.sum())
        sums.add(Gap(1, sum(rollout.sampled), beyond, float(largest), total, line, int(token)))
    return sums
