"""Loading a model: its configuration, checked before anything is loaded, its tokenizer, and its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from sparse_rl.attention.families import cache_shape, check_replayable, check_sizes
from sparse_rl.config import show
from sparse_rl.errors import UserError, reason, unread
from sparse_rl.files import check_readable, read_text
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.models.directory import CONFIG_FILE, RUN_MODEL, load_scorers, saved_policy
from sparse_rl.models.hub import check_available
from sparse_rl.models.weights import stored_shapes

GENERATION_FILE, TOKENIZER_FILE = "generation_config.json", "tokenizer.json"
MOST_TOKENS = 2**24  # of a vocabulary


def load_config(model: str) -> Any:
    """The configuration of a directory or hub name, checked to be of a family that we replay.

    Raises UserError: no such model, not a causal language model of the families, sliding windows, dropout.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if Path(model).exists() and not (Path(model) / CONFIG_FILE).is_file():
        if (Path(model) / RECIPE_FILE).is_file():
            mend = f"a training writes {RUN_MODEL}/ at its end, train --resume goes on with one that was interrupted"
            raise UserError(f"{model} is the directory of a run that has left no model: {mend}", "model")
        raise UserError(f"{model} is not a model directory: it has no {CONFIG_FILE}", "model")
    check_available(model)
    _check_files(model)
    try:
        check_sizes(PreTrainedConfig.get_config_dict(model)[0], model)
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # what the library makes of a file that is none of its own
        wrong = f"{model} is neither a model directory nor a hub name that can be read: {reason(error)}"
        raise UserError(wrong, "model") from error
    check_replayable(config, model)
    for found in (config, load_generation_config(model) if Path(model).is_dir() else None):
        ends = getattr(found, "eos_token_id", None)
        if any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends]) if ends is not None):
            raise UserError(
                f"eos_token_id of {model} is {show(ends)}; it must be a token's number, or several", "model"
            )
    return config


def load_generation_config(model: str | Path) -> Any:
    """How a directory or hub name says that it is sampled from, and ended; None where it does not.

    Raises UserError where the file is there but cannot be read.
    """
    from transformers import GenerationConfig

    is_here = (Path(model) / GENERATION_FILE).is_file()
    if Path(model).is_dir() and not is_here:
        return None
    try:
        return GenerationConfig.from_pretrained(str(model))
    except Exception as error:  # what the library makes of a file that is none of its own
        if not is_here and isinstance(error, OSError):  # a hub model without one
            return None
        raise UserError(f"{GENERATION_FILE} of {model} cannot be read: {reason(error)}", "model") from error


def _check_files(model: str) -> None:
    """Raise UserError where a directory's settings, tokenizer or template have no end: libraries read them whole."""
    for file in (file for suffix in ("json", "jinja", "txt", "model") for file in Path(model).glob(f"*.{suffix}")):
        try:
            check_readable(file)
        except (OSError, UserError) as error:
            raise UserError(f"{file} cannot be read: {unread(error)}", "model") from error


def _check_token_ids(file: Path) -> None:
    """Raise ValueError where a tokenizer has ids that no vocabulary reaches: the library makes a list as long."""
    if not file.is_file():
        return
    content = json.loads(read_text(file))
    vocabulary = content["model"].get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    if wrong := [one for one in ids if not 0 <= one < MOST_TOKENS][:1]:
        raise ValueError(f"{show(wrong[0])} is no token's id")


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model, padding on the left, with a pad token."""
    from transformers import AutoTokenizer

    _check_files(model)
    try:
        _check_token_ids(Path(model) / TOKENIZER_FILE)
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
        tokenizer("text")
    except Exception as error:  # what the libraries make of files that are none of their own
        raise UserError(f"{model} has no tokenizer that can be read: {reason(error)}", "model") from error
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


def load_model(directory: str | Path, dtype: str = "float32") -> Any:
    """The model of a directory or hub name, with the scorers that it carries; its policy is `saved_policy(directory)`.

    Raises UserError where a file is missing or cannot be used.
    """
    from sparse_rl.attention.interface import adopt

    model = load_plain_model(directory, dtype)
    policy = saved_policy(directory)
    if isinstance(policy, LearnedPolicy):
        load_scorers(directory, model, policy)
    return adopt(model)


def untrained_model(directory: str | Path, seed: int, dtype: str = "float32") -> Any:
    """A model of the configuration of a directory or hub name, its weights drawn from `seed`.

    The weights are drawn in float32 on the CPU, and the global generator is left as it was.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(str(directory))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if (generation := load_generation_config(directory)) is not None:
        model.generation_config = generation
    return model.to(getattr(torch, dtype))


def load_plain_model(directory: str | Path, dtype: str = "float32", key: str = "model") -> Any:
    """The model of a directory as transformers loads it: without scorers, and under transformers' own attention.

    dtype : torch's name of it; key : the recipe's key of the model, for errors. Raises UserError where its weights
    cannot be read.
    """
    from transformers import AutoModelForCausalLM

    stored_shapes(directory, key)
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # what the library makes of files that are none of its own
        raise UserError(f"the weights of {directory} cannot be read: {reason(error)}", key) from error
