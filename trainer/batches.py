"""Arranges sequences as the rows of a forward pass, either padded or packed, and runs a model on them under a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_rl.attention.families import cache_shape, windows_of
from sparse_rl.attention.interface import NO_MASK, KVView
from sparse_rl.attention.views.factory import make_view
from sparse_rl.models.base import base_of
from sparse_rl.trace import EvictionTrace, pack_traces
from trainer.examples import Example


@dataclass
class Batch:
    """A batch of sequences as right-padded rows. With packing, a row holds several sequences.

    In the shapes, B is the number of rows, S the length of the longest row, and N the number of completion tokens.

    ids : token ids, int64 [B, S]
    positions : position of each token in its sequence, from 0, int64 [B, S]
    where : (rows, columns) of the positions at which the model predicts the completion tokens, int64 [N] each
    targets : completion tokens, int64 [N]
    rows : the sequences that each row holds
    attention_kernel : one of ATTENTION_KERNELS
    through : True lets gradients flow into the fits of policy am; False treats the fits as constants
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
        rows = _packed(examples) if packing else [[example] for example in examples]

        def padded(of: Callable[[Example], Tensor]) -> Tensor:
            return pad_sequence([torch.cat([of(sequence) for sequence in row]) for row in rows], batch_first=True).to(
                device
            )

        def predicts(sequence: Example) -> Tensor:
            following = torch.arange(1, sequence.length + 1)
            return (following >= len(sequence.prompt)) & (following < sequence.length)

        ids = padded(lambda sequence: torch.tensor([*sequence.prompt, *sequence.completion]))
        positions = padded(lambda sequence: torch.arange(sequence.length))
        row, column = padded(predicts).nonzero(as_tuple=True)
        return cls(ids, positions, (row, column), ids[row, column + 1], rows, attention_kernel, through)

    @property
    def examples(self) -> list[Example]:
        """The examples in the order of `targets`."""
        return [example for row in self.rows for example in row]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of tokens of the rows and of their prompts, int64 [B] each. Rows must not be packed."""
        rows = [(example.length, len(example.prompt)) for (example,) in self.rows]
        lengths, prompts = torch.tensor(rows, device=self.ids.device).T
        return lengths, prompts

    def hidden(self, model: Any, *, replayed: bool) -> Tensor:
        """Return the model's last hidden states at the positions that predict the targets, [N, hidden size].

        replayed : True replays the traces; False gives each sequence a full cache
        """
        if replayed:
            traces = [[trace_of(example) for example in row] for row in self.rows]
        else:
            config = base_of(model).config
            (layers, kv_heads, _), windows = cache_shape(config), windows_of(config)
            traces = [[EvictionTrace.dense(layers, kv_heads, e.length, windows) for e in row] for row in self.rows]
        packed, starts = [pack_traces(row) for row in traces], [0] * len(traces)
        view = make_view(packed, starts, self.ids.shape[1], self.ids.device, self.attention_kernel, self.through)
        return self.hidden_under(model, view)

    def hidden_under(self, model: Any, view: KVView) -> Tensor:
        """Return the last hidden states under `view` at the positions that predict the targets, [N, hidden size]."""
        inputs = {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": NO_MASK.to(self.ids.device)}
        out = base_of(model).get_decoder()(**inputs, kv_view=view, use_cache=False)
        return out.last_hidden_state[self.where]


def trace_of(example: Example) -> EvictionTrace:
    assert example.trace is not None, "the example has no trace to replay: no engine has sampled or simulated it"
    return example.trace


def _packed(examples: Sequence[Example]) -> list[list[Example]]:
    """Pack the sequences into rows that are at most as long as the longest sequence.

    Longer sequences are placed first, and each goes into the first row with enough free tokens.
    """
    width = max(example.length for example in examples)
    rows: list[list[Example]] = []
    free: list[int] = []
    for example in sorted(examples, key=lambda sequence: -sequence.length):
        row = next((i for i, space in enumerate(free) if space >= example.length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(example)
        free[row] -= example.length
    return rows
