"""The settings of Attention Matching as a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sparse_rl.config import Positive, PositiveInt
from sparse_rl.errors import UserError
from sparse_rl.policies.config import EvictingConfig, PolicyConfig


@dataclass(frozen=True, kw_only=True)
class AMConfig(EvictingConfig):
    """Attention Matching: kept entries get biases and new values that preserve the attention over all entries.

    budget : number of entries kept per kv head, sinks and window included; or {tokens: [...], entries: [...]}, with
        which it grows
    period : number of entries that are added between two compactions; null means the (smallest) budget
    reference_queries : number of last tokens whose queries choose and fit the entries; null means 128, or budget +
        period if that is less
    select : attention keeps the keys that receive the most attention; omp chooses keys by orthogonal matching pursuit
        of the attention mass; omp_fast is omp with 8 keys in a step, which takes less time
    aggregate : reduction of the attention over the reference queries, for each key: rms (root mean square), mean or max
    ridge : weight that pulls the fitted values towards the old values, in units of the attention's mean square
    fit : ridge fits by ridge regression; paper uses the paper's own solvers, for comparison only, because training
        cannot replay them
    """

    name: ClassVar[str] = "am"
    policy_class: ClassVar[str] = "sparse_rl.methods.am.policy:AM"
    view_class: ClassVar[str] = "sparse_rl.methods.am.view:MatchedView"
    context_view_class: ClassVar[str | None] = "sparse_rl.methods.am.view:ContextView"
    sections: ClassVar[str | None] = "sparse_rl.methods.am.sections"
    packs: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    window: PositiveInt = 16
    period: PositiveInt | None = None  # type: ignore[assignment]  # __post_init__ sets a number
    reference_queries: PositiveInt | None = None
    select: Literal["attention", "omp", "omp_fast"] = "attention"
    aggregate: Literal["rms", "mean", "max"] = "rms"
    ridge: Positive = 1e-3
    fit: Literal["ridge", "paper"] = "ridge"

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        if self.period is None:
            object.__setattr__(self, "period", self.least)
        first = self.schedule.first(0)  # minimum number of tokens seen at the first compaction
        if self.reference_queries is None:
            object.__setattr__(self, "reference_queries", min(128, first))
        super().__post_init__()
        if self.reference_queries > first:
            have = f"the first compaction has budget + period = {first} queries"
            raise UserError(f"{self.reference_queries} is too many: {have}", "reference_queries")

    @property
    def refitted(self) -> int:
        """Number of entries that a compaction fits in each kv head, at most if the budget grows; sinks and window stay
        unchanged.
        """
        budget = self.budget if isinstance(self.budget, int) else self.budget.entries[-1]
        return budget - self.sinks - self.window

    def check_trainable(self) -> None:
        if self.fit == "paper":
            raise UserError("the paper's own solvers cannot be replayed in training; use ridge", "fit")

    def remark(self, group: int, layers: int) -> str | None:
        assert self.reference_queries is not None
        if (conditions := self.reference_queries * group) >= self.refitted:
            return None
        return (
            f"{self.reference_queries} reference queries of {group} heads are {conditions} conditions for the "
            f"{self.refitted} entries that are fitted; raise reference_queries, or lower the budget"
        )
