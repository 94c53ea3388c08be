"""From a recipe to a run: what every kind of training shares, and which trainer serves which kind."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rollout.choice import with_chosen_engine
from sparse_rl.data import load_data
from sparse_rl.engines import recipe_engine_options, settle_attention
from sparse_rl.errors import UserError
from sparse_rl.models import (
    POLICY_FILE,
    SCORERS,
    load_config,
    load_model,
    load_tokenizer,
    save_policy,
    saved_policy,
)
from sparse_rl.policies import make_policy
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
from trainer import rundir
from trainer.batches import base_of
from trainer.checkpoint import PARTIAL, clear_partial, failure, publish
from trainer.deepspeed import deepspeed_config, prepare_deepspeed

logger = logging.getLogger("sparse_rl")

# recipe keys handed on under the same name: to transformers' TrainingArguments, and to SparseGRPOConfig
SHARED = (
    *("output_dir", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "max_grad_norm"),
    *("weight_decay", "adam_beta1", "adam_beta2", "logging_steps", "save_total_limit", "report_to", "run_name"),
)
OWN = (
    *(
        "num_generations",
        "max_completion_length",
        "temperature",
        "top_p",
        "loss_type",
        "epsilon",
        "epsilon_high",
        "beta",
    ),
    *("scale_rewards", "num_iterations", "steps_per_generation", "train_attention", "attention"),
    *("importance_correction", "importance_clip", "zero_truncated_advantages", "uniform_groups"),
)


def train(recipe: Recipe, resume: str | None = None) -> Path:
    """Run a training recipe in this process (one of N, where launched). Returns the directory of the final model.

    resume : a checkpoint directory, or "newest" for the newest in the recipe's output_dir
    """
    if not isinstance(recipe, TrainRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} is not trained; see sparse-rl {recipe.kind}", "kind")
    rundir.check_world(recipe)
    config = load_config(recipe.model)
    if isinstance(recipe, SampledRecipe):
        recipe = dataclasses.replace(recipe, rollout=with_chosen_engine(recipe.rollout, config))
    if isinstance(recipe, ReplayedRecipe):
        recipe = settle_attention(recipe, config)
    checkpoint = None if resume is None else str(rundir.checkpoint_of(recipe, resume))
    if checkpoint is None:
        rundir.refuse_used(recipe)
    folder = rundir.prepare(recipe)
    if "wandb" in recipe.report_to:
        rundir.wandb_offline_without_key(folder)
    trainer = TRAINERS[recipe.kind](recipe, folder)
    trainer.recipe = recipe.resolved()
    if isinstance(recipe, TaughtRecipe):
        trainer.args.eval_on_start = trainer.eval_dataset is not None and checkpoint is None
    final = folder / "model"
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        _export(trainer, recipe, final)
    finally:
        _close_engine(trainer)  # last: an engine may take the process group down with it
    return final


def arguments(recipe: TrainRecipe) -> dict[str, Any]:
    """The keys that transformers' TrainingArguments share, from a recipe."""
    deepspeed = deepspeed_config(recipe.launch)
    if deepspeed is not None:
        prepare_deepspeed()
    given = {name: getattr(recipe, name) for name in SHARED}
    return {
        **given,
        "save_strategy": "steps" if recipe.save_steps else "no",
        "save_steps": recipe.save_steps or 1,
        "bf16": recipe.dtype == "bfloat16",
        "fp16": recipe.dtype == "float16",
        "use_cpu": not torch.cuda.is_available(),
        "deepspeed": deepspeed,
        "model_init_kwargs": {"dtype": _weights_dtype(recipe), "device_map": None},
        "disable_tqdm": False,
        **recipe.trainer_options,
    }


def _weights_dtype(recipe: TrainRecipe) -> str:
    """Full training without DeepSpeed keeps float32 weights under autocast: AdamW on bfloat16 ones loses updates."""
    return recipe.dtype if recipe.launch.zero_stage or recipe.lora is not None else "float32"


def _lora(recipe: TrainRecipe) -> Any:
    if recipe.lora is None:
        return None
    from peft import LoraConfig

    lora = recipe.lora
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM")


