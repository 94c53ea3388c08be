"""Lets TRL load models from directories as the other commands do: the text part of a multimodal model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trl.trainer import grpo_trainer, sft_trainer
from trl.trainer.utils import create_model_from_path

from sparse_rl.models.load import read_model

MODULES: tuple[Any, ...] = (grpo_trainer, sft_trainer)


class _Models:
    """Stands in for the class from whose `from_pretrained` TRL gets a model."""

    from_pretrained = staticmethod(read_model)


@contextmanager
def text_parts() -> Iterator[None]:
    """Let TRL's trainers load their models, and the reference model, by `read_model`."""
    architecture: Any = _Models
    ours = partial(create_model_from_path, architecture=architecture)
    for module in MODULES:
        module.create_model_from_path = ours
    try:
        yield
    finally:
        for module in MODULES:
            module.create_model_from_path = create_model_from_path
