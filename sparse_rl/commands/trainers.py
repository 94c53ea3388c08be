"""Build the trainer of a prepared recipe: one function for each kind.

The configurations of components in the recipe are passed on unchanged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.config import SAMPLE_LIVE
from rollout.make import make_engine
from sparse_rl.analysis.evaluation import model_label
from sparse_rl.commands.examples import recipe_data, taught_examples
from sparse_rl.commands.prepared import Prepared
from sparse_rl.commands.sampling import engine_arguments
from sparse_rl.errors import UserError
from sparse_rl.methods.dms.policy import DMS
from sparse_rl.models.base import base_of
from sparse_rl.models.directory import POLICY_FILE, SCORERS, saved_policy
from sparse_rl.models.load import load_model, load_plain_model, untrained_model
from sparse_rl.policies.registry import make_policy
from sparse_rl.recipe import DistillRecipe, GRPORecipe, KVpopRecipe, SFTRecipe, TaughtRecipe, TrainRecipe
from trainer import rundir
from trainer.arguments import adapters, model_options, refusals, training_options, weights_dtype
from trainer.deepspeed import outside_deepspeed
from trainer.scored.trainer import carry_scorers

logger = logging.getLogger("sparse_rl")
CHECK_PROBLEMS = 256  # problems on which stop_at_accuracy measures the accuracy


def training_arguments(recipe: TrainRecipe) -> dict[str, Any]:
    """Return the options that transformers' TrainingArguments and TRL's configurations share."""
    return training_options(
        recipe.training,
        recipe.launch,
        output_dir=recipe.output_dir,
        seed=recipe.seed,
        dtype=recipe.dtype,
        more=recipe.trainer_options,
    )


def _weights_dtype(recipe: TrainRecipe) -> str:
    return weights_dtype(recipe.dtype, recipe.launch, recipe.lora)


def grpo(prepared: Prepared[GRPORecipe], folder: Path) -> Any:
    from trainer.grpo.arguments import grpo_arguments
    from trainer.grpo.trainer import SparseGRPOTrainer

    recipe, (functions, weights) = prepared.recipe, prepared.rewards
    options = training_arguments(recipe)
    validation = recipe.validation
    if validation is not None:
        groups = -(-recipe.training.per_device_train_batch_size // validation.samples)
        options |= {
            "eval_strategy": "steps",
            "eval_steps": validation.every,
            "num_generations_eval": validation.samples,
            "per_device_eval_batch_size": groups * validation.samples,
        }
    args = grpo_arguments(
        recipe.grpo,
        **vars(recipe.replay),
        scorers=recipe.scorers,
        model_init_kwargs=model_options(_weights_dtype(recipe)),
        reward_weights=weights,
        **options,
    )
    engine = {**engine_arguments(recipe), "policy": recipe.cache, "progress": recipe.rollout.progress}
    kind, policy = recipe.rollout.engine, make_policy(recipe.cache)

    def engine_of(live: Any) -> Any:
        carry_scorers(live, policy, recipe.model)
        return make_engine(kind, model=live if kind in SAMPLE_LIVE else recipe.model, **engine)

    watchers: list[Any] = [rundir.CompletionLog(folder)]
    if {"wandb", "tensorboard"} & set(recipe.training.report_to):
        from sparse_rl.commands.last_rollouts import LastRollouts

        watchers.append(LastRollouts(model_label(recipe.model)))
    trainer = SparseGRPOTrainer(
        model=recipe.model,
        reward_funcs=functions,
        args=args,
        train_dataset=prepared.rows,
        eval_dataset=prepared.held_out,
        processing_class=prepared.tokenizer,
        peft_config=adapters(recipe.lora, prepared.skeleton),
        callbacks=[rundir.RunLog(folder), *watchers],
        make_engine=engine_of,
        sleep=recipe.rollout.sleep,
        thinking=recipe.data.thinking,
    )
    for watcher in watchers:
        watcher.trainer = trainer
    return trainer


def sft(prepared: Prepared[SFTRecipe], folder: Path) -> Any:
    from trainer.sft.trainer import make_trainer

    recipe, tokenizer, problems = prepared.recipe, prepared.tokenizer, None
    if recipe.sft.stop_at_accuracy is not None:
        assert recipe.data.synthetic is not None
        fresh = dataclasses.replace(recipe.data.synthetic, split="calibration", size=CHECK_PROBLEMS)
        source = dataclasses.replace(recipe.data, synthetic=fresh)
        problems = recipe_data(source, tokenizer, ("prompt", "answer"))
    options = training_arguments(recipe)
    if recipe.sft.from_scratch:
        model = untrained_model(recipe.model, recipe.seed, _weights_dtype(recipe))
    else:
        model, options["model_init_kwargs"] = recipe.model, model_options(_weights_dtype(recipe))
    further = adapters(recipe.lora, prepared.skeleton), [rundir.RunLog(folder)], problems
    return make_trainer(model, recipe.sft, options, tokenizer, prepared.rows, *further)


def distill(prepared: Prepared[DistillRecipe], folder: Path) -> Any:
    from trainer.distill.trainer import DistillArguments, DistillTrainer

    recipe = prepared.recipe
    examples, held_out = taught_examples(prepared)
    args = DistillArguments(
        **_taught_options(recipe, held_out), loss=recipe.loss, distill=recipe.distill, scorers=recipe.scorers
    )
    policy = make_policy(recipe.cache)
    student = carry_scorers(load_plain_model(recipe.model, _weights_dtype(recipe)), policy, recipe.model)
    teacher = _teacher(recipe, student, [*examples, *(held_out or [])])
    if recipe.lora is not None:
        from peft import get_peft_model

        with refusals():
            student = get_peft_model(student, adapters(recipe.lora, prepared.skeleton))
    starting: Any = recipe.model
    live = recipe.rollout.engine in SAMPLE_LIVE
    if live and recipe.distill.completions == "student":
        starting = base_of(student)
    elif live and not recipe.distill.refresh_every and recipe.launch.zero_stage < 3:
        # a teacher that is the starting model and never changes also serves as the sampled model
        starting = teacher if recipe.own_teacher and not policy.layered_parameters else recipe.model
    with outside_deepspeed(args):
        arguments = {**engine_arguments(recipe), "policy": recipe.cache, "progress": recipe.rollout.progress}
        engine = make_engine(recipe.rollout.engine, model=starting, **arguments)
    return DistillTrainer(
        student, teacher, engine, args, examples, held_out, sleep=recipe.rollout.sleep,
        processing_class=prepared.tokenizer, callbacks=[rundir.RunLog(folder)],
    )  # fmt: skip


def kvpop(prepared: Prepared[KVpopRecipe], folder: Path) -> Any:
    from trainer.kvpop.gates import GateTrainer
    from trainer.kvpop.trainer import KVpopArguments, KVpopTrainer

    recipe = prepared.recipe
    examples, held_out = taught_examples(prepared)
    args = KVpopArguments(**_taught_options(recipe, held_out), loss=recipe.loss, kvpop=recipe.kvpop)
    student = load_model(recipe.model, _weights_dtype(recipe))
    policy: Any = make_policy(recipe.cache)
    if hasattr(student, SCORERS):
        carried: Any = saved_policy(recipe.model)
        if carried.config.scorer != policy.config.scorer:
            scorers = carried.config.scorer.as_block()
            message = f"the model carries scorers {scorers}; set cache.scorer to them, or remove its {POLICY_FILE}"
            raise UserError(message, "cache.scorer")
        logger.warning("the scorers that %s carries are trained further", recipe.model)
    teacher = _teacher(recipe, student, [*examples, *(held_out or [])])
    kind = GateTrainer if isinstance(policy, DMS) else KVpopTrainer
    return kind(
        student, teacher, policy, args, examples, held_out,
        processing_class=prepared.tokenizer, callbacks=[rundir.RunLog(folder)],
    )  # fmt: skip


TRAINERS: dict[str, Callable[[Any, Path], Any]] = {
    "grpo": grpo,
    "distill": distill,
    "kvpop": kvpop,
    "sft": sft,
}


def _taught_options(recipe: TaughtRecipe, held_out: Any) -> dict[str, Any]:
    """Return the options that DistillArguments and KVpopArguments share."""
    options = training_arguments(recipe)
    if held_out is not None:
        assert recipe.validation is not None
        options |= {"eval_strategy": "steps", "eval_steps": recipe.validation.every}
    return {
        **options,
        **vars(recipe.replay),
        "per_device_eval_batch_size": recipe.training.per_device_train_batch_size,
    }


def _teacher(recipe: TaughtRecipe, student: Any, examples: Any) -> Any:
    """Return the teacher model, or the teacher cache, which must contain all `examples`."""
    from trainer.teacher.cache import TeacherCache

    folder = recipe.taught_by.teacher_cache
    if folder is not None:
        cache = TeacherCache(folder, recipe.expected_teacher_facts(student.config.vocab_size))
        if unknown := sum(example not in cache for example in examples):
            message = f"{folder} lacks {unknown} sequences of this dataset; run sparse-rl teacher with this recipe"
            raise UserError(message, "teacher_cache")
        return cache
    return load_plain_model(recipe.teacher_model, recipe.dtype, "model" if recipe.own_teacher else "teacher")
