"""Functions that create the engines of a prepared recipe, and turn its prompts into tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import SAMPLE_LIVE
from sparse_rl.attention import compute_exactly
from sparse_rl.attention.families import context_length
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.progress import stage
from sparse_rl.recipe import Recipe

if TYPE_CHECKING:
    from rollout.engine import Engine
    from rollout.evaluation.contexts import ContextEngines, Questions
    from sparse_rl.commands.prepared import Prepared
    from sparse_rl.policies.base import Policy


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `make_engine`, except model, policy and progress. The engine must already be chosen."""
    rollout, bounds = recipe.rollout, recipe.prompt_bounds()
    assert rollout is not None
    arguments = {"dtype": recipe.dtype, "max_batch": rollout.max_batch}
    if rollout.engine == "hf":
        return arguments
    prompt = None if None in bounds else max(bound or 0 for bound in bounds)
    return {
        **arguments,
        "max_prompt": prompt,
        "max_model_len": rollout.max_model_len or (prompt and prompt + recipe.sampling().max_tokens),
        "kv_cache_gb": rollout.kv_cache_gb,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel": rollout.tensor_parallel,
        "sleep_mode": rollout.sleep,
        "full_graphs": rollout.full_graphs,
        "exact": rollout.exact,
    }


def engines(prepared: Prepared, progress: bool = False) -> Callable[..., AbstractContextManager[Engine]]:
    """Return a function (policy, **options of `make_engine`) -> context manager, which opens and closes the engine.

    The hf engine samples from one module under all policies: `prepared.live`, or the recipe's model, which this
    function loads. The vllm engine loads a copy of the model for each policy.
    """
    from rollout.make import make_engine

    recipe, rollout = prepared.recipe, prepared.recipe.rollout
    assert rollout is not None
    compute_exactly(rollout.exact)
    source = prepared.live
    if source is None:
        source = load_for_sampling(recipe) if rollout.engine in SAMPLE_LIVE else recipe.model

    @contextmanager
    def open_engine(policy: Policy, **options: Any) -> Iterator[Engine]:
        arguments = {**engine_arguments(recipe), "progress": progress, **options}
        with stage("starting", f"the {rollout.engine} engine"):
            engine = make_engine(rollout.engine, model=source, policy=policy, **arguments)
        try:
            yield engine
        finally:
            engine.close()

    return open_engine


def context_engines(prepared: Prepared, folder: Path, progress: bool = False) -> ContextEngines:
    """Return the engines that compact a recipe's contexts and answer questions; `folder` is for temporary files."""
    from rollout.evaluation.contexts import ContextEngines
    from sparse_rl.policies.registry import make_policy

    full, recipe = make_policy("full"), prepared.recipe
    answering = partial(engines(prepared, progress), full)
    window = engine_arguments(recipe).get("max_model_len") or context_length(prepared.config)
    if recipe.rollout.engine in SAMPLE_LIVE:
        return ContextEngines(answering, None, folder, window)

    @contextmanager
    def compacting() -> Iterator[Engine]:
        import torch

        with engines(replace(prepared, recipe=recipe.with_rollout(engine="hf")), progress)(full) as engine:
            yield engine
        del engine
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU

    return ContextEngines(answering, compacting, folder, window)


def identity(prepared: Prepared, *parts: Any) -> str:
    """Return a digest of all that determines an engine's results, except the cache policy: the model's files, dtype,
    engine, exact, seed, and `parts`, which must be convertible to JSON.
    """
    from rollout.evaluation.journal import point_key
    from sparse_rl.models.directory import file_states

    recipe = prepared.recipe
    assert recipe.rollout is not None
    model = None if prepared.live is not None else (recipe.model, file_states(recipe.model))
    return point_key(model, recipe.dtype, recipe.rollout.engine, recipe.rollout.exact, recipe.seed, *parts)


def load_for_sampling(recipe: Recipe) -> Any:
    """Load the recipe's model, onto a GPU if there is one."""
    import torch

    from sparse_rl.models.load import load_model

    with stage("loading", recipe.model):
        return load_model(recipe.model, recipe.dtype).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompt_tokens(data: Any, tokenizer: Any, config: DataConfig, room: int | None, where: str) -> list[list[int]]:
    """Return a dataset's prompts as the token ids that the model receives.

    room : maximum number of tokens in a prompt; None means no check
    where : recipe key of the dataset, for error messages
    """
    from sparse_rl.data.tokens import prompt_ids, refuse_long, refuse_text

    if config.has_context:
        prompts = [[*item.context, *item.rest] for item in context_questions(data, tokenizer, config).prompts]
    else:
        if room is not None:
            for number, prompt in enumerate(data["prompt"], start=1):
                refuse_text(number, prompt, tokenizer, room, where)
        prompts = [prompt_ids(prompt, tokenizer, config.thinking) for prompt in data["prompt"]]
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"the prompt of problem {number} has no tokens; remove the problem", where)
        if room is not None:
            refuse_long(number, len(prompt), room, where)
    return prompts


def context_questions(data: Any, tokenizer: Any, config: DataConfig) -> Questions:
    """Return the prompts of a dataset with contexts, each split after its context, and the prompts about the contexts.

    A prompt about a context is the end of a user's turn that begins with the context. The model answers it without
    thinking, if its chat template can switch this off.
    """
    from rollout.context.prompts import ContextPrompts
    from rollout.evaluation.contexts import Questions
    from sparse_rl.data.tokens import split_prompt, with_context

    rows = list(zip(data["prompt"], data["context"], strict=True))
    prompts = []
    for i, (prompt, context) in enumerate(rows):
        try:
            prompts.append(split_prompt(prompt, context, tokenizer, config.thinking))
        except UserError as error:
            raise UserError(f"problem {i + 1}: {error.message}") from None
    prompt, context = rows[0]

    def follow(text: str) -> list[int]:
        return split_prompt(with_context(prompt, context, context, text), context, tokenizer, thinking=False).rest

    return Questions(prompts, ContextPrompts.of(tokenizer, follow, not isinstance(prompt, str)))
