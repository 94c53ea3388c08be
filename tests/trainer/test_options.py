"""A trainer refuses unsupported options and arguments with an error of one line, before a model is loaded. It does so
in Python as in a recipe.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import trl
from datasets import Dataset
from trainer_runs import GKV
from transformers import TrainingArguments

from sparse_rl.errors import UserError
from sparse_rl.recipe import make_recipe
from trainer.arguments import ReplayedArguments
from trainer.config import SFTConfig
from trainer.distill import DistillArguments, DistillTrainer
from trainer.grpo.trainer import SparseGRPOArguments, SparseGRPOTrainer, check_made
from trainer.options import REFUSED, instead
from trainer.retrofit import KVpopArguments
from trainer.sft import make_trainer

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
        return SparseGRPOArguments(**all_options)
    if kind == "sft":
        return make_trainer("nowhere", SFTConfig(), all_options, None, None, None, ())
    return {"distill": DistillArguments, "kvpop": KVpopArguments}[kind](**all_options)


def refused(kind: str) -> list[tuple[str, Any]]:
    """Return the library's options that a kind refuses, each with a value other than its default."""
    fields = [f for f in dataclasses.fields(LIBRARIES[kind]) if instead(f.name, kind)]
    return [(f.name, not f.default if isinstance(f.default, bool) else "x") for f in fields]


@pytest.mark.parametrize("kind", REFUSED)
def test_python_refuses_the_same_options_as_a_recipe(kind, tmp_path):
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


def test_grpo_refuses_the_expected_options():
    """GRPO refuses the options named here, so that none can disappear from its list unnoticed."""
    names = {option for option, _ in refused("grpo")}
    assert names >= {
        *("use_vllm", "repetition_penalty", "generation_kwargs", "cache_implementation"),
        *("chat_template_kwargs", "cast_lm_head_to_fp32", "use_transformers_continuous_batching"),
        *("neftune_noise_alpha", "vllm_mode", "vllm_importance_sampling_mode", "fsdp"),
    }
    assert not names & {"beta", "loss_type", "sync_ref_model", "temperature"}


def test_arguments_that_are_constructed_directly_are_checked_too(tmp_path):
    with pytest.raises(UserError, match=r"use_vllm: not an option here: use the key rollout\.engine"):
        SparseGRPOArguments(output_dir=str(tmp_path), **CPU, use_vllm=True)
    grpo_args = SparseGRPOArguments(output_dir=str(tmp_path), **CPU, importance_clip=5.0)
    assert (grpo_args.vllm_importance_sampling_mode, grpo_args.vllm_importance_sampling_clip_max) == (
        "token_truncate",
        5.0,
    )
    with pytest.raises(UserError, match=r"match_gradient: must be through or constant, got 'none'"):
        DistillArguments(output_dir=str(tmp_path), **CPU, match_gradient="none")
    assert DistillArguments(output_dir=str(tmp_path), **CPU, match_gradient="constant").match_gradient == "constant"
    assert isinstance(grpo_args, ReplayedArguments)
    assert grpo_args.kind == "grpo"


@pytest.mark.parametrize("kind", ["grpo", "distill", "kvpop"])
def test_gradient_checkpointing_is_never_reentrant(kind, tmp_path):
    for options in ({"preserve_rng_state": False}, {}):
        trainer_args = arguments(kind, tmp_path, gradient_checkpointing_kwargs=options)
        assert trainer_args.gradient_checkpointing_kwargs == {"use_reentrant": False, **options}
    for refused_options, message in (
        ({"use_reentrant": None}, "reentrant gradient checkpointing is not supported"),
        ({"use_reentrant": True}, "reentrant gradient checkpointing is not supported"),
        ('{"use_reentrant": true}', "reentrant gradient checkpointing is not supported"),
    ):
        with pytest.raises(UserError, match=message):
            arguments(kind, tmp_path, gradient_checkpointing_kwargs=refused_options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tools": [len]}, "tools: len needs type hints and a docstring with its Args"),
        ({"environment_factory": 3}, "environment_factory: 3 has no method reset, with which a conversation begins"),
        ({"rollout_func": print}, "rollout_func: a trace is recorded by our engine alone"),
        ({"args": TrainingArguments("o", **CPU)}, "args: must be of class SparseGRPOArguments .* or GRPOConfig, got T"),
        ({"args": trl.GRPOConfig("o", **CPU, repetition_penalty=2.0)}, "repetition_penalty: not an option here"),
        ({"rollout": ["hf"]}, "rollout: expected a mapping"),
        ({"prompt_cache": ["am"]}, "prompt_cache: expected a mapping"),
        ({"rollout": {"max_bach": 2}}, "rollout.max_bach: unknown key; did you mean rollout.max_batch"),
        ({"rollout": {"tensor_parallel": 2}}, "rollout.tensor_parallel: in training each process"),
        ({"cache": {"policy": "gkv"}}, "cache policy 'gkv' needs a budget"),
        ({"engine": SimpleNamespace()}, "cache: the given engine has a policy of its own; remove cache"),
        ({"peft_config": PREFIX}, "peft_config: only LoRA adapters .*, got PrefixTuningConfig"),
        ({"peft_config": PROMPT}, "peft_config: only LoRA adapters .*, got PromptTuningConfig"),
        ({"peft_config": peft.IA3Config()}, "peft_config: only LoRA adapters .*, got IA3Config"),
        ({"peft_config": peft.LoraConfig(lora_dropout=0.1)}, "peft_config.lora_dropout: adapter dropout"),
    ],
)
def test_unsupported_trainer_arguments_are_refused(given, says, grpo):

    def make(**defaults: Any) -> Any:
        return SparseGRPOTrainer(**{**defaults, **given})

    with pytest.raises(UserError, match=says) as caught:
        grpo(model="nowhere", trainer_class=make)
    assert "\n" not in str(caught.value)


