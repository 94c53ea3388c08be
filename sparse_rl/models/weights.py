"""The files of a model's weights, read without loading the model: the text part, checks, and an identity.

Only safetensors files are read, because a pickle (pytorch_model.bin, *.pt) may run code when it is opened. The checks
read only file headers.

The text part of a multimodal model is used as if it were a model of its own; the other parts are not loaded. Published
models, and `save_pretrained`, name its weights as older versions of transformers did;
`save_pretrained(save_original_format=False)` uses the names in the module.

By a fingerprint of the weights, files that belong to one model refuse another. It is a digest of the first values of
each tensor, in bfloat16, equal for the safetensors files of a directory and for a module with these weights in float32
or bfloat16. It is empty (unknown, and not checked) for a hub name without local files, a module in float16, whose range
is smaller, quantized weights, weights that are split over processes, and a module with adapters (LoRA). Of the matrices
of experts, which a module joins to one tensor, only the first one is digested.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.families import MULTIMODAL
from sparse_rl.errors import UserError, reason
from sparse_rl.files import fingerprint, open_tensors, read_json
from sparse_rl.models.directory import CONFIG_FILE, INDEX, POLICY_FILE, SCORER_FILE, SCORERS, WEIGHTS

# ---- the text part ---------------------------------------------------------------------------------------------------

HEAD = "lm_head."  # start of a name that a multimodal model's module and its text part share
RENAMED = {  # patterns of stored names -> their replacements in the text part
    r"^(?:language_model\.model|model\.language_model)\.": "model.",
    r"^language_model\.lm_head\.": HEAD,
}
CARRIED = (  # settings of a text model that stand outside of text_config
    *("name_or_path", "dtype", "eos_token_id", "bos_token_id", "pad_token_id"),
    *("tie_word_embeddings", "quantization_config"),
)


def text_config(config: Any) -> Any:
    """Return the configuration of a multimodal model's text part, or `config` itself for a text model."""
    if config.model_type not in MULTIMODAL:
        return config
    part = config.text_config
    for name in CARRIED:
        if (value := getattr(config, name, None)) is not None:
            setattr(part, name, value)
    part.architectures = [MULTIMODAL[config.model_type]]
    return part


def settings_of(folder: Path) -> Mapping[str, Any]:
    """Return the content of config.json in a directory; it is empty if there is no such file."""
    return read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the text part, or all of it; ValueError if it is missing."""
    if str(settings.get("model_type")) not in MULTIMODAL:
        return settings
    part = settings.get("text_config")
    if not isinstance(part, dict):
        raise ValueError(f"text_config is not a mapping in {CONFIG_FILE}")
    return part


def text_names(names: Iterable[str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return stored name -> name in the text part. Other parts are left out; a text model's names are unchanged.

    settings : content of the config.json beside the files
    """
    if str(settings.get("model_type")) not in MULTIMODAL:
        return {name: name for name in names}
    renamed = {}
    for stored in names:
        name = stored
        for pattern, replacement in RENAMED.items():
            name = re.sub(pattern, replacement, name)
        if name != stored or name.startswith(HEAD):
            renamed[stored] = name
    return renamed


# ---- checks ----------------------------------------------------------------------------------------------------------

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
        mend = "merge it into its base model, and name the merged model"
        raise UserError(f"{model} is an adapter ({ADAPTER}); {mend}", key)
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
            with open_tensors(file) as opened:
                names = text_names(opened.keys(), settings)
                shapes |= {name: list(opened.get_slice(stored).get_shape()) for stored, name in names.items()}
    except Exception as error:  # any exception of the library for a damaged file
        raise UserError(f"{file} cannot be read ({reason(error)}); download or write it again", key) from error
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model's directory. Raises ValueError, KeyError or OSError for a wrong index."""
    return [folder / name for name in ([WEIGHTS] if (folder / WEIGHTS).is_file() else _shards(folder / INDEX))]


def _shards(index: Path) -> list[str]:
    names = sorted(set(read_json(index)["weight_map"].values()))
    if not names or any(Path(name).name != name for name in names):
        raise ValueError("weight_map does not name files beside it")
    return names


def meta_model(config: Any, model: str = "the model") -> Any:
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
    if shapes is None:
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
            describes = f"the model that its {CONFIG_FILE} describes"
            raise UserError(f"{file_name} of {model} does not belong to {describes}", key)
    return empty_model


def _part_of(model: Any, stored: str, weights: dict[str, Any]) -> bool:
    """Return True if transformers, loading the model, would make a stored tensor a part of one of the weights."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    name, pattern = name_in_module(stored, get_model_conversion_mapping(model), model.base_model_prefix, weights)
    return pattern is not None and name in weights


def name_in_module(stored: str, rules: list[Any], *prefix: Any) -> tuple[str, str | None]:
    """Return the module's name of a stored tensor, and the pattern of the converter in `rules` for it, if any."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return rename_source_key(stored, renamings, converters, *prefix)


# ---- identity --------------------------------------------------------------------------------------------------------

VALUES = 64  # values of a tensor that are digested: the first ones of its first row
PREFIX = "model."  # of the names of a causal model's weights; a checkpoint of its decoder lacks the prefix
SETTINGS = (  # patterns of the files that configure a model and its tokenizer
    *("config.json", "generation_config.json", POLICY_FILE, "*token*.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template*", "additional_chat_templates/*"),
)
WEIGHT_FILES = ("model*.safetensors", INDEX, SCORER_FILE)
LEFT_OUT = (SCORERS, "lm_head.", "rotary_emb.")  # a checkpoint or a module may lack these tensors


