"""rollout: sampling under eviction, with recording.

    engine = make_engine("hf", model="path/to/model", policy={"policy": "gkv", "budget": 512})
    rollouts = engine.generate(prompts, SamplingConfig(max_tokens=1024, n=8, seed=0))

config.py    SamplingConfig, and RolloutConfig, a recipe's `rollout:` block
engine.py    the Engine protocol and the Rollout record
make.py      make_engine, an engine by its name;  choice.py  which engine this machine and this model are best served by
requests.py  what engines do alike before they sample: prompt checks, seeds, stop tokens
sampling.py  the sampler;  sampling_reference.py  the plain one, which it equals
hf.py        the reference engine on plain transformers;  cache.py  its caches, which record the evictions
gated.py     its caches whose kv heads hold different numbers of entries;  paged.py  whose queries read pages
layered.py   its caches whose layers have policies of their own;  context/  contexts that are compacted once
files.py     rollouts as files;  origin.py  how those were sampled;  verify.py  the law, checked of them
vllm/        the fast engine, which keeps its own copy of the weights
evaluation/  pass@k over tasks and caches

To add an engine: a class with the methods of `Engine`, a line in `make.engine_class`, its name in `config.EngineName`
and in `config.RolloutConfig.engine`, and what chooses it in choice.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from rollout.choice import default_engine
    from rollout.config import ENGINES, RolloutConfig, SamplingConfig
    from rollout.engine import Engine, Rollout
    from rollout.make import make_engine

__getattr__ = public_names(__name__)

__all__ = ["ENGINES", "Engine", "Rollout", "RolloutConfig", "SamplingConfig", "default_engine", "make_engine"]
