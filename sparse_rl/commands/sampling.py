"""From a recipe to sampling: its caches, its engines, its prompts in tokens. `train`, `eval` and `rollout` share it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import SAMPLE_LIVE, RolloutConfig
from sparse_rl.attention import compute_exactly
from sparse_rl.attention.families import cache_shape, window_of
from sparse_rl.commands.console import warn
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
from sparse_rl.progress import stage
from sparse_rl.recipe import Recipe

if TYPE_CHECKING:
    from rollout.engine import Engine
    from rollout.evaluation.contexts import ContextEngines, Questions
    from sparse_rl.policies.base import Policy


def engine_config_of(recipe: Recipe) -> RolloutConfig:
    """The sampling engine of a recipe that has one."""
    rollout = recipe.engine_config()
    assert rollout is not None
    return rollout


def choose_recipe_engine(recipe: Recipe, config: Any) -> tuple[Recipe, str]:
    """(the recipe with its engine chosen for a model of this configuration, why it is this one); prints what is unwise

    config : None: for a live module
    """
    from rollout.choice import choose_engine

    rollout, caches = engine_config_of(recipe), cache_configs(recipe)
    kind, reason = choose_engine(rollout, config, caches)
    for remark in remarks(caches, config) if config is not None else ():
        warn(remark)
    compute_exactly(rollout.exact)
    chosen = recipe.with_engine_config(replace(rollout, engine=kind))
    if config is not None:
        check_lengths(chosen, config)
    return chosen, reason


def check_lengths(recipe: Recipe, config: Any) -> None:
    """Raise UserError where the longest prompt that a recipe lets pass, and a completion, are more than a model of this
    configuration reads. Where prompts have no bound, `prompt_room` is for those that are read.

    Its engine is chosen. Completions of a dataset are cut to what the model reads; vllm is asked to hold the longest.
    """
    if (window := window_of(config)) is None or (rollout := recipe.engine_config()) is None:
        return
    cut = recipe.trained and not recipe.as_training().samples_behind_prompts()
    if cut and (rollout.engine in SAMPLE_LIVE or None in recipe.prompt_bounds()):
        return
    completion = recipe.sampling().max_tokens
    prompt = max((bound or 1 for bound in recipe.prompt_bounds()), default=1)
    if prompt + completion > window:
        made = f"{completion:,} tokens, behind a prompt of {'at least 1' if prompt == 1 else f'up to {prompt:,}'}"
        wrong = f"{made}, are more than the {window:,} that the model reads; lower it"
        raise UserError(wrong, recipe.completion_key)
    if (rollout.max_model_len or 0) > window:
        wrong = f"{rollout.max_model_len:,} is more than the {window:,} tokens that the model reads; lower or remove it"
        raise UserError(wrong, "rollout.max_model_len")


def prompt_room(recipe: Recipe, config: Any) -> int | None:
    """The tokens that a prompt may have, so that the model reads the whole completion too; None: not known."""
    window = window_of(config)
    return None if window is None or recipe.engine_config() is None else window - recipe.sampling().max_tokens


def remarks(caches: Iterable[PolicyConfig], config: Any) -> list[str]:
    """What a user should hear of caches, for a model of this configuration."""
    layers, kv_heads, _ = cache_shape(config)
    group = config.num_attention_heads // kv_heads
    return [f"{cache.name}: {found}" for cache in caches if (found := cache.remark(group, layers)) is not None]


def cache_configs(recipe: Recipe) -> list[PolicyConfig]:
    """The caches of a recipe; where it names none, the one that the model's directory carries, or the full cache."""
    from sparse_rl.models.directory import saved_policy

    caches = recipe.caches()
    if None in caches:
        saved = saved_policy(recipe.model)
        own = FullConfig() if saved is None else saved.config
        return [own if cache is None else cache for cache in caches]
    return [cache for cache in caches if cache is not None]


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    """What `make_engine` takes of a recipe whose engine is chosen, besides model, policy and progress."""
    from rollout.choice import engine_options

    return engine_options(
        engine_config_of(recipe),
        dtype=recipe.dtype,
        prompt_bounds=recipe.prompt_bounds(),
        max_completion_length=recipe.sampling().max_tokens,
    )


