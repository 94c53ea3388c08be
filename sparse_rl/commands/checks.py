"""All checks of a training recipe that are possible before a model is loaded, as in `sparse-rl train --dry-run`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any, TypeVar

from sparse_rl.commands.console import say
from sparse_rl.commands.examples import with_data
from sparse_rl.commands.prepared import Prepared, prepare
from sparse_rl.commands.resume import checkpoint_to_resume
from sparse_rl.errors import UserError, listed
from sparse_rl.methods.kvpop.scorers.registry import sketch_scorer
from sparse_rl.models.directory import saved_policy
from sparse_rl.models.load import load_config
from sparse_rl.models.weights import check_weights
from sparse_rl.recipe import KVpopRecipe, TaughtRecipe, TrainRecipe
from sparse_rl.recipe.kinds.sampled import ReplayedRecipe
from trainer.config import LoraConfig

T = TypeVar("T", bound=TrainRecipe)
NOT_CHECKED = (
    "the values of the weights; memory (sparse-rl doctor RECIPE); calls of the rewards; rows remaining after keep "
    "and length limits; DeepSpeed and several processes; trainer options beyond their types"
)


def prepare_training(recipe: T, resume: str | None = None, here: bool = True) -> Prepared[T]:
    """Resolve a training recipe and check everything except its output folder. Raises UserError at the first mistake.

    resume : value of --resume; None means a new run
    here : True if this process trains; choices are then printed, and attention kernels are checked on the process's GPU
    """
    for backend in recipe.training.report_to:
        if importlib.util.find_spec(backend) is None:
            raise UserError(f"{backend} is not installed; pip install {backend}, or leave it out here", "report_to")
    prepared = prepare(recipe)
    saved_policy(recipe.model)
    recipe, config = prepared.recipe, prepared.config
    findings = {"recipe": f"{recipe.kind}, into {recipe.output_dir}", **prepared.findings}
    if recipe.lora is not None:
        findings["lora"] = _adapters(prepared.skeleton, recipe.lora)
    if isinstance(recipe, KVpopRecipe):
        findings |= _learned(recipe, prepared.shape)
    if isinstance(recipe, TaughtRecipe):
        findings["teacher"] = _teacher(recipe, config)
    prepared = with_data(prepared)
    if prepared.rewards[0]:
        findings[recipe.named_rewards()[0]] = _rewards(*prepared.rewards)
    findings["data"] = f"{len(prepared.rows)} rows, with {', '.join(prepared.rows.column_names)}"
    findings["batch"] = recipe.describe_batches(len(prepared.rows))
    if recipe.validation is not None:
        findings["validation"] = f"{len(prepared.held_out)} problems, every {recipe.validation.every} steps"
    if isinstance(recipe, ReplayedRecipe):
        recipe, kernel_findings = _choose_kernel(recipe, config, here)
        findings |= kernel_findings
    checkpoint = None
    if resume is not None:
        checkpoint = checkpoint_to_resume(recipe, resume)
        findings["resume"] = str(checkpoint)
    for topic in ("rollouts", "attention kernel", "scorers' target"):
        if here and topic in findings:
            say(topic, findings[topic])
    return replace(prepared, recipe=recipe, findings=findings, checkpoint=checkpoint)


def _choose_kernel(recipe: Any, config: Any, here: bool) -> tuple[Any, dict[str, str]]:
    """Return (the recipe with its attention kernel chosen, findings that give the reason for the choice)."""
    from sparse_rl.attention.choice import check_target, choose_kernel, will_check

    wanted = recipe.replay.attention_kernel
    if will_check(wanted) and not here:  # each training process compiles and checks on its own GPU
        return recipe, {"attention kernel": f"{wanted}; flex will be checked on the GPU, see sparse-rl doctor"}
    if will_check(wanted):
        say("attention kernel", "compiling and checking FlexAttention on this GPU, which takes a while")
    kernel, finding = choose_kernel(wanted, map(load_config, recipe.attending_models()), recipe.dtype)
    findings = {"attention kernel": finding}
    if here and recipe.foresees() and will_check("auto"):
        findings["scorers' target"] = str(check_target(config, recipe.dtype))
    return recipe.with_attention_kernel(kernel), findings


def _adapters(skeleton: Any, lora: LoraConfig) -> str:
    """Describe the LoRA adapters. Raises UserError if they match no layer, or a layer that cannot be adapted."""
    from torch.nn import Embedding, Linear

    from trainer.arguments import adapters
    from trainer.memory import adapted_modules, lora_parameters

    adapters(lora, skeleton)
    adapted = adapted_modules(skeleton, lora)
    if refused := [name for name, module in adapted if not isinstance(module, Linear | Embedding)]:
        raise UserError(
            f"{refused[0] or 'the whole model'} is not a linear or embedding layer and cannot be adapted",
            "lora.target_modules",
        )
    if not adapted:
        names = sorted(
            {name.rpartition(".")[2] for name, module in skeleton.named_modules() if isinstance(module, Linear)}
        )
        raise UserError(f"matches no layer of the model, which has {listed(names)}", "lora.target_modules")
    return f"{lora_parameters(skeleton, lora):,} parameters in {len(adapted)} layers"


def _rewards(functions: list[Any], weights: list[float]) -> str:
    names = [getattr(function, "__name__", type(function).__name__) for function in functions]
    return ", ".join(f"{name} × {weight:g}" for name, weight in zip(names, weights, strict=True))


def _learned(recipe: KVpopRecipe, shape: tuple[int, int, int]) -> dict[str, str]:
    """Describe the learned cache, and the memory of the scorers' state as a number of cache entries."""
    import torch

    from sparse_rl.methods.config import KVpopPolicyConfig
    from sparse_rl.policies.registry import make_policy

    cache: Any = recipe.cache
    _, heads, dim = shape
    scorer = sketch_scorer(cache.scorer, heads=heads, dim=dim)
    parameters = sum(weight.numel() for weight in scorer.parameters())
    entry = 2 * heads * dim * torch.finfo(getattr(torch, recipe.dtype)).bits // 8
    state = -(-scorer.state_bytes() // entry)
    size = f"{parameters:,} parameters per layer"
    if state and isinstance(cache, KVpopPolicyConfig):
        size += f"; its state takes the memory of {state} entries, cache.state_entries is {cache.state_entries}"
    return {"cache": repr(make_policy(cache)), "scorer": size}


def _teacher(recipe: TaughtRecipe, config: Any) -> str:
    """Describe the teacher. Raises UserError if the teacher does not suit the recipe."""
    folder, teacher = recipe.taught_by.teacher_cache, recipe.taught_by.teacher
    if folder is not None:
        from trainer.teacher.cache import TeacherCache

        cache = TeacherCache(folder, recipe.expected_teacher_facts(config.vocab_size))
        return f"predictions saved in {folder}: {len(cache.places)} sequences"
    if teacher is None:
        return "the model itself, with a full cache"
    teacher_config = load_config(teacher)
    check_weights(teacher_config, teacher, "teacher")
    if teacher_config.vocab_size != config.vocab_size:
        raise UserError(
            f"has a vocabulary of {teacher_config.vocab_size} tokens, but the student's has {config.vocab_size}; "
            "use a teacher with the student's vocabulary",
            "teacher",
        )
    return f"{teacher}, with a full cache"