def _grpo(recipe: GRPORecipe, folder: Path) -> Any:
    from rewards import make_rewards
    from trainer.grpo import SparseGRPOConfig, SparseGRPOTrainer

    try:
        functions, weights = make_rewards(recipe.rewards)
    except ValueError as error:
        raise UserError(str(error), "rewards") from error
    tokenizer = load_tokenizer(recipe.model)
    data = load_data(recipe.data, tokenizer)
    recipe.check_prompts(len(data))
    keys = {name: getattr(recipe, name) for name in OWN}
    validation = recipe.validation
    held_out = None
    if validation is not None:
        source = dataclasses.replace(validation.data, limit=validation.problems)
        held_out = load_data(source, tokenizer, where="validation.data")
        keys |= {"eval_strategy": "steps", "eval_steps": validation.every, "num_generations_eval": validation.samples}
        groups = -(-recipe.per_device_train_batch_size // validation.samples)
        keys["per_device_eval_batch_size"] = groups * validation.samples
    guard = recipe.replay_guard
    args = SparseGRPOConfig(
        **{
            **arguments(recipe),
            **keys,
            "top_k": recipe.top_k or 0,
            "reward_weights": weights,
            "policy": recipe.cache,
            "guard": guard.enabled,
            "guard_factor": guard.factor,
            "guard_floor": guard.floor,
            "rollout_engine": recipe.rollout.engine,
            "rollout_model": None if recipe.rollout.engine == "hf" else recipe.model,
            "rollout_options": {**recipe_engine_options(recipe), "progress": recipe.rollout.progress},
            "rollout_sleep": recipe.rollout.sleep,
            "thinking": recipe.data.thinking,
        }
    )
    completions = rundir.CompletionLog(folder)
    trainer = SparseGRPOTrainer(
        model=recipe.model,
        reward_funcs=functions,
        args=args,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=_lora(recipe),
        callbacks=[rundir.RunLog(folder), completions],
    )
    completions.trainer = trainer
    return trainer


def _sft(recipe: SFTRecipe, folder: Path) -> Any:
    from trainer.sft import make_trainer

    tokenizer = load_tokenizer(recipe.model)
    data = load_data(recipe.data, tokenizer, require=("prompt", "completion"))
    return make_trainer(recipe, arguments(recipe), tokenizer, data, _lora(recipe), [rundir.RunLog(folder)])


def _distill(recipe: DistillRecipe, folder: Path) -> Any:
    from rollout.config import SamplingConfig
    from rollout.make import make_engine
    from trainer.distill import DistillConfig, DistillTrainer
    from trainer.rows import taught_rows

    tokenizer = load_tokenizer(recipe.model)
    rows, held_out = taught_rows(recipe, tokenizer)
    sampled = recipe.completions == "student"
    args = DistillConfig(
        **_taught_arguments(recipe, held_out),
        sampling=SamplingConfig(recipe.max_completion_length, recipe.temperature) if sampled else None,
        refresh_every=recipe.refresh_every,
        rollout_sleep=recipe.rollout.sleep,
        packing=recipe.packing,
    )
    student = _load(recipe.model, _weights_dtype(recipe))
    teacher = _teacher(recipe, student, [*rows, *(held_out or [])])
    if recipe.lora is not None:
        from peft import get_peft_model

        student = get_peft_model(student, _lora(recipe))
    starting: Any = recipe.model
    if recipe.rollout.engine == "hf" and sampled:
        starting = base_of(student)
    elif recipe.rollout.engine == "hf" and not recipe.refresh_every and recipe.launch.zero_stage < 3:
        own = recipe.teacher is None and recipe.teacher_cache is None
        starting = teacher if own else recipe.model  # a teacher that is the starting model, and stays it, serves both
    with _outside_deepspeed(args):
        engine = make_engine(
            recipe.rollout.engine,
            model=starting,
            policy=recipe.cache,
            **recipe_engine_options(recipe),
        )
    return DistillTrainer(
        student, teacher, engine, args, rows, held_out,
        processing_class=tokenizer, callbacks=[rundir.RunLog(folder)],
    )  # fmt: skip


def _kvpop(recipe: KVpopRecipe, folder: Path) -> Any:
    from sparse_rl.attention import FutureTarget
    from trainer.kvpop import KVpopConfig, KVpopTrainer
    from trainer.losses import BoundaryLoss
    from trainer.rows import taught_rows

    tokenizer = load_tokenizer(recipe.model)
    rows, held_out = taught_rows(recipe, tokenizer)
    same = ("boundary_weight", "scorer_learning_rate", "scorer_final_learning_rate", "scorer_warmup_steps")
    args = KVpopConfig(
        **_taught_arguments(recipe, held_out),
        boundary=BoundaryLoss(**vars(recipe.boundary)),
        target=FutureTarget(**vars(recipe.target)),
        train_base=recipe.train_base,
        prefill=recipe.prefill,
        **{name: getattr(recipe, name) for name in same},
    )
    student = load_model(recipe.model, _weights_dtype(recipe))
    policy: Any = make_policy(recipe.cache)
    if hasattr(student, SCORERS):
        carried: Any = saved_policy(recipe.model)
        if carried.scorer != policy.scorer:
            mend = f"the model carries scorers {carried.scorer}; name these, or remove its {POLICY_FILE}"
            raise UserError(mend, "cache.scorer")
        logger.warning("the scorers of %s are trained further", recipe.model)
    teacher = _teacher(recipe, student, [*rows, *(held_out or [])])
    return KVpopTrainer(
        student, teacher, policy, args, rows, held_out,
        processing_class=tokenizer, callbacks=[rundir.RunLog(folder)],
    )  # fmt: skip


def _taught_arguments(recipe: Any, held_out: Any) -> dict[str, Any]:
    """What DistillConfig and KVpopConfig take alike."""
    from trainer.losses import DistillationLoss

    keys = arguments(recipe)
    keys.pop("model_init_kwargs")
    if held_out is not None:
        keys |= {"eval_strategy": "steps", "eval_steps": recipe.validation.every}
    loss = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(DistillationLoss)}
    return {
        **keys,
        "loss": DistillationLoss(**loss),
        "top_k": recipe.top_k,
        "attention": recipe.attention,
        "per_device_eval_batch_size": recipe.per_device_train_batch_size,
    }


