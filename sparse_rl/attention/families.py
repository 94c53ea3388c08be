"""Checks that a model can be replayed, and the shape of its KV cache, from its configuration. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparse_rl.config import show
from sparse_rl.errors import UserError

# model_type -> reason why only the hf engine can sample from it; None means that vllm can, too
FAMILIES: dict[str, str | None] = {
    "qwen2": None,
    "qwen3": None,
    "llama": None,
    "mistral": None,
    "ministral3": None,
    "phi3": None,
    "granite": None,
    "seed_oss": None,
    "glm4": None,
    "smollm3": None,
    "olmo2": None,
    "starcoder2": None,
    "qwen3_moe": None,
    "qwen2_moe": None,
    "mixtral": None,
    "olmoe": None,
    "glm4_moe": None,
    "gemma3_text": "its sliding-window layers need caches of their own",
}

# model_type of a multimodal model whose text part is used -> its class, in `architectures` of config.json
MULTIMODAL = {"gemma3": "Gemma3ForConditionalGeneration"}

# model_type -> settings that vLLM does not read, with the value that its code for the family assumes
UNREAD: dict[str, dict[str, Any]] = {
    "qwen3": {"attention_bias": False},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "qwen3_moe": {"attention_bias": False},
    "qwen2_moe": {"qkv_bias": True},
    "olmoe": {
        **{"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False, "tie_word_embeddings": False},
    },
    "glm4_moe": {"tie_word_embeddings": False},
}

WINDOWS = "its sliding-window layers evict by themselves, which is not replayed yet"
STATE = "it has layers with a recurrent state, which is no KV cache and cannot be evicted"
LATENT = "its latent attention (MLA) has no keys and values of single heads"
SEVERAL = "it reads images or sound, and only text is supported"

# model_type -> what is missing for a family that users ask for
MISSING: dict[str, str] = {
    **dict.fromkeys(("gemma3n_text", "olmo3", "cohere2", "exaone4"), WINDOWS),
    **dict.fromkeys(("gemma", "cohere"), "the family has not been tested"),
    "gemma2": "its soft-capped attention and its sliding windows are not replayed",
    "gpt_oss": "its attention sinks and sliding windows are not replayed yet",
    "llama4_text": "its chunked attention is not replayed",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"), LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "jamba", "bamba", "mamba", "mamba2"), STATE),
    **dict.fromkeys(("zamba2", "falcon_h1", "falcon_mamba", "granitemoehybrid", "nemotron_h", "lfm2"), STATE),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "minimax", "kimi_linear", "qwen3_5", "qwen3_5_moe"), STATE),
    **dict.fromkeys(("gemma3n", "mistral3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"), SEVERAL),
}

LAYER_KINDS = {  # entries of layer_types -> what is missing for a layer of that kind
    "sliding_attention": "it has sliding-window layers, which evict by themselves",
    "chunked_attention": "it has layers with chunked attention",
    **dict.fromkeys(
        ("linear_attention", "mamba", "conv", "recurrent", "hybrid"), "it has layers with a recurrent state"
    ),
}
NOISES = (  # random changes of a forward pass in training
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embedding_dropout", "embd_pdrop", "hidden_dropout"),
    "router_jitter_noise",
)
BY_LENGTH = ("dynamic", "longrope")  # kinds of RoPE whose frequencies depend on the length of the text

SIZES = {  # key of config.json -> maximum allowed value
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1000),
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 1_000_000),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 2**30),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST_EXPERTS = 32_767  # traces record experts in int16


def check_sizes(values: Mapping[str, Any], model: str = "the model") -> None:
    """Raise UserError if config.json has an implausible size. Call this before transformers uses the sizes."""
    for name, most in SIZES.items():
        size = values.get(name)
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            mistake = f"{name} is {show(size)} in config.json of {model}; a whole number from 1 to {most:,} is needed"
            raise UserError(mistake, "model")
    for name in EXPERTS:
        count = values.get(name) or 0
        if type(count) is not int or count > MOST_EXPERTS:
            mistake = f"{name} is {show(count)} in config.json of {model}; at most {MOST_EXPERTS:,} are supported"
            raise UserError(mistake, "model")


def check_replayable(config: Any, model: str = "the model") -> None:
    """Raise UserError if the model's forward pass cannot be replayed.

    Replay needs a supported family, full causal attention in all layers, no dropout, RoPE whose frequencies do not
    depend on the length of the text, and equal groups of query heads.
    """
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        parts = any(hasattr(config, name) for name in ("vision_config", "audio_config"))
        why = MISSING.get(config.model_type, SEVERAL if parts else f"the supported families are {families}")
        raise UserError(f"{model} is of type {config.model_type!r}, which cannot be replayed: {why}", "model")
    for kind in getattr(config, "layer_types", None) or []:
        if kind != "full_attention":
            why = LAYER_KINDS.get(kind, f"it has layers of the unknown kind {show(kind)}")
            raise UserError(f"{model} cannot be replayed: {why}", "model")
    if getattr(config, "layer_types", None) is None and hidden_window(config):
        raise UserError(
            f"{model} cannot be replayed: sliding_window {show(config.sliding_window)} in its config.json makes every "
            "layer ignore older tokens; set sliding_window to null if no text will be longer than the window",
            "model",
        )
    if config.num_attention_heads % config.num_key_value_heads:
        heads = f"{config.num_key_value_heads} kv heads do not divide {config.num_attention_heads} heads"
        raise UserError(f"{heads} in config.json of {model}", "model")
    for name in NOISES:
        if value := getattr(config, name, 0.0):
            wrong = f"{model} has {name} {show(value)}, and random changes cannot be replayed"
            raise UserError(f"{wrong}; set {name} to 0 in config.json", "model")
    if (kind := rope_type(config)) in BY_LENGTH:
        raise UserError(
            f"{model} has RoPE of type {kind}, which depends on the length of the text: the sampler and the trainer "
            "would turn the same key differently",
            "model",
        )


def hidden_window(config: Any) -> bool:
    """Return True if a configuration without layer types has a sliding window, which then applies to all layers."""
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def rope_type(config: Any) -> str:
    """Return the kind of a model's RoPE; "default" is RoPE without scaling."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def is_text_part(config: Any) -> bool:
    """Return True if the configuration describes the text part of a multimodal model's directory."""
    return any(name in MULTIMODAL.values() for name in getattr(config, "architectures", None) or [])


def family_only_hf(config: Any) -> str | None:
    """Return the reason why only the hf engine can sample from the model. None means that vllm can, too."""
    family = config.model_type
    reasons = ["vLLM would load all parts of the multimodal model"] if is_text_part(config) else []
    reasons += [
        f"vLLM ignores {name} in config.json, and assumes {json.dumps(assumed)}"
        for name, assumed in UNREAD.get(family, {}).items()
        if getattr(config, name, assumed) != assumed
    ]
    reason = next(iter(reasons), FAMILIES.get(family))
    return reason and f"{family}: {reason}"


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of layers, the number of kv heads, and the head dimension of a model's KV cache.

    config : the model's configuration, from transformers
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim


def window_of(config: Any) -> int | None:
    """Return the maximum number of tokens that a model can read. None means unknown, because RoPE is scaled."""
    return None if rope_type(config) != "default" else config.max_position_embeddings
