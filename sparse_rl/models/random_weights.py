"""Models with random weights, for measurements of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sparse_rl.attention.families import check_replayable, check_sizes
from sparse_rl.config import show
from sparse_rl.errors import UserError, listed, reason
from sparse_rl.models.directory import SCORERS, attach_scorers, needs_scorers, save_policy, write_scorers
from sparse_rl.policies.base import Policy

SCORER_NOISE = 0.1  # standard deviation of the noise added to new scorers, which rank by recency


def changed_config(config: Any, changes: Mapping[str, Any], key: str) -> Any:
    """Return a copy of a model's configuration with some of its keys replaced. Errors name the recipe key `key`."""
    from transformers import AutoConfig

    settings = config.to_dict()
    for name in changes:
        if name not in settings:
            raise UserError(f"unknown key; the configuration has {listed(sorted(settings), name)}", f"{key}.{name}")
    if "num_hidden_layers" in changes:
        settings.pop("layer_types", None)  # a list with an item for each layer
    try:
        changed = AutoConfig.for_model(**{**settings, **changes})
    except Exception as error:  # any exception of the library for an invalid value
        raise UserError(f"{show(dict(changes))} is not a shape of {config.model_type}: {reason(error)}", key) from error
    try:
        check_sizes(changed.to_dict(), "the model with this shape")
        check_replayable(changed, "the model with this shape")
    except UserError as error:
        raise UserError(error.message, key) from None
    return changed


def random_model(config: Any, dtype: str, seed: int, device: str = "cpu") -> Any:
    """Return a model with random weights from `seed`. The global generator is not changed."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def attach_random_scorers(model: Any, policy: Any) -> None:
    """Attach scorers with random weights to a model if the policy is a learned one. They replace earlier scorers."""
    if not needs_scorers(policy):
        return
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        attach_scorers(model, policy)
        for weight in getattr(model, SCORERS).parameters():
            weight += SCORER_NOISE * torch.randn_like(weight)


def save_random_model(make: Callable[[], Any], policy: Policy, folder: Path) -> Path:
    """Write the model that `make` returns, with random scorers for a learned policy, to a directory below `folder`;
    return it. All policies without scorers share a directory. A directory that exists is returned as it is.
    """
    scorer: Any = policy.config.scorer if needs_scorers(policy) else None
    words = [policy.name, *map(str, vars(scorer).values())] if scorer else ["full"]
    place = folder / "-".join(words)
    if place.is_dir():
        return place
    model = make()
    attach_random_scorers(model, policy)
    model.save_pretrained(place)
    if scorer:
        write_scorers(place, model.state_dict())
        save_policy(place, policy)
    return place
