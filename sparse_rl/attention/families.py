"""Checks that a model can be replayed, and the shape of its KV cache, from its configuration. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_rl.config import show
from sparse_rl.errors import UserError

NO_STATES = "our vLLM plugin lacks hybrid families, whose layers with a state are a cache group of their own"
WITHOUT_STATES = "models of a hybrid family that have attention alone were not tested with vLLM"
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
    "qwen3_next": NO_STATES,
    "qwen3_5_text": NO_STATES,
    "olmo_hybrid": NO_STATES,
    "granitemoehybrid": NO_STATES,
    "bamba": NO_STATES,
    "nemotron_h": NO_STATES,
    "falcon_h1": NO_STATES,
    "lfm2": NO_STATES,
}

# model_type of a multimodal model whose text part is used -> its class, in `architectures` of config.json
MULTIMODAL = {"gemma3": "Gemma3ForConditionalGeneration", "qwen3_5": "Qwen3_5ForConditionalGeneration"}

# Settings that every family must have: transformers or vLLM reads them, and another value is another attention.
REQUIRED: dict[str, Any] = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size", "quantization_config")
    ),
    **dict.fromkeys(("num_kv_shared_layers", "is_heterogeneous")),
    "mamba_rms_norm": False,  # transformers' norm of a single token in Falcon-H1 has a wrong shape
}

# Settings that only one of transformers and vLLM reads, with the value under which both compute the same. With another
# value only hf samples. EVERY_FAMILY holds for each family, unless its own entry has another value or ANY.
ANY = object()
EVERY_FAMILY: dict[str, Any] = {
    **{"hidden_act": "silu", "logit_scale": 1.0, "partial_rotary_factor": 1.0, "dual_chunk_attention_config": None},
    **{"sliding_window": None, "layer_types": None, "qk_norm": False, "llama_4_scaling": None},
    **dict.fromkeys(("rotary_pct", "rotary_emb_fraction", "rotary_emb_base")),
    **dict.fromkeys(("bias", "qkv_bias", "mlp_bias", "attention_bias", "ada_rms_norm_t_cond"), False),
    "shared_expert_intermediate_size": 0,
}
BOTH_READ_BIASES = {"attention_bias": ANY, "mlp_bias": ANY}
READ_BY_ONE: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": ANY},
    "qwen3": {"layer_types": ANY},
    "llama": BOTH_READ_BIASES,
    "mistral": {"sliding_window": ANY},
    "ministral3": {"sliding_window": ANY, "llama_4_scaling": ANY},  # `model_arguments` sets the latter
    "phi3": {"sliding_window": ANY, "partial_rotary_factor": ANY},
    "granite": {**BOTH_READ_BIASES, "layer_rope_theta": None, "attention_sinks": False},
    "seed_oss": {**BOTH_READ_BIASES, "attention_out_bias": ANY},
    "glm4": {"attention_bias": ANY, "partial_rotary_factor": ANY},
    "smollm3": {**BOTH_READ_BIASES, "layer_types": ANY, "hidden_act": ANY},
    "olmo2": {"attention_bias": ANY, "hidden_act": ANY},
    "olmo3": {"attention_bias": ANY},
    "starcoder2": {"sliding_window": ANY, "hidden_act": ANY},
    "qwen3_moe": {"sliding_window": ANY},
    "qwen2_moe": {"qkv_bias": True, "layer_types": ANY, "shared_expert_intermediate_size": ANY},
    "mixtral": {"sliding_window": ANY},
    "olmoe": {"clip_qkv": None, "norm_topk_prob": False, "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    "glm4_moe": {"attention_bias": ANY, "partial_rotary_factor": ANY, "tie_word_embeddings": False},
}

# families whose transformers code gives each layer its own mask, by `layer_types`
WINDOWED = ("qwen2", "qwen3", "qwen2_moe", "smollm3", "olmo3", "gemma3_text")
WHOLE_WINDOWED = ("mistral", "ministral3", "phi3", "mixtral", "starcoder2", "qwen3_moe")  # one window for all layers
SLIDING = "sliding_attention"  # in `layer_types`: a layer whose queries see the last `sliding_window` tokens

HYBRID = tuple(family for family, why in FAMILIES.items() if why == NO_STATES)  # sparse_rl/states has their mixers
WITHOUT_KEYS = ("linear_attention", "conv", "mlp", "moe")  # in `layer_types`: layers that hold no keys and values

WINDOWS = "its sliding-window layers have not been tested"
STATE = "it has only layers with a recurrent state, which is no KV cache and cannot be evicted"
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
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), STATE),
    **dict.fromkeys(("qwen3_5_moe_text", "lfm2_moe"), "the experts of this hybrid family have not been tested"),
    "jamba": "its layers with a state are of Mamba 1, whose steps have not been made exact",
    "zamba2": "its layers share one attention, whose keys and values differ in each of its uses",
    "minimax": "its lightning attention has not been made exact",
    "kimi_linear": "its attention is latent (MLA), and its delta rule, with a decay for each channel, is not exact",
    "recurrent_gemma": "its recurrent layers (RG-LRU) have not been made exact, and its attention has sliding windows",
    **dict.fromkeys(("gemma3n", "mistral3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"), SEVERAL),
}

LAYER_KINDS = {  # entries of layer_types -> what is missing for a layer of that kind
    SLIDING: "it has sliding-window layers, which its family is not known to have",
    "chunked_attention": "it has layers with chunked attention",
    "moe": "its experts have not been tested",
    **dict.fromkeys(
        ("linear_attention", "mamba", "conv", "recurrent", "hybrid"), "it has layers with a recurrent state"
    ),
}
NOISES = (  # random changes of a forward pass in training
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embedding_dropout", "embd_pdrop", "hidden_dropout"),
    "router_jitter_noise",
)

SIZES = {  # key of config.json -> maximum allowed value
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 1000),
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 1_000_000),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 2**30),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST_EXPERTS = 32_767  # traces record experts in int16


def check_sizes(values: Mapping[str, Any], model: str = "the model") -> None:
    """Raise UserError if config.json has an implausible size. Call this before transformers uses the sizes."""
    limits = {**{name: (1, most) for name, most in SIZES.items()}, **dict.fromkeys(EXPERTS, (0, MOST_EXPERTS))}
    for name, (least, most) in limits.items():
        size = values.get(name)
        if size is not None and (type(size) is not int or not least <= size <= most):
            wanted = f"a whole number from {least} to {most:,} is needed"
            raise UserError(f"{name} is {show(size)} in config.json of {model}; {wanted}", "model")


def check_replayable(config: Any, model: str = "the model") -> None:
    """Raise UserError if the model's forward pass cannot be replayed: it needs a supported family, a layer without a
    sliding window (or one window for all, see `longest_text`), the settings in REQUIRED, and equal groups of heads.
    """
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        parts = any(hasattr(config, name) for name in ("vision_config", "audio_config"))
        why = MISSING.get(config.model_type, SEVERAL if parts else f"the supported families are {families}")
        raise UserError(f"{model} is of type {config.model_type!r}, which cannot be replayed: {why}", "model")
    supported: tuple[str, ...] = ("full_attention", SLIDING) if config.model_type in WINDOWED else ("full_attention",)
    if config.model_type in HYBRID:
        supported = ("full_attention", "hybrid", "linear_attention", "conv", "mlp")
    if not recorded_layers(config):
        raise UserError(
            f"{model} cannot be replayed: no layer has keys and values, so there is nothing to evict", "model"
        )
    for kind in getattr(config, "layer_types", None) or []:
        if kind not in supported:
            why = LAYER_KINDS.get(kind, f"it has layers of the unknown kind {show(kind)}")
            raise UserError(f"{model} cannot be replayed: {why}", "model")
    _check_windows(config, model)
    for name, only in REQUIRED.items():
        if (value := getattr(config, name, only)) != only and (value or only):  # null, false and 0 are alike
            raise UserError(f"{model} cannot be replayed: {_why_not(name, value)}", "model")
    if config.num_attention_heads % config.num_key_value_heads:
        heads = f"{config.num_key_value_heads} kv heads do not divide {config.num_attention_heads} heads"
        raise UserError(f"{heads} in config.json of {model}", "model")


def _why_not(name: str, value: Any) -> str:
    if name == "quantization_config":
        kind = value.get("quant_method") if isinstance(value, Mapping) else getattr(value, "quant_method", None)
        return f"its weights are quantized ({kind or 'unknown'}); use the model's unquantized weights"
    return f"{name} is {show(value)} in its config.json, an attention that nobody has tested here"


def refuse_states(config: Any, what: str, key: str = "model") -> None:
    """Raise UserError, about the setting `key`, if a model has layers with a state, which `what` cannot follow."""
    if state_layers(config):
        raise UserError(f"{what}, and {config.model_type} has layers with a state", key)


def check_noises(config: Any, model: str = "the model") -> None:
    """Raise UserError if a model in memory changes at random in training."""
    for name in NOISES:
        if value := getattr(config, name, 0.0):
            why = "random changes cannot be replayed; set it to 0"
            raise UserError(f"{model} has {name} {show(value)}, and {why}", "model")


def _check_windows(config: Any, model: str) -> None:
    kinds, window = getattr(config, "layer_types", None) or [], getattr(config, "sliding_window", None)
    if SLIDING not in kinds:
        return
    if type(window) is not int or window < 1:
        wrong = f"sliding_window is {show(window)} in config.json of {model}, whose layer_types name {SLIDING}"
        raise UserError(f"{wrong}; a whole number from 1 on is needed", "model")
    if set(kinds) == {SLIDING}:
        why = "all its layers have a sliding window, so no layer is left for a cache policy"
        mend = "set sliding_window to null if no text will be longer than the window"
        raise UserError(f"{model} cannot be replayed: {why}; {mend}", "model")


def longest_text(config: Any) -> tuple[int, str] | None:
    """Return the length up to which a model is what replay assumes, and what changes beyond it; None if nothing does:
    a window of all layers hides nothing from a shorter text, and RoPE that depends on the length is fixed until then.
    """
    limits = []
    window = getattr(config, "sliding_window", None) if config.model_type in WHOLE_WINDOWED else None
    if window and window < config.max_position_embeddings:
        limits.append((window, "all its layers have a sliding window, beyond which they forget"))
    for rope in ropes(config):
        if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            limits.append((int(original), f"its RoPE of type {kind} changes beyond them"))
    return min(limits, default=None)


def check_length(config: Any, tokens: int) -> None:
    """Raise UserError if a text of `tokens` tokens is longer than `longest_text` allows."""
    if (limit := longest_text(config)) is not None and tokens > limit[0]:
        raise UserError(f"a text of {tokens:,} tokens is too long: the model takes {limit[0]:,}, because {limit[1]}")


def ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a model's RoPE, or of each of its kinds of layers, which may differ (Gemma 3)."""
    settings = getattr(config, "rope_parameters", None) or {}
    return [part for part in settings.values() if isinstance(part, Mapping)] or [settings]


