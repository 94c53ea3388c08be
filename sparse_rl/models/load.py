"""Load a model's configuration, tokenizer and weights; the configuration is checked first."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.families import NOISES, cache_shape, check_replayable, check_sizes, is_text_part
from sparse_rl.config import show
from sparse_rl.errors import UserError, reason, unread
from sparse_rl.files import check_readable, open_tensors, read_json
from sparse_rl.metrics import RECIPE_FILE
from sparse_rl.models.directory import (
    CONFIG_FILE,
    RUN_MODEL,
    load_scorers,
    model_directory,
    needs_scorers,
    saved_policy,
)  # fmt: skip
from sparse_rl.models.hub import SHAPES, UnavailableError, check_available
from sparse_rl.models.weights import RENAMED, stored_shapes, text_config, text_settings, weight_files

logger = logging.getLogger("sparse_rl")
GENERATION_FILE, TOKENIZER_FILE = "generation_config.json", "tokenizer.json"
GENERATION_MODES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")  # other values depend on these
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json"),
)
PROBE = (  # texts that a tokenizer must read as its tokenizer.json does
    *("x = 12", " leading and trailing ", "two  spaces\n\n  indented\ttab\r\n", "1234567 + 0.5e-3", "it's I'LL"),
    *(
        "def f(a, b):\n    return a[0]**2  # {}",
        "Größe naïve 数学 привет ½ \u00a0 🙂",
        "<|im_start|>user\n<s>[INST] </s>",
    ),
)
MOST_TOKENS = 2**24  # limit for the size of a vocabulary


def load_config(model: str) -> Any:
    """Load the configuration of a directory or hub name, of a multimodal model that of its text part (weights.py).

    Raises UserError if there is no such model, or if it cannot be replayed (`check_replayable`).
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
    for name in NOISES:
        if value := getattr(config, name, 0.0):
            _warn_once(f"{model}: {name} {show(value)} is set to 0, because random changes cannot be replayed")
            setattr(config, name, 0.0)
    for source in (config, load_generation_config(model)):
        ends = getattr(source, "eos_token_id", None)
        if any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends]) if ends is not None):
            wanted = "it must be a token id, or a list of token ids"
            raise UserError(f"eos_token_id of {model} is {show(ends)}; {wanted}", "model")
    return config


def load_shape(model: str) -> Any:
    """Load the configuration of a directory or hub name; if it is unavailable, use the table SHAPES, which has the
    model's shape, but not the model's eos, rope and dtype.
    """
    try:
        return load_config(model)
    except UnavailableError:
        if model not in SHAPES:
            raise
    from transformers import AutoConfig

    return AutoConfig.for_model(**SHAPES[model])


def load_generation_config(model: str | Path) -> Any:
    """Load the generation config of a directory or hub name; without a file, the one that its config.json implies."""
    from transformers import GenerationConfig

    try:
        try:
            return GenerationConfig.from_pretrained(str(model))
        except OSError:
            if (Path(model) / GENERATION_FILE).is_file():
                raise
            return GenerationConfig.from_pretrained(str(model), CONFIG_FILE, _from_model_config=True)
    except Exception as error:  # any exception of the library for an invalid file
        place = f"generation settings of {model} ({GENERATION_FILE}, or {CONFIG_FILE} without one)"
        raise UserError(f"{place} are invalid; correct or remove them: {reason(error)}", "model") from error


def writable(generation: Any) -> Any:
    """Return a generation config that transformers can save; it refuses values without effect, as a temperature without
    `do_sample`. That is set to true if more values can then be kept; values that it still refuses are left out.
    """
    values = generation.to_diff_dict()
    choices = [_saved_values({**values, **more}) for more in ({}, {"do_sample": True})]
    return type(generation)(**max(choices, key=lambda kept: len(kept.keys() - {"do_sample"})))


def changed_generation_settings(model: str) -> str:
    """Describe how the trained model's generation config will differ from the model's; "" if it will not."""
    generation = load_generation_config(model)
    before, after = generation.to_diff_dict(), writable(generation).to_diff_dict()
    changes = [f"{name}={after.get(name)}" for name in {**before, **after} if before.get(name) != after.get(name)]
    return f"transformers refuses to save it as it is; the trained model's has {', '.join(changes)}" if changes else ""


def _saved_values(values: dict[str, Any]) -> dict[str, Any]:
    from transformers import GenerationConfig

    kept: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: name not in GENERATION_MODES):
        with suppress(Exception):  # any exception of the library for an invalid value
            GenerationConfig(**kept, **{name: values[name]}).validate(strict=True)
            kept[name] = values[name]
    return kept


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
    content = read_json(file)
    vocabulary = content["model"].get("vocab")
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    if invalid := [token_id for token_id in ids if not 0 <= token_id < MOST_TOKENS][:1]:
        raise ValueError(f"{show(invalid[0])} is not a valid token id")


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model, with padding on the left and a pad token.

    transformers rebuilds a tokenizer by the class that tokenizer_config.json names. If that one reads the texts in
    PROBE otherwise than tokenizer.json (as LlamaTokenizerFast, which loses all spaces of a byte-level tokenizer), this
    returns the tokenizer of tokenizer.json itself, and logs a warning.
    """
    tokenizer, warning = _read_tokenizer(model_directory(model))
    if warning:
        _warn_once(warning)
    return tokenizer


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def misread_tokenizer(model: str) -> Any | None:
    """Return the model's tokenizer if transformers and vLLM read another one by themselves; else None."""
    tokenizer, warning = _read_tokenizer(model)
    return tokenizer if warning else None


