"""rollout samples completions under eviction, and records every eviction.

    engine = make_engine("hf", model="path/to/model", policy={"policy": "gkv", "budget": 512})
    rollouts = engine.generate(prompts, SamplingConfig(max_tokens=1024, n=8, seed=0))

To add an engine, write a class with the methods of `Engine`, and add a line to CLASSES of engine.py, the engine's name
to `config.EngineName` and `config.RolloutConfig.engine`, and the condition for choosing it to `choose_engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from rollout.config import ENGINES, RolloutConfig, SamplingConfig
    from rollout.engine import Engine, Rollout, Turn, default_engine, make_engine

__getattr__ = public_names(__name__)

__all__ = ["ENGINES", "Engine", "Rollout", "RolloutConfig", "SamplingConfig", "Turn", "default_engine", "make_engine"]
