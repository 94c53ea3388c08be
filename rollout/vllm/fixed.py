"""Memory at addresses that never change, for what is new in each step: a CUDA graph reads those it was made with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


class Fixed:
    """One buffer for each name, with room for `rows` requests, allocated when the name is first used."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.memory: dict[str, torch.Tensor] = {}

    def copy(self, name: str, value: torch.Tensor, count: int) -> torch.Tensor:
        """A copy of `value`, of one size for each of `count` requests, in the name's buffer, until its next copy."""
        if name not in self.memory:
            self.memory[name] = value.new_empty(value.numel() // count * self.rows)
        return self.memory[name][: value.numel()].view(value.shape).copy_(value)

    def copy_fields(self, record: Any, count: int) -> None:
        """Put a `copy` in the place of each tensor of a dataclass, and of dataclasses in it."""
        for f in dataclasses.fields(record):
            value = getattr(record, f.name)
            if isinstance(value, torch.Tensor):
                setattr(record, f.name, self.copy(f"{type(record).__name__}.{f.name}", value, count))
            elif dataclasses.is_dataclass(value):
                self.copy_fields(value, count)
