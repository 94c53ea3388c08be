"""Sequences as the rows of a forward: padded or packed, under their traces and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import NO_MASK, KVView
from sparse_rl.attention.views.factory import make_view
from sparse_rl.models.base import base_of
from sparse_rl.trace import EvictionTrace, pack_traces
from trainer.examples import Example


@dataclass
class Batch:
    """Sequences as right-padded rows, several to a row where they are packed.

    ids, positions : int64 [B, S], positions anew for each sequence
    where : (row, column) int64 [N] each, of the positions that predict the completion tokens `targets` int64 [N]
    rows : the sequences of each row
    attention_kernel : one of ATTENTION_KERNELS
    through : see `make_view`
    """

    ids: Tensor
    positions: Tensor
    where: tuple[Tensor, Tensor]
    targets: Tensor
    rows: list[list[Example]]
    attention_kernel: str = "gather"
    through: bool = True

    @classmethod
    def make(
        cls,
        examples: Sequence[Example],
        device: torch.device,
        packing: bool = False,
        attention_kernel: str = "gather",
        through: bool = True,
    ) -> Batch:
        """The batch of these examples on `device`, each a row, or with `packing` several to a row."""
        rows = _packed(examples) if packing else [[example] for example in examples]

        def padded(of: Callable[[Example], Tensor]) -> Tensor:
            return pad_sequence([torch.cat([of(one) for one in row]) for row in rows], batch_first=True).to(device)

        def predicts(one: Example) -> Tensor:
            following = torch.arange(1, one.length + 1)
            return (following >= len(one.prompt)) & (following < one.length)

        ids = padded(lambda one: torch.tensor([*one.prompt, *one.completion]))
        positions = padded(lambda one: torch.arange(one.length))
        row, column = padded(predicts).nonzero(as_tuple=True)
        return cls(ids, positions, (row, column), ids[row, column + 1], rows, attention_kernel, through)

    @property
    def examples(self) -> list[Example]:
        """In the order of `targets`."""
        return [example for row in self.rows for example in row]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Of rows that are not packed: the tokens of each, and of its prompt: int64 [B] each."""
        rows = [(example.length, len(example.prompt)) for (example,) in self.rows]
        lengths, prompts = torch.tensor(rows, device=self.ids.device).T
        return lengths, prompts

    def hidden(self, model: Any, *, replayed: bool) -> Tensor:
        """A model's last hidden states [N, H] where it predicts the targets.

        replayed : under the traces; else each sequence sees all of itself
        """
        if replayed:
            traces = [[trace_of(example) for example in row] for row in self.rows]
        else:
            layers, kv_heads, _ = cache_shape(base_of(model).config)
            traces = [[EvictionTrace.dense(layers, kv_heads, example.length) for example in row] for row in self.rows]
        packed, starts = [pack_traces(row) for row in traces], [0] * len(traces)
        view = make_view(packed, starts, self.ids.shape[1], self.ids.device, self.attention_kernel, self.through)
        return self.hidden_under(model, view)

    def hidden_under(self, model: Any, view: KVView) -> Tensor:
        """A model's last hidden states [N, H] where it predicts the targets, under any view of the rows."""
        inputs = {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": NO_MASK.to(self.ids.device)}
        out = base_of(model).get_decoder()(**inputs, kv_view=view, use_cache=False)
        return out.last_hidden_state[self.where]


def trace_of(example: Example) -> EvictionTrace:
    """The evictions of an example that an engine has sampled or simulated."""
    assert example.trace is not None, "no engine has seen this example: there is nothing to replay"
    return example.trace


def _packed(examples: Sequence[Example]) -> list[list[Example]]:
    """Rows as long as the longest sequence, each filled first-fit, the longest first."""
    width = max(example.length for example in examples)
    rows: list[list[Example]] = []
    free: list[int] = []
    for example in sorted(examples, key=lambda one: -one.length):
        row = next((i for i, space in enumerate(free) if space >= example.length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(example)
        free[row] -= example.length
    return rows
