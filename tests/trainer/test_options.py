"""A trainer refuses unsupported options and arguments with an error of one line, before a model is loaded. It does so
in Python as in a recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import trl
from transformers import TrainingArguments

from sparse_rl.errors import UserError
from sparse_rl.recipe import make_recipe
from trainer.arguments import ReplayedArguments
from trainer.distill.trainer import DistillArguments, DistillTrainer
from trainer.grpo.arguments import SparseGRPOArguments, check_made, grpo_arguments
from trainer.grpo.config import SparseGRPOConfig
from trainer.kvpop.trainer import KVpopArguments
from trainer.options import REFUSED, instead
from trainer.sft.config import SFTConfig
from trainer.sft.trainer import make_trainer

CPU = {"use_cpu": True, "bf16": False, "report_to": []}
SHARED = {"model": "nowhere", "output_dir": "o", "data": {"path": "p.jsonl"}}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {**SHARED, "rewards": ["math"], "cache": {"policy": "tova", "budget": 8}},
    "distill": {**SHARED, "cache": {"policy": "tova", "budget": 8}},
    "kvpop": {**SHARED, "cache": {"policy": "kvpop", "budget": 8, "window": 2}},
    "sft": SHARED,
}
LIBRARIES = {"grpo": trl.GRPOConfig, "distill": TrainingArguments, "kvpop": TrainingArguments, "sft": trl.SFTConfig}
PREFIX = peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
PROMPT = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")


def arguments(kind: str, folder: Path, **options: Any) -> Any:
    """Make a trainer's arguments as a Python caller does."""
    all_options = {"output_dir": str(folder), **CPU, **options}
    if kind == "grpo":
        return grpo_arguments(SparseGRPOConfig(), **all_options)
    if kind == "sft":
        return make_trainer("nowhere", SFTConfig(), all_options, None, None, None, ())
    return {"distill": DistillArguments, "kvpop": KVpopArguments}[kind](**all_options)


def refused(kind: str) -> list[tuple[str, Any]]:
    """Return the library's options that a kind refuses, each with a value other than its default."""
    fields = [f for f in dataclasses.fields(LIBRARIES[kind]) if instead(f.name, kind)]
    return [(f.name, not f.default if isinstance(f.default, bool) else "x") for f in fields]


@pytest.mark.parametrize("kind", REFUSED)
def test_python_refuses_the_same_options_as_a_recipe(kind: str, tmp_path: Path) -> None:
    assert len(refused(kind)) > 15
    for option, value in refused(kind):
        with pytest.raises(UserError) as in_python:
            arguments(kind, tmp_path, **{option: value})
        with pytest.raises(UserError) as in_a_recipe:
            make_recipe({"kind": kind, **RECIPES[kind], option: value})
        assert (in_python.value.key, in_a_recipe.value.key) == (option, option)
        fix = str(instead(option, kind))
        assert fix in in_python.value.message
        assert fix in in_a_recipe.value.message


def test_grpo_refuses_the_expected_options() -> None:
    """GRPO refuses the options named here, so that none can disappear from its list unnoticed."""
    names = {option for option, _ in refused("grpo")}
    assert names >= {
        *("use_vllm", "min_p", "repetition_penalty", "generation_kwargs", "cache_implementation"),
        *("chat_template_kwargs", "cast_lm_head_to_fp32", "use_transformers_continuous_batching"),
        *("neftune_noise_alpha", "vllm_mode", "vllm_importance_sampling_mode", "fsdp"),
    }
    assert not names & {"beta", "loss_type", "sync_ref_model", "temperature"}


def test_arguments_that_are_constructed_directly_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"use_vllm: not an option here: use the key rollout\.engine"):
        SparseGRPOArguments(output_dir=str(tmp_path), **CPU, use_vllm=True)
    grpo_args = SparseGRPOArguments(output_dir=str(tmp_path), **CPU, sparse=SparseGRPOConfig(importance_clip=5.0))
    assert (grpo_args.vllm_importance_sampling_mode, grpo_args.vllm_importance_sampling_clip_max) == (
        "token_truncate",
        5.0,
    )
    assert isinstance(grpo_args, ReplayedArguments)
    assert grpo_args.kind == "grpo"


