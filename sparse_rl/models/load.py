"""Load a model's configuration, tokenizer and weights; the configuration is checked first."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from sparse_rl.attention.families import cache_shape, check_replayable, check_sizes, is_text_part
from sparse_rl.config import show
from sparse_rl.errors import UserError, reason, unread
from sparse_rl.files import check_readable, read_text
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.models.directory import CONFIG_FILE, RUN_MODEL, load_scorers, saved_policy
from sparse_rl.models.hub import check_available
from sparse_rl.models.text_part import RENAMED, text_config, text_settings
from sparse_rl.models.weights import stored_shapes, weight_files

GENERATION_FILE, TOKENIZER_FILE = "generation_config.json", "tokenizer.json"
MOST_TOKENS = 2**24  # limit for the size of a vocabulary


def load_config(model: str) -> Any:
    """Load the configuration of a directory or hub name, and check that its model family supports replay.

    For a multimodal model, this is the configuration of its text part (text_part.py). Raises UserError if there is no
    such model, or if it cannot be replayed (`check_replayable`).
    """
    from transformers import AutoConfig, PreTrainedConfig

    if Path(model).exists() and not (Path(model) / CONFIG_FILE).is_file():
        if (Path(model) / RECIPE_FILE).is_file():
            hint = f"training writes {RUN_MODEL}/ when it ends; continue an interrupted run with train --resume"
            raise UserError(f"{model} is the directory of a run that has left no model: {hint}", "model")
        raise UserError(f"{model} is not a model directory: it has no {CONFIG_FILE}", "model")
    check_available(model)
    _check_files(model)
    try:
        settings = PreTrainedConfig.get_config_dict(model)[0]
        check_sizes(settings, model)
        check_sizes(text_settings(settings), model)
        config = text_config(AutoConfig.from_pretrained(model, trust_remote_code=False))
    except UserError:
        raise
    except Exception as error:  # any exception of the library for an invalid file
        message = f"{model} is neither a model directory nor a hub name that can be read: {reason(error)}"
        raise UserError(message, "model") from error
    check_replayable(config, model)
    for source in (config, load_generation_config(model) if Path(model).is_dir() else None):
        ends = getattr(source, "eos_token_id", None)
        if any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends]) if ends is not None):
            raise UserError(
                f"eos_token_id of {model} is {show(ends)}; it must be a token id, or a list of token ids", "model"
            )
    return config


def load_generation_config(model: str | Path) -> Any:
    """Load the generation config of a directory or hub name. None means that there is none."""
    from transformers import GenerationConfig

    is_here = (Path(model) / GENERATION_FILE).is_file()
    if Path(model).is_dir() and not is_here:
        return None
    try:
        return GenerationConfig.from_pretrained(str(model))
    except Exception as error:  # any exception of the library for an invalid file
        if not is_here and isinstance(error, OSError):  # a hub model without a generation config
            return None
        raise UserError(f"{GENERATION_FILE} of {model} cannot be read: {reason(error)}", "model") from error


def _check_files(model: str) -> None:
    """Raise UserError if a settings, tokenizer or template file is endless or too large; libraries read files whole."""
    for file in (file for suffix in ("json", "jinja", "txt", "model") for file in Path(model).glob(f"*.{suffix}")):
        try:
            check_readable(file)
        except (OSError, UserError) as error:
            raise UserError(f"{file} cannot be read: {unread(error)}", "model") from error


def _check_token_ids(file: Path) -> None:
    """Raise ValueError for a token id of MOST_TOKENS or more: the library would allocate a list of that length."""
    if not file.is_file():
        return
    content = json.loads(read_text(file))
    vocabulary = content["model"].get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    if invalid := [token_id for token_id in ids if not 0 <= token_id < MOST_TOKENS][:1]:
        raise ValueError(f"{show(invalid[0])} is not a valid token id")


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model, with padding on the left and a pad token."""
    from transformers import AutoTokenizer

    _check_files(model)
    try:
        _check_token_ids(Path(model) / TOKENIZER_FILE)
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
        tokenizer("text")
    except Exception as error:  # any exception of the libraries for invalid files
        raise UserError(f"{model} has no tokenizer that can be read: {reason(error)}", "model") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def model_fingerprint(config: Any) -> str:
    """Return a short name of an architecture for trace files: family, layers, kv heads, head dim and a config hash."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    layers, kv_heads, head_dim = cache_shape(config)
    settings = {
        k: v
        for k, v in config.to_dict().items()
        if not k.startswith("_") and k not in ("transformers_version", "dtype")
    }
    if is_text_part(config):  # as in the text model that is saved from it
        settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{config.model_type}-L{layers}-H{kv_heads}-D{head_dim}-{digest}"


def load_model(directory: str | Path, dtype: str = "float32") -> Any:
    from sparse_rl.attention.interface import adopt

    model = load_plain_model(directory, dtype)
    policy = saved_policy(directory)
    if isinstance(policy, LearnedPolicy):
        load_scorers(directory, model, policy)
    return adopt(model)


def untrained_model(directory: str | Path, seed: int, dtype: str = "float32") -> Any:
    """Create a model with the configuration of a directory or hub name, and random weights from `seed`.

    The weights are drawn in float32 on the CPU. The global generator is not changed.
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
    """Load a model without scorers, with transformers' own attention. Errors name the recipe key `key`."""
    stored_shapes(directory, key)
    try:
        return read_model(directory, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # any exception of the library for invalid files
        raise UserError(f"the weights of {directory} cannot be read: {reason(error)}", key) from error


def read_model(directory: str | Path, **options: Any) -> Any:
    """Load a model by transformers, or the text part of a multimodal model.

    options : options of `from_pretrained`
    """
    from transformers import AutoModelForCausalLM

    config = load_config(str(directory))
    if not is_text_part(config):
        return AutoModelForCausalLM.from_pretrained(directory, **options)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, key_mapping=RENAMED, **options)
    del model._weight_conversions  # with which `save_pretrained` would write the names of the multimodal model
    return model


def load_weights(model: Any, directory: str | Path) -> Any:
    """Load the weights in a directory, such as a checkpoint, into a model; return torch's lists of missing names.

    transformers joins the tensors of single experts. Other tensors, such as scorers, are read under their own names.
    """
    from safetensors.torch import load_file

    stored = {name: tensor for file in weight_files(Path(directory)) for name, tensor in load_file(file).items()}
    named = {name: tensor for name, tensor in stored.items() if name in model.state_dict()}
    joined = read_model(directory, dtype="auto", use_safetensors=True).state_dict()
    return model.load_state_dict({**named, **joined}, strict=False)
