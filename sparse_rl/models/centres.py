"""The centres of a model's queries, which the policy `triattention` needs, in its directory.

`sparse-rl calibrate` writes the file cache_centres.safetensors. It names the model by a fingerprint of its weights, and
has the settings of its RoPE; the file of another model is refused. A model that was trained under the policy gets the
centres under which it was trained. In memory they are `model.cache_centres`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from sparse_rl.attention.families import policy_shape, ropes
from sparse_rl.errors import UserError, one_line
from sparse_rl.files import open_tensors
from sparse_rl.methods.triattention.config import ATTACHED_AS
from sparse_rl.methods.triattention.policy import Centres, TriAttention
from sparse_rl.models.directory import CENTRES_FILE, check_scorers, keep_apart
from sparse_rl.models.load import base_of, load_config
from sparse_rl.models.weights import Identity, identify
from sparse_rl.policies.base import Policy


def write_centres(directory: str | Path, centres: Centres) -> Path:
    """Write the centres into the directory of their model. Returns the file."""
    from safetensors.torch import save_file

    file, model = Path(directory) / CENTRES_FILE, identify(directory)
    about = {"model": model.name, "fingerprint": model.fingerprint, "rope": _rope(load_config(str(directory)))}
    try:
        save_file({name: value.contiguous() for name, value in vars(centres).items()}, file, about)
    except Exception as error:  # of the operating system, or of the library
        raise UserError(f"{file} cannot be written: {one_line(error)}", "model") from error
    keep_apart(directory)
    return file


def read_centres(directory: str | Path) -> Centres:
    """Read the centres in a model's directory.

    Raises UserError if there are none, or if they belong to a model with other weights, shapes or RoPE.
    """
    file, calibrate = Path(directory) / CENTRES_FILE, f"sparse-rl calibrate {directory} TEXT"
    if not file.is_file():
        raise UserError(f"the policy triattention needs {file}; measure centres: {calibrate}", "cache.policy")
    config = load_config(str(directory))
    try:
        with open_tensors(file) as opened:
            about = opened.metadata()
            centres = Centres(**{name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        (layers, _, dim), heads = policy_shape(config), config.num_attention_heads
        shapes = {"centre": (layers, heads, dim), "size": (layers, heads, dim // 2), "frequency": (layers, dim // 2)}
        for name, value in vars(centres).items():
            if value.shape != shapes[name] or not value.isfinite().all():
                raise UserError(f"{name} has shape {list(value.shape)}, or values that are not finite")
        if about["rope"] != _rope(config):
            raise UserError(f"it was measured with RoPE {about['rope']}, but the model has {_rope(config)}")
        Identity(about["model"], about["fingerprint"]).check(identify(directory), "the file")
    except Exception as error:  # any exception of the library for a damaged file
        why = one_line(error, 1000)
        raise UserError(f"{file} cannot be used: {why}; measure again: {calibrate}", "cache.policy") from error
    return centres


def fitting_centres(directory: str | Path) -> Centres | None:
    """Return the centres in a model's directory, or None if it has none that fit."""
    try:
        return read_centres(directory)
    except UserError:
        return None


def carry_centres(model: Any, policy: Policy) -> None:
    """Attach the centres in the model's directory to the model, if the policy needs them and the model has none."""
    if isinstance(policy, TriAttention) and not hasattr(base_of(model), ATTACHED_AS):
        setattr(base_of(model), ATTACHED_AS, read_centres(model.config._name_or_path))


def copy_centres(start: str, directory: str | Path, policy: Policy) -> None:
    """Copy the centres of the model `start` to the directory of a model that was trained from it under the policy."""
    if isinstance(policy, TriAttention):
        try:
            write_centres(directory, read_centres(start))
        except UserError as error:  # the start model's directory may have moved
            logging.getLogger("sparse_rl").warning("the trained model has no centres for triattention: %s", error)


def check_parameters(directory: str | Path, policy: Policy) -> None:
    """Raise UserError if the policy needs scorers or centres, and the directory has none that fit. Builds no model."""
    check_scorers(directory, policy)
    if isinstance(policy, TriAttention):
        read_centres(directory)


def _rope(config: Any) -> str:
    return json.dumps([dict(rope) for rope in ropes(config)], sort_keys=True, default=str)
