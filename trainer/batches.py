"""Sequences as the rows of a forward: padded or packed, under their traces and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.engine import Rollout
from sparse_rl.attention import NO_MASK, KVView, ReplayView, cache_shape
from sparse_rl.trace import EvictionTrace, pack_traces


@dataclass
class Batch:
    """Sequences as right-padded rows, several to a row where they are packed.

    rollouts : in the order of `targets`; ids, positions int64 [B, S], positions anew for each sequence
    where : (row, column) int64 [N] each, of the positions that predict the completion tokens `targets` int64 [N]
    rows : the sequences of each row
    path : of attention, one of sparse_rl.attention.PATHS
    """

    rollouts: list[Rollout]
    ids: torch.Tensor
    positions: torch.Tensor
    where: tuple[torch.Tensor, torch.Tensor]
    targets: torch.Tensor
    rows: list[list[Rollout]]
    path: str = "sdpa"

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], device: torch.device, packing: bool = False, path: str = "sdpa") -> Batch:
        rows = _packed(rollouts) if packing else [[rollout] for rollout in rollouts]
        width = max(sum(map(length_of, row)) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        positions = torch.zeros(len(rows), width, dtype=torch.long)
        places: list[tuple[int, int]] = []
        targets: list[int] = []
        for number, row in enumerate(rows):
            start = 0
            for rollout in row:
                tokens = [*rollout.prompt_ids, *rollout.completion_ids]
                end, first = start + len(tokens), start + len(rollout.prompt_ids)
                ids[number, start:end] = torch.tensor(tokens)
                positions[number, start:end] = torch.arange(len(tokens))
                places += [(number, column) for column in range(first - 1, end - 1)]
                targets += rollout.completion_ids
                start = end
        number, column = torch.tensor(places, device=device).T
        return cls(
            [rollout for row in rows for rollout in row],
            ids.to(device),
            positions.to(device),
            (number, column),
            torch.tensor(targets, device=device),
            rows,
            path,
        )

    def hidden(self, model: Any, *, replayed: bool) -> torch.Tensor:
        """A model's last hidden states [N, H] where it predicts the targets.

        replayed : under the traces; else each sequence sees all of itself
        """
        if replayed:
            traces = [[rollout.trace for rollout in row] for row in self.rows]
        else:
            layers, kv_heads, _ = cache_shape(base_of(model).config)
            traces = [[EvictionTrace.dense(layers, kv_heads, length_of(r)) for r in row] for row in self.rows]
        packed, starts = [pack_traces(row) for row in traces], [0] * len(traces)
        view = ReplayView.of(packed, starts, self.ids.shape[1], self.ids.device, self.path)
        return self.hidden_under(model, view)

    def hidden_under(self, model: Any, view: KVView) -> torch.Tensor:
        """The same under any view."""
        device = self.ids.device
        decoder = base_of(model).get_decoder()
        out = decoder(
            input_ids=self.ids,
            position_ids=self.positions,
            attention_mask=NO_MASK.to(device),
            kv_view=view,
            use_cache=False,
        )
        return out.last_hidden_state[self.where]


def _packed(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rows as long as the longest sequence, each filled first-fit, the longest first."""
    width = max(map(length_of, rollouts))
    rows: list[list[Rollout]] = []
    free: list[int] = []
    for rollout in sorted(rollouts, key=lambda r: -length_of(r)):
        length = length_of(rollout)
        row = next((i for i, space in enumerate(free) if space >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(rollout)
        free[row] -= length
    return rows


def length_of(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.completion_ids)


def base_of(model: Any) -> Any:
    """The transformers model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
