"""The settings of LuKA's caches: clustered attention, and a separate policy for each range of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from sparse_rl.config import Configuration, NonNegativeInt, PositiveInt, Probability
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.config import LearnedConfig
from sparse_rl.policies.config import LinedConfig, PolicyConfig
from sparse_rl.policies.schedule import PerLayer, ReadsPages, Schedule


@dataclass(frozen=True, kw_only=True)
class ClusteredConfig(PolicyConfig):
    """The cache holds all entries; queries read most pages of tokens as one summary per page (LuKA section 3.2).

    page : number of tokens of a page
    window : minimum number of tokens between the end of a page and the first query that reads the page's summary
        instead of its tokens
    sinks : number of first tokens, which belong to no page
    open_pages : maximum number of pages that a query opens, that is, reads token by token; null means 3, or 16 if
        threshold or fraction is given
    bias : with log_n, a summary weighs as much in the softmax as its n tokens; with none, as much as one token
    values : with kept, summaries have keys and values; with zero, their values are zero (for comparison)
    compressor : weights of a page's tokens in the page's summary: mean weights all tokens equally; attention uses a
        softmax over the attention that each token received until the page closed; random uses one random token
    threshold : only pages whose summary has more than this share of the attention are opened; for evaluation only
    fraction : share of the closed pages that is opened, rounded up; for evaluation only
    softmax : joint uses one softmax over all entries that are read; with nested, the tokens of an opened page share the
        weight of the page's summary (the paper's equation 3), for evaluation only
    """

    name: ClassVar[str] = "clustered"
    policy_class: ClassVar[str] = "sparse_rl.methods.pages.policy:Clustered"
    cache_class: ClassVar[str] = "sparse_rl.methods.pages.cache:PagedCache"
    view_class: ClassVar[str] = "sparse_rl.methods.pages.view:PagedView"
    sections: ClassVar[str | None] = "sparse_rl.methods.pages.sections"
    packs: ClassVar[bool] = False
    page: PositiveInt = 16
    window: NonNegativeInt = 128
    sinks: NonNegativeInt = 0
    open_pages: NonNegativeInt | None = None  # __post_init__ sets a number
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

    @property
    def recorded(self) -> int:
        assert self.open_pages is not None
        return 4 + 2 * self.open_pages + (0 if self.compressor == "mean" else 4)

    def check_trainable(self) -> None:
        for key in ("threshold", "fraction"):
            if getattr(self, key) is not None:
                raise UserError(f"remove {key}, which is only for evaluation; training uses open_pages alone", key)
        if self.softmax == "nested":
            raise UserError("nested cannot be replayed in training; use joint", "softmax")

    @property
    def schedule(self) -> Schedule:
        return ReadsPages(begins=self.sinks + self.page + self.window + 1)

    @property
    def only_hf(self) -> str | None:
        return "vllm's kernels read all entries of a sequence"


@dataclass(frozen=True, kw_only=True)
class PartConfig(Configuration):
    """The policy of a range of layers.

    layers : number of layers of the range, not counting those with a sliding window; if these numbers do not sum to the
        model's number of layers without a window, they are taken as proportions
    cache : policy of these layers, {policy: a name, its parameters}, or the name alone
    """

    layers: PositiveInt
    cache: PolicyConfig


def mixed() -> list[PartConfig]:
    """Return the default parts: the layers of LuKA's mixed attention (section 4.2), with our default parameters."""
    policies = (8, LinedConfig()), (20, ClusteredConfig()), (8, LinedConfig())
    return [PartConfig(layers=layers, cache=cache) for layers, cache in policies]


@dataclass(frozen=True, kw_only=True)
class LayeredConfig(PolicyConfig):
    """A separate policy for each range of layers (LuKA section 3.3).

    parts : ranges of layers in order, from the first layer on; null means LuKA's mixed attention with our default
        parameters: 8 layers with lined, 20 with clustered, and 8 with lined
    """

    name: ClassVar[str] = "layered"
    policy_class: ClassVar[str] = "sparse_rl.methods.pages.layered:Layered"
    cache_class: ClassVar[str] = "sparse_rl.methods.pages.layered:layered_cache"
    view_class: ClassVar[str] = "sparse_rl.methods.pages.layered:LayeredView"
    packs: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    parts: list[PartConfig] | None = None  # __post_init__ sets a list

    def __post_init__(self) -> None:
        if self.parts is None:
            object.__setattr__(self, "parts", mixed())
        super().__post_init__()
        if not self.parts:
            raise UserError("name at least one part, for example [{layers: 1, cache: full}]", "parts")
        for place, part in enumerate(self.ranges):
            if not part.cache.in_parts:
                why = "is for all layers together and cannot be a part"
                raise UserError(f"{part.cache.name} {why}", f"parts[{place}].cache")
            if part.cache.turns != "kept":
                raise UserError("is for all layers together; remove it", f"parts[{place}].cache.turns")
        if len({str(part.cache) for part in self.ranges if isinstance(part.cache, ClusteredConfig)}) > 1:
            raise UserError("clustered parts must have the same settings", "parts")

    @property
    def ranges(self) -> list[PartConfig]:
        """Ranges of layers with their policies: `parts`, or the default."""
        assert self.parts is not None
        return self.parts

    def spans(self, layers: int) -> list[int]:
        """Return the number of layers of each part in a model with `layers` layers."""
        return spans([part.layers for part in self.ranges], layers)

    @property
    def schedule(self) -> Schedule:
        return PerLayer(parts=tuple((part.layers, part.cache.schedule) for part in self.ranges))

    @property
    def only_hf(self) -> str | None:
        return "vllm gives all layers of a sequence the same blocks"

    @property
    def recorded(self) -> int:
        return max(part.cache.recorded for part in self.ranges)

    def check_trainable(self) -> None:
        for place, part in enumerate(self.ranges):
            if isinstance(part.cache, LearnedConfig):
                wrong = f"{part.cache.name} is trained only in all layers; use another policy in this part"
                raise UserError(wrong, f"parts[{place}].cache.policy")
            try:
                part.cache.check_trainable()
            except UserError as error:
                raise UserError(error.message, f"parts[{place}].cache.{error.key}") from None

    def remark(self, group: int, layers: int) -> str | None:
        if layers == sum(part.layers for part in self.ranges):
            return None
        counted = zip(self.spans(layers), self.ranges, strict=True)
        layers_by_part = ", ".join(f"{n} {part.cache.name}" for n, part in counted)
        return f"the {layers} layers under the policy are: {layers_by_part}"


def spans(shares: Sequence[int], whole: int) -> list[int]:
    """Split the number `whole` in the proportions `shares`, with rounded boundaries; return the parts."""
    total, past, cuts = sum(shares), 0, [0]
    for share in shares:
        past += share
        cuts.append((2 * past * whole + total) // (2 * total))
    return [after - before for before, after in pairwise(cuts)]
