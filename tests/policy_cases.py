"""Which policies the suite samples under: all of the registry that engines take."""

from __future__ import annotations

from sparse_rl.errors import UserError
from sparse_rl.policies.config import CONFIGS, PolicyConfig, accepted_parameters, refuse_unsampled


def _is_sampled(name: str) -> bool:
    size = {"budget": 999} if "budget" in accepted_parameters(name) else {}
    try:
        refuse_unsampled(PolicyConfig.from_block({"policy": name, **size}))
    except UserError:
        return False
    return True


SAMPLED = [name for name in CONFIGS if _is_sampled(name)]
EVICTING = [name for name in SAMPLED if name != "full"]
