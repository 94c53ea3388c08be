"""Resolve a recipe once: determine all facts that commands need before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollout import choice
from rollout.config import SAMPLE_LIVE
from rollout.context import budgets
from rollout.context.rotation import check_movable
from sparse_rl.attention.families import context_length, global_layers, is_text_part, policy_shape, windows_of
from sparse_rl.commands.console import warn
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
from sparse_rl.models.directory import check_scorers, saved_policy
from sparse_rl.models.identity import identify
from sparse_rl.models.known import load_shape
from sparse_rl.models.load import load_config, load_tokenizer
from sparse_rl.models.random_weights import changed_config
from sparse_rl.models.weights import check_weights, meta_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.registry import make_policy
from sparse_rl.recipe import BenchRecipe, Recipe, SFTRecipe, TrainRecipe

R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class Prepared(Generic[R]):
    """A recipe, and facts about it. The fields from `rows` on are set only for a training run (checks.py).

    recipe : the recipe, with the engine chosen and, for training, the attention kernel
    config : configuration of the recipe's model, or of `live`
    shape : shape of the cache of the layers without a sliding window: (layers, kv heads, head dim)
    policies : cache policies that the engine samples under
    live : module in memory to sample from instead of the recipe's model
    findings : topic -> text, as `sparse-rl train --dry-run` prints them
    remarks : warnings about settings that are allowed but unwise
    skeleton : the model on the meta device, without memory
    rows, held_out : rows of the recipe's dataset, and of its validation dataset
    rewards : (functions, weights) of the recipe's rewards
    checkpoint : checkpoint from which the run resumes; None for a new run
    """

    recipe: R
    config: Any
    shape: tuple[int, int, int] = (0, 0, 0)
    policies: list[Policy] = field(default_factory=list)
    tokenizer: Any = None
    live: Any = None
    findings: Mapping[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    skeleton: Any = None
    rows: Any = None
    held_out: Any = None
    rewards: tuple[list[Callable], list[float]] = ([], [])
    checkpoint: Path | None = None

    @property
    def room(self) -> int | None:
        """Maximum number of prompt tokens that leaves room for a completion in the context length; None if unknown."""
        window = context_length(self.config)
        return None if window is None or self.recipe.rollout is None else window - self.recipe.sampling().max_tokens


def prepare(recipe: R, live: Any = None) -> Prepared[R]:
    """Resolve a recipe, check its model's files, and warn about unwise settings. Raises UserError at the first mistake.

    live : module in memory to sample from; by default the recipe's model is loaded later
    """
    prepared = prepare_model(recipe, load_config(recipe.model), live)
    return replace(prepared, tokenizer=load_tokenizer(recipe.model))


def prepare_model(recipe: R, config: Any, live: Any = None) -> Prepared[R]:
    """Do what `prepare` does, for a model with this configuration, but load no tokenizer."""
    fresh = isinstance(recipe, SFTRecipe) and recipe.sft.from_scratch
    skeleton = (meta_model if fresh else check_weights)(config, recipe.model)
    prepared = resolve(recipe, config, live)
    for compaction in recipe.prompt_caches():
        try:
            if compaction.budgets is not None:
                budgets.load(
                    compaction.budgets, global_layers(config), prepared.shape[1], identify(live or recipe.model)
                )
        except UserError as error:
            raise UserError(error.message, "prompt_cache.budgets") from error
        if compaction.by_text:
            check_movable(config, "prompt_cache.chunking")
    for policy in prepared.policies:
        check_scorers(recipe.model, policy)
    for remark in prepared.remarks:
        warn(remark)
    return replace(prepared, skeleton=skeleton)


def resolve(recipe: R, config: Any, live: Any = None, cuda: bool | None = None) -> Prepared[R]:
    """Resolve a recipe for this machine and a model configuration. Reads no file but the model's cache policy.

    live : module in memory to sample from; None means the recipe's model
    cuda : True if the recipe runs on a GPU; None means True if this machine has a GPU

    Raises UserError if the recipe's engine is not available, or if a prompt and a completion exceed the context length.
    """
    layers, kv_heads, head_dim = shape = policy_shape(config)
    caches, remarks = cache_configs(recipe), []
    findings = {
        "model": f"{recipe.model}: {config.model_type}, {layer_words(config)}, {kv_heads} kv heads of {head_dim}"
    }
    if is_text_part(config):
        findings["model"] += ", the text part of a multimodal model"
    policies = [make_policy(cache) for cache in caches]
    if policies:
        findings["cache"] = ", ".join(map(repr, policies))
    if recipe.rollout is not None:
        engine, findings["rollouts"] = choice.choose_engine(
            recipe.rollout, None if live is not None else config, caches, cuda
        )
        recipe = recipe.with_rollout(engine=engine)
        if live is None:
            check_lengths(recipe, config)
            group = config.num_attention_heads // kv_heads
            named_remarks = [(cache.name, cache.remark(group, layers)) for cache in caches]
            remarks = [f"{name}: {remark}" for name, remark in named_remarks if remark is not None]
    config = config if live is None else live.config
    return Prepared(recipe, config, shape, policies, live=live, findings=findings, remarks=remarks)


def layer_words(config: Any) -> str:
    """Describe a model's layers, for example "6 layers, of which 5 have a sliding window of 512 tokens"."""
    windows = windows_of(config)
    sliding, words = sum(map(bool, windows)), f"{len(windows)} layers"
    return f"{words}, of which {sliding} have a sliding window of {max(windows)} tokens" if sliding else words


