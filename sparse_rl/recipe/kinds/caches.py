"""A check of the sequences that a recipe asks its engine to hold."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.config import RolloutConfig
from sparse_rl.errors import UserError


def check_model_len(rollout: RolloutConfig, prompt_bounds: Iterable[int | None], max_completion_length: int) -> None:
    """Raise a UserError where the engine's longest sequence does not hold a prompt and a completion."""
    need = max(bound or 1 for bound in prompt_bounds) + max_completion_length
    if rollout.max_model_len is not None and rollout.max_model_len < need:
        wrong = f"must hold a prompt and a completion, at least {need} tokens here; raise or remove it"
        raise UserError(wrong, "rollout.max_model_len")
