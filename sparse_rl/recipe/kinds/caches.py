"""Checks of the cache that a recipe names, and of the sequences that its engine must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.config import RolloutConfig
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.policies.config import cache_config


def check_cache(block: Mapping[str, Any], key: str = "cache", *, learned: bool = False) -> None:
    """Raise a UserError unless `block` is {policy: a known name, its parameters with values in range}.

    learned : of a policy that is retrofitted to a model, instead of one that engines sample under
    """
    if not isinstance(block.get("policy"), str):
        raise UserError("missing; name a cache policy, for example full, streaming or gkv", f"{key}.policy")
    try:
        policy = cache_config(block)
    except UserError as error:
        raise UserError(str(error), key) from None
    if policy.schedule.before_attending != learned:
        wrong = "no engine samples under it yet; it is trained by recipes of kind kvpop"
        raise UserError("recipes of kind kvpop train kvpop" if learned else wrong, f"{key}.policy")


def check_model_len(rollout: RolloutConfig, sources: Mapping[str, DataConfig], max_completion_length: int) -> None:
    """Raise a UserError where the engine's longest sequence does not hold a prompt and a completion."""
    need = max(data.max_prompt_tokens or 1 for data in sources.values()) + max_completion_length
    if rollout.max_model_len is not None and rollout.max_model_len < need:
        wrong = f"must hold a prompt and a completion, at least {need} tokens here; raise or remove it"
        raise UserError(wrong, "rollout.max_model_len")