@pytest.mark.parametrize("kind", ["grpo", "distill", "kvpop"])
def test_gradient_checkpointing_is_never_reentrant(kind: str, tmp_path: Path) -> None:
    """Reentrant checkpointing, torch's default, is replaced by `use_reentrant: False`. If a caller asks for it, or for
    an unknown option, the error has one line.
    """
    for options in ({"preserve_rng_state": False}, {}):
        trainer_args = arguments(kind, tmp_path, gradient_checkpointing_kwargs=options)
        assert trainer_args.gradient_checkpointing_kwargs == {"use_reentrant": False, **options}
    for refused_options, message in (
        ({"every_n_layers": 2}, "gradient_checkpointing_kwargs: its keys must be among .*, got 'every_n_layers'"),
        ({"use_reentrant": None}, "reentrant gradient checkpointing is not supported"),
        ({"use_reentrant": True}, "reentrant gradient checkpointing is not supported"),
        ('{"use_reentrant": true}', "reentrant gradient checkpointing is not supported"),
    ):
        with pytest.raises(UserError, match=message):
            arguments(kind, tmp_path, gradient_checkpointing_kwargs=refused_options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tools": [len]}, "tools: a trace covers one completion"),
        ({"environment_factory": dict}, "environment_factory: a trace covers one completion"),
        ({"rollout_func": print}, "rollout_func: a trace covers one completion"),
        ({"args": trl.GRPOConfig("o", **CPU)}, r"args: must be made by grpo_arguments .*, got GRPOConfig"),
        ({"args": None}, "args: must be made by grpo_arguments .*, got NoneType"),
        ({"peft_config": PREFIX}, "peft_config: only LoRA adapters .*, got PrefixTuningConfig"),
        ({"peft_config": PROMPT}, "peft_config: only LoRA adapters .*, got PromptTuningConfig"),
        ({"peft_config": peft.IA3Config()}, "peft_config: only LoRA adapters .*, got IA3Config"),
        ({"peft_config": peft.LoraConfig(lora_dropout=0.1)}, "peft_config.lora_dropout: adapter dropout"),
    ],
)
def test_unsupported_trainer_arguments_are_refused(given: dict[str, Any], says: str, grpo: Callable) -> None:
    """Unsupported arguments of a trainer are refused before a model is loaded: the model `nowhere` does not exist."""
    from trainer.grpo.trainer import SparseGRPOTrainer

    def make(**defaults: Any) -> Any:
        return SparseGRPOTrainer(**{**defaults, **given})

    with pytest.raises(UserError, match=says) as caught:
        grpo(model="nowhere", trainer_class=make)
    assert "\n" not in str(caught.value)


def test_a_model_with_adapters_other_than_lora_is_refused(grpo: Callable, new_model: Callable) -> None:
    """GRPO and distillation refuse a model that has adapters other than LoRA."""
    model = peft.get_peft_model(new_model("qwen3"), PROMPT)
    with pytest.raises(UserError, match="only LoRA adapters can be trained under evictions, got PromptTuningConfig"):
        grpo(model=model)
    engine: Any = None
    with pytest.raises(UserError, match="only LoRA adapters can be trained under evictions, got PromptTuningConfig"):
        DistillTrainer(model, new_model("qwen3"), engine, engine, [])


def test_sync_ref_model_needs_a_separate_reference_model(grpo: Callable, tmp_path: Path) -> None:
    """The option sync_ref_model is refused without a reference model that is separate from the policy, and under
    learned policies.
    """
    learned = {"policy": "kvpop", "budget": 8, "window": 2}
    for keys, message in (
        ({}, "sync_ref_model: needs beta above 0"),
        ({"beta": 0.1, "lora": {"r": 4}}, "sync_ref_model: with lora the reference model, which has no adapter"),
        ({"beta": 0.1, "cache": learned}, "sync_ref_model: cache.policy kvpop has scorers, but the reference"),
    ):
        with pytest.raises(UserError, match=message):
            make_recipe({"kind": "grpo", **RECIPES["grpo"], "sync_ref_model": True, **keys})
    with pytest.raises(UserError, match="sync_ref_model: needs beta above 0"):
        grpo(model="nowhere", sync_ref_model=True)
    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM")
    with pytest.raises(UserError, match="`sync_ref_model=True` while using a PEFT model"):  # this is TRL's message
        grpo(sync_ref_model=True, beta=0.1, peft_config=lora)