@dataclass(frozen=True)
class Identity:
    """Name and fingerprint of a model; an empty fingerprint is unknown."""

    name: str = ""
    fingerprint: str = ""

    def check(self, other: Identity, subject: str) -> None:
        """Raise UserError if both fingerprints are known and differ.

        other : the model with which `subject`, which was made with this model, is used
        """
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            own, used = (f"{model.name or 'a model'} ({model.fingerprint})" for model in (self, other))
            raise UserError(f"{subject} is of another model: it was made with {own}, and is used with {used}")


UNKNOWN = Identity()


def file_fingerprints(place: str, weights: bool) -> dict[str, str]:
    """Return the fingerprints, by name, of the files read of a model's directory or hub name, or of one file."""
    folder, patterns = Path(place), [*SETTINGS, *(WEIGHT_FILES if weights else ())]
    if folder.is_file():
        return {"content": fingerprint(folder)}
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(place, allow_patterns=patterns))
    if (folder / WEIGHTS).is_file() and not (folder / SCORER_FILE).is_file():
        patterns = [pattern for pattern in patterns if pattern != INDEX]  # `sparse-rl calibrate` may have written it
    files = sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    return {str(file.relative_to(folder)): fingerprint(file) for file in files}


def weights_digest(place: str) -> str:
    """Return a digest of the files of weights, scorers included, of a model's directory or hub name."""
    files = file_fingerprints(place, weights=True).items()
    weights = sorted(text for name, text in files if name.endswith(".safetensors"))
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()[:16]


def identify(model: Any) -> Identity:
    """Return the identity of a directory, of a hub name, or of a module in memory."""
    if not isinstance(model, (str, Path)):
        return Identity(getattr(model.config, "_name_or_path", ""), _digest(model))
    folder = Path(model) if Path(model).is_dir() else _cached(str(model))
    return Identity(str(model), "" if folder is None else _stored_digest(folder))


def _cached(name: str) -> Path | None:
    """Return the folder of a hub model in the local cache of hub models. None means that it has no weights there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        files = [try_to_load_from_cache(name, file) for file in (WEIGHTS, INDEX)]
    except HFValidationError:
        return None
    return next((Path(file).parent for file in files if isinstance(file, str)), None)


def _stored_digest(folder: Path) -> str:
    starts: dict[str, Tensor] = {}
    try:
        files = weight_files(folder)
        if not all(file.is_file() for file in files):
            return ""  # a part of a hub model that was not downloaded
        stored: dict[str, Path] = {}
        for file in files:
            with open_tensors(file) as opened:
                stored |= dict.fromkeys(opened.keys(), file)
        firsts = _firsts(settings_of(folder), stored)
        for file in files:
            with open_tensors(file) as opened:
                for name, stored_name in firsts.items():
                    if stored[stored_name] == file and not any(part in name for part in LEFT_OUT):
                        shape = (tensor := opened.get_slice(stored_name)).get_shape()
                        row = (*[slice(0, 1)] * (len(shape) - 1), slice(0, VALUES))
                        starts[name] = tensor[row] if shape else opened.get_tensor(stored_name)
    except FileNotFoundError:
        return ""  # a configuration without weights, for a model with random weights
    except Exception as error:  # any exception of the library for a damaged file
        raise UserError(f"the weights in {folder} cannot be read: {reason(error)}", "model") from error
    return _of_starts({name.removeprefix(PREFIX): start for name, start in starts.items()})


def _firsts(settings: Mapping[str, Any], stored: Iterable[str]) -> dict[str, str]:
    """Return the name of the stored tensor with which each tensor of a module begins, by the module's name.

    As transformers does, this leaves out layers behind the model's last one, which predict several tokens.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import dot_natural_key

    names = text_names(stored, settings)
    config = text_settings(settings)
    rules = get_checkpoint_conversion_mapping(config.get("model_type")) or []
    firsts: dict[str, str] = {}
    for stored_name in sorted(names, key=dot_natural_key):
        layer = re.search(r"\blayers\.(\d+)\.", stored_name)
        if layer is None or int(layer[1]) < config.get("num_hidden_layers", 1 << 30):
            firsts.setdefault(name_in_module(names[stored_name], rules)[0], stored_name)
    return firsts


def _digest(module: Any) -> str:
    if hasattr(module, "get_base_model"):
        return ""  # the weights of adapters are not in a checkpoint of the model
    starts: dict[str, Tensor] = {}
    for name, weight in module.state_dict().items():
        if not weight.numel() or weight.is_meta or weight.dtype == torch.float16:
            return ""
        if not any(part in name for part in LEFT_OUT):
            starts[name.removeprefix(PREFIX)] = weight[(0,) * (weight.dim() - 1)][:VALUES]
    return _of_starts(starts)


def _of_starts(starts: dict[str, Tensor]) -> str:
    names = sorted(starts)
    if not names or not all(starts[name].dtype in (torch.float32, torch.bfloat16, torch.float16) for name in names):
        return ""
    values = torch.cat([starts[name].flatten().to(torch.bfloat16) for name in names]).cpu()
    digest = hashlib.sha256("\n".join(f"{name} {starts[name].numel()}" for name in names).encode())
    digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
