"""The settings of every cache policy, each one dataclass; to be read without torch.

    config = PolicyConfig.from_block({"policy": "gkv", "budget": 512, "alpha": 0.7})
    config.schedule.peak            # entries; see schedule.py

Here, and here alone, a parameter has its default and the rule that its value must keep.
"""

from __future__ import annotations

from sparse_rl.config import yaml_fields
from sparse_rl.methods.am.config import AMConfig
from sparse_rl.methods.dms.config import DMSConfig
from sparse_rl.methods.eviction.config import (
    CAKEConfig,
    EvictingConfig,
    GKVConfig,
    H2OConfig,
    LinedConfig,
    MorphKVConfig,
    RKVConfig,
    ScoredWindowConfig,
    SnapKVConfig,
    StreamingConfig,
    TovaConfig,
)
from sparse_rl.methods.kvpop.config import KVpopPolicyConfig, LearnedConfig
from sparse_rl.methods.pages.config import ClusteredConfig, LayeredConfig
from sparse_rl.policies.config import FullConfig, PolicyConfig

__all__ = [
    "CONFIGS",
    "AMConfig",
    "CAKEConfig",
    "ClusteredConfig",
    "DMSConfig",
    "EvictingConfig",
    "FullConfig",
    "GKVConfig",
    "H2OConfig",
    "KVpopPolicyConfig",
    "LayeredConfig",
    "LearnedConfig",
    "LinedConfig",
    "MorphKVConfig",
    "PolicyConfig",
    "RKVConfig",
    "ScoredWindowConfig",
    "SnapKVConfig",
    "StreamingConfig",
    "TovaConfig",
    "accepted_parameters",
]

CONFIGS: dict[str, type[PolicyConfig]] = {
    "full": FullConfig,
    "streaming": StreamingConfig,
    "h2o": H2OConfig,
    "lined": LinedConfig,
    "tova": TovaConfig,
    "snapkv": SnapKVConfig,
    "morphkv": MorphKVConfig,
    "rkv": RKVConfig,
    "gkv": GKVConfig,
    "cake": CAKEConfig,
    "am": AMConfig,
    "kvpop": KVpopPolicyConfig,  # this and the next are retrofitted to a model (trainer/kvpop/)
    "dms": DMSConfig,
    "clustered": ClusteredConfig,
    "layered": LayeredConfig,
}
"""The settings of each cache policy, by the name that recipes give it: one line registers a method."""


def accepted_parameters(policy: str) -> list[str]:
    """The names of the parameters that a policy of this name takes. Raises KeyError where there is no such policy."""
    return list(yaml_fields(CONFIGS[policy]))
