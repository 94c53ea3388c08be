"""Multimodal models, whose text part is used as if it were a model of its own. The other parts are not loaded.

The files of a multimodal model name its weights in one of two ways. Published models, and `save_pretrained`, use the
names of older versions of transformers. `save_pretrained(save_original_format=False)` uses the names in the module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparse_rl.attention.families import MULTIMODAL
from sparse_rl.files import read_text
from sparse_rl.models.directory import CONFIG_FILE

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
    """Return the configuration of a multimodal model's text part, or `config` itself for a text model.

    `families.is_text_part` recognises the text part, until `save_pretrained` writes the class of the text model.
    """
    if config.model_type not in MULTIMODAL:
        return config
    part = config.text_config
    for name in CARRIED:
        if (value := getattr(config, name, None)) is not None:
            setattr(part, name, value)
    part.architectures = [MULTIMODAL[config.model_type]]
    return part


def settings_of(folder: Path) -> Mapping[str, Any]:
    """Return the content of config.json in a directory; it is empty if there is no such file.

    Raises OSError or ValueError if the file cannot be read.
    """
    settings = json.loads(read_text(folder / CONFIG_FILE)) if (folder / CONFIG_FILE).is_file() else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{CONFIG_FILE} is not a mapping")
    return settings


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the text part, or all of it for a text model.

    Raises ValueError if a multimodal model has no such part.
    """
    if str(settings.get("model_type")) not in MULTIMODAL:
        return settings
    part = settings.get("text_config")
    if not isinstance(part, dict):
        raise ValueError(f"text_config is not a mapping in {CONFIG_FILE}")
    return part


def text_names(names: Iterable[str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that stored tensors have in the text part: stored name -> name. Other parts are left out.

    The names in the files of a text model are returned unchanged.

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
