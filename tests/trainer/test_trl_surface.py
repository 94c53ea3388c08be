"""The members of TRL and transformers that we override or read exist with their signatures (docs/internals.md).

After an update of these libraries, a failure names the changed member. The table gives the reason why we use it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import deepspeed.ops
import pytest
import transformers
from accelerate import Accelerator
from deepspeed.checkpoint import ds_to_universal
from processes import python
from transformers.integrations import deepspeed as hf_deepspeed
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.models.utils import _ForwardRedirection, prepare_deepspeed
from trl.trainer import grpo_trainer, sft_trainer
from trl.trainer.utils import (
    FusedCausalLMOutput,
    RepeatSampler,
    add_fused_lm_head,
    create_model_from_path,
    maybe_gather_lm_head_ctx,
)

DOCUMENT = Path(__file__).parents[2] / "docs/internals.md"
IMAGES = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids "
    "mm_token_type_ids image_position_ids"
)
METHODS = {
    GRPOTrainer: {
        "_get_train_sampler": "dataset",
        "_tokenize_prompts": "prompts",
        "_generate": "prompts",
        "_tool_call_loop": "prompts prompt_ids completion_ids completions logprobs images multimodal_fields",
        "_get_tool_suffix_ids": "tool_messages",
        "_generate_single_turn": "prompt_ids images multimodal_fields num_generations has_tool_images",
        "_calculate_rewards": "inputs prompts completions completion_ids_list",
        "_log_completion_extra": "column values",
        "_generate_and_score_completions": "inputs",
        "_prepare_inputs": "generation_batch",
        "training_step": "model inputs num_items_in_batch",
        "_compute_loss": "model inputs",
        "_get_per_token_logps_and_entropies": (
            f"model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss {IMAGES}"
        ),
    },
    RepeatSampler: {"__init__": "data_source mini_repeat_count batch_size repeat_count shuffle seed", "__iter__": ""},
    transformers.Trainer: {
        "_get_output_dir": "trial",
        "_save_checkpoint": "model trial",
        "create_model_card": (
            "language license tags model_name finetuned_from tasks dataset_tags dataset dataset_args"
        ),
        "save_model": "output_dir _internal_call",
        "train": "resume_from_checkpoint trial ignore_keys_for_eval",
        "_load_rng_state": "checkpoint",
        "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
        "log": "logs start_time",
        "_init_training_state": ("max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial"),
        "_run_epoch": (
            "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
            "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
        ),
        "_maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",
        "_load_from_checkpoint": "resume_from_checkpoint model",
        "_save": "output_dir state_dict",
        "get_batch_samples": "epoch_iterator num_batches device",
        "compute_loss": "model inputs return_outputs num_items_in_batch",
    },
}
FUNCTIONS: dict[Callable, str] = {
    _ForwardRedirection.__call__: "self wrapper_module original_module method args kwargs",
    prepare_deepspeed: "model accelerator",
    unwrap_model_for_generation: (
        "model accelerator gather_deepspeed3_params generation_kwargs gradient_checkpointing_kwargs"
    ),
    hf_deepspeed.unset_hf_deepspeed_config: "",
    ds_to_universal.main: "args",
    create_model_from_path: "model_id architecture kwargs",
    maybe_gather_lm_head_ctx: "params",
}
ATTRIBUTES = {
    GRPOTrainer: "use_vllm environments _metrics _logs _step _buffered_inputs _total_train_tokens aux_loss_enabled",
    transformers.Trainer: "_tr_loss _total_loss_scalar _globalstep_last_logged",
}


@pytest.mark.parametrize("owner", METHODS)
def test_methods_have_the_expected_parameters(owner):
    for name, parameters in METHODS[owner].items():
        assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *parameters.split()], name


def test_functions_have_the_expected_parameters_and_bodies():
    for function, parameters in FUNCTIONS.items():
        assert list(inspect.signature(function).parameters) == parameters.split(), function
    assert {"log_probs", "entropy"} <= {field.name for field in dataclasses.fields(FusedCausalLMOutput)}
    assert "self, *args, fused_lm_head=False, labels=None," in inspect.getsource(add_fused_lm_head)
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    assert "self.args.logging_nan_inf_filter" in inspect.getsource(transformers.Trainer._run_epoch)
    assert all(module.create_model_from_path is create_model_from_path for module in (grpo_trainer, sft_trainer))
    assert isinstance(Accelerator.optimizer_step_was_skipped, property)


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_objects_get_the_attributes_that_we_use(owner):
    source = inspect.getsource(owner)
    for name in ATTRIBUTES[owner].split():
        assert re.search(rf"self\.{name}\b.*=", source), name


def test_only_expected_functions_read_use_vllm():
    """We set it after construction."""
    readers = {
        name
        for name, function in vars(GRPOTrainer).items()
        if callable(function) and "self.use_vllm" in inspect.getsource(function)
    }
    assert readers == {
        "__init__",  # runs before we set `use_vllm`
        "_generate_single_turn",  # overridden by us
        "_generate",  # reads `use_vllm` only with rollout_func
        "_tool_call_loop",  # overridden by us
        "_generate_and_score_completions",  # the correction
        "_compute_loss",  # the correction
    }


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_training_imports_no_vllm():
    """Control: TRL alone imports it."""
    for module, imports_it in (("trainer.grpo.trainer", 0), ("trl.trainer.grpo_trainer", 1)):
        assert python("-c", f"import sys, {module}; sys.exit('vllm' in sys.modules)").returncode == imports_it


TRLS_OWN = """
import sys, torch, trainer.grpo.trainer
from accelerate import Accelerator
from trl.trainer.grpo_trainer import VLLMGeneration
assert "vllm" not in sys.modules
server = {"mode": "server", "server_base_url": "http://127.0.0.1:9", "server_timeout": 0}
try:
    VLLMGeneration(torch.nn.Linear(1, 1), Accelerator(), None, **server)
