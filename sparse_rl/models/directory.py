"""Model directories, and the files that sparse-rl adds to them: the cache policy, and the scorers of a learned policy.

cache_policy.json holds the cache policy that the model was trained under; engines and evaluation use this policy by
default. cache_scorer.safetensors holds the scorers; plain transformers ignores this file. In memory, the scorers are
the module list `model.cache_scorers`, with one scorer per layer that has no sliding window.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from sparse_rl.config import show
from sparse_rl.errors import UserError, one_line
from sparse_rl.files import open_tensors, read_json
from sparse_rl.lazy import SOURCES
from sparse_rl.methods.kvpop.config import ATTACHED_AS as SCORERS

if TYPE_CHECKING:  # model_directory must not import torch
    from sparse_rl.methods.kvpop.policy import LearnedPolicy
    from sparse_rl.policies.base import Policy

CONFIG_FILE = "config.json"
RUN_MODEL = "model"  # subdirectory of a run's directory that holds the trained model
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POLICY_FILE = "cache_policy.json"
POLICY_VERSION = 1
SCORER_FILE = "cache_scorer.safetensors"
CENTRES_FILE = "cache_centres.safetensors"  # models/centres.py


def model_directory(name: str) -> str:
    """Return the directory of a run's trained model, or of a shipped model ("quickstart/model"); else `name` itself."""
    path = Path(name)
    if (path / CONFIG_FILE).is_file():
        return name
    if (path / RUN_MODEL / CONFIG_FILE).is_file():
        return str(path / RUN_MODEL)
    shipped = SOURCES / "recipes" / name
    return str(shipped) if not path.exists() and (shipped / CONFIG_FILE).is_file() else name


def file_states(directory: str | Path) -> list[tuple[str, int, int]]:
    """Return (name, bytes, time of the last change in nanoseconds) of each file of a directory; none for a hub name."""
    files = sorted(file for file in Path(directory).glob("*") if file.is_file()) if Path(directory).is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def save_policy(directory: str | Path, policy: Policy) -> None:
    """Write cache_policy.json into a model's directory: the default policy for sampling from the model."""
    content = {"format_version": POLICY_VERSION, **policy.config.as_block()}
    (Path(directory) / POLICY_FILE).write_text(json.dumps(content, indent=2) + "\n")


def saved_policy(directory: str | Path) -> Policy | None:
    """Return the policy saved in a model directory, or None if there is none. Raises UserError for an unusable file."""
    from sparse_rl.policies.make import make_policy

    file = Path(directory) / POLICY_FILE
    if not os.path.lexists(file):
        return None
    try:
        content = read_json(file)
        version = content.pop("format_version", None)
        if version != POLICY_VERSION:
            raise UserError(f"it has format version {show(version)}, but this sparse-rl reads {POLICY_VERSION}")
        return make_policy(content)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be used: {error}") from error


# ---- scorers ---------------------------------------------------------------------------------------------------------


def needs_scorers(policy: Any) -> TypeGuard[LearnedPolicy]:
    return hasattr(getattr(policy, "config", None), "scorer")


def attach_scorers(model: Any, policy: LearnedPolicy) -> None:
    """Attach untrained float32 scorers to a model. Saving the model does not save the scorers; see `write_scorers`."""
    from torch import nn

    from sparse_rl.attention.families import policy_shape
    from sparse_rl.methods.kvpop.scorers import make_scorer

    layers, heads, dim = policy_shape(model.config)
    scorers = nn.ModuleList(make_scorer(policy.config.scorer, heads=heads, dim=dim) for _ in range(layers))
    setattr(model, SCORERS, scorers.to(model.device))
    model._keys_to_ignore_on_save = [f"{SCORERS}.{name}" for name in scorers.state_dict()]


def write_scorers(directory: str | Path, weights: Any) -> None:
    """Write the scorers in a model's state dict to cache_scorer.safetensors."""
    from safetensors.torch import save_file

    prefix = f"{SCORERS}."
    scorer_weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    folder = Path(directory)
    save_file({name: value.detach().cpu().contiguous() for name, value in scorer_weights.items()}, folder / SCORER_FILE)
    keep_apart(folder)


def keep_apart(directory: str | Path) -> None:
    """Write an index of the weights if there is none: without it, vLLM would load our safetensors files as weights."""
    folder = Path(directory)
    if (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        with open_tensors(folder / WEIGHTS) as stored:
            names = list(stored.keys())
        size = {"total_size": (folder / WEIGHTS).stat().st_size}
        index = {"metadata": size, "weight_map": dict.fromkeys(names, WEIGHTS)}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_scorers(directory: str | Path, model: Any, policy: LearnedPolicy) -> None:
    import torch

    with torch.random.fork_rng(devices=[]):  # the random initial weights are replaced immediately
        attach_scorers(model, policy)
    read_scorers(directory, model)


def read_scorers(directory: str | Path, model: Any) -> None:
    """Load cache_scorer.safetensors into a model's scorers. Raises UserError if the file is missing or does not fit."""
    weights = stored_scorers(directory)
    try:
        getattr(model, SCORERS).load_state_dict(weights)
    except Exception as error:  # the file holds scorers of another shape
        raise UserError(f"{Path(directory) / SCORER_FILE} cannot be used: {one_line(error, 1000)}", "model") from error


def stored_scorers(directory: str | Path) -> dict[str, Any]:
    """Return the tensors of cache_scorer.safetensors by name, "LAYER.PARAMETER"."""
    file = Path(directory) / SCORER_FILE
    if not file.exists():
        raise UserError(f"{file} is missing: the model has a learned policy, but not its scorers", "model")
    try:
        with open_tensors(file) as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if wrong := [n for n, value in weights.items() if not (value.is_floating_point() and value.isfinite().all())]:
            raise UserError(f"{wrong[0]} has values that are not finite numbers; train or copy the model again")
        return weights
    except Exception as error:  # the file is damaged
        raise UserError(f"{file} cannot be used: {one_line(error, 1000)}", "model") from error


def check_scorers(directory: str | Path, policy: Policy) -> None:
    """Raise UserError if the policy needs scorers, and the directory has none or different ones. Builds no model."""
    for learned in filter(needs_scorers, getattr(policy, "parts", [policy])):
        own_policy = saved_policy(directory)
        learned.check(own_policy.config.scorer if needs_scorers(own_policy) else None, str(directory))
        stored_scorers(directory)
