"""From a recipe to a run: the one file of trainer/ that knows recipes. Everything else takes values.

What turns each kind of recipe into a trainer; where its examples come from; what its run directory is; and, for
`sparse-rl teacher`, what is written for it. (Over 400 lines: all of it goes to the commands, and none stays here.)
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollout.choice import with_chosen_engine
from sparse_rl.attention.choice import choose_kernel
from sparse_rl.data.problems import load_data
from sparse_rl.engines import recipe_engine_options
from sparse_rl.errors import UserError
from sparse_rl.models.base import base_of
from sparse_rl.models.directory import POLICY_FILE, SCORERS, save_policy, saved_policy
from sparse_rl.models.load import load_config, load_model, load_tokenizer
from sparse_rl.policies import make_policy
from sparse_rl.recipe import (
    DataConfig,
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
from sparse_rl.recipe.schema import dump_yaml
from trainer import rundir
from trainer.arguments import adapters, model_options, training_options, weights_dtype
from trainer.checkpoint import PARTIAL, clear_partial, failure, publish
from trainer.config import TrainingConfig
from trainer.examples import Example, accepted, completed_examples, prompt_examples, text_examples
from trainer.rundir import MayChange

logger = logging.getLogger("sparse_rl")
Config = TypeVar("Config")
CHECK_PROBLEMS = 256  # that stop_at_accuracy looks at


def train(recipe: Recipe, resume: str | None = None) -> Path:
    """Run a training recipe in this process (one of N, where launched). Returns the directory of the final model.

    resume : a checkpoint directory, or "newest" for the newest in the recipe's output_dir
    """
    if not isinstance(recipe, TrainRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} is not trained; see sparse-rl {recipe.kind}", "kind")
    rundir.check_world(recipe.launch.processes)
    config = load_config(recipe.model)
    if isinstance(recipe, SampledRecipe):
        recipe = dataclasses.replace(recipe, rollout=with_chosen_engine(recipe.rollout, config))
    if isinstance(recipe, ReplayedRecipe):
        configs = map(load_config, recipe.attending_models)
        kernel, finding = choose_kernel(recipe.attention_kernel, configs, recipe.dtype)
        logger.info("attention kernel: %s", finding)
        recipe = dataclasses.replace(recipe, attention_kernel=kernel)  # type: ignore[arg-type]  # a kernel's name
    checkpoint = None if resume is None else str(checkpoint_to_resume(recipe, resume))
    if checkpoint is None:
        rundir.refuse_used(recipe.output_dir)
    folder = prepare(recipe)
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


def part(config: type[Config], recipe: Any) -> Config:
    """A component's configuration, out of the recipe's keys of the same names."""
    names = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    return config(**{name: getattr(recipe, name) for name in names})


# ---- the run directory -----------------------------------------------------------------------------------------------

# The keys of a recipe that may differ in the run that resumes a checkpoint.
MAY_CHANGE = (
    *("output_dir", "run_name", "report_to", "logging_steps", "save_steps", "save_total_limit", "disable_tqdm"),
    *("log_completions", "num_completions_to_print", "rollout.progress", "replay_guard.enabled"),
    *("launch.machines", "launch.machine_rank", "launch.main_process_ip", "launch.main_process_port"),
)
MAY_CHANGE_BUT_FOR_ROUNDING = (
    *("gradient_checkpointing", "rollout.max_batch", "rollout.kv_cache_gb", "rollout.gpu_memory_utilization"),
    *("rollout.max_model_len", "rollout.sleep", "attention_kernel"),
)
LENGTH = ("max_steps", "num_train_epochs")  # these may change too where the learning rate does not depend on them
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


def prepare(recipe: Recipe) -> Path:
    """The run directory, with the resolved recipe in it."""
    return rundir.prepare(recipe.output_dir, dump_yaml(recipe.resolved()))


def checkpoint_to_resume(recipe: TrainRecipe, resume: str) -> Path:
    """The checkpoint that `--resume` means for a recipe; see rundir.checkpoint_of."""
    freely: tuple[str, ...] = MAY_CHANGE
    if recipe.lr_scheduler_type in ENDLESS and (recipe.warmup_steps == 0 or recipe.warmup_steps >= 1):
        freely += LENGTH
    if isinstance(recipe, ReplayedRecipe) and recipe.attention_kernel == "auto":
        freely += ("attention_kernel",)  # not chosen yet: the processes that train will ask again
    may_change = MayChange(freely, MAY_CHANGE_BUT_FOR_ROUNDING)
    return rundir.checkpoint_of(recipe.output_dir, resume, recipe.resolved(), may_change)


# ---- arguments -------------------------------------------------------------------------------------------------------


def options_of(recipe: TrainRecipe) -> dict[str, Any]:
    """What transformers' TrainingArguments and TRL's share, from a recipe."""
    return training_options(
        part(TrainingConfig, recipe),
        recipe.launch,
        output_dir=recipe.output_dir,
        seed=recipe.seed,
        dtype=recipe.dtype,
        more=recipe.trainer_options,
    )


def _weights_dtype(recipe: TrainRecipe) -> str:
    return weights_dtype(recipe.dtype, recipe.launch, recipe.lora)


# ---- trainers --------------------------------------------------------------------------------------------------------


def _grpo(recipe: GRPORecipe, folder: Path) -> Any:
    from rewards import make_rewards
    from rollout.make import make_engine
    from trainer.grpo.arguments import grpo_arguments
    from trainer.grpo.config import GRPOConfig
    from trainer.grpo.trainer import SparseGRPOTrainer

    try:
        functions, weights = make_rewards(recipe.rewards)
    except ValueError as error:
        raise UserError(str(error), "rewards") from error
    tokenizer = load_tokenizer(recipe.model)
    data = load_data(recipe.data, tokenizer)
    recipe.check_prompts(len(data))
    options = options_of(recipe)
    validation = recipe.validation
    held_out = None
    if validation is not None:
        source = dataclasses.replace(validation.data, limit=validation.problems)
        held_out = load_data(source, tokenizer, where="validation.data")
        options |= {"eval_strategy": "steps", "eval_steps": validation.every}
        groups = -(-recipe.per_device_train_batch_size // validation.samples)
        options |= {
            "num_generations_eval": validation.samples,
            "per_device_eval_batch_size": groups * validation.samples,
        }
    args = grpo_arguments(
        part(GRPOConfig, recipe),
        attention_kernel=recipe.attention_kernel,
        model_init_kwargs=model_options(_weights_dtype(recipe)),
        reward_weights=weights,
        **options,
    )
    engine: dict[str, Any] = {**recipe_engine_options(recipe), "policy": recipe.cache}
    engine["progress"] = recipe.rollout.progress and os.environ.get("RANK", "0") == "0"
    kind = recipe.rollout.engine

    completions = rundir.CompletionLog(folder)
    trainer = SparseGRPOTrainer(
        model=recipe.model,
        reward_funcs=functions,
        args=args,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=adapters(recipe.lora),
        callbacks=[rundir.RunLog(folder), completions],
        make_engine=lambda live: make_engine(kind, model=live if kind == "hf" else recipe.model, **engine),
        sleep=recipe.rollout.sleep,
        thinking=recipe.data.thinking,
    )
    completions.trainer = trainer
    return trainer


def _sft(recipe: SFTRecipe, folder: Path) -> Any:
    from trainer.sft.config import SFTConfig
    from trainer.sft.trainer import make_trainer

    tokenizer = load_tokenizer(recipe.model)
    data = load_data(recipe.data, tokenizer, require=("prompt", "completion"))
    problems = None
    if recipe.stop_at_accuracy is not None:
        assert recipe.data.synthetic is not None
        fresh = dataclasses.replace(recipe.data.synthetic, split="calibration", size=CHECK_PROBLEMS)
        source = dataclasses.replace(recipe.data, synthetic=fresh)
        problems = load_data(source, tokenizer, require=("prompt", "answer"))
    return make_trainer(
        recipe.model,
        part(SFTConfig, recipe),
        {"model_init_kwargs": model_options(_weights_dtype(recipe)), **options_of(recipe)},
        tokenizer,
        data,
        adapters(recipe.lora),
        [rundir.RunLog(folder)],
        problems,
    )


def _distill(recipe: DistillRecipe, folder: Path) -> Any:
    from rollout.make import make_engine
    from trainer.distill.config import DistillConfig
    from trainer.distill.trainer import DistillArguments, DistillTrainer
    from trainer.losses.config import DistillationLossConfig

    tokenizer = load_tokenizer(recipe.model)
    examples, held_out = taught_examples(recipe, tokenizer)
    sampled = recipe.completions == "student"
    args = DistillArguments(
        **_taught_options(recipe, held_out),
        loss=part(DistillationLossConfig, recipe),
        distill=part(DistillConfig, recipe),
    )
    student = _load(recipe.model, _weights_dtype(recipe))
    teacher = _teacher(recipe, student, [*examples, *(held_out or [])])
    if recipe.lora is not None:
        from peft import get_peft_model

        student = get_peft_model(student, adapters(recipe.lora))
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
        student, teacher, engine, args, examples, held_out, sleep=recipe.rollout.sleep,
        processing_class=tokenizer, callbacks=[rundir.RunLog(folder)],
    )  # fmt: skip


def _kvpop(recipe: KVpopRecipe, folder: Path) -> Any:
    from trainer.kvpop.config import KVpopConfig, KVpopLossConfig
    from trainer.kvpop.trainer import KVpopArguments, KVpopTrainer

    tokenizer = load_tokenizer(recipe.model)
    examples, held_out = taught_examples(recipe, tokenizer)
    args = KVpopArguments(
        **_taught_options(recipe, held_out),
        loss=part(KVpopLossConfig, recipe),
        kvpop=part(KVpopConfig, recipe),
    )
    student = load_model(recipe.model, _weights_dtype(recipe))
    policy: Any = make_policy(recipe.cache)
    if hasattr(student, SCORERS):
        carried: Any = saved_policy(recipe.model)
        if carried.config.scorer != policy.config.scorer:
            scorers = carried.config.scorer.parameters()
            mend = f"the model carries scorers {scorers}; name these, or remove its {POLICY_FILE}"
            raise UserError(mend, "cache.scorer")
        logger.warning("the scorers of %s are trained further", recipe.model)
    teacher = _teacher(recipe, student, [*examples, *(held_out or [])])
    return KVpopTrainer(
        student, teacher, policy, args, examples, held_out,
        processing_class=tokenizer, callbacks=[rundir.RunLog(folder)],
    )  # fmt: skip


TRAINERS: dict[str, Callable[[Any, Path], Any]] = {
    "grpo": _grpo,
    "distill": _distill,
    "kvpop": _kvpop,
    "sft": _sft,
}


# ---- what is taught, and by whom -------------------------------------------------------------------------------------


def taught_examples(recipe: TaughtRecipe, tokenizer: Any) -> tuple[list[Example], list[Example] | None]:
    """What a recipe with a teacher trains on, and what it holds out; None where it does not."""
    load: Any = load_texts if isinstance(recipe, KVpopRecipe) else load_examples
    examples, validation = load(recipe, recipe.data, tokenizer), recipe.validation
    if validation is None:
        return examples, None
    source = dataclasses.replace(validation.data, limit=validation.problems)
    return examples, load(recipe, source, tokenizer, "validation.data")


def load_examples(recipe: DistillRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Example]:
    """The examples of a dataset that `keep` and the lengths leave."""
    if recipe.completions == "student":
        return prompt_examples(load_data(config, tokenizer, where=where), tokenizer, config.thinking)
    require = ("prompt", "completion") if recipe.keep is None else ("prompt", "completion", "answer")
    data = load_data(config, tokenizer, require=require, where=where)
    if recipe.keep is not None:
        from rewards import make_rewards

        try:
            (reward,), _ = make_rewards([recipe.keep])
        except ValueError as error:
            raise UserError(str(error), "keep") from error
        data = accepted(data, reward, recipe.keep_from, where)
    context = load_config(recipe.model).max_position_embeddings
    return completed_examples(
        data,
        tokenizer,
        config.thinking,
        max_length=min(length for length in (recipe.max_length, recipe.rollout.max_model_len, context) if length),
        max_completion_length=recipe.max_completion_length,
        where=where,
    )


def load_texts(recipe: KVpopRecipe, config: DataConfig, tokenizer: Any, where: str = "data") -> list[Example]:
    """Texts of up to max_length tokens, packed where the recipe says so."""
    data = load_data(config, tokenizer, require=("prompt", "completion"), where=where)
    longest = min(recipe.max_length, load_config(recipe.model).max_position_embeddings)
    return text_examples(data, tokenizer, config.thinking, max_length=longest, packing=recipe.packing, where=where)


def _taught_options(recipe: Any, held_out: Any) -> dict[str, Any]:
    """What DistillArguments and KVpopArguments take alike."""
    options = options_of(recipe)
    if held_out is not None:
        options |= {"eval_strategy": "steps", "eval_steps": recipe.validation.every}
    return {
        **options,
        "attention_kernel": recipe.attention_kernel,
        "per_device_eval_batch_size": recipe.per_device_train_batch_size,
    }


def expected_facts(recipe: TaughtRecipe, vocab_size: int) -> dict[str, Any]:
    """What a teacher cache has to be for a recipe, whose student has so many tokens: some of TeacherFacts."""
    return {
        "source": recipe.teacher or recipe.model,
        "temperature": recipe.temperature,
        "top_k": recipe.top_k,
        "vocab_size": vocab_size,
    }


def _teacher(recipe: Any, student: Any, examples: Any) -> Any:
    """In memory, or what one has written down of all these examples."""
    from trainer.teacher.cache import TeacherCache

    if recipe.teacher_cache is not None:
        cache = TeacherCache(recipe.teacher_cache, expected_facts(recipe, student.config.vocab_size))
        if unknown := sum(example not in cache for example in examples):
            mend = f"{recipe.teacher_cache} does not know {unknown} sequences of this dataset; write it for this recipe"
            raise UserError(mend, "teacher_cache")
        return cache
    teacher = _load(recipe.teacher or recipe.model, recipe.dtype)
    if teacher.config.vocab_size != student.config.vocab_size:
        sizes = f"{teacher.config.vocab_size} tokens, the student's {student.config.vocab_size}"
        raise UserError(f"the vocabulary has {sizes}; it must be the same", "teacher")
    return teacher


def write_teacher(recipe: TaughtRecipe) -> tuple[Path, int, int]:
    """What `sparse-rl teacher` does: the folder, its examples, and the shards that were there already.

    Raises UserError for a recipe without teacher_cache, TeacherCacheError where the folder holds something else.
    """
    from trainer.teacher.cache import TeacherFacts, weights_fingerprint, write_teacher_cache

    if recipe.teacher_cache is None or recipe.top_k is None:
        raise UserError("name the folder to write, and top_k", "teacher_cache")
    source = recipe.teacher or recipe.model
    load_config(source)
    try:
        Path(recipe.teacher_cache).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{recipe.teacher_cache} cannot be written: {error}", "teacher_cache") from error
    tokenizer = load_tokenizer(recipe.model)
    examples, held_out = taught_examples(recipe, tokenizer)
    examples += held_out or []
    teacher = _load(source, recipe.dtype, "teacher").to("cuda" if torch.cuda.is_available() else "cpu")
    facts = TeacherFacts(
        source,
        weights_fingerprint(teacher),
        teacher.config.vocab_size,
        recipe.temperature,
        recipe.top_k,
        recipe.teacher_cache_dtype,
    )
    size = recipe.per_device_train_batch_size
    there = write_teacher_cache(
        recipe.teacher_cache, teacher, examples, facts, batch_size=size, chunk=recipe.chunk, progress=True
    )
    return Path(recipe.teacher_cache), len(examples), there


def _load(model: str, dtype: str, key: str = "model") -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise UserError(f"the weights of {model} cannot be read: {str(error).splitlines()[0]}", key) from error


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
