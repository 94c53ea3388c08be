"""Gives the trainer's weights to an engine, either as the live module or as a copy.

The weights of a copy are named as in a Hugging Face checkpoint. For checkpoints, this module also saves and
restores a reference model that follows the trained model (TRL's `sync_ref_model`).
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
    """Let an engine sample from the live module in this block, with the numerics of training.

    gather : under ZeRO-3, True gathers all weights for the whole block
    """
    model, accelerator = trainer.model_wrapped, trainer.accelerator
    options: dict[str, Any] = {"gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs}
    with unwrap_model_for_generation(model, accelerator, gather, **options), accelerator.autocast():
        yield


def named_weights(model: Any, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of every weight, one at a time.

    A head that is tied to the embedding is yielded once, under the embedding's name. Under ZeRO-3 all processes gather
    each weight together: exhaust the iterator on all processes. An adapted weight is yielded as a new tensor, the sum
    of the frozen weight and the product of its LoRA matrices.
    """
    module = accelerator.unwrap_model(model)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            continue
        with gathered(weight, accelerator):
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), _merged(module, name, weight)


def give_weights(engine: Engine, model: Any, accelerator: Any) -> None:
    """Update an engine's copy of the weights to the weights of `model`.

    Raises StoppedError if the scorers in the engine then differ from the scorers of `model`.
    """
    scorers: dict[str, Tensor] = {}

    def collecting_scorers() -> Iterator[tuple[str, Tensor]]:
        for name, weight in named_weights(model, accelerator):
            if SCORERS in name.split("."):
                scorers[name] = weight.clone()
            yield name, weight

    engine.load_weights(collecting_scorers())
    check_scorers_in(engine, scorers)


def reference_state(model: Any, accelerator: Any) -> dict[str, Tensor]:
    """Return name -> weight (on the CPU) on the first process, and an empty dict on the other processes.

    Every process must call this function and `load_reference`: under ZeRO-3 each process holds a part of every weight.
    """
    kept: dict[str, Tensor] = {}
    for name, weight in named_weights(model, accelerator):
        if accelerator.is_main_process:
            kept[name] = weight.to("cpu", copy=True)
    return kept


@torch.no_grad()
def load_reference(model: Any, accelerator: Any, kept: dict[str, Tensor]) -> None:
    """Load `kept`, the weights that the first process holds, into the model of every process."""
    for name, weight in accelerator.unwrap_model(model).named_parameters():
        with gathered(weight, accelerator, writer=0):
            if accelerator.is_main_process:
                weight.copy_(kept[name])
        if not partitioned(accelerator):
            broadcast(weight.data)


def partitioned(accelerator: Any) -> bool:
    """Return True under ZeRO-3, where each process holds only a part of every weight."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def gathered(weight: torch.nn.Parameter, accelerator: Any, writer: int | None = None) -> Any:
    """Return a context manager that makes a weight whole on every process. Without ZeRO-3 it does nothing.

    writer : rank whose changes are sent to all processes; None if the weight is only read
    """
    if not partitioned(accelerator):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=writer)


@torch.no_grad()
def _merged(module: Any, name: str, weight: torch.nn.Parameter) -> Tensor:
    if not name.endswith(".base_layer.weight"):
        return weight.detach()
    adapted = module.get_submodule(name.removesuffix(".base_layer.weight"))
    return weight + sum(adapted.get_delta_weight(adapter) for adapter in adapted.active_adapters)
