"""The settings of the policy `press`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from sparse_rl.config import Rule, Text
from sparse_rl.policies.config import PolicyConfig
from sparse_rl.policies.schedule import CompactsPrompts, Schedule


@dataclass(frozen=True, kw_only=True)
class PressConfig(PolicyConfig):
    """A press of the library kvpress: the prompt is compacted once, at its end, and nothing is evicted afterwards.

    press : class of kvpress, such as SnapKVPress, that gives each entry of the prompt a score (docs/elsewhere.md)
    compression_ratio : fraction of the prompt's entries that is evicted from each kv head
    options : further arguments of the class, as in {window_size: 32}
    """

    name: ClassVar[str] = "press"
    policy_class: ClassVar[str] = "sparse_rl.methods.press.policy:Press"
    in_parts: ClassVar[bool] = False
    sinks: ClassVar[int] = 0
    window: ClassVar[int] = 0
    press: Text = "SnapKVPress"
    compression_ratio: Annotated[float, Rule("between 0 and 1", lambda v: 0 < v < 1)] = 0.5
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def schedule(self) -> Schedule:
        return CompactsPrompts(share=1 - self.compression_ratio)

    @property
    def only_hf(self) -> str | None:
        return "a press reads the hidden states of transformers' attention layers"
