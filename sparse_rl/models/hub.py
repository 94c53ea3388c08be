"""Models of the hub: is one available, and the shapes of those that the shipped recipes name.

Without the check, made once and before any heavy import, huggingface_hub would send a request for each file, and retry
after 1, 2, 4, 8 and 8 seconds.

The table of shapes serves `sparse-rl doctor` if the hub cannot be reached. Layers, heads and sizes are from
litgpt/config.py (github.com/Lightning-AI/litgpt, commit 26857050); DeepSeek-R1-Distill-Qwen-7B has the shape of
Qwen2.5-Math-7B; the context lengths are from the model cards, read in November 2026.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from sparse_rl.errors import UserError

logger = logging.getLogger("sparse_rl")
CONNECT_SECONDS = 1.5


class UnavailableError(UserError):
    """A hub model is not in the hub's cache and cannot be downloaded."""


def check_available(model: str) -> None:
    """Raise UnavailableError if `model` is neither local nor cached, and the hub is unreachable.

    Raises UserError for an invalid name. If the hub is unreachable but the model is cached, this process and its
    children use only the cache from now on.
    """
    if Path(model).exists():
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"{model} is neither a model directory nor a hub name; name one", "model") from error
    if (why := _unreachable()) is None:
        return
    if not cached:
        raise UnavailableError(
            f"there is no directory {model}, the cache of hub models ({constants.HF_HUB_CACHE}) does not hold it, and "
            f"{why}. Give the path of a local copy; or run `hf download {model}` on a machine with network access, "
            "copy its cache here, and set HF_HUB_OFFLINE=1",
            "model",
        )
    if not constants.HF_HUB_OFFLINE:
        logger.warning("%s: hub models are loaded from the cache only, as with HF_HUB_OFFLINE=1", why)
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


@cache
def _unreachable() -> str | None:
    """Return the reason why the hub cannot be used. None means that the hub answered, with any status."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, httpx

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=httpx.Timeout(CONNECT_SECONDS))
    except httpx.ReadTimeout:  # the hub is reachable but slow
        return None
    except httpx.TransportError as error:
        return f"{constants.ENDPOINT} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
    return None


# ---- shapes ----------------------------------------------------------------------------------------------------------

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
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
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


def is_tabled(model: str) -> bool:
    """Return True if `load_shape` (load.py) reads the shape of `model` from the table."""
    try:
        check_available(model)
    except UnavailableError:
        return model in SHAPES
    return False
