"""Gives the trainer's weights to an engine, as the live module or as a copy, and a reference model's to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor
from trl.models import unwrap_model_for_generation

from rollout.engine import Engine
from sparse_rl.errors import StoppedError
from sparse_rl.methods.kvpop.policy import LearnedPolicy
from sparse_rl.methods.kvpop.scorers import head_digests
from sparse_rl.models.directory import SCORERS, check_scorers, load_scorers
from sparse_rl.policies.base import Policy


@contextmanager
def live_weights(trainer: Any, *, gather: bool = True) -> Iterator[None]:
    """Let an engine sample from the live module in this block, with the numerics of training. gather : under ZeRO-3,
    True gathers all weights for the whole block"""
    model, accelerator = trainer.model_wrapped, trainer.accelerator
    options: dict[str, Any] = {"gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs}
    with unwrap_model_for_generation(model, accelerator, gather, **options), accelerator.autocast():
        yield


def named_weights(model: Any, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name (as in a Hugging Face checkpoint) and the tensor of every weight, one at a time.

    A head that is tied to the embedding is yielded once, under the embedding's name. Under ZeRO-3 all processes gather
    each weight together: exhaust the iterator on all processes. An adapted weight is yielded as a new tensor, the sum
    of the frozen weight and the product of its LoRA matrices.
    """
    module = accelerator.unwrap_model(model)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            continue
        with gathered(weight, accelerator):
            whole = weight.detach()
            if name.endswith(".base_layer.weight"):
                adapted = module.get_submodule(name.removesuffix(".base_layer.weight"))
                whole = whole + sum(adapted.get_delta_weight(adapter).detach() for adapter in adapted.active_adapters)
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), whole


def carry_scorers(model: Any, policy: Policy, directory: str) -> Any:
    """Return the model, with the frozen scorers of `directory` if the policy is learned. Raises UserError if the
    directory contains no scorers, or those of another policy."""
    if isinstance(policy, LearnedPolicy) and not hasattr(model, SCORERS):
        check_scorers(directory, policy)
        load_scorers(directory, model, policy)
        getattr(model, SCORERS).to(model.dtype).requires_grad_(False)  # ZeRO-3 needs a single dtype
    return model


def check_scorers_in(engine: Any, weights: dict[str, Any]) -> None:
    """Raise StoppedError if an engine's scorers differ from the scorers in the trainer's `weights`."""
    prefix = f"{SCORERS}."
    scorers = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    held = engine.scorer_digests() if scorers else {}
    wrong = [name for name, value in head_digests(scorers).items() if held.get(name) != value]
    if wrong:
        raise StoppedError(
            f"the engine's scorers are not the trainer's ({len(wrong)} of {len(scorers)} tensors, such as {wrong[0]}): "
            "evictions by stale scorers would not show in the replay gap. The last checkpoint is untouched"
        )


def give_weights(engine: Engine, model: Any, accelerator: Any) -> None:
    """Update an engine's copy of the weights to those of `model`. Raises StoppedError if its scorers then differ."""
    scorers: dict[str, Tensor] = {}

    def collecting_scorers() -> Iterator[tuple[str, Tensor]]:
        for name, weight in named_weights(model, accelerator):
            if SCORERS in name.split("."):
                scorers[name] = weight.clone()
            yield name, weight

    engine.load_weights(collecting_scorers())
    check_scorers_in(engine, scorers)


def reference_state(model: Any, accelerator: Any) -> dict[str, Tensor]:
    """Return name -> weight (on the CPU) on the first process, and an empty dict on the others, which call it too."""
    first, weights = accelerator.is_main_process, named_weights(model, accelerator)
    return {name: weight.to("cpu", copy=True) for name, weight in weights if first}


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
    """Return a context manager that makes a weight whole on every process under ZeRO-3, and then sends the changes of
    rank `writer` to all."""
    if not partitioned(accelerator):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=writer)
