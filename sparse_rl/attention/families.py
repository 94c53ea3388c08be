"""Checks that a model can be replayed, and the shape of its KV cache, from its configuration. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_rl.config import show
from sparse_rl.errors import UserError

# model_type -> reason why only the hf engine can sample from it; None means that vllm can, too
FAMILIES: dict[str, str | None] = {
    "qwen2": None,
    "qwen3": None,
    "llama": None,
}

SIZES = {  # key of config.json -> maximum allowed value
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1000),
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 1_000_000),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 2**30),
}


def check_sizes(values: Mapping[str, Any], model: str = "the model") -> None:
    """Raise UserError if config.json has an implausible size. Call this before transformers uses the sizes."""
    for name, most in SIZES.items():
        size = values.get(name)
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            mistake = f"{name} is {show(size)} in config.json of {model}; a whole number from 1 to {most:,} is needed"
            raise UserError(mistake, "model")


def check_replayable(config: Any, model: str = "the model") -> None:
    """Raise UserError if the model's attention cannot be replayed.

    Replay needs a supported family, no sliding windows, no attention dropout, and equal groups of query heads.
    """
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise UserError(f"{model} is of type {config.model_type!r}; the supported families are {families}", "model")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise UserError(f"{model} cannot be replayed: it has sliding-window layers, which evict by themselves", "model")
    if config.num_attention_heads % config.num_key_value_heads:
        heads = f"{config.num_key_value_heads} kv heads do not divide {config.num_attention_heads} heads"
        raise UserError(f"{heads} in config.json of {model}", "model")
    if getattr(config, "attention_dropout", 0.0):
        raise UserError(f"{model} has attention_dropout, which cannot be replayed; set it to 0 in config.json", "model")


def family_only_hf(config: Any) -> str | None:
    """Return the reason why only the hf engine can sample from the model. None means that vllm can, too."""
    reason = FAMILIES.get(config.model_type)
    return reason and f"{config.model_type}: {reason}"


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of layers, the number of kv heads, and the head dimension of a model's KV cache.

    config : the model's configuration, from transformers
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim


def window_of(config: Any) -> int | None:
    """Return the maximum number of tokens that a model can read. None means unknown, because RoPE is scaled."""
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    return None if scaled else config.max_position_embeddings
