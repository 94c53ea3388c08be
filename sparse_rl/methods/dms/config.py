"""The settings of DMS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from sparse_rl.config import AtLeastOne, Rule
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.config import LearnedConfig
from sparse_rl.policies.schedule import GatesDecide, Schedule


@dataclass(frozen=True, kw_only=True)
class DMSConfig(LearnedConfig):
    """DMS: when a token arrives, a gate decides whether the token is dropped when it leaves the window.

    Our gates read the token's key and value, and there are sinks. NVIDIA's published code has no sinks, and its gates
    read a channel of the next token's query, or the next token's hidden state.

    compression : number of tokens per entry held, averaged over layers and kv heads; the gates are trained to reach it
    bias : added to the score of every gate; with a negative bias, gates start nearly closed (KVpop's papers give no
        value; the default is that of NVIDIA's published model)
    """

    name: ClassVar[str] = "dms"
    policy_class: ClassVar[str] = "sparse_rl.methods.dms.policy:DMS"
    learned_view_class: ClassVar[str] = "sparse_rl.methods.dms.view:GatedView"
    cache_class: ClassVar[str] = "sparse_rl.methods.dms.cache:GatedCache"
    compression: AtLeastOne = 4.0
    bias: Annotated[float, Rule("between -100 and 100", lambda v: -100 <= v <= 100)] = -5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer.name == "recency" or getattr(self.scorer, "readout", "immediate") == "delayed":
            raise UserError(
                "a gate must decide as soon as its token arrives: use linear, mlp, or mlstm with readout immediate",
                "scorer",
            )

    @property
    def schedule(self) -> Schedule:
        return GatesDecide(begins=self.sinks + self.window + 1)

    @property
    def only_hf(self) -> str | None:
        return "vllm holds the same number of entries in every kv head"
