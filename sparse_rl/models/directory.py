"""Which directory holds a model, and what it carries beside it: its cache policy, and the scorers of a learned one.

cache_policy.json says under which cache a model was trained; engines and evaluation use it with no flags.
cache_scorer.safetensors holds the scorers, which plain transformers ignores. In memory they are the module list
`model.cache_scorers`, one per layer.
"""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.config import show
from sparse_rl.errors import UserError, one_line
from sparse_rl.files import read_text
from sparse_rl.methods.kvpop.scorers.config import ATTACHED_AS as SCORERS

if TYPE_CHECKING:  # so that a path is answered before torch is imported
    from sparse_rl.methods.kvpop.learned import LearnedPolicy
    from sparse_rl.policies.base import Policy

CONFIG_FILE = "config.json"
RUN_MODEL = "model"  # where a training leaves its model, in the directory of the run
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POLICY_FILE = "cache_policy.json"
POLICY_VERSION = 1
SCORER_FILE = "cache_scorer.safetensors"


def model_directory(name: str) -> str:
    """The directory that a user means by `name`: of a run, that of the model which it has left; of a shipped model,
    such as "quickstart/model", where it is installed. Any other name stands for itself.
    """
    path = Path(name)
    if (path / CONFIG_FILE).is_file():
        return name
    if (path / RUN_MODEL / CONFIG_FILE).is_file():
        return str(path / RUN_MODEL)
    shipped = _shipped_model(name)
    return name if path.exists() or shipped is None else str(shipped)


def _shipped_model(name: str) -> Path | None:
    """The directory of a model in the package `recipes`, beside the recipes that use it; None where there is none."""
    try:
        folder = Path(str(importlib.resources.files("recipes"))) / name
    except ModuleNotFoundError:  # the package alone ships none
        return None
    return folder if (folder / CONFIG_FILE).is_file() else None


def save_policy(directory: str | Path, policy: Policy) -> None:
    """Write cache_policy.json into a model's directory: the policy that it is sampled under unless told otherwise."""
    content = {"format_version": POLICY_VERSION, **policy.config.as_block()}
    (Path(directory) / POLICY_FILE).write_text(json.dumps(content, indent=2) + "\n")


def saved_policy(directory: str | Path) -> Policy | None:
    """The policy that a model directory carries, or None.

    Raises UserError where the file is there but cannot be used.
    """
    from sparse_rl.policies.registry import make_policy

    file = Path(directory) / POLICY_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(read_text(file))
        if not isinstance(content, dict):
            raise UserError("it is not a mapping")
        version = content.pop("format_version", None)
        if version != POLICY_VERSION:
            raise UserError(f"format version {show(version)}, this reads {POLICY_VERSION}")
        return make_policy(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be used: {error}") from error


# ---- scorers ---------------------------------------------------------------------------------------------------------


def attach_scorers(model: Any, policy: LearnedPolicy) -> None:
    """Give a model untrained scorers, float32. Saved as a whole it leaves them out: see write_scorers."""
    from torch import nn

    from sparse_rl.attention.families import cache_shape
    from sparse_rl.methods.kvpop.scorers.registry import make_scorer

    layers, heads, dim = cache_shape(model.config)
    scorers = nn.ModuleList(make_scorer(policy.config.scorer, heads=heads, dim=dim) for _ in range(layers))
    setattr(model, SCORERS, scorers.to(model.device))
    model._keys_to_ignore_on_save = [f"{SCORERS}.{name}" for name in scorers.state_dict()]


def write_scorers(directory: str | Path, weights: Any) -> None:
    """Write cache_scorer.safetensors from a model's state dict, beside the weights of the model itself.

    And an index of those, where there is none: vLLM would load every safetensors file that no index leaves out.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    prefix = f"{SCORERS}."
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    folder = Path(directory)
    save_file({name: value.detach().cpu().contiguous() for name, value in own.items()}, folder / SCORER_FILE)
    if (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        with safe_open(folder / WEIGHTS, "pt") as stored:
            names = list(stored.keys())
        index = {
            "metadata": {"total_size": (folder / WEIGHTS).stat().st_size},
            "weight_map": dict.fromkeys(names, WEIGHTS),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def load_scorers(directory: str | Path, model: Any, policy: LearnedPolicy) -> None:
    """Give a model the scorers of its directory. Raises UserError as `read_scorers`."""
    import torch

    with torch.random.fork_rng(devices=[]):  # what they are drawn as is replaced at once
        attach_scorers(model, policy)
    read_scorers(directory, model)


def read_scorers(directory: str | Path, model: Any) -> None:
    """Load cache_scorer.safetensors into a model's scorers.

    Raises UserError where it is missing, unreadable, or of other scorers.
    """
    weights = stored_scorers(directory)
    try:
        getattr(model, SCORERS).load_state_dict(weights)
    except Exception as error:  # of other scorers
        raise UserError(f"{Path(directory) / SCORER_FILE} cannot be used: {one_line(error, 1000)}", "model") from error


def stored_scorers(directory: str | Path) -> dict[str, Any]:
    """The tensors of cache_scorer.safetensors by name: a layer's number, and the parameter's name.

    Raises UserError where it is missing or unreadable.
    """
    from safetensors.torch import load_file

    file = Path(directory) / SCORER_FILE
    if not file.is_file():
        raise UserError(f"{file} is missing: the model carries a learned policy without its scorers", "model")
    try:
        return load_file(file)
    except Exception as error:  # damaged
        raise UserError(f"{file} cannot be used: {one_line(error, 1000)}", "model") from error


def check_scorers(directory: str | Path, policy: Policy) -> None:
    """Raise UserError where a policy needs scorers, and the directory has none or others; nothing is loaded for it."""
    from sparse_rl.methods.kvpop.learned import LearnedPolicy

    if isinstance(policy, LearnedPolicy):
        own = saved_policy(directory)
        policy.check(own.config.scorer if isinstance(own, LearnedPolicy) else None, str(directory))
        stored_scorers(directory)
