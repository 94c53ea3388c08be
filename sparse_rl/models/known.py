"""Shapes of the hub models that the shipped recipes name, for `sparse-rl doctor` if the hub cannot be reached.

Sources, read in November 2026: layers, heads and sizes are from litgpt/config.py (github.com/Lightning-AI/litgpt,
commit 26857050), which quotes each model's config.json. That file lacks DeepSeek-R1-Distill-Qwen-7B, which was derived
from Qwen2.5-Math-7B and has its shape. The context lengths are from the model cards. The parameter counts computed from
these shapes equal the published ones (tests/models/test_known_models.py).
"""

from __future__ import annotations

from typing import Any

from sparse_rl.models.hub import UnavailableError, check_available
from sparse_rl.models.load import load_config

KEYS = (
    *("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
TABLE: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", 28, 12, 2, 1536, 8960, 151_936, 32_768, True),
    "Qwen/Qwen3-0.6B": ("qwen3", 28, 16, 8, 1024, 3072, 151_936, 40_960, True),
    "Qwen/Qwen3-1.7B-Base": ("qwen3", 28, 16, 8, 2048, 6144, 151_936, 32_768, True),
    "Qwen/Qwen3-4B": ("qwen3", 36, 32, 8, 2560, 9728, 151_936, 40_960, True),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3", 36, 32, 8, 2560, 9728, 151_936, 262_144, True),
    "Qwen/Qwen3-8B": ("qwen3", 36, 32, 8, 4096, 12_288, 151_936, 40_960, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": ("qwen2", 28, 28, 4, 3584, 18_944, 152_064, 131_072, False),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("llama", 32, 32, 8, 4096, 14_336, 128_256, 131_072, False),
    "meta-llama/Llama-3.2-3B-Instruct": ("llama", 28, 24, 8, 3072, 8192, 128_256, 131_072, True),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", 32, 32, 8, 4096, 14_336, 32_768, 32_768, False),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", 48, 32, 4, 2048, 6144, 151_936, 40_960, False),
    "google/gemma-3-12b-it": ("gemma3_text", 48, 16, 8, 3840, 15_360, 262_208, 131_072, True),  # its text part
}
FURTHER: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-Instruct-v0.3": {"sliding_window": None},  # transformers' default is 4096
    "Qwen/Qwen3-30B-A3B": {
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    },
    "google/gemma-3-12b-it": {
        **{"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 1024},
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
SHAPES = {
    name: {**dict(zip(KEYS, row, strict=True)), "head_dim": 128, **FURTHER.get(name, {})} for name, row in TABLE.items()
}


def load_shape(model: str) -> Any:
    """Load the configuration of a directory or hub name; if it is unavailable, use the table SHAPES.

    A configuration from the table has the model's shape, but not the model's eos, rope and dtype. Raises
    UnavailableError if the table does not have the model either.
    """
    try:
        return load_config(model)
    except UnavailableError:
        if model not in SHAPES:
            raise
    from transformers import AutoConfig

    return AutoConfig.for_model(**SHAPES[model])


def is_tabled(model: str) -> bool:
    """Return True if `load_shape` reads the shape of `model` from the table."""
    try:
        check_available(model)
    except UnavailableError:
        return model in SHAPES
    return False
