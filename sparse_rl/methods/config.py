"""The settings of every cache policy, one dataclass each; importing them needs no torch.

    config = PolicyConfig.from_block({"policy": "gkv", "budget": 512, "alpha": 0.7})
    config.schedule.peak            # maximum number of entries; see sparse_rl/policies/schedule.py

Only these dataclasses define a parameter's default and the rule that its value must satisfy.
"""

from __future__ import annotations

from sparse_rl.config import yaml_fields
from sparse_rl.methods.am.config import AMConfig
from sparse_rl.methods.kvpop.config import DMSConfig, KVpopPolicyConfig, LearnedConfig
from sparse_rl.methods.pages.config import ClusteredConfig, LayeredConfig
from sparse_rl.methods.press.config import PressConfig
from sparse_rl.methods.triattention.config import TriAttentionConfig
from sparse_rl.policies.config import (
    CAKEConfig,
    EvictingConfig,
    FullConfig,
    GKVConfig,
    GrowingBudget,
    H2OConfig,
    LinedConfig,
    MorphKVConfig,
    PolicyConfig,
    RKVConfig,
    ScoredWindowConfig,
    SnapKVConfig,
    StreamingConfig,
    TovaConfig,
    budget_words,
)

__all__ = [
    "CONFIGS",
    "AMConfig",
    "CAKEConfig",
    "ClusteredConfig",
    "DMSConfig",
    "EvictingConfig",
    "FullConfig",
    "GKVConfig",
    "GrowingBudget",
    "H2OConfig",
    "KVpopPolicyConfig",
    "LayeredConfig",
    "LearnedConfig",
    "LinedConfig",
    "MorphKVConfig",
    "PolicyConfig",
    "PressConfig",
    "RKVConfig",
    "ScoredWindowConfig",
    "SnapKVConfig",
    "StreamingConfig",
    "TovaConfig",
    "TriAttentionConfig",
    "accepted_parameters",
    "budget_words",
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
    "triattention": TriAttentionConfig,
    "am": AMConfig,
    "kvpop": KVpopPolicyConfig,  # a model is trained for kvpop and dms (trainer/retrofit.py)
    "dms": DMSConfig,
    "clustered": ClusteredConfig,
    "layered": LayeredConfig,
    "press": PressConfig,
}
"""The settings class of each cache policy, by its name in recipes; one line here registers a method."""


def accepted_parameters(policy: str) -> list[str]:
    """Return the parameter names of the policy with this name. Raises UserError if there is no such policy."""
    return list(yaml_fields(PolicyConfig.member({"policy": policy})))