def test_rows_that_are_no_dataset_are_refused(grpo, tiny, tmp_path):
    """Control: the same rows as a Dataset. Distillation reads a stream whole; GRPO needs a length."""
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]
    dataset = Dataset.from_list(rows)

    def distill(given: Any) -> Any:
        args = DistillArguments(output_dir=str(tmp_path), **CPU)
        return DistillTrainer(tiny(), args, given, cache=GKV, rollout={"engine": "hf"}).train_dataset

    assert distill(dataset.to_iterable_dataset()) == distill(dataset)
    assert len(distill(dataset)) == 8
    with pytest.raises(UserError, match=r"train_dataset: must be a datasets\.Dataset, or a list of Examples"):
        distill(rows)

    def make(**defaults: Any) -> Any:
        return SparseGRPOTrainer(**{**defaults, "train_dataset": dataset.to_iterable_dataset()})

    grpo()
    with pytest.raises(UserError, match=r"train_dataset: must be a datasets\.Dataset, which has a length"):
        grpo(trainer_class=make)


def test_rows_without_contexts_are_refused_where_contexts_are_compacted(grpo, tiny, tmp_path):
    """Control: rows with contexts."""
    rows = Dataset.from_list([{"prompt": "1+1=", "completion": "2", "context": "1+"}] * 8)
    given: dict[str, Any] = {"cache": "full", "prompt_cache": {"ratio": 0.5}}

    def distill(rows: Any, held_out: Any = None) -> Any:
        args = DistillArguments(output_dir=str(tmp_path), **CPU)
        return DistillTrainer(tiny(), args, rows, held_out, rollout={"engine": "hf"}, **given)

    def make(**defaults: Any) -> Any:
        return SparseGRPOTrainer(**{**defaults, **given})

    def with_contexts(**defaults: Any) -> Any:
        return make(**{**defaults, "train_dataset": rows})

    distill(rows, rows)
    grpo(trainer_class=with_contexts)
    without = rows.remove_columns("context")
    for refused in (
        lambda: distill(without),
        lambda: distill(rows, without),
        lambda: grpo(trainer_class=make),
        lambda: grpo(trainer_class=with_contexts, held_out=4),
    ):
        with pytest.raises(UserError, match="prompt_cache: needs rows with a column context"):
            refused()


def test_a_model_with_adapters_other_than_lora_is_refused(grpo, new_model):
    model = peft.get_peft_model(new_model("qwen3"), PROMPT)
    with pytest.raises(UserError, match="only LoRA adapters can be trained under evictions, got PromptTuningConfig"):
        grpo(model=model)
    with pytest.raises(UserError, match="only LoRA adapters can be trained under evictions, got PromptTuningConfig"):
        DistillTrainer(model, train_dataset=[])


def test_sync_ref_model_needs_a_separate_reference_model(grpo):
    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM")
    with pytest.raises(UserError, match="`sync_ref_model=True` while using a PEFT model"):  # this is TRL's message
        grpo(sync_ref_model=True, beta=0.1, peft_config=lora)


def test_settings_that_trl_switches_on_are_refused(new_model):
    """TRL switches them on for LoRA under ZeRO-3, and the balancing loss by keys of config.json."""
    accepted = {"args": SimpleNamespace(gradient_checkpointing_kwargs=None), "aux_loss_enabled": True}
    for family, balanced in (("granite", False), ("qwen3_moe", True)):
        trainer = SimpleNamespace(**accepted, model=new_model(family))
        check_made(trainer)
        assert trainer.aux_loss_enabled is balanced
    reentrant = SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(UserError, match="LoRA under ZeRO-3 makes gradient checkpointing reentrant"):
        check_made(SimpleNamespace(**{**accepted, "args": reentrant, "model": new_model("qwen3")}))


def test_an_optimizer_that_is_not_installed_is_refused_in_one_line(grpo):
    with pytest.raises(UserError, match=r"an option is refused: .*lomo") as caught:
        grpo(optim="lomo").train()
    assert "\n" not in str(caught.value)
