"""Training: GRPO end to end by the product's own command, and the passes of a model under evictions."""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpu.kernels import compared, let_flex_train
from benchmarks.gpu.stages import config_of, dummy_model, sizes
from benchmarks.gpu.worker import HOUSE, Options, Row, attempt
from benchmarks.speed import evictions, passes

QUICKSTART = HOUSE / "recipes/quickstart/model"
PARTS = ("sync", "generate", "rewards", "logprobs", "update", "step")
VLLM = ("vllm",) if importlib.util.find_spec("vllm") else ()


def grpo_quickstart(options: Options) -> Iterator[Row]:
    """Yield a row for each engine: times of a step's parts, the gap, and the memory beside `doctor`'s prediction."""
    yield from grpo(options, str(QUICKSTART), ("hf", *VLLM), sizes(options).grpo)


def grpo_model(options: Options) -> Iterator[Row]:
    """Yield a row as `grpo_quickstart` does, with dummy weights and one engine (vLLM if installed). Rewards are 0."""
    size = sizes(options)
    cache = {"policy": "gkv", "budget": 128, "window": 16, "period": 32}  # that of qwen2.5-1.5b/grpo
    with tempfile.TemporaryDirectory() as folder:
        model = dummy_model(config_of(size.small_model), options)
        ends = json.loads((QUICKSTART / "config.json").read_text())
        for config, key in product((model.config, model.generation_config), ("eos", "bos", "pad")):
            setattr(config, f"{key}_token_id", ends.get(f"{key}_token_id"))
        model.save_pretrained(folder)
        for file in QUICKSTART.glob("tokenizer*"):
            shutil.copy(file, folder)
        del model
        # Only one engine: memory that a first training does not free would count in the peak of a second one.
        overrides = {**size.grpo, "cache": cache, "gradient_checkpointing": True, **size.grpo_model}
        yield from grpo(options, folder, VLLM or ("hf",), overrides)


def grpo(options: Options, model: str, engines: tuple[str, ...], overrides: Row) -> Iterator[Row]:
    for engine in engines:
        if not options.measured(engine=engine):
            yield attempt({"engine": engine}, partial(trained, options, model, engine, overrides))


def trained(options: Options, model: str, engine: str, overrides: Row) -> Row:
    from sparse_rl.commands.memory import OUTSIDE, device_memory, plan
    from sparse_rl.commands.train import run_training
    from sparse_rl.metrics import read_metrics
    from sparse_rl.recipe import TrainRecipe, load_recipe

    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "model": model,
            "output_dir": f"{folder}/run",
            "dtype": "bfloat16",
            "rollout.engine": engine,
            **overrides,
        }
        words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        prepared = load_recipe("quickstart/grpo", words).expect(TrainRecipe).prepare_training()
        predicted, cuda = plan(prepared, device_memory()), options.device == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        run_training(prepared, lambda trainer: None)
        metrics = [line for line in read_metrics(Path(folder, "run")) if "time/step" in line]
    measured = metrics[1:] or metrics  # the first step compiles and warms up
    row: Row = {f"{part} s": statistics.median(line[f"time/{part}"] for line in measured) for part in PARTS}
    row["tokens/s"] = statistics.median(line["time/tokens_per_second"] for line in measured)
    row["gap mean"] = statistics.median(line["replay/gap_mean"] for line in metrics)
    row["gap max"] = max(line["replay/gap_max"] for line in metrics)
    row["predicted GB"] = (predicted.device + (-OUTSIDE if cuda else predicted.host)) / 1e9
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**row, "peak GB": peak / 1e9}


def steps(options: Options) -> Iterator[Row]:
    """Yield a row for each attention kernel: forward and backward pass of a model over one long sequence."""
    let_flex_train(options)
    size = sizes(options)
    model = dummy_model(config_of(size.small_model, max_position_embeddings=2 * size.trained), options).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    evict_at = evictions("uniform", size.trained, size.budget, heads, window=16).expand(layers, -1, -1)
    works = passes(model, evict_at.contiguous(), {name: (name, False) for name in ("flex_sorted", "gather")})
    for name, row in compared(works, 3, reference="causal SDPA").items():
        yield {"kernel": name, "S": size.trained, **row}
