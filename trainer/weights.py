"""The trainer's weights for an engine that has a copy of its own, by their names in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from rollout.engine import Engine
from sparse_rl.models.directory import SCORERS
from trainer.scored.trainer import check_scorers_in


def named_weights(model: Any, accelerator: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight, one at a time; a tied head comes once, under the embedding's name.

    Under ZeRO-3 each is gathered while it is yielded, which every process must take part in: exhaust it on all of them.
    An adapter's product is added to a copy of the weight it adapts, so that the frozen weights keep their bits.
    """
    module = accelerator.unwrap_model(model)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            continue
        with gathered(weight, accelerator):
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), _merged(module, name, weight)


def give_weights(engine: Engine, model: Any, accelerator: Any) -> None:
    """Bring an engine's copy up to date; its scorers, where it samples by some, are compared with what was given.

    Raises StoppedError where they differ.
    """
    scorers: dict[str, torch.Tensor] = {}

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in named_weights(model, accelerator):
            if SCORERS in name.split("."):
                scorers[name] = weight.clone()
            yield name, weight

    engine.load_weights(noted())
    check_scorers_in(engine, scorers)


def partitioned(accelerator: Any) -> bool:
    """Whether each process holds a part of every weight: ZeRO-3."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def gathered(weight: torch.nn.Parameter, accelerator: Any, writer: int | None = None) -> Any:
    """A context in which a weight is whole. writer : the process that writes into it, under ZeRO-3 for all of them"""
    if not partitioned(accelerator):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=writer)


@torch.no_grad()
def _merged(module: Any, name: str, weight: torch.nn.Parameter) -> torch.Tensor:
    """The weight, with what the active LoRA adapters add to it."""
    if not name.endswith(".base_layer.weight"):
        return weight.detach()
    adapted = module.get_submodule(name.removesuffix(".base_layer.weight"))
    return weight + sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
