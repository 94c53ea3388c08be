"""Measurement of head budgets (Attention Matching, section 3.4, appendix E): sensitivity curves of all kv heads.

The loss is the negative log-likelihood per token of answers that the model has sampled with the full cache. The journal
(journal.py) has a line for each context, with these answers, and a line for each of its heads, with the head's curve.
So a measurement that was interrupted, or shared by several processes, ends with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import fsum
from typing import Any

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.context import Context, PromptCacheConfig
from rollout.context.budgets import Varied, allocate
from rollout.context.competition import global_shares
from rollout.context.prompts import ContextPrompts
from rollout.evaluation.journal import Journal, point_key, settings_of, work
from sparse_rl.progress import Stage, stage

CONTEXT = (-1, -1)  # unit of the line of a context; the unit of a head is (layer, kv head)


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    cache : settings of the compactions; their ratio is not used
    ratios, base : ratios of the head that is varied, and the ratio of all other heads
    global_ratios : ratios at which the keys of all heads compete
    sampling : settings of the answers
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


class MeasuredContext:
    """A context with questions about it. Its results are lines of the journal.

    task, problem : name of its task, and index of the first problem about it
    tokens, first : token ids of the context, and the number of tokens among them that the chat template puts first
    prompts : token ids of each question
    about : prompts about the context
    """

    def __init__(
        self,
        task: str,
        problem: int,
        tokens: Sequence[int],
        first: int,
        prompts: Sequence[Sequence[int]],
        about: ContextPrompts,
        settings: Settings,
        journal: Journal,
    ) -> None:
        self.task, self.problem, self.tokens, self.prompts, self.about = task, problem, tokens, prompts, about
        self.settings, self.journal = settings, journal
        self.cache = replace(settings.cache, first=settings.cache.first + first)
        asked = [about.repeat, about.questions, *about.requests, *prompts]
        texts = [list(tokens), [list(prompt) for prompt in asked]]
        ratios = [list(settings.ratios), settings.base, list(settings.global_ratios)]
        self.key = point_key(
            settings.identity, texts, settings_of(self.cache), ratios, asdict(settings.sampling), settings.shape
        )

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, kv head) of each head."""
        layers, kv_heads = self.settings.shape
        return [(layer, head) for layer in range(layers) for head in range(kv_heads)]

    @property
    def finished(self) -> int:
        """Number of heads whose curves are in the journal."""
        return sum(head in self.journal.units(self.key) for head in self.heads)

    @property
    def complete(self) -> bool:
        """True if the journal holds the curves of all heads."""
        return self.finished == len(self.heads)

    def measure(self, engine: Any, on_stage: Callable[[str], None], on_head: Callable[[], None]) -> None:
        """Measure the curves that are not in the journal yet, with an hf engine."""
        settings, units = self.settings, self.journal.units
        studied = engine.study(self.tokens, self.cache, self.about, on_stage)
        line = units(self.key).get(CONTEXT)
        if line is None:
            on_stage("answers with the full cache")
            rollouts = engine.generate(self.prompts, settings.sampling, studied.whole)
            answers = [rollout.completion_ids for rollout in rollouts]
        else:
            answers = line["answers"]
        loss = partial(self._loss, engine, answers)
        on_stage(f"compaction of all heads, ratio {settings.base:g}")
        varied = Varied(studied, self.cache, settings.base)
        if line is None:
            shares = global_shares(studied.scores(self.cache), settings.global_ratios)
            line = {"answers": answers, "full_loss": loss(studied.whole), "baseline_loss": loss(varied.unvaried())}
            self.journal.add([{"point": self.key, "unit": CONTEXT, **line, "global_shares": shares.tolist()}])
        for layer, head in self.heads:
            if (layer, head) not in units(self.key):
                on_stage(f"layer {layer}, kv head {head}")
                losses = varied.curve(layer, head, settings.ratios, loss, line["baseline_loss"])
                self.journal.add([{"point": self.key, "unit": (layer, head), "losses": losses}])
                on_head()

    def _loss(self, engine: Any, answers: Sequence[Sequence[int]], context: Context) -> float:
        """Return the negative log-likelihood per token of the answers after a compaction of the context."""
        logprobs = [value for values in engine.logprobs(self.prompts, answers, context) for value in values.tolist()]
        return -fsum(logprobs) / len(logprobs)

    def line(self) -> dict[str, Any]:
        """Return the context's own results."""
        return self.journal.units(self.key)[CONTEXT]

    def losses(self) -> list[list[list[float]]]:
        """Return the curves as [layer][kv head][ratio]. Requires that all are in the journal."""
        units, (layers, kv_heads) = self.journal.units(self.key), self.settings.shape
        return [[units[layer, head]["losses"] for head in range(kv_heads)] for layer in range(layers)]


def measure_curves(
    contexts: Sequence[MeasuredContext],
    open_engine: Callable[[Any], AbstractContextManager[Any]],
    journal: Journal,
    progress: bool = True,
) -> None:
    """Measure the curves that are not in the journal yet. Skip contexts on which other processes work.

    open_engine : function that returns a context manager of the hf engine; its argument is not used
    """
    done, total = sum(context.finished for context in contexts), sum(len(context.heads) for context in contexts)
    with stage("measuring", total=total, unit="head", shown=progress, done=done) as shown:

        def measure(context: MeasuredContext, engine: Any) -> None:
            context.measure(engine, partial(_tell, shown, contexts.index(context), len(contexts)), shown.advance)

        work(contexts, open_engine, journal, measure, lambda: None)


def _tell(shown: Stage, place: int, count: int, begins: str) -> None:
    shown.tell(f"context {place + 1} of {count}: {begins}")


def results(contexts: Sequence[MeasuredContext]) -> tuple[Tensor, dict[str, Any]]:
    """Return the head budgets [L, Hkv], and the further content of their file. Requires that all contexts are complete.

    The budgets are computed by algorithm 4 from the mean curves, at the ratio `base`.
    """
    settings, lines = contexts[0].settings, [context.line() for context in contexts]
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
