"""Loading a model: its configuration, checked before anything is loaded, its tokenizer, and its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from sparse_rl.attention.families import cache_shape, check_replayable
from sparse_rl.errors import UserError
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.models.directory import CONFIG_FILE, RUN_MODEL, attach_scorers, read_scorers, saved_policy
from sparse_rl.models.hub import check_available
from sparse_rl.policies.kvpop import KVpop


def load_config(model: str) -> Any:
    """The configuration of a directory or hub name, checked to be of a family that we replay.

    Raises UserError: no such model, not a causal language model of the families, sliding windows, dropout.
    """
    from transformers import AutoConfig

    if Path(model).exists() and not (Path(model) / CONFIG_FILE).is_file():
        if (Path(model) / RECIPE_FILE).is_file():
            mend = f"a training writes {RUN_MODEL}/ at its end, train --resume goes on with one that was interrupted"
            raise UserError(f"{model} is the directory of a run that has left no model: {mend}", "model")
        raise UserError(f"{model} is not a model directory: it has no {CONFIG_FILE}", "model")
    check_available(model)
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{model} is neither a model directory nor a hub name that can be read: {first}", "model"
        ) from error
    check_replayable(config, model)
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
    layers, kv_heads, head_dim = cache_shape(config)
    own = {
        k: v
        for k, v in config.to_dict().items()
        if not k.startswith("_") and k not in ("transformers_version", "dtype")
    }
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{config.model_type}-L{layers}-H{kv_heads}-D{head_dim}-{digest}"


def load_model(directory: str | Path, dtype: str = "float32", key: str = "model") -> Any:
    """The model of a directory or hub name, with the scorers that it carries; its policy is `saved_policy(directory)`.

    key : the recipe key that names it, for error messages

    Raises UserError where a file is missing or cannot be used.
    """
    from sparse_rl.attention.interface import adopt

    model = load_plain_model(directory, dtype, key)
    policy = saved_policy(directory)
    if isinstance(policy, KVpop):
        attach_scorers(model, policy)
        read_scorers(directory, model)
    return adopt(model)


def untrained_model(directory: str | Path, seed: int, dtype: str = "float32") -> Any:
    """A model of the configuration of a directory or hub name, its weights drawn from `seed`.

    The weights are drawn in float32 on the CPU, and the global generator is left as it was.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = load_config(str(directory))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with contextlib.suppress(OSError):  # a model need not have one
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.to(getattr(torch, dtype))


def load_plain_model(directory: str | Path, dtype: str = "float32", key: str = "model") -> Any:
    """The same as transformers loads it: without scorers, and under transformers' own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"the weights of {directory} cannot be read: {first}", key) from error
