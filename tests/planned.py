"""Return the memory plan of a recipe that is resolved for a model's configuration."""

from __future__ import annotations

from typing import Any

from sparse_rl.commands import memory
from sparse_rl.commands.memory import Plan

GRPO = {
    "kind": "grpo", "model": "m", "output_dir": "o", "dtype": "float32", "rewards": ["boxed"],
    "data": {"synthetic": {"task": "running_sum", "size": 8}}, "max_completion_length": 100,
    "cache": {"policy": "streaming", "budget": 32, "period": 8}, "rollout": {"engine": "hf"},
}  # fmt: skip


def plan(recipe: Any, config: Any, cuda: bool = False) -> Plan:
    """Return the plan on a CPU, or on a GPU of 80 GB."""
    return memory.plan(recipe.resolve(config, cuda=cuda), 80 * 10**9 if cuda else None)