def test_dropping_groups_needs_a_single_sum_of_rewards(grpo: Callable) -> None:
    """`uniform_groups: drop` drops groups whose rewards are all equal. It needs the sum of all rewards, so it is
    refused if each reward is normalised separately.
    """
    message = "uniform_groups: drop needs multi_objective_aggregation sum_then_normalize"
    options = {"uniform_groups": "drop", "multi_objective_aggregation": "normalize_then_sum"}
    with pytest.raises(UserError, match=message):
        make_recipe({"kind": "grpo", **RECIPES["grpo"], **options})
    with pytest.raises(UserError, match=message):
        grpo(model="nowhere", **options)


def test_settings_that_trl_switches_on_are_refused(new_model: Callable) -> None:
    """TRL itself switches on reentrant gradient checkpointing (for LoRA under ZeRO-3), which is refused. It also
    switches on the balancing loss of experts, by keys of config.json. A dense model that has these keys gets no such
    loss.
    """
    accepted = {"args": SimpleNamespace(gradient_checkpointing_kwargs=None), "aux_loss_enabled": True}
    for family, balanced in (("granite", False), ("qwen3_moe", True)):
        trainer = SimpleNamespace(**accepted, model=new_model(family))
        check_made(trainer)
        assert trainer.aux_loss_enabled is balanced
    reentrant = SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(UserError, match="LoRA under ZeRO-3 makes gradient checkpointing reentrant"):
        check_made(SimpleNamespace(**{**accepted, "args": reentrant, "model": new_model("qwen3")}))


@pytest.mark.parametrize(
    ("kind", "option", "value", "says"),
    [
        ("grpo", "importance_sampling_level", "tokens", "expected one of token, sequence"),
        ("grpo", "multi_objective_aggregation", "sum", "expected one of sum_then_normalize, normalize_then_sum"),
        ("grpo", "ref_model_sync_steps", 0, "expected a whole number >= 1"),
        ("grpo", "top_entropy_quantile", -1.0, "expected a number between 0 and 1"),
        ("grpo", "router_aux_loss_coef", -0.01, "expected a number >= 0"),
        ("grpo", "log_level", "loud", "expected one of detail"),
        ("distill", "train_sampling_strategy", "group_by_length", "expected one of random, sequential"),
        ("sft", "train_sampling_strategy", "group_by_length", "expected one of"),
        ("sft", "packing_strategy", "best", "expected one of bfd, bfd_split, wrapped"),
    ],
)
def test_invalid_values_are_refused_in_a_recipe(kind: str, option: str, value: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"{option}: {says}"):
        make_recipe({"kind": kind, **RECIPES[kind], option: value})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dataloader_persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"cycles": 1}}, "unexpected keyword argument 'cycles'"),
        ({"optim": "lomo"}, "lomo"),
        (
            {"metric_for_best_model": "accuracy", "held_out": 4, "eval_strategy": "steps", "eval_steps": 1,
             "num_generations_eval": 2, "save_strategy": "steps", "save_steps": 1},
            "`metric_for_best_model` training argument is set to 'eval_accuracy'",
        ),
    ],
)  # fmt: skip
@pytest.mark.few(2)
def test_errors_of_the_libraries_in_training_are_one_line(settings: dict[str, Any], says: str, grpo: Callable) -> None:
    """If a data loader, optimizer, learning-rate schedule or metric refuses an option, the error is a user error of one
    line too, although these objects are created late."""
    with pytest.raises(UserError, match=f"an option is refused: .*{says}") as caught:
        grpo(**settings).train()
    assert "\n" not in str(caught.value)


def test_activation_offloading_is_refused_on_a_cpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="activation_offloading: needs a GPU"):
        arguments("sft", tmp_path, activation_offloading=True)
