"""All that can be checked of a training recipe before a model is loaded: `sparse-rl train --dry-run`."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from sparse_rl.errors import UserError
from sparse_rl.recipe import (
    DistillRecipe,
    GRPORecipe,
    KVpopRecipe,
    Recipe,
    ReplayedRecipe,
    SampledRecipe,
    SFTRecipe,
    TaughtRecipe,
    TrainRecipe,
)

NOT_CHECKED = (
    "the weights; whether it fits (sparse-rl doctor RECIPE); rewards at work; which rows keep and the lengths leave; "
    "DeepSpeed and several processes; trainer options beyond their types"
)


def check_training(recipe: Recipe, resume: str | None = None) -> list[tuple[str, str]]:
    """(what, finding) of everything checked, in order. Raises UserError at the first thing that is wrong."""
    import torch

    from rollout.choice import choose_engine, with_chosen_engine
    from sparse_rl.attention.choice import choose_kernel
    from sparse_rl.attention.families import cache_shape
    from sparse_rl.data.problems import load_data
    from sparse_rl.models.load import load_config, load_tokenizer
    from sparse_rl.policies import make_policy
    from trainer.rundir import refuse_used
    from trainer.train import checkpoint_to_resume

    if not isinstance(recipe, TrainRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} is not trained; use sparse-rl {recipe.kind}", "kind")
    found = [("recipe", f"{recipe.kind}, into {recipe.output_dir}")]
    for backend in recipe.report_to:
        if importlib.util.find_spec(backend) is None:
            raise UserError(f"{backend} is not installed; install it, or remove it here", "report_to")
    config = load_config(recipe.model)
    layers, kv_heads, head_dim = cache_shape(config)
    found.append(("model", f"{recipe.model}: {config.model_type}, {layers} layers, {kv_heads} kv heads of {head_dim}"))
    if isinstance(recipe, SampledRecipe):
        found.append(("cache", repr(make_policy(recipe.cache))))
        found.append(("rollouts", choose_engine(recipe.rollout, config)[1]))
        recipe = dataclasses.replace(recipe, rollout=with_chosen_engine(recipe.rollout, config))
    if isinstance(recipe, ReplayedRecipe):
        if torch.cuda.is_available():  # compiling and checking is for the processes that train, each on its GPU
            finding = f"{recipe.attention_kernel}; flex is checked on the GPU, see sparse-rl doctor"
            found.append(("attention kernel", finding))
        else:
            configs = map(load_config, recipe.attending_models)
            kernel, finding = choose_kernel(recipe.attention_kernel, configs, recipe.dtype)
            found.append(("attention kernel", finding))
            recipe = dataclasses.replace(recipe, attention_kernel=kernel)  # type: ignore[arg-type]  # a kernel's name
    if isinstance(recipe, GRPORecipe):
        found.append(("rewards", _rewards(recipe.rewards, "rewards")))
    if isinstance(recipe, KVpopRecipe):
        found += _learned(recipe, config)
    if isinstance(recipe, TaughtRecipe):
        found.append(("teacher", _teacher(recipe, config)))
    if isinstance(recipe, DistillRecipe) and recipe.keep is not None:
        found.append(("kept", f"what scores >= {recipe.keep_from:g}: {_rewards([recipe.keep], 'keep')}"))
    tokenizer = load_tokenizer(recipe.model)
    require = ["prompt"]
    sampled = isinstance(recipe, DistillRecipe) and recipe.completions == "student"
    if isinstance(recipe, SFTRecipe | TaughtRecipe) and not sampled:
        require.append("completion")
    if isinstance(recipe, DistillRecipe) and recipe.keep is not None:
        require.append("answer")
    data = load_data(recipe.data, tokenizer, require=require)
    found.append(("data", f"{len(data)} rows, with {', '.join(data.column_names)}"))
    found.append(("batch", _batch(recipe, len(data))))
    if isinstance(recipe, SampledRecipe | KVpopRecipe) and recipe.validation is not None:
        source = dataclasses.replace(recipe.validation.data, limit=recipe.validation.problems)
        taught = isinstance(recipe, TaughtRecipe)
        held_out = load_data(source, tokenizer, require=require if taught else ("prompt",), where="validation.data")
        found.append(("validation", f"{len(held_out)} problems every {recipe.validation.every} steps"))
    if resume is None:
        refuse_used(recipe.output_dir)
    else:
        found.append(("resume", str(checkpoint_to_resume(recipe, resume))))
    return found


def _rewards(named: list[Any], key: str) -> str:
    from rewards import make_rewards

    try:
        functions, weights = make_rewards(named)
    except ValueError as error:
        raise UserError(str(error), key) from error
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
    return ", ".join(f"{name} × {weight:g}" for name, weight in zip(names, weights, strict=True))


def _learned(recipe: KVpopRecipe, config: Any) -> list[tuple[str, str]]:
    """The cache that is learned, and the memory that the scorers' state takes from it."""
    import torch

    from sparse_rl.attention.families import cache_shape
    from sparse_rl.policies import make_policy
    from sparse_rl.scorers import sketch_scorer

    _, heads, dim = cache_shape(config)
    policy: Any = make_policy(recipe.cache)
    scorer = sketch_scorer(policy.config.scorer, heads=heads, dim=dim)
    parameters = sum(weight.numel() for weight in scorer.parameters())
    entry = 2 * heads * dim * torch.finfo(getattr(torch, recipe.dtype)).bits // 8
    state = -(-scorer.state_bytes() // entry)
    size = f"{parameters:,} parameters a layer"
    if state:
        size += f"; its state is as large as {state} entries, cache.state_entries is {policy.config.state_entries}"
    return [("cache", repr(policy)), ("scorer", size)]


def _teacher(recipe: TaughtRecipe, config: Any) -> str:
    from sparse_rl.models.load import load_config
    from trainer.teacher.cache import TeacherCache
    from trainer.train import expected_facts

    if recipe.teacher_cache is not None:
        cache = TeacherCache(recipe.teacher_cache, expected_facts(recipe, config.vocab_size))
        return f"what is written in {recipe.teacher_cache}: {len(cache.places)} sequences"
    if recipe.teacher is None:
        return "the model itself, with a full cache"
    own = load_config(recipe.teacher)
    if own.vocab_size != config.vocab_size:
        raise UserError(f"has {own.vocab_size} tokens, and the student {config.vocab_size}", "teacher")
    return f"{recipe.teacher}, with a full cache"


def _batch(recipe: TrainRecipe, rows: int) -> str:
    """The arithmetic of batches in words; an error where the data do not fill one generation."""
    ranks, accumulated = recipe.launch.processes, recipe.gradient_accumulation_steps
    update = recipe.per_device_train_batch_size * ranks * accumulated
    if isinstance(recipe, KVpopRecipe) and recipe.packing:
        return f"{update} rows of {recipe.max_length} tokens a step; how many the texts fill is not known before"
    if not isinstance(recipe, GRPORecipe):
        per_epoch = -(-rows // update)
        steps = recipe.max_steps if recipe.max_steps > 0 else max(1, round(per_epoch * recipe.num_train_epochs))
        return f"{update} rows a step, {per_epoch} steps an epoch, {steps} steps"
    prompts, generated = recipe.check_prompts(rows), recipe.completions_per_generation
    completions = (rows // prompts) * generated * recipe.num_iterations
    per_epoch = completions // update
    steps = recipe.max_steps if recipe.max_steps > 0 else max(1, round(per_epoch * recipe.num_train_epochs))
    return (
        f"{prompts} prompts × {recipe.num_generations} samples a generation, {update} completions a step, {steps} steps"
    )
