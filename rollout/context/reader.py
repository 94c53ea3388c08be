"""The functions of the hf engine that a compaction needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.context.cache import Context, ContextCache, cache_after
from rollout.context.layerwise import LayerwiseView
from rollout.context.prompts import ContextPrompts
from rollout.context.rotation import moved
from sparse_rl.attention.families import global_layers, windows_of
from sparse_rl.models.identity import Identity


@dataclass(frozen=True)
class EngineReader:
    """The functions of an `HFEngine` that a compaction needs; implements `Reader` (conversations.py)."""

    engine: Any
    prompts: ContextPrompts

    @property
    def model(self) -> Identity:
        identity: Identity = self.engine.identity
        return identity

    @property
    def group(self) -> int:
        config = self.engine.model.config
        return int(config.num_attention_heads // config.num_key_value_heads)

    def cache(self, context: Context | None, captures: bool = False) -> Any:
        return cache_after(context, windows_of(self.engine.model.config), captures)

    def read(self, texts: Sequence[Sequence[int]], cache: ContextCache) -> None:
        self.engine._read([list(text) for text in texts], cache)

    def logits(self, texts: Sequence[Sequence[int]], cache: ContextCache) -> list[Tensor]:
        engine, longest = self.engine, max(map(len, texts))
        device = next(engine.model.parameters()).device
        ids = torch.tensor([[*text, *[text[-1]] * (longest - len(text))] for text in texts], device=device)
        cache.begin_prefill([len(text) for text in texts], device)
        places = torch.arange(longest, device=device)[None] + cache.past
        hidden = engine._hidden(ids, places, cache)
        logits = engine._logits(hidden.flatten(0, 1)).view(*ids.shape, -1)
        return [row[: len(text)] for row, text in zip(logits, texts, strict=True)]

    def read_layerwise(self, view: LayerwiseView) -> None:
        device = next(self.engine.model.parameters()).device
        ids, positions = (torch.tensor([x], device=device) for x in (view.ids, view.positions))
        with self.engine._sampling():
            self.engine._hidden(ids, positions, view)

    def write(
        self, context: Context, prompts: Sequence[Sequence[int]], most_tokens: int, samples: int, seed: int
    ) -> list[list[int]]:
        sampling = SamplingConfig(most_tokens, n=samples, seed=seed)
        return [rollout.completion_ids for rollout in self.engine.generate(prompts, sampling, context)]

    def moved(self, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
        return moved(self.engine.model.get_decoder().rotary_emb, keys, old, new)

    def query_norm(self, layer: int) -> Tensor | None:
        model = self.engine.model
        attention = model.get_decoder().layers[global_layers(model.config)[layer]].self_attn
        weight = getattr(getattr(attention, "q_norm", None), "weight", None)
        return weight if weight is not None and weight.numel() == attention.head_dim else None
