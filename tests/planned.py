"""Return the memory plan of a recipe that is resolved for a model's configuration."""

from __future__ import annotations

from typing import Any

from sparse_rl.commands import memory
from sparse_rl.commands.plan import Plan
from sparse_rl.commands.prepared import resolve


def plan(recipe: Any, config: Any, cuda: bool | None = None) -> Plan:
    return memory.plan(resolve(recipe, config, cuda=cuda), cuda)
