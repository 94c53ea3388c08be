"""Identity of a model's weights, by which files that belong to one model refuse another.

The fingerprint is cheap: a digest of the first values of each tensor, in bfloat16. It is equal for the safetensors
files of a directory and for a module with these weights in float32 or bfloat16. It is empty, which means that it is
unknown and is not checked, in these cases: a hub name without local files, a module in float16 (whose range is smaller
than that of bfloat16), quantized weights, weights that are split over processes, and a module with adapters (LoRA).

Files hold the matrices of every expert, of which a module makes one tensor. Of these, only the first one is digested,
which is the start of the module's tensor, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sparse_rl.errors import UserError, reason
from sparse_rl.models.directory import INDEX, SCORERS, WEIGHTS
from sparse_rl.models.text_part import settings_of, text_names, text_settings
from sparse_rl.models.weights import name_in_module, weight_files

VALUES = 64  # values of a tensor that are digested: the first ones of its first row
PREFIX = "model."  # of the names of a causal model's weights; a checkpoint of its decoder lacks the prefix
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


def identify(model: Any) -> Identity:
    """Return the identity of a directory, of a hub name, or of a module in memory.

    Raises UserError if the weights of a directory cannot be read.
    """
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
            with safe_open(file, framework="pt") as opened:
                stored |= dict.fromkeys(opened.keys(), file)
        firsts = _firsts(settings_of(folder), stored)
        for file in files:
            with safe_open(file, framework="pt") as opened:
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

    This follows the rules by which transformers loads the model. Layers behind the model's last one, which some
    checkpoints have for the prediction of several tokens, are left out, as they are by transformers.

    settings : content of the model's config.json
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
    """Return the digest of the first values of each tensor, by name."""
    names = sorted(starts)
    if not names or not all(starts[name].dtype in (torch.float32, torch.bfloat16, torch.float16) for name in names):
        return ""
    values = torch.cat([starts[name].flatten().to(torch.bfloat16) for name in names]).cpu()
    digest = hashlib.sha256("\n".join(f"{name} {starts[name].numel()}" for name in names).encode())
    digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
