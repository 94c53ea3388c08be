"""All that can be checked of a training recipe before a model is loaded: `sparse-rl train --dry-run`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from sparse_rl.errors import UserError, listed
from sparse_rl.recipe import Recipe, TaughtRecipe, TrainRecipe
from trainer.config import LoraConfig

NOT_CHECKED = (
    "the values of the weights; whether it fits (sparse-rl doctor RECIPE); rewards at work; which rows keep and the "
    "lengths leave; DeepSpeed and several processes; trainer options beyond their types"
)


def check_folder(training: TrainRecipe, resume: str | None) -> None:
    """Raise UserError where the run may not have its output_dir. Needs no library that takes seconds to import."""
    from trainer.lock import refuse_running
    from trainer.resume import refuse_used

    _refuse_unwritable(Path(training.output_dir))
    if training.launch.machine_rank == 0:  # that writes; the others may come when it has begun
        refuse_running(training.output_dir)
    if resume is None:
        refuse_used(training.output_dir)


def check_training(recipe: Recipe, resume: str | None = None) -> list[tuple[str, str]]:
    """(what, finding) of everything checked besides the folder, in order. Raises UserError at the first thing that is
    wrong.
    """
    from sparse_rl.attention.families import cache_shape
    from sparse_rl.commands.resume import checkpoint_to_resume
    from sparse_rl.commands.sampling import choose_recipe_engine
    from sparse_rl.models.directory import check_scorers, saved_policy
    from sparse_rl.models.load import load_config, load_tokenizer
    from sparse_rl.models.weights import check_weights, meta_model
    from sparse_rl.policies.registry import make_policy

    training = recipe.as_training()
    findings = [("recipe", f"{training.kind}, into {training.output_dir}")]
    for backend in training.training.report_to:
        if importlib.util.find_spec(backend) is None:
            raise UserError(f"{backend} is not installed; pip install {backend}, or remove it here", "report_to")
    config = load_config(training.model)
    made = (check_weights if training.reads_weights() else meta_model)(config, training.model)
    saved_policy(training.model)
    layers, kv_heads, head_dim = cache_shape(config)
    shape = f"{layers} layers, {kv_heads} kv heads of {head_dim}"
    findings.append(("model", f"{training.model}: {config.model_type}, {shape}"))
    for cache in training.caches():
        policy = make_policy(cache or "full")
        check_scorers(training.model, policy)
        findings.append(("cache", repr(policy)))
    if training.engine_config() is not None:
        chosen, finding = choose_recipe_engine(training, config)
        findings.append(("rollouts", finding))
        training = chosen.as_training()
    if training.attention_kernel() is not None:
        training, finding = _attention_kernel(training)
        findings.append(("attention kernel", finding))
    if training.lora is not None:
        findings.append(("lora", _adapters(made, training.lora)))
    for key, rewards in training.rewards_by_key().items():
        findings.append((key, _rewards(rewards, key)))
    if (learned := training.learned_cache()) is not None:
        findings += _learned(learned, config, training.dtype)
    if (taught := training.taught()) is not None:
        findings.append(("teacher", _teacher(taught, config)))
    findings += _data(training, load_tokenizer(training.model))
    if resume is not None:
        findings.append(("resume", str(checkpoint_to_resume(training, resume))))
    return findings


def _refuse_unwritable(folder: Path) -> None:
    """Raise UserError where a folder cannot be made, as far as can be seen without making it."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written into" if there.is_dir() else "is no folder"
        raise UserError(f"{folder} cannot be written: {there} {why}; name another", "output_dir")


def _attention_kernel(recipe: TrainRecipe) -> tuple[TrainRecipe, str]:
    """The recipe with its attention kernel chosen, and why it is this one."""
    import torch

    from sparse_rl.attention.choice import choose_kernel
    from sparse_rl.models.load import load_config

    wanted = recipe.attention_kernel()
    assert wanted is not None
    if torch.cuda.is_available():  # compiling and checking is for the processes that train, each on its GPU
        return recipe, f"{wanted}; flex is checked on the GPU, see sparse-rl doctor"
    kernel, finding = choose_kernel(wanted, map(load_config, recipe.attending_models()), recipe.dtype)
    return recipe.with_attention_kernel(kernel), finding


