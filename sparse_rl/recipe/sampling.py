"""The engines of a run, which sample under its cache policies, and its prompts as tokens."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollout.config import SAMPLE_LIVE
from rollout.context.reader import ContextPrompts
from rollout.engine import Engine, make_engine
from rollout.measure.contexts import ContextEngines, Questions
from rollout.measure.journal import point_key
from sparse_rl.attention import compute_exactly
from sparse_rl.attention.families import context_length
from sparse_rl.data.config import DataConfig
from sparse_rl.data.tokens import prompt_ids, split_prompt
from sparse_rl.errors import UserError
from sparse_rl.models.directory import file_states
from sparse_rl.models.load import load_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import make_policy
from sparse_rl.progress import stage
from sparse_rl.recipe.run import Recipe, Run, ToolsRecipe

if TYPE_CHECKING:
    from trainer.conversations import ToolUse


def engines(run: Run, progress: bool = False) -> Callable[..., AbstractContextManager[Engine]]:
    """Return a function (policy, **options of `make_engine`) -> context manager, which opens and closes the engine.

    The hf engine samples from one module under all policies: `run.live`, or the recipe's model, which this
    function loads. The vllm engine loads a copy of the model for each policy.
    """
    recipe, rollout = run.recipe, run.recipe.rollout
    assert rollout is not None
    compute_exactly(rollout.exact)
    source = run.live
    if source is None:
        source = load_for_sampling(recipe) if rollout.engine in SAMPLE_LIVE else recipe.model

    @contextmanager
    def open_engine(policy: Policy, **options: Any) -> Iterator[Engine]:
        arguments = {**recipe.engine_arguments(), "progress": progress, **options}
        if isinstance(recipe, ToolsRecipe) and recipe.uses_tools and rollout.engine == "vllm":
            arguments |= {"max_prompt": None, "max_model_len": rollout.max_model_len}  # schemas and turns are longer
        with stage("starting", f"the {rollout.engine} engine"):
            engine = make_engine(rollout.engine, model=source, policy=policy, **arguments)
        try:
            yield engine
        finally:
            engine.close()

    return open_engine


def context_engines(run: Run, folder: Path, progress: bool = False) -> ContextEngines:
    """Return the engines that compact a recipe's contexts and answer questions; `folder` is for temporary files."""
    full, recipe = make_policy("full"), run.recipe
    answering = partial(engines(run, progress), full)
    window = recipe.engine_arguments().get("max_model_len") or context_length(run.config)
    if recipe.rollout.engine in SAMPLE_LIVE:
        return ContextEngines(answering, None, folder, window)

    @contextmanager
    def compacting() -> Iterator[Engine]:
        with engines(replace(run, recipe=recipe.with_rollout(engine="hf")), progress)(full) as engine:
            yield engine
        del engine
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU

    return ContextEngines(answering, compacting, folder, window)


def identity(run: Run, *parts: Any) -> str:
    """Return a digest of all that determines an engine's results, except the cache policy: the model's files, dtype,
    engine, exact, seed, and `parts`, which must be convertible to JSON.
    """
    recipe = run.recipe
    assert recipe.rollout is not None
    model = None if run.live is not None else (recipe.model, file_states(recipe.model))
    return point_key(model, recipe.dtype, recipe.rollout.engine, recipe.rollout.exact, recipe.seed, *parts)


def load_for_sampling(recipe: Recipe) -> Any:
    """Load the recipe's model, onto a GPU if there is one."""
    with stage("loading", recipe.model):
        return load_model(recipe.model, recipe.dtype).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompt_tokens(data: Any, tokenizer: Any, config: DataConfig) -> list[list[int]]:
    """Return a dataset's prompts as the token ids that the model receives."""
    if config.has_context:
        return [[*item.context, *item.rest] for item in context_questions(data, tokenizer, config).prompts]
    return [prompt_ids(prompt, tokenizer, config.thinking) for prompt in data["prompt"]]


def tool_use(run: Run, config: DataConfig, rows: Any, rewards: int = 1) -> ToolUse | None:
    """Return what samples the conversations of a recipe with tools about rows of a dataset; None if it names no tools.

    rewards : number of rewards besides those of environments
    """
    recipe = run.recipe
    if not isinstance(recipe, ToolsRecipe) or not recipe.uses_tools:
        return None
    from trainer.conversations import ToolUse

    (rounds, seconds), longest = recipe.tool_limits(), recipe.sampling().max_tokens
    given, window = recipe.given_tools(run.tokenizer, rewards), context_length(run.config)
    tools, factory = given["tools"], given["environment_factory"]
    limits = rounds or sys.maxsize, seconds, longest, window
    return ToolUse(rows, tools, factory, run.tokenizer, config.thinking, *limits)


def context_questions(data: Any, tokenizer: Any, config: DataConfig) -> Questions:
    """Return the prompts of a dataset with contexts, each split after its context, and prompts about the contexts."""
    rows = list(zip(data["prompt"], data["context"], strict=True))
    prompts = []
    for i, (prompt, context) in enumerate(rows):
        try:
            prompts.append(split_prompt(prompt, context, tokenizer, config.thinking))
        except UserError as error:
            raise UserError(f"problem {i + 1}: {error.message}") from None
    return Questions(prompts, ContextPrompts.of_row(data[0], tokenizer))