def policies_of(recipe: Recipe) -> list[Policy]:
    """Policies of `cache_configs`, once the model's weights, and its head budgets, are seen to be there."""
    from rollout.context.budgets import load
    from sparse_rl.models.directory import check_scorers
    from sparse_rl.models.load import load_config
    from sparse_rl.models.weights import check_weights
    from sparse_rl.policies.registry import make_policy

    config = load_config(recipe.model)
    check_weights(config, recipe.model)
    for compaction in recipe.prompt_caches():
        try:
            if compaction.budgets is not None:
                load(compaction.budgets, *cache_shape(config)[:2])
        except UserError as error:
            raise UserError(error.message, "prompt_cache.budgets") from error
    policies = [make_policy(cache) for cache in cache_configs(recipe)]
    for policy in policies:
        check_scorers(recipe.model, policy)
    return policies


def engines(recipe: Recipe, model: Any = None, progress: bool = False) -> Callable[..., AbstractContextManager[Engine]]:
    """policy, further options of `make_engine` -> a context with the engine of a recipe (whose engine is chosen) under
    it, closed at its end.

    hf samples from one module for all policies: `model`, or the recipe's, loaded here. vllm loads its own for each.
    """
    from rollout.make import make_engine

    kind = engine_config_of(recipe).engine
    if kind in SAMPLE_LIVE and model is None:
        model = _load_model(recipe)
    source = recipe.model if model is None else model

    @contextmanager
    def opened(policy: Policy, **options: Any) -> Iterator[Engine]:
        given = {**engine_arguments(recipe), "progress": progress, **options}
        with stage("starting", f"the {kind} engine"):
            engine = make_engine(kind, model=source, policy=policy, **given)
        try:
            yield engine
        finally:
            engine.close()

    return opened


def context_engines(recipe: Recipe, folder: Path, model: Any = None, progress: bool = False) -> ContextEngines:
    """The engines of a recipe (whose engine is chosen) that compacts contexts; see `engines`.

    folder : where those lie that one engine hands to the other
    """
    from rollout.evaluation.contexts import ContextEngines
    from sparse_rl.models.load import load_config
    from sparse_rl.policies.registry import make_policy

    full, rollout = make_policy("full"), engine_config_of(recipe)
    answering = partial(engines(recipe, model, progress), full)
    config = load_config(recipe.model) if model is None else model.config
    window = engine_arguments(recipe).get("max_model_len") or window_of(config)
    if rollout.engine in SAMPLE_LIVE:
        return ContextEngines(answering, None, folder, window)

    @contextmanager
    def compacting() -> Iterator[Engine]:
        import torch

        with engines(recipe.with_engine_config(replace(rollout, engine="hf")), progress=progress)(full) as engine:
            yield engine
        del engine
        gc.collect()
        torch.cuda.empty_cache()  # nothing where there is no GPU

    return ContextEngines(answering, compacting, folder, window)


def _load_model(recipe: Recipe) -> Any:
    import torch

    from sparse_rl.models.load import load_model

    with stage("loading", recipe.model):
        return load_model(recipe.model, recipe.dtype).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompt_tokens(data: Any, tokenizer: Any, config: DataConfig, room: int | None, where: str) -> list[list[int]]:
    """The prompts of a dataset as the model is given them.

    room : tokens that a prompt may have, see `prompt_room`; where : the dataset's key, for errors
    """
    from sparse_rl.data.tokens import prompt_ids, refuse_long, refuse_text

    if config.has_context:
        prompts = [[*one.context, *one.rest] for one in context_questions(data, tokenizer, config).prompts]
    else:
        if room is not None:
            for number, prompt in enumerate(data["prompt"], start=1):
                refuse_text(number, prompt, tokenizer, room, where)
        prompts = [prompt_ids(prompt, tokenizer, config.thinking) for prompt in data["prompt"]]
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"the prompt of problem {number} has no tokens; drop it", where)
        if room is not None:
            refuse_long(number, len(prompt), room, where)
    return prompts


def context_questions(data: Any, tokenizer: Any, config: DataConfig) -> Questions:
    """The prompts of a dataset with contexts, cut behind these, and what self-study asks, as a user would."""
    from rollout.context.prompts import STUDY_PROMPTS
    from rollout.evaluation.contexts import Questions
    from sparse_rl.data.tokens import split_prompt, with_context

    cut = partial(split_prompt, tokenizer=tokenizer, thinking=config.thinking)
    rows = list(zip(data["prompt"], data["context"], strict=True))
    prompts = []
    for i, (prompt, context) in enumerate(rows):
        try:
            prompts.append(cut(prompt, context))
        except UserError as error:
            raise UserError(f"problem {i + 1}: {error.message}") from None
    prompt, context = rows[0]
    asked = [with_context(prompt, context, context, f"\n\n{text}") for text in STUDY_PROMPTS]
    return Questions(prompts, [cut(one, context).rest for one in asked])
