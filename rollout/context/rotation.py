"""Keys that RoPE has turned to one position, turned to another (Attention Matching, appendix C.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.families import ropes, windows_of
from sparse_rl.errors import UserError

# Kinds of RoPE whose frequencies do not depend on the length of the text. yarn also scales cosines and sines.
FIXED = {"default", "linear", "llama3", "yarn"}


def check_movable(config: Any, key: str = "chunking") -> None:
    """Raise UserError if the frequencies of a model's RoPE depend on the length of the text that it reads.

    key : the setting that the error names
    """
    rope, *others = ropes(config)
    if others or any(windows_of(config)):
        wrong = "the model has layers with sliding windows or several kinds of RoPE, so keys cannot be moved"
        raise UserError(f"{wrong}; use chunking: kv", key)
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or not all(getattr(config, "no_rope_layers", None) or [1]):
        wrong = "RoPE turns only a part of the model's keys, so keys cannot be moved"
        raise UserError(f"{wrong}; use chunking: kv", key)
    if kind not in FIXED:
        wrong = f"the model's RoPE of type {kind} depends on the length of the text, so keys cannot be moved"
        raise UserError(f"{wrong}; use chunking: kv", key)


def moved(rotary: Any, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return keys [1, Hkv, N, D], which RoPE has turned to the positions `old`, turned to the positions `new`.

    The angle is the difference between the angles of both positions, each rounded to float32 as in the model. The angle
    of the difference of positions would differ from it by this rounding.

    rotary : the model's module that computes cosines and sines, each times its `attention_scaling`
    old, new : int64 [1, Hkv, N]
    """
    (cos, sin), (new_cos, new_sin) = (_cos_and_sin(rotary, positions) for positions in (old, new))
    turn_cos, turn_sin = new_cos * cos + new_sin * sin, new_sin * cos - new_cos * sin
    wide = keys.double()
    lower, upper = wide.chunk(2, dim=-1)
    turned = wide * turn_cos + torch.cat([-upper, lower], dim=-1) * turn_sin
    return turned.to(keys.dtype)


def _cos_and_sin(rotary: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 cosines and sines [1, Hkv, N, D] of the angles at positions [1, Hkv, N], without the scaling."""
    dummy = torch.empty(0, dtype=torch.float32, device=positions.device)
    cos, sin = (x.double()[None] / rotary.attention_scaling for x in rotary(dummy, positions[0]))
    return cos, sin
