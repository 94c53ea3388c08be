"""Measurement of head budgets (Attention Matching, section 3.4, appendix E): sensitivity curves of all kv heads.

The loss is the negative log-likelihood per token of answers that the model has sampled with the full cache. The journal
(journal.py) has a line for each context, with these answers, and a line for each of its heads, with the head's curve.
So a measurement that was interrupted, or shared by several processes, ends with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import fsum
from typing import Any

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.context import Context, PromptCacheConfig
from rollout.context.budgets import Varied, allocate, global_shares
from rollout.context.reader import ContextPrompts
from rollout.measure.journal import Journal, Point, settings_of
from sparse_rl.progress import Stage

CONTEXT = (-1, -1)  # unit of the line of a context; the unit of a head is (layer, kv head)


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    cache : settings of the compactions; their ratio is not used
    ratios, base : ratios of the head that is varied, and the ratio of all other heads
    global_ratios : ratios at which the keys of all heads compete
    shape : number of layers, number of kv heads in a layer
    identity : digest of everything else that determines the results, except the contexts
    """

    cache: PromptCacheConfig
    ratios: Sequence[float]
    base: float
    global_ratios: Sequence[float]
    sampling: SamplingConfig
    shape: tuple[int, int]
    identity: str


class MeasuredContext(Point):
    """A context with questions about it: a line for the context, and one for each kv head, the unit of work.

    task, problem : name of its task, and index of the first problem about it
    tokens, first : token ids of the context, and the number of tokens among them that the chat template puts first
    prompts, about : token ids of each question, and prompts about the context
    """

    unit = "head"

    def __init__(
        self,
        label: str,
        task: str,
        problem: int,
        tokens: Sequence[int],
        first: int,
        prompts: Sequence[Sequence[int]],
        about: ContextPrompts,
        settings: Settings,
        journal: Journal,
    ) -> None:
        self.label, self.task, self.problem, self.tokens = label, task, problem, tokens
        self.prompts, self.about, self.settings = prompts, about, settings
        cache = replace(settings.cache, first=settings.cache.first + first)
        asked = [about.repeat, about.questions, *about.requests, *prompts]
        texts = [list(tokens), [list(prompt) for prompt in asked]]
        ratios = [list(settings.ratios), settings.base, list(settings.global_ratios)]
        determining = settings.identity, texts, settings_of(cache), ratios, asdict(settings.sampling), settings.shape
        super().__init__(journal, cache, len(self.heads), *determining)

    @property
    def heads(self) -> list[tuple[int, int]]:
        layers, kv_heads = self.settings.shape
        return [(layer, head) for layer in range(layers) for head in range(kv_heads)]

    @property
    def finished(self) -> int:
        return sum(head in self.journal.units(self.key) for head in self.heads)

    def measure(self, engine: Any, shown: Stage) -> None:
        settings, units = self.settings, self.journal.units
        shown.tell(f"{self.label}: queries and answers")
        studied = engine.study(self.tokens, self.cache, self.about)
        line = units(self.key).get(CONTEXT)
        if line is None:
            rollouts = engine.generate(self.prompts, settings.sampling, studied.whole)
            answers = [rollout.completion_ids for rollout in rollouts]
        else:
            answers = line["answers"]
        loss = partial(self._loss, engine, answers)
        varied = Varied(studied, self.cache, settings.base)
        if line is None:
            shares = global_shares(studied.scores(self.cache), settings.global_ratios)
            line = {"answers": answers, "full_loss": loss(studied.whole), "baseline_loss": loss(varied.unvaried())}
            self.journal.add([{"point": self.key, "unit": CONTEXT, **line, "global_shares": shares.tolist()}])
        for layer, head in self.heads:
            if (layer, head) not in units(self.key):
                shown.tell(f"{self.label}: layer {layer}, kv head {head}")
                losses = varied.curve(layer, head, settings.ratios, loss, line["baseline_loss"])
                self.journal.add([{"point": self.key, "unit": (layer, head), "losses": losses}])
                shown.advance()

    def _loss(self, engine: Any, answers: Sequence[Sequence[int]], context: Context) -> float:
        logprobs = [value for values in engine.logprobs(self.prompts, answers, context) for value in values.tolist()]
        return -fsum(logprobs) / len(logprobs)

    def row(self) -> dict[str, Any]:
        return self.journal.units(self.key)[CONTEXT]

    def losses(self) -> list[list[list[float]]]:
        """Return the curves as [layer][kv head][ratio]. Requires that all are in the journal."""
        units, (layers, kv_heads) = self.journal.units(self.key), self.settings.shape
        return [[units[layer, head]["losses"] for head in range(kv_heads)] for layer in range(layers)]


def results(contexts: Sequence[MeasuredContext]) -> tuple[Tensor, dict[str, Any]]:
    """Return the head budgets [L, Hkv], by algorithm 4 from the mean curves of complete contexts, at the ratio `base`,
    and the further content of their file.
    """
    settings, lines = contexts[0].settings, [context.row() for context in contexts]
    losses = [context.losses() for context in contexts]
    curves = torch.tensor(losses, dtype=torch.float64).mean(0)
    used = {name: value for name, value in settings_of(settings.cache).items() if name not in ("ratio", "budgets")}
    content = {
        "settings": {"prompt_cache": used, "sampling": asdict(settings.sampling)},
        "contexts": [
            {"task": one.task, "problem": one.problem, "tokens": len(one.tokens), "questions": len(one.prompts)}
            for one in contexts
        ],
        "ratios": list(settings.ratios),
        "base": settings.base,
        "full_losses": [line["full_loss"] for line in lines],
        "baseline_losses": [line["baseline_loss"] for line in lines],
        "losses": losses,
        "global_ratios": list(settings.global_ratios),
        "global_shares": [line["global_shares"] for line in lines],
    }
    return allocate(curves, settings.ratios, settings.base), content
