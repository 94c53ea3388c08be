"""Checks that a model can be replayed, and the shape of its KV cache, from its configuration. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparse_rl.config import show
from sparse_rl.errors import UserError

NO_WINDOWS = "vLLM keeps layers with sliding windows in a cache group of their own, which our plugin lacks"

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
    "olmo3": NO_WINDOWS,
    "starcoder2": None,
    "gemma3_text": NO_WINDOWS,
    "qwen3_moe": None,
    "qwen2_moe": None,
    "mixtral": None,
    "olmoe": None,
    "glm4_moe": None,
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

# families whose transformers code gives each layer its own mask, by `layer_types`
WINDOWED = ("qwen2", "qwen3", "qwen2_moe", "smollm3", "olmo3", "gemma3_text")
SLIDING = "sliding_attention"  # in `layer_types`: a layer whose queries see the last `sliding_window` tokens

WINDOWS = "its sliding-window layers have not been tested"
STATE = "it has layers with a recurrent state, which is no KV cache and cannot be evicted"
LATENT = "its latent attention (MLA) has no keys and values of single heads"
SEVERAL = "it reads images or sound, and only text is supported"

# model_type -> what is missing for a family that users ask for
MISSING: dict[str, str] = {
    **dict.fromkeys(("cohere2", "exaone4"), WINDOWS),
    "gemma3n_text": "some of its layers share keys and values, or have sliding windows, which has not been tested",
    **dict.fromkeys(("gemma", "cohere"), "the family has not been tested"),
    "gemma2": "its soft-capped attention and its sliding windows are not replayed",
    "gpt_oss": "its attention sinks are not replayed",
    "llama4_text": "its chunked attention is not replayed",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"), LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "jamba", "bamba", "mamba", "mamba2"), STATE),
    **dict.fromkeys(("zamba2", "falcon_h1", "falcon_mamba", "granitemoehybrid", "nemotron_h", "lfm2"), STATE),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "minimax", "kimi_linear", "qwen3_5", "qwen3_5_moe"), STATE),
    **dict.fromkeys(("gemma3n", "mistral3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"), SEVERAL),
}

LAYER_KINDS = {  # entries of layer_types -> what is missing for a layer of that kind
    SLIDING: "it has sliding-window layers, which its family is not known to have",
    "chunked_attention": "it has layers with chunked attention",
    **dict.fromkeys(
        ("linear_attention", "mamba", "conv", "recurrent", "hybrid"), "it has layers with a recurrent state"
    ),
}
NOISES = (  # random changes of a forward pass in training
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embedding_dropout", "embd_pdrop", "hidden_dropout"),
    "router_jitter_noise",
)
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
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

    Replay needs a supported family, causal attention in all layers, at least one layer without a sliding window, no
    dropout, no soft caps, RoPE whose frequencies do not depend on the length of the text, and equal groups of query
    heads.
    """
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        parts = any(hasattr(config, name) for name in ("vision_config", "audio_config"))
        why = MISSING.get(config.model_type, SEVERAL if parts else f"the supported families are {families}")
        raise UserError(f"{model} is of type {config.model_type!r}, which cannot be replayed: {why}", "model")
    supported = ("full_attention", SLIDING) if config.model_type in WINDOWED else ("full_attention",)
    for kind in getattr(config, "layer_types", None) or []:
        if kind not in supported:
            why = LAYER_KINDS.get(kind, f"it has layers of the unknown kind {show(kind)}")
            raise UserError(f"{model} cannot be replayed: {why}", "model")
    if getattr(config, "layer_types", None) is None and hidden_window(config):
        raise UserError(
            f"{model} cannot be replayed: sliding_window {show(config.sliding_window)} in its config.json makes every "
            "layer ignore older tokens; set sliding_window to null if no text will be longer than the window",
            "model",
        )
    _check_windows(config, model)
    for name in SOFT_CAPS:
        if value := getattr(config, name, None):
            raise UserError(f"{model} has {name} {show(value)}, and soft caps are not supported", "model")
    if getattr(config, "use_bidirectional_attention", False):
        raise UserError(f"{model} cannot be replayed: its tokens attend to later tokens", "model")
    if config.num_attention_heads % config.num_key_value_heads:
        heads = f"{config.num_key_value_heads} kv heads do not divide {config.num_attention_heads} heads"
        raise UserError(f"{heads} in config.json of {model}", "model")
    for name in NOISES:
        if value := getattr(config, name, 0.0):
            wrong = f"{model} has {name} {show(value)}, and random changes cannot be replayed"
            raise UserError(f"{wrong}; set {name} to 0 in config.json", "model")
    for rope in ropes(config):
        if (kind := rope.get("rope_type")) in BY_LENGTH:
            raise UserError(
                f"{model} has RoPE of type {kind}, which depends on the length of the text: the sampler and the "
                "trainer would turn the same key differently",
                "model",
            )


def _check_windows(config: Any, model: str) -> None:
    kinds, window = getattr(config, "layer_types", None) or [], getattr(config, "sliding_window", None)
    if SLIDING not in kinds:
        return
    if type(window) is not int or window < 1:
        wrong = f"sliding_window is {show(window)} in config.json of {model}, whose layer_types name {SLIDING}"
        raise UserError(f"{wrong}; a whole number from 1 on is needed", "model")
    if set(kinds) == {SLIDING}:
        raise UserError(
            f"{model} cannot be replayed: all its layers have a sliding window, so no layer is left for a cache "
            "policy; set sliding_window to null if no text will be longer than the window",
            "model",
        )


def hidden_window(config: Any) -> bool:
    """Return True if a configuration without layer types has a sliding window, which then applies to all layers."""
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a model's RoPE, or of each of its kinds of layers, which may differ (Gemma 3)."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [part for part in settings.values() if isinstance(part, Mapping)] or [settings]


def windows_of(config: Any) -> list[int]:
    """Return the sliding window of each layer in tokens, the query's own included; 0 for a layer without a window.

    A query at position q of a layer with the window W sees the tokens after position q - W.
    """
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [config.sliding_window if kind == SLIDING else 0 for kind in kinds]


def global_layers(config: Any) -> list[int]:
    """Return the indices of the layers without a sliding window. Cache policies act on these layers alone."""
    return [layer for layer, window in enumerate(windows_of(config)) if not window]


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
    if any(windows_of(config)):
        reasons.append(NO_WINDOWS)
    reason = next(iter(reasons), FAMILIES.get(family))
    return reason and f"{family}: {reason}"


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of layers, the number of kv heads, and the head dimension of a model's KV cache.

    config : the model's configuration, from transformers
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim


def policy_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of global layers, the number of kv heads, and the head dimension: the part of the KV cache on
    which cache policies act.
    """
    _, kv_heads, head_dim = cache_shape(config)
    return len(global_layers(config)), kv_heads, head_dim


def context_length(config: Any) -> int | None:
    """Return the maximum number of tokens that a model can read. None means unknown, because RoPE is scaled."""
    scaled = any(rope.get("rope_type", "default") != "default" for rope in ropes(config))
    return None if scaled else config.max_position_embeddings
