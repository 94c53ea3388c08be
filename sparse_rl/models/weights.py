"""Checks that a model's directory holds weights that can be loaded. The checks read only file headers.

Only safetensors files are read, because a pickle (pytorch_model.bin, *.pt) may run code when it is opened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from sparse_rl.errors import UserError, reason
from sparse_rl.files import read_text
from sparse_rl.models.directory import CONFIG_FILE, INDEX, WEIGHTS
from sparse_rl.models.text_part import settings_of, text_names

PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
ADAPTER = "adapter_config.json"
CONVERT = (
    "from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained({0!r}, dtype='auto', use_safetensors=False).save_pretrained({0!r})"
)


def stored_shapes(model: str | Path, key: str = "model") -> dict[str, list[int]] | None:
    """Return the shape of each tensor in a directory's weight files, by name. None means that `model` is a hub name.

    Of a multimodal model, these are the weights of its text part, with the names that they have there. Raises UserError
    for missing, pickled or incomplete weights, and for an adapter.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    if (folder / ADAPTER).is_file():
        raise UserError(
            f"{model} is an adapter ({ADAPTER}); merge it into its base model, and name the merged model", key
        )
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if pickled:
            convert = f'python -c "{CONVERT.format(str(model))}"'
            mistake = f"{folder / pickled[0]} is a pickle, which may run code as it is read; use safetensors weights"
            raise UserError(f"{mistake}. If you trust the file, convert it: {convert}", key)
        raise UserError(f"{model} has no weights: there is no {WEIGHTS}", key)
    file = folder / CONFIG_FILE
    shapes: dict[str, list[int]] = {}
    try:
        settings = settings_of(folder)
        file = folder / (WEIGHTS if (folder / WEIGHTS).is_file() else INDEX)
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as opened:
                names = text_names(opened.keys(), settings)
                shapes |= {name: list(opened.get_slice(stored).get_shape()) for stored, name in names.items()}
    except Exception as error:  # any exception of the library for a damaged file
        raise UserError(f"{file} cannot be read ({reason(error)}); download or write it again", key) from error
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's directory. Raises ValueError, KeyError or OSError for a wrong index."""
    return [folder / name for name in ([WEIGHTS] if (folder / WEIGHTS).is_file() else _shards(folder / INDEX))]


def _shards(index: Path) -> list[str]:
    names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
    if not names or any(Path(name).name != name for name in names):
        raise ValueError("weight_map does not name files beside it")
    return names


def meta_model(config: Any, model: str = "the model") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # any exception of the constructor for values that the configuration class accepted
        raise UserError(f"{CONFIG_FILE} of {model} describes no model: {reason(error)}", "model") from error


def check_weights(config: Any, model: str, key: str = "model") -> Any:
    """Return the configuration's model on the meta device, after a check that a directory's weights match it."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = stored_shapes(model, key)
    empty_model = meta_model(config, model)
    if shapes is None or getattr(config, "quantization_config", None) is not None:
        return empty_model
    prefix = f"{empty_model.base_model_prefix}."

    def stored(*names: str) -> str | None:
        return next((n for name in names for n in (name, name.removeprefix(prefix)) if n in shapes), None)

    aliases: dict[int, list[str]] = {}  # names of each weight; tied weights share one entry
    weights = dict(empty_model.named_parameters(remove_duplicate=False))
    weights |= {name: buffer for name, buffer in empty_model.state_dict().items() if name not in weights}
    for name, weight in weights.items():
        aliases.setdefault(id(weight), []).append(name)
    under_own_name = {names[0]: stored(*names) for names in aliases.values()}
    pairs = [(file_name, weights[name]) for name, file_name in under_own_name.items() if file_name is not None]
    others = {name: weights[name] for name, file_name in under_own_name.items() if file_name is None}
    # Under the names in a file, transformers writes one tensor for each expert, for example.
    for name, weight in revert_weight_conversion(empty_model, others).items():
        if (file_name := stored(name)) is None:
            raise UserError(f"the weights of {model} lack {name}, which its {CONFIG_FILE} requires", key)
        pairs.append((file_name, weight))
    for file_name, weight in pairs:
        if shapes[file_name] != list(weight.shape):
            mistake = f"{file_name} of {model} has shape {shapes[file_name]}, but {list(weight.shape)} by its"
            raise UserError(f"{mistake} {CONFIG_FILE}; one of the files belongs to another model", key)
    for file_name in sorted(shapes.keys() - {file_name for file_name, _ in pairs}):
        if _part_of(empty_model, file_name, weights):
            raise UserError(
                f"{file_name} of {model} does not belong to the model that its {CONFIG_FILE} describes", key
            )
    return empty_model


def _part_of(model: Any, stored: str, weights: dict[str, Any]) -> bool:
    """Return True if transformers, loading the model, would make a stored tensor a part of one of the weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    name, pattern = name_in_module(stored, get_model_conversion_mapping(model), model.base_model_prefix, weights)
    return pattern is not None and name in weights


def name_in_module(stored: str, rules: list[Any], *prefix: Any) -> tuple[str, str | None]:
    """Return the module's name of a stored tensor, and the pattern of the converter that handles it, if there is one.

    rules : transformers' rules for the conversion of the model's files
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return rename_source_key(stored, renamings, converters, *prefix)
