"""The settings of the policies under which queries read pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sparse_rl.config import NonNegativeInt, PositiveInt, Probability
from sparse_rl.errors import UserError
from sparse_rl.policies.config.base import PolicyConfig
from sparse_rl.policies.schedule import ReadsPages, Schedule


@dataclass(frozen=True, kw_only=True)
class ClusteredConfig(PolicyConfig):
    """
    page : tokens of a page
    window : tokens that come after a page before its summary is read instead, at least
    sinks : the first tokens, in no page
    open_pages : pages that a query reads token by token, at most; null: 3, or 16 where threshold or fraction is given
    bias : log_n, a summary weighs as much as the tokens that it stands for; none, as one
    values : kept, or zero: summaries have keys alone, for comparison
    compressor : how much of a summary each token of its page is: mean, all as much; attention, by the attention that
        it got until the page closes; random, one of them is the summary
    threshold : pages are opened whose summary has a larger share of the attention; for evaluation only
    fraction : this share of the closed pages is opened, rounded up; for evaluation only
    softmax : joint, over all that is read; nested, the tokens of an opened page share what its summary had (the paper's
        equation 3), for evaluation only
    """

    name: ClassVar[str] = "clustered"
    packs: ClassVar[bool] = False
    page: PositiveInt = 16
    window: NonNegativeInt = 128
    sinks: NonNegativeInt = 0
    open_pages: NonNegativeInt | None = None  # a number from here on
    bias: Literal["log_n", "none"] = "log_n"
    values: Literal["kept", "zero"] = "kept"
    compressor: Literal["mean", "attention", "random"] = "mean"
    threshold: Probability | None = None
    fraction: Probability | None = None
    softmax: Literal["joint", "nested"] = "joint"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None and self.fraction is not None:
            raise UserError("give a threshold or a fraction, not both", "fraction")
        if self.open_pages is None:
            chosen = self.threshold is not None or self.fraction is not None
            object.__setattr__(self, "open_pages", 16 if chosen else 3)

    def check_trainable(self) -> None:
        for key in ("threshold", "fraction"):
            if getattr(self, key) is not None:
                raise UserError("is for evaluation only; a training opens open_pages pages", key)
        if self.softmax == "nested":
            raise UserError("nested cannot be followed in training; use joint", "softmax")

    @property
    def schedule(self) -> Schedule:
        return ReadsPages(begins=self.sinks + self.page + self.window + 1)

    @property
    def only_hf(self) -> str | None:
        return "vllm's kernels read all that a sequence holds"
