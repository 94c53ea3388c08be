"""The trainer's weights as an engine has them: the live module's, or a copy, by the names in a Hugging Face checkpoint;
and those of a reference model that follows the policy (TRL's `sync_ref_model`), as a checkpoint keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor
from trl.models import unwrap_model_for_generation

from rollout.engine import Engine
from sparse_rl.models.directory import SCORERS
from trainer.scored.trainer import check_scorers_in


@contextmanager
def live_weights(trainer: Any, *, gather: bool = True) -> Iterator[None]:
    """In here an engine can sample from the live module, as training computes. gather : all of it, under ZeRO-3"""
    model, accelerator = trainer.model_wrapped, trainer.accelerator
    given: dict[str, Any] = {"gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs}
    with unwrap_model_for_generation(model, accelerator, gather, **given), accelerator.autocast():
        yield


def named_weights(model: Any, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
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
    """Bring an engine's copy up to date. Raises StoppedError where its scorers, if any, are not those it was given."""
    scorers: dict[str, Tensor] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, weight in named_weights(model, accelerator):
            if SCORERS in name.split("."):
                scorers[name] = weight.clone()
            yield name, weight

    engine.load_weights(noted())
    check_scorers_in(engine, scorers)


def reference_state(model: Any, accelerator: Any) -> dict[str, Tensor]:
    """Every weight by its name, on the CPU; nothing on any process but the first.

    Every process must take part, here and in `load_reference`: under ZeRO-3 each has a part.
    """
    kept: dict[str, Tensor] = {}
    for name, weight in named_weights(model, accelerator):
        if accelerator.is_main_process:
            kept[name] = weight.to("cpu", copy=True)
    return kept


@torch.no_grad()
def load_reference(model: Any, accelerator: Any, kept: dict[str, Tensor]) -> None:
    """Give every process what `reference_state` has kept on the first."""
    for name, weight in accelerator.unwrap_model(model).named_parameters():
        with gathered(weight, accelerator, writer=0):
            if accelerator.is_main_process:
                weight.copy_(kept[name])
        if not partitioned(accelerator):
            broadcast(weight.data)


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
def _merged(module: Any, name: str, weight: torch.nn.Parameter) -> Tensor:
    """The weight, with what the active LoRA adapters add to it."""
    if not name.endswith(".base_layer.weight"):
        return weight.detach()
    adapted = module.get_submodule(name.removesuffix(".base_layer.weight"))
    return weight + sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