except OSError as error:
    print(error, VLLMGeneration.__init__.__globals__["LLM"])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_trl_itself_can_use_vllm_in_a_process_that_trains():
    """It looks for its server, which is not there, and has what it needs to sample in the process."""
    process = python("-c", TRLS_OWN)
    assert "The vLLM server can't be reached" in process.stdout and "vllm." in process.stdout, process.stderr


def test_the_sampler_gives_trls_order_in_the_first_epoch(grpo):
    schedule = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}
    trainer = grpo(**schedule)
    sampler, trl_sampler = trainer._get_train_sampler(), GRPOTrainer._get_train_sampler(trainer)
    order = list(trl_sampler)
    assert list(sampler) == order
    assert len(sampler) == len(trl_sampler) == len(order) > 0
    sampler.set_epoch(1)
    assert list(sampler) != order
    assert sorted(sampler) == sorted(order)


def test_the_table_lists_every_name():
    """The table of docs/internals.md lists exactly the members of TRL and transformers that are checked here."""
    checked = {f"{owner.__name__}.{name}" for owner, names in METHODS.items() for name in names if name != "__init__"}
    checked |= {f"{owner.__name__}.{name}" for owner, names in ATTRIBUTES.items() for name in names.split()}
    checked |= {"add_fused_lm_head", "_ForwardRedirection", "prepare_deepspeed", "unwrap_model_for_generation"}
    checked |= {"create_model_from_path", "maybe_gather_lm_head_ctx", "INTEGRATION_TO_CALLBACK"}
    checked |= {"TrainingArguments.logging_nan_inf_filter", "Accelerator.optimizer_step_was_skipped"}
    checked |= {"is_vllm_available", "unset_hf_deepspeed_config", "deepspeed.ops.__compatible_ops__"}
    section = DOCUMENT.read_text().split("## TRL and transformers")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([^`]+)` \|", section, re.M)) == checked
