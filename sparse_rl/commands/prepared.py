"""A recipe, resolved once: what commands need of it that is known before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollout import choice
from rollout.config import SAMPLE_LIVE
from rollout.context import budgets
from sparse_rl.attention.families import cache_shape, window_of
from sparse_rl.commands.console import warn
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
from sparse_rl.models.directory import check_scorers, saved_policy
from sparse_rl.models.load import load_config, load_tokenizer
from sparse_rl.models.weights import check_weights, meta_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.registry import make_policy
from sparse_rl.recipe import Recipe, SFTRecipe, TrainRecipe

R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class Prepared(Generic[R]):
    """A recipe, and what was found for it.

    recipe : its engine is chosen, and in training its attention kernel
    config : of its model, or of `live`, a module that is sampled from instead
    shape : of its cache: (layers, kv heads, head dim)
    policies : that its engine samples under
    findings : what -> what was found, in words, as `sparse-rl train --dry-run` prints them
    remarks : on what is allowed and unwise
    skeleton : the model without its memory

    Of a training (checks.py) also:

    rows, held_out : of its dataset, and of its validation's
    rewards : (functions, weights) that it names
    checkpoint : that it goes on from
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
        """The tokens that a prompt may have, so that the model reads the whole completion too; None: not known."""
        window = window_of(self.config)
        return None if window is None or self.recipe.rollout is None else window - self.recipe.sampling().max_tokens


def prepare(recipe: R, live: Any = None) -> Prepared[R]:
    """The recipe resolved, and its model's files checked; what is unwise is said.

    live : a module to sample from; by default the recipe's model is loaded, later

    Raises UserError at the first thing that is wrong.
    """
    config = load_config(recipe.model)
    fresh = isinstance(recipe, SFTRecipe) and recipe.sft.from_scratch
    skeleton = (meta_model if fresh else check_weights)(config, recipe.model)
    prepared = resolve(recipe, config, live)
    for compaction in recipe.prompt_caches():
        try:
            if compaction.budgets is not None:
                budgets.load(compaction.budgets, *prepared.shape[:2])
        except UserError as error:
            raise UserError(error.message, "prompt_cache.budgets") from error
    for policy in prepared.policies:
        check_scorers(recipe.model, policy)
    for remark in prepared.remarks:
        warn(remark)
    return replace(prepared, skeleton=skeleton, tokenizer=load_tokenizer(recipe.model))


def resolve(recipe: R, config: Any, live: Any = None, cuda: bool | None = None) -> Prepared[R]:
    """What a recipe means on this machine, for a model of this configuration, of which no file is read but its policy.

    cuda : whether it runs on a GPU; None: as this machine has

    Raises UserError where its engine cannot be had, and as `check_lengths` does.
    """
    layers, kv_heads, head_dim = shape = cache_shape(config)
    caches, remarks = cache_configs(recipe), []
    findings = {"model": f"{recipe.model}: {config.model_type}, {layers} layers, {kv_heads} kv heads of {head_dim}"}
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
            said = [(cache.name, cache.remark(group, layers)) for cache in caches]
            remarks = [f"{name}: {remark}" for name, remark in said if remark is not None]
    config = config if live is None else live.config
    return Prepared(recipe, config, shape, policies, live=live, findings=findings, remarks=remarks)


def cache_configs(recipe: Recipe) -> list[PolicyConfig]:
    """The caches of a recipe; where it names none, the one that the model's directory carries, or the full cache."""
    caches = recipe.caches()
    if None in caches:
        saved = saved_policy(recipe.model)
        own = FullConfig() if saved is None else saved.config
        return [own if cache is None else cache for cache in caches]
    return [cache for cache in caches if cache is not None]


def check_lengths(recipe: Recipe, config: Any) -> None:
    """Raise UserError where the longest prompt that a recipe lets pass, and a completion, are more than a model of this
    configuration reads. Where prompts have no bound, `Prepared.room` is for those that are read.

    Its engine is chosen. Completions of a dataset are cut to what the model reads; vllm is asked to hold the longest.
    """
    if (window := window_of(config)) is None or (rollout := recipe.rollout) is None:
        return
    cut = isinstance(recipe, TrainRecipe) and not recipe.samples_behind_prompts()
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


def rewards_of(named: list[Any], key: str) -> tuple[list[Callable], list[float]]:
    """(functions, weights) of the rewards that a key names. Raises UserError for what is none."""
    from rewards import make_rewards

    try:
        return make_rewards(named)
    except ValueError as error:
        raise UserError(str(error), key) from error