def _kinds(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def recorded_layers(config: Any) -> list[int]:
    """Return the indices of the layers that hold keys and values: these are the layers of a trace, in this order."""
    return [layer for layer, kind in enumerate(_kinds(config)) if kind not in WITHOUT_KEYS]


def state_layers(config: Any) -> list[int]:
    """Return the indices of the layers that hold a state (sparse_rl/states), among them those that hold keys, too."""
    return [i for i, kind in enumerate(_kinds(config)) if kind in ("linear_attention", "conv", "hybrid")]


def windows_of(config: Any) -> list[int]:
    """Return the sliding window of each recorded layer in tokens, the query's own included; 0 for a layer without one.

    A query at position q of a layer with the window W sees the tokens after position q - W.
    """
    kinds = _kinds(config)
    return [config.sliding_window if kinds[layer] == SLIDING else 0 for layer in recorded_layers(config)]


def global_layers(config: Any) -> list[int]:
    """Return the indices in the model of the recorded layers without a sliding window, on which cache policies act."""
    layers = zip(recorded_layers(config), windows_of(config), strict=True)
    return [layer for layer, window in layers if not window]


def is_text_part(config: Any) -> bool:
    """Return True if the configuration describes the text part of a multimodal model's directory."""
    return any(name in MULTIMODAL.values() for name in getattr(config, "architectures", None) or [])


def family_only_hf(config: Any) -> str | None:
    """Return the reason why only the hf engine can sample from the model, or None."""
    family = config.model_type
    reasons = ["vLLM would load all parts of the multimodal model"] if is_text_part(config) else []
    if any(windows_of(config)):
        reasons.append(NO_WINDOWS)
    if family in HYBRID:
        reasons.append(NO_STATES if state_layers(config) else WITHOUT_STATES)
    for name, alike in {**EVERY_FAMILY, **READ_BY_ONE.get(family, {})}.items():
        value = getattr(config, name, alike)
        if alike is not ANY and value != alike and (value or alike):  # null, false and 0 are alike
            reasons.append(f"vLLM and transformers read {name} {show(value)} in config.json differently")
    divides = family in ("qwen2", "qwen2_moe", "olmoe")  # vLLM's code computes the size of a head
    if divides and cache_shape(config)[2] * config.num_attention_heads != config.hidden_size:
        reasons.append("vLLM ignores head_dim in config.json")
    for rope in ropes(config):
        kind, factor, length = (rope.get(k) for k in ("rope_type", "factor", "original_max_position_embeddings"))
        partial = READ_BY_ONE.get(family, {}).get("partial_rotary_factor") is ANY
        if not partial and rope.get("partial_rotary_factor", 1.0) != 1.0:
            reasons.append("vLLM and transformers read partial_rotary_factor in config.json differently")
        if kind == "dynamic":
            reasons.append("vLLM scales dynamic RoPE at all lengths")
        if kind == "yarn" and factor and (length or 0) * factor < config.max_position_embeddings:
            reasons.append("vLLM's table for YaRN is shorter than max_position_embeddings")
    reason = next(iter(reasons), FAMILIES.get(family))
    return reason and f"{family}: {reason}"


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of recorded layers, of kv heads, and the head dimension of a model's KV cache."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return len(recorded_layers(config)), config.num_key_value_heads, head_dim


def policy_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of `global_layers`, of kv heads, and the head dimension: where cache policies act."""
    _, kv_heads, head_dim = cache_shape(config)
    return len(global_layers(config)), kv_heads, head_dim


def context_length(config: Any) -> int | None:
    """Return the maximum number of tokens that a model can read. None means unknown, because RoPE is scaled."""
    if (limit := longest_text(config)) is not None:
        return limit[0]
    scaled = any(rope.get("rope_type", "default") != "default" for rope in ropes(config))
    return None if scaled else config.max_position_embeddings
