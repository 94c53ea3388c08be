"""Model directories: what must hold before anything is loaded, the tokenizer, and the cache policy kept beside a model.

MODEL_DIR/cache_policy.json says under which cache a model was trained; engines and evaluation use it with no flags.
MODEL_DIR/cache_scorer.safetensors holds the scorers of a learned policy, which plain transformers ignores. In memory
they are the module list `model.cache_scorers`, one per layer.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sparse_rl.errors import UserError
from sparse_rl.policies import KVpop, Policy, make_policy

POLICY_FILE = "cache_policy.json"
POLICY_VERSION = 1
SCORER_FILE = "cache_scorer.safetensors"
SCORERS = "cache_scorers"


def base_of(model: Any) -> Any:
    """The transformers model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load_config(model: str) -> Any:
    """The configuration of a directory or hub name, checked to be of a family that we replay.

    Raises UserError: no such model, not a causal language model of the families, sliding windows, dropout.
    """
    from transformers import AutoConfig

    from sparse_rl.attention import FAMILIES

    if Path(model).exists() and not (Path(model) / "config.json").is_file():
        raise UserError(f"{model} is not a model directory: it has no config.json", "model")
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{model} is neither a model directory nor a hub name that can be read: {first}", "model"
        ) from error
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{model} is of type {config.model_type!r}; the supported families are {', '.join(FAMILIES)}", "model"
        )
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise UserError(f"{model} has sliding-window layers, which evict by themselves; it cannot be replayed", "model")
    if getattr(config, "attention_dropout", 0.0):
        raise UserError(f"{model} has attention_dropout, which cannot be replayed; set it to 0 in config.json", "model")
    return config


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model, padding on the left, with a pad token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"{model} has no tokenizer that can be read: {first}", "model") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_fingerprint(config: Any) -> str:
    """A short name of an architecture, for trace files: family, layers, kv heads, head dim and a hash of the rest."""
    from sparse_rl.attention import cache_shape

    layers, kv_heads, head_dim = cache_shape(config)
    own = {
        k: v
        for k, v in config.to_dict().items()
        if not k.startswith("_") and k not in ("transformers_version", "dtype")
    }
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{config.model_type}-L{layers}-H{kv_heads}-D{head_dim}-{digest}"


def save_policy(directory: str | Path, policy: Policy) -> None:
    """Write cache_policy.json."""
    content = {"format_version": POLICY_VERSION, "policy": policy.name, **policy.parameters()}
    (Path(directory) / POLICY_FILE).write_text(json.dumps(content, indent=2) + "\n")


def saved_policy(directory: str | Path) -> Policy | None:
    """The policy that a model directory carries, or None.

    Raises UserError where the file is there but cannot be used.
    """
    file = Path(directory) / POLICY_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        version = content.pop("format_version")
        if version != POLICY_VERSION:
            raise ValueError(f"format version {version}, this reads {POLICY_VERSION}")
        return make_policy(content)
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{file} cannot be used: {error}") from error


# ---- scorers ---------------------------------------------------------------------------------------------------------


def load_model(directory: str | Path, dtype: str = "float32") -> Any:
    """The model of a directory, with the scorers that it carries; its policy is `saved_policy(directory)`.

    Raises UserError where a file is missing or cannot be used.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from sparse_rl.attention import adopt

    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"the weights of {directory} cannot be read: {first}", "model") from error
    policy = saved_policy(directory)
    if isinstance(policy, KVpop):
        attach_scorers(model, policy)
        read_scorers(directory, model)
    return adopt(model)


def attach_scorers(model: Any, policy: KVpop) -> None:
    """Give a model untrained scorers, float32. Saved as a whole it leaves them out: see write_scorers."""
    from torch import nn

    from sparse_rl.attention import cache_shape
    from sparse_rl.scorers import make_scorer

    layers, heads, dim = cache_shape(model.config)
    scorers = nn.ModuleList(make_scorer(policy.scorer, heads=heads, dim=dim) for _ in range(layers))
    setattr(model, SCORERS, scorers.to(model.device))
    model._keys_to_ignore_on_save = [f"{SCORERS}.{name}" for name in scorers.state_dict()]


def write_scorers(directory: str | Path, weights: Any) -> None:
    """Write cache_scorer.safetensors from a model's state dict."""
    from safetensors.torch import save_file

    prefix = f"{SCORERS}."
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    save_file({name: value.detach().cpu().contiguous() for name, value in own.items()}, Path(directory) / SCORER_FILE)


def read_scorers(directory: str | Path, model: Any) -> None:
    """Load cache_scorer.safetensors into a model's scorers.

    Raises UserError where it is missing, unreadable, or of other scorers.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(directory) / SCORER_FILE
    if not file.is_file():
        raise UserError(f"{file} is missing: the model carries a learned policy without its scorers", "model")
    try:
        getattr(model, SCORERS).load_state_dict(load_file(file))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise UserError(f"{file} cannot be used: {' '.join(str(error).split())}", "model") from error