def shape_of(recipe: Recipe) -> Any:
    """Return the configuration of a recipe's model, which may come from the table of known models (models/known.py).

    Raises UnavailableError if no file and no row of the table describes the model.
    """
    config = load_shape(recipe.model)
    if isinstance(recipe, BenchRecipe) and recipe.shape:
        config = changed_config(config, recipe.shape, "shape")
    return config


def cache_configs(recipe: Recipe) -> list[PolicyConfig]:
    """Return the recipe's cache policies. If none is named, the policy saved with the model is used, or else `full`."""
    caches = recipe.caches()
    if None in caches:
        saved = saved_policy(recipe.model)
        fallback = FullConfig() if saved is None else saved.config
        return [fallback if cache is None else cache for cache in caches]
    return [cache for cache in caches if cache is not None]


def check_lengths(recipe: Recipe, config: Any) -> None:
    """Raise UserError if the longest allowed prompt and a completion together exceed the model's context length.

    The recipe's engine must be chosen. Prompts without a bound are checked against `Prepared.room` when the dataset is
    read. Completions from a dataset are truncated to the context length, so they are checked only for vllm, which must
    hold the longest sequence.
    """
    if (window := context_length(config)) is None or (rollout := recipe.rollout) is None:
        return
    cut = isinstance(recipe, TrainRecipe) and not recipe.samples_behind_prompts()
    if cut and (rollout.engine in SAMPLE_LIVE or None in recipe.prompt_bounds()):
        return
    completion = recipe.sampling().max_tokens
    prompt = max((bound or 1 for bound in recipe.prompt_bounds()), default=1)
    if prompt + completion > window:
        lengths = f"{completion:,} tokens, after a prompt of {'at least 1' if prompt == 1 else f'up to {prompt:,}'}"
        wrong = f"{lengths}, exceed the model's context length of {window:,} tokens; lower this value"
        raise UserError(wrong, recipe.completion_key)
    if (rollout.max_model_len or 0) > window:
        wrong = f"{rollout.max_model_len:,} exceeds the model's context length of {window:,} tokens; lower this value"
        raise UserError(wrong, "rollout.max_model_len")


def rewards_of(named: list[Any], key: str) -> tuple[list[Callable], list[float]]:
    """Return (functions, weights) of the rewards that a recipe key names. Raises UserError for an invalid reward."""
    from rewards import make_rewards

    try:
        return make_rewards(named)
    except ValueError as error:
        raise UserError(str(error), key) from error