def _data(recipe: TrainRecipe, tokenizer: Any) -> list[tuple[str, str]]:
    from sparse_rl.commands.examples import training_data

    data = training_data(recipe, recipe.data, tokenizer)
    findings = [
        ("data", f"{len(data)} rows, with {', '.join(data.column_names)}"),
        ("batch", recipe.describe_batches(len(data))),
    ]
    if (validation := recipe.held_out()) is not None:
        held_out = training_data(recipe, validation.limited_data(), tokenizer, "validation.data")
        findings.append(("validation", f"{len(held_out)} problems every {validation.every} steps"))
    return findings


def _adapters(made: Any, lora: LoraConfig) -> str:
    """made : the model, without its memory"""
    from torch.nn import Embedding, Linear

    from trainer.memory import adapted_modules, lora_parameters

    adapted = adapted_modules(made, lora)
    if wrong := [name for name, module in adapted if not isinstance(module, Linear | Embedding)]:
        raise UserError(f"{wrong[0] or 'the whole model'} has no weight of its own to adapt", "lora.target_modules")
    if not adapted:
        names = sorted({name.rpartition(".")[2] for name, module in made.named_modules() if isinstance(module, Linear)})
        raise UserError(f"names no layer of the model; it has {listed(names)}", "lora.target_modules")
    return f"{lora_parameters(made, lora):,} parameters in {len(adapted)} layers"


def _rewards(named: list[Any], key: str) -> str:
    from rewards import make_rewards

    try:
        functions, weights = make_rewards(named)
    except ValueError as error:
        raise UserError(str(error), key) from error
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
    return ", ".join(f"{name} × {weight:g}" for name, weight in zip(names, weights, strict=True))


def _learned(cache: Any, config: Any, dtype: str) -> list[tuple[str, str]]:
    """The cache that is learned, and the memory that the scorers' state takes from it."""
    import torch

    from sparse_rl.attention.families import cache_shape
    from sparse_rl.methods.config import KVpopPolicyConfig
    from sparse_rl.methods.kvpop.scorers.registry import sketch_scorer
    from sparse_rl.policies.registry import make_policy

    _, heads, dim = cache_shape(config)
    scorer = sketch_scorer(cache.scorer, heads=heads, dim=dim)
    parameters = sum(weight.numel() for weight in scorer.parameters())
    entry = 2 * heads * dim * torch.finfo(getattr(torch, dtype)).bits // 8
    state = -(-scorer.state_bytes() // entry)
    size = f"{parameters:,} parameters a layer"
    if state and isinstance(cache, KVpopPolicyConfig):
        size += f"; its state is as large as {state} entries, cache.state_entries is {cache.state_entries}"
    return [("cache", repr(make_policy(cache))), ("scorer", size)]


def _teacher(recipe: TaughtRecipe, config: Any) -> str:
    from sparse_rl.models.load import load_config
    from sparse_rl.models.weights import check_weights

    folder, teacher = recipe.taught_by.teacher_cache, recipe.taught_by.teacher
    if folder is not None:
        from trainer.teacher.cache import TeacherCache

        cache = TeacherCache(folder, recipe.expected_teacher_facts(config.vocab_size))
        return f"what is written in {folder}: {len(cache.places)} sequences"
    if teacher is None:
        return "the model itself, with a full cache"
    own = load_config(teacher)
    check_weights(own, teacher, "teacher")
    if own.vocab_size != config.vocab_size:
        raise UserError(f"has {own.vocab_size} tokens, and the student {config.vocab_size}", "teacher")
    return f"{teacher}, with a full cache"
