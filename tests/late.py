"""Engines for sampling ahead of the training: one that samples in a thread, as servers do, and the reference, which
samples when it is asked, with weights that are late."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rollout.config import SamplingConfig
from rollout.engine import Rollout


@dataclass
class UnderWay:
    """A batch that a thread samples. done : place -> rollout, all of them once they are sampled"""

    future: Future[list[Rollout]] | None = None
    done: dict[int, Rollout] = field(default_factory=dict)


class ThreadedEngine:
    """Samples in a thread with an engine that has weights of its own, which must not change meanwhile."""

    def __init__(self, engine: Any) -> None:
        assert not engine.shares_weights
        self.engine, self.pool, self.batch = engine, ThreadPoolExecutor(1), UnderWay()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def begin(self, prompts: list[list[int]], sampling: SamplingConfig) -> UnderWay:
        self._check_idle()
        batch = self.batch = UnderWay()

        def work() -> list[Rollout]:
            rollouts: list[Rollout] = self.engine.generate(prompts, sampling)
            batch.done.update(enumerate(rollouts))
            return rollouts

        batch.future = self.pool.submit(work)
        return batch

    def finish(self, batch: UnderWay) -> list[Rollout]:
        assert batch.future is not None
        return batch.future.result()

    def generate(self, *given: Any) -> list[Rollout]:
        self._check_idle()
        return list(self.engine.generate(*given))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._check_idle()
        self.engine.load_weights(weights)

    def _check_idle(self) -> None:
        assert self.batch.future is None or self.batch.future.done(), "a batch is under way"


class LateEngine:
    """Samples, in this process, with weights that are some updates older than those that it was given last.

    engine : an engine with weights of its own
    updates : number of updates by which it is late; until it has as many, it samples with the first weights
    """

    def __init__(self, engine: Any, updates: int = 1) -> None:
        assert not engine.shares_weights
        self.engine = engine
        self.waiting: deque[list[tuple[str, Tensor]]] = deque(maxlen=updates + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.waiting.append([(name, weight.detach().clone()) for name, weight in weights])
        self.engine.load_weights(self.waiting[0])