def _read_tokenizer(model: str) -> tuple[Any, str]:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    _check_files(model)
    problems = []
    try:
        _check_token_ids(Path(model) / TOKENIZER_FILE)
        file = cached_file(model, TOKENIZER_FILE, _raise_exceptions_for_missing_entries=False)
        own = None if file is None else Tokenizer.from_file(file)
        for reader in (AutoTokenizer, PreTrainedTokenizerFast)[: 1 if own is None else 2]:
            try:
                tokenizer = reader.from_pretrained(model, padding_side="left", trust_remote_code=False)
                tokenizer("text")
                problem = None if own is None else _difference(tokenizer, own)
            except Exception as error:  # any exception of the libraries for invalid files
                problem = reason(error)
            if problem is None:
                break
            problems.append(problem)
        else:
            raise ValueError(problems[0])
    except Exception as error:  # as above
        raise UserError(f"{model} has no tokenizer that can be read: {reason(error)}", "model") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    used = f"{model}: tokenizer.json itself is used, because transformers misreads it"
    return tokenizer, "".join(f"{used}: {problem}" for problem in problems)


def _difference(tokenizer: Any, own: Any) -> str | None:
    """Return how a tokenizer reads PROBE otherwise than `own`, the tokenizer of tokenizer.json; None if it does not."""
    own.no_truncation()
    own.no_padding()
    special = [token.content for token in own.get_added_tokens_decoder().values() if token.special]
    for text in (*PROBE, "".join(f"a {token} b" for token in special[:8])):
        ids, given = own.encode(text, add_special_tokens=False).ids, tokenizer.encode(text, add_special_tokens=False)
        if ids != given:
            read = tokenizer.decode(given)
            return f"{show(text)} becomes {show(read) if read != text else 'other tokens'}"
    return None


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer into a model's directory: the files that it was loaded from, unless it was changed since."""
    from transformers.utils import cached_file

    start = tokenizer.name_or_path

    def content(one: Any) -> Any:
        return one.get_vocab(), one.chat_template, one.special_tokens_map

    tokenizer.save_pretrained(folder)
    with suppress(OSError, UserError):  # the start model's directory may have moved
        if content(_read_tokenizer(start)[0]) == content(tokenizer):
            find = partial(cached_file, start, _raise_exceptions_for_missing_entries=False)
            for name, file in {name: find(name) for name in TOKENIZER_FILES}.items():
                (folder / name).unlink(missing_ok=True)
                if file is not None:
                    shutil.copyfile(file, folder / name)


def model_fingerprint(config: Any) -> str:
    """Return a short name of an architecture for trace files: family, layers, kv heads, head dim and a config hash."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    layers, kv_heads, head_dim = cache_shape(config)
    left_out = ("transformers_version", "dtype")
    settings = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k not in left_out}
    if is_text_part(config):  # as in the text model that is saved from it
        settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{config.model_type}-L{layers}-H{kv_heads}-D{head_dim}-{digest}"


def load_model(directory: str | Path, dtype: str = "float32") -> Any:
    from sparse_rl.attention.interface import adopt

    model = load_plain_model(directory, dtype)
    policy = saved_policy(directory)
    if needs_scorers(policy):
        load_scorers(directory, model, policy)
    return adopt(model)


def untrained_model(directory: str | Path, seed: int, dtype: str = "float32") -> Any:
    """Create a model with the configuration of a directory or hub name, and random weights from `seed`, drawn in
    float32 on the CPU. The global generator is not changed.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(str(directory))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = load_generation_config(directory)
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
    """Load a model, or the text part of a multimodal model, by transformers' `from_pretrained` with `options`."""
    from transformers import AutoModelForCausalLM

    config = load_config(str(directory))
    if not is_text_part(config):
        return AutoModelForCausalLM.from_pretrained(directory, config=config, **options)
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, key_mapping=RENAMED, **options)
    del model._weight_conversions  # with which `save_pretrained` would write the names of the multimodal model
    return model


def load_weights(model: Any, directory: str | Path) -> Any:
    """Load the weights in a directory, such as a checkpoint, into a model; return torch's lists of missing names.

    transformers joins the tensors of single experts. Other tensors, such as scorers, are read under their own names.
    """
    weights = read_model(directory, dtype="auto", use_safetensors=True).state_dict()
    others = model.state_dict().keys() - weights.keys()
    for file in weight_files(Path(directory)):
        with open_tensors(file) as opened:
            weights |= {name: opened.get_tensor(name) for name in others & set(opened.keys())}
    return model.load_state_dict(weights, strict=False)


# ---- models in memory ------------------------------------------------------------------------------------------------


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from last hidden states [..., hidden size] to logits [..., vocabulary] of a base model: the
    output embedding, Granite's division by `logits_scaling`, and Falcon-H1's factor `lm_head_multiplier`.
    """
    output, scaling = model.get_output_embeddings(), getattr(model.config, "logits_scaling", 1.0)
    factor = getattr(model.config, "lm_head_multiplier", 1.0)
    return output if scaling == factor == 1.0 else lambda hidden: output(hidden) / scaling * factor
