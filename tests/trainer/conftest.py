"""Fixtures that run the real GRPO trainer for a few steps on a tiny random model: `grpo(...)`, `metrics_of(...)`.

The model reads the running-sum tokenizer (one token per character). Its weights are large enough for attention to
matter (initializer_range 0.2), so that evictions change the sampled tokens. It stops at any of four tokens, so that
about half of the completions are truncated.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from learned import with_scorers
from trainer_runs import GKV, SETTINGS, STOP, digits, problems, small, trained

from sparse_rl.models.directory import save_policy, write_scorers
from sparse_rl.models.load import load_model
from sparse_rl.recipe import make_recipe

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="session")
def tiny(new_model, tmp_path_factory):
    """tiny(family="qwen3", **config) returns the directory of a tiny random model with a tokenizer."""
    from transformers import GenerationConfig

    from sparse_rl.data.synthetic import EOS_ID, PAD_ID, RunningSum

    folders: dict[str, str] = {}

    def make(family: str = "qwen3", **config: Any) -> str:
        key = f"{family}{config or ''}"
        if key not in folders:
            folder = tmp_path_factory.mktemp(family)
            ids = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "bos_token_id": None}
            model = new_model(family, initializer_range=0.2, **ids, **config)
            model.generation_config = GenerationConfig(eos_token_id=STOP, pad_token_id=PAD_ID)
            model.save_pretrained(folder)
            RunningSum.tokenizer().save_pretrained(folder)
            folders[key] = str(folder)
        return folders[key]

    return make


@pytest.fixture
def learned(tiny, tmp_path):
    """learned(policy, source=tiny()) returns a model directory like the output of a retrofit, with a tokenizer."""

    def make(policy: Any, source: str | None = None) -> str:
        folder = tmp_path / f"{policy.name}-{policy.config.scorer.name}"
        if not folder.exists():
            shutil.copytree(source or tiny(), folder)
            write_scorers(folder, with_scorers(load_model(folder), policy).state_dict())
            save_policy(folder, policy)
        return str(folder)

    return make


@pytest.fixture
def retrofit(tiny, tmp_path):
    """retrofit(**keys) returns a recipe that retrofits the tiny model in a few steps."""
    shared = small(tiny(), tmp_path / "run", kind="kvpop", packing=False, max_length=128, scorer_warmup_steps=1)
    del shared["rollout"]
    return lambda **keys: make_recipe({**shared, "gradient_checkpointing": False, **keys})


@pytest.fixture
def grpo(tiny, tmp_path):
    """grpo(**settings) returns an untrained SparseGRPOTrainer, with `output_dir` tmp_path / name.

    Not passed to the trainer's configuration: family, model, reward, count, held_out, peft_config, trainer_class,
    callbacks, engine, and the engine's settings policy, own_weights (a directory), own_dtype, sleep, servers and ahead.
    All other settings override SETTINGS.
    """
    from rollout import make_engine
    from sparse_rl.models.load import load_tokenizer
    from trainer import SparseGRPOArguments, SparseGRPOTrainer
    from trainer.rundir import RunLog

    def make(
        name: str = "run",
        *,
        family: str = "qwen3",
        model: Any = None,
        reward: Any = digits,
        count: int = 24,
        held_out: int = 0,
        peft_config: Any = None,
        trainer_class: type = SparseGRPOTrainer,
        callbacks: tuple = (),
        policy: Any = GKV,
        own_weights: str | None = None,
        own_dtype: str = "float32",
        sleep: bool = False,
        engine: Any = None,
        servers: list[str] | None = None,
        ahead: int = 0,
        **settings: Any,
    ) -> SparseGRPOTrainer:
        folder = tmp_path / name
        sampled: dict[str, Any] = {"cache": policy}
        if own_weights:
            sampled = {"engine": make_engine("hf", model=own_weights, dtype=own_dtype, policy=policy)}
        if engine is not None:
            sampled = {"engine": engine}
        folder.mkdir(exist_ok=True)
        data = problems(count + held_out)
        return trainer_class(
            model=model or tiny(family),
            reward_funcs=reward,
            args=SparseGRPOArguments(output_dir=str(folder), **{**SETTINGS, **settings}),
            train_dataset=data.select(range(count)),
            eval_dataset=data.select(range(count, count + held_out)) if held_out else None,
            processing_class=load_tokenizer(tiny(family)),
            peft_config=peft_config,
            callbacks=[RunLog(folder), *callbacks],
            rollout={"sleep": sleep, "progress": False, "ahead": ahead}
            | ({"engine": "server", "servers": servers} if servers else {}),
            **sampled,
        )

    return make


@pytest.fixture
def metrics_of(grpo):
    """metrics_of(**settings) trains, and then returns the lines of metrics.jsonl that belong to a step."""
    return lambda *args, **settings: trained(grpo(*args, **settings))
