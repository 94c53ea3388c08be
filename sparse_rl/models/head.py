"""The head of a language model: from its decoder's last hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from last hidden states [..., hidden size] to logits [..., vocabulary], as in the model.

    It is the output embedding, and Granite's division by `logits_scaling`. `model` is the base model, without adapters
    and wrappers.
    """
    output, scaling = model.get_output_embeddings(), getattr(model.config, "logits_scaling", 1.0)
    return output if scaling == 1.0 else lambda hidden: output(hidden) / scaling
