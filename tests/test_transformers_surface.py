"""The code outside trainer/ relies on names and behaviour of transformers. The tests check that they still exist.
docs/internals.md gives the reason for each.
"""

import functools
import inspect
import re
from pathlib import Path

import transformers.trainer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import rename_source_key, revert_weight_conversion
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sparse_rl.attention.interface import ATTENTION, NO_MASK, adopt
from sparse_rl.states import delta, mamba2

DOCUMENT = Path(__file__).parents[1] / "docs/internals.md"
HELD = {
    *("AttentionInterface.register", "AttentionMaskInterface.register", "masking_utils.sdpa_mask"),
    "sdpa_attention.sdpa_attention_forward",
    *("PreTrainedModel.set_attn_implementation", "PretrainedConfig._attn_implementation"),
    *("_gradient_checkpointing_func", "gradient_checkpointing"),
    *("PreTrainedModel._keys_to_ignore_on_save", "trainer.DEFAULT_PROGRESS_CALLBACK"),
    *("core_model_loading.revert_weight_conversion", "core_model_loading.rename_source_key"),
    *("conversion_mapping.get_model_conversion_mapping", "conversion_mapping.get_checkpoint_conversion_mapping"),
    *("convert_peft_config_for_transformers", "PreTrainedModel._weight_conversions"),
    "modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    *delta.FUNCTIONS,
    *mamba2.FUNCTIONS,
}


def test_our_attention_is_registered_and_adopt_selects_it(new_model):
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert list(inspect.signature(interface.register).parameters) == ["key", "value"]
        assert ATTENTION in interface().valid_keys()
    assert AttentionMaskInterface()[ATTENTION] is sdpa_mask
    model = new_model("qwen3")
    assert model.config._attn_implementation != ATTENTION
    adopt(model)
    assert model.config._attn_implementation == ATTENTION
    assert NO_MASK.ndim == 4  # a mask that transformers takes as already prepared


def test_checkpointed_modules_show_their_checkpointing_options(new_model):
    """From them we read if checkpointing is reentrant."""
    model = new_model("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    functions = [m._gradient_checkpointing_func for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    assert functions
    assert all(isinstance(f, functools.partial) and f.keywords["use_reentrant"] is False for f in functions)


def test_other_names_of_transformers_exist():
    assert hasattr(PreTrainedModel, "_keys_to_ignore_on_save")
    source = inspect.getsource(transformers.trainer)
    uses = [line.strip() for line in source.splitlines() if "DEFAULT_PROGRESS_CALLBACK" in line]
    # transformers defines this name twice, and we look it up once
    assert len(uses) == 3
    assert uses[-1].endswith("else DEFAULT_PROGRESS_CALLBACK)")
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gemma3_text"] == "Gemma3ForCausalLM"
    assert 'getattr(model, "_weight_conversions", None)' in inspect.getsource(revert_weight_conversion)


def test_functions_have_the_expected_parameters():
    for function, parameters in (
        (revert_weight_conversion, "model state_dict"),
        (rename_source_key, "source_key weight_renamings weight_converters base_model_prefix meta_state_dict reverse"),
        (get_model_conversion_mapping, "model key_mapping hf_quantizer add_legacy"),
        (get_checkpoint_conversion_mapping, "model_type"),
        (
            sdpa_attention_forward,
            "module query key value attention_mask dropout scaling is_causal position_bias cache kwargs",
        ),
        (convert_peft_config_for_transformers, "peft_config model conversions"),
    ):
        assert list(inspect.signature(function).parameters) == parameters.split(), function


def test_the_table_in_the_docs_lists_exactly_these_names():
    section = DOCUMENT.read_text().split("## transformers, outside `trainer/`")[1].split("\n## ")[0]
    first_column = re.findall(r"^\| (`[^|]+) \|", section, re.M)
    assert {name for cell in first_column for name in re.findall(r"`([^`]+)`", cell)} == HELD
