"""The settings of the policy `triattention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_rl.config import PositiveInt
from sparse_rl.policies.config import EvictingConfig

ATTACHED_AS = "cache_centres"  # attribute of a model that has its centres in memory


@dataclass(frozen=True, kw_only=True)
class TriAttentionConfig(EvictingConfig):
    """The score of an entry is the attention that future queries are expected to pay to it (TriAttention).

    The expectation is computed from centres of the model's queries, which `sparse-rl calibrate` measures, once per
    model.

    horizon : future queries are assumed at the distances 1, 2, 4, 8, ... up to this number of tokens
    """

    name: ClassVar[str] = "triattention"
    policy_class: ClassVar[str] = "sparse_rl.methods.triattention.policy:TriAttention"
    in_parts: ClassVar[bool] = False
    period: PositiveInt = 128
    horizon: PositiveInt = 65536