def _teacher(recipe: Any, student: Any, rows: Any) -> Any:
    """In memory, or what it has said of all these rows."""
    from trainer.teacher import TeacherCache, expected_facts

    if recipe.teacher_cache is not None:
        cache = TeacherCache(recipe.teacher_cache, expected_facts(recipe, student.config.vocab_size))
        if unknown := sum(row not in cache for row in rows):
            mend = f"{recipe.teacher_cache} does not know {unknown} sequences of this dataset; write it for this recipe"
            raise UserError(mend, "teacher_cache")
        return cache
    teacher = _load(recipe.teacher or recipe.model, recipe.dtype)
    if teacher.config.vocab_size != student.config.vocab_size:
        sizes = f"{teacher.config.vocab_size} tokens, the student's {student.config.vocab_size}"
        raise UserError(f"the vocabulary has {sizes}; it must be the same", "teacher")
    return teacher


TRAINERS: dict[str, Callable[[Any, Path], Any]] = {
    "grpo": _grpo,
    "distill": _distill,
    "kvpop": _kvpop,
    "sft": _sft,
}


def _load(model: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise UserError(f"the weights of {model} cannot be read: {str(error).splitlines()[0]}", "model") from error


@contextmanager
def _outside_deepspeed(args: Any) -> Iterator[None]:
    """A model that is loaded here is whole, and not partitioned by ZeRO-3."""
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if getattr(args, "hf_deepspeed_config", None) is not None:
            deepspeed.set_hf_deepspeed_config(args.hf_deepspeed_config)


def _close_engine(trainer: Any) -> None:
    """What goes wrong here is only logged: it must not hide the error that ended the run."""
    try:
        if hasattr(trainer, "engine"):
            trainer.engine.close()
    except Exception:
        logger.warning("the engine did not close", exc_info=True)


def _export(trainer: Any, recipe: TrainRecipe, place: Path) -> None:
    """The final model as a plain Hugging Face directory, whole or not there; LoRA's adapter beside it."""
    made = place.parent / PARTIAL
    try:
        _write_model(trainer, recipe, made / place.name)
        if trainer.is_world_process_zero():
            for folder in filter(Path.exists, (made / "adapter", made / place.name)):
                publish(folder, place.with_name(folder.name))
    except Exception as error:
        told = failure("the final model", place.parent, error)  # before what has filled the disk goes
        clear_partial(place.parent)
        raise told from error
    trainer.accelerator.wait_for_everyone()


def _write_model(trainer: Any, recipe: TrainRecipe, folder: Path) -> None:
    """The final model with its cache policy; LoRA merged in."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if recipe.lora is not None:
        trainer.save_model(str(folder.with_name("adapter")))
        if trainer.is_world_process_zero():
            model.merge_and_unload().save_pretrained(folder)
    else:
        trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        trainer.processing_class.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        if isinstance(recipe, SampledRecipe):
            save_policy(folder, make_policy(recipe.cache))
