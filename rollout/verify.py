"""Whether rollouts on disk obey the law: replayed under its trace, each sampled token has the log-prob that it had.

Compared are `model_logprobs`, those before top-p and top-k, at the temperature of sampling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollout.files import Part, RolloutFiles
from rollout.origin import COMPLETIONS, Origin
from sparse_rl.attention import cache_shape, compute_exactly, replay_logprobs
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.models.load import model_fingerprint

BOUNDS = {"float32": 1e-5, "float16": 0.1, "bfloat16": 0.6}
"""The largest gap of a right replay, by dtype (docs/numerics.md says what was measured)."""
INEXACT = 1e-4  # in float32, where attention is not computed in float64
LOGITS = 2**28  # of one forward
ROWS = 8  # of one forward, at most


@dataclass
class Gap:
    """|log-prob replayed - log-prob sampled| over tokens, in nats.

    rollouts, tokens : so many were compared
    beyond : tokens whose gap is above the bound
    largest, total : the largest gap, and the sum of all
    line, token : where the largest is: in completions.jsonl, from 1, and in its completion, from 0
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
        """Over all tokens."""
        return self.total / self.tokens

    def add(self, other: Gap) -> None:
        """Count what another has counted."""
        if other.largest > self.largest:
            self.largest, self.line, self.token = other.largest, other.line, other.token
        self.rollouts += other.rollouts
        self.tokens += other.tokens
        self.beyond += other.beyond
        self.total += other.total

    def as_numbers(self) -> dict[str, float]:
        """For machines."""
        names = ("rollouts", "tokens", "largest", "mean", "beyond", "line", "token")
        return {name: getattr(self, name) for name in names}


def default_bound(origin: Origin, dtype: str, device: str) -> float:
    """The largest gap that passes: of the coarser of the sampler's dtype and `dtype`, in which it is replayed."""
    bound = max(BOUNDS[origin.dtype], BOUNDS[dtype])
    return bound if origin.exact and device == "cpu" else max(bound, INEXACT)


def check_model(origin: Origin, config: Any, model: str) -> bool:
    """Whether the configuration of a model is the sampler's in all that it says.

    model : how to name it

    Raises UserError where it is of another family, shape or vocabulary, so that nothing could be replayed.
    """
    ours, theirs = model_fingerprint(config), origin.made_by.get("model", "")
    shape, sampled = ours.rpartition("-")[0], theirs.rpartition("-")[0]
    if shape != sampled:
        raise UserError(f"{model} is {shape}, and {sampled} has sampled these rollouts; name that model", "MODEL")
    if config.vocab_size != origin.vocabulary:
        wrong = f"{model} knows {config.vocab_size} tokens, and what has sampled these rollouts {origin.vocabulary}"
        raise UserError(f"{wrong}; name that model", "MODEL")
    return ours == theirs


def verify(model: Any, files: RolloutFiles, bound: float) -> Iterator[tuple[Path, Gap]]:
    """The gap of each file of traces, in their order; under a full cache of completions.jsonl, some lines at a time.

    model : adopted, in evaluation mode

    Raises UserError where files are not as `RolloutFiles.parts` needs them, or no view replays a trace; NotFiniteError
    where the model gives NaN.
    """
    compute_exactly(files.origin.exact)
    for part in files.parts(*cache_shape(model.config)[:2]):
        yield part.file, _gap(model, part, files.origin, bound)


def _gap(model: Any, part: Part, origin: Origin, bound: float) -> Gap:
    found = Gap()
    longest = max(len(r.trace) for r in part.rollouts)
    rows = min(max(LOGITS // (longest * model.config.vocab_size), 1), ROWS)
    with torch.no_grad():
        replayed = replay_logprobs(model, part.rollouts, origin.sampling.temperature, rows)
    for line, (rollout, ours) in enumerate(zip(part.rollouts, replayed, strict=True), start=part.line):
        gaps = (ours.cpu() - torch.tensor(rollout.model_logprobs)).abs().double()
        largest, token = gaps.max(0)
        if not math.isfinite(largest):
            place = f"line {line} of {COMPLETIONS}, token {int(token)} of its completion"
            raise NotFiniteError(f"replayed, the log-prob of {place} is not a finite number: the model gives NaN")
        beyond, total = int((gaps > bound).sum()), float(gaps.sum())
        found.add(Gap(1, len(gaps), beyond, float(largest), total, line, int(token)))
    return found
