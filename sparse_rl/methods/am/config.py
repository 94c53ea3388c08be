"""The settings of Attention Matching as a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sparse_rl.config import Positive, PositiveInt
from sparse_rl.errors import UserError
from sparse_rl.methods.eviction.config import EvictingConfig
from sparse_rl.policies.config import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class AMConfig(EvictingConfig):
    """Attention Matching: what stays gets biases and values that stand for what went.

    period : as for the others; None: the budget
    reference_queries : of how many of the last tokens the queries say what must be kept; None: 128, where the first
        compaction has as many
    select : attention, the keys that receive most of it; omp, orthogonal matching pursuit of the attention mass
    aggregate : how the attention of all reference queries to a key becomes one number: root mean square, mean or max
    ridge : of the values' fit, which shrinks towards what they were; in units of the attention's mean square
    fit : ridge; or paper, the paper's own solvers, for comparison: no trainer can follow them
    """

    name: ClassVar[str] = "am"
    policy_class: ClassVar[str] = "sparse_rl.methods.am.policy:AM"
    view_class: ClassVar[str] = "sparse_rl.methods.am.view:MatchedView"
    sections: ClassVar[str | None] = "sparse_rl.methods.am.sections"
    packs: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    window: PositiveInt = 16
    period: PositiveInt | None = None  # type: ignore[assignment]  # a number from here on
    reference_queries: PositiveInt | None = None
    select: Literal["attention", "omp"] = "attention"
    aggregate: Literal["rms", "mean", "max"] = "rms"
    ridge: Positive = 1e-3
    fit: Literal["ridge", "paper"] = "ridge"

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        if self.period is None:
            object.__setattr__(self, "period", self.budget)
        most = self.schedule.first(0)  # tokens seen at the first compaction, at least
        if self.reference_queries is None:
            object.__setattr__(self, "reference_queries", min(128, most))
        super().__post_init__()
        if self.reference_queries > most:
            wrong = f"{self.reference_queries}: the first compaction has no more queries than budget + period, {most}"
            raise UserError(wrong, "reference_queries")

    @property
    def refitted(self) -> int:
        """The entries of a kv head that a compaction leaves and fits; sinks and window stay as they are."""
        return self.budget - self.sinks - self.window

    def check_trainable(self) -> None:
        if self.fit == "paper":
            raise UserError("the paper's own solvers cannot be followed in training; use ridge", "fit")

    def conditions(self, group: int) -> int:
        """The reference queries of a kv head, to which a group of query heads belongs."""
        assert self.reference_queries is not None
        return self.reference_queries * group

    def remark(self, group: int, layers: int) -> str | None:
        if (queries := self.conditions(group)) >= self.refitted:
            return None
        few = f"{self.reference_queries} reference queries of {group} heads are {queries} conditions"
        return f"{few} for the {self.refitted} entries that are fitted; raise reference_queries, or lower the budget"
