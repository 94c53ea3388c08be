"""rollout samples completions under eviction, and records every eviction.

    engine = make_engine("hf", model="path/to/model", policy={"policy": "gkv", "budget": 512})
    rollouts = engine.generate(prompts, SamplingConfig(max_tokens=1024, n=8, seed=0))

config.py    settings of sampling, and of the engine (a recipe's `rollout:` block)
engine.py    the Engine protocol and the Rollout record
make.py      creates an engine from its name;  choice.py  chooses an engine for this machine and this model
requests.py  steps common to all engines before they sample: prompt checks, seeds, stop tokens
sampling.py  the sampler;  sampling_reference.py  a plain sampler, whose results the sampler must equal
hf.py        the reference engine on plain transformers, with the caches of sparse_rl/methods
context/     contexts that are compacted once
files.py     rollouts as files;  origin.py  record of how the rollouts in files were sampled
verify.py    checks that replay of rollouts in files gives the log-probs of the sampler
vllm/        the fast engine, which keeps its own copy of the weights
evaluation/  pass@k of tasks, and perplexity, under each of several cache policies
timing/      time and memory of sampling, and of the compaction of contexts

To add an engine, write a class with the methods of `Engine`, and add a line to `make.engine_class`, the engine's name
to `config.EngineName` and `config.RolloutConfig.engine`, and the condition for choosing it to choice.py.
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
