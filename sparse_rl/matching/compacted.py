"""The record of a context that was compacted once: the settings, parts and reference queries of its fits, from which a
trainer recomputes biases and values. Only queries of the context's own tokens can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.matching.block import Fit
from sparse_rl.trace import TraceError

SECTIONS = ("compacted_with", "compacted_parts", "compacted_queries")
GROUP = -1  # in compacted_queries: all query heads of the group


@dataclass(frozen=True)
class ContextRecord:
    """The settings of the fits of a compacted context. A trace holds them as numbers.

    ridge : ridge of the value fit
    pursuit : True if keys are chosen by orthogonal matching pursuit (omp or omp_fast), False if by attention
    biases, values : False if biases, or values, were left as they were
    """

    ridge: float
    pursuit: bool
    biases: bool
    values: bool

    @classmethod
    def read(cls, settings: Tensor) -> ContextRecord:
        """Read the record from the trace section compacted_with.

        settings : the section, float64 [4]
        """
        ridge, pursuit, biases, values = settings.tolist()
        return cls(ridge, bool(pursuit), bool(biases), bool(values))

    @property
    def fit(self) -> Fit:
        """Settings for `refit`. The settings that only affect the choice of entries have default values."""
        return Fit("omp" if self.pursuit else "attention", ridge=self.ridge, biases=self.biases, values=self.values)

    def sections(self, bounds: Sequence[int], queries: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the trace sections compacted_with, compacted_parts and compacted_queries.

        bounds : positions at which the parts begin, and the end of the last part
        queries : for each part, the reference queries of a kv head, int [number of queries, 2]: the query's token, and
            its query head within the group, or GROUP for one query of each query head
        """
        rows = [F.pad(of_part, (1, 0), value=part) for part, of_part in enumerate(queries)]
        return {
            "compacted_with": torch.tensor(astuple(self), dtype=torch.float64),
            "compacted_parts": torch.tensor(bounds, dtype=torch.int32),
            "compacted_queries": torch.cat(rows).to(torch.int32),
        }


@dataclass(frozen=True)
class FittedPart:
    """A part of a context, whose entries are fitted together.

    start, end : the positions of the part's tokens are `start` to `end` - 1
    heads, tokens : int64 [n], the query head within the group, and the token, of each reference query of a kv head
    """

    start: int
    end: int
    heads: Tensor
    tokens: Tensor


def fitted_parts(bounds: Tensor, queries: Tensor, group: int) -> list[FittedPart]:
    """Return the parts of a compacted context.

    bounds, queries : the trace sections compacted_parts and compacted_queries of one sequence
    group : G, the number of query heads per kv head

    Raises TraceError if a reference query is of a query head that does not exist.
    """
    part_of, token_of, head_of = queries.long().unbind(1)
    if int(head_of.max()) >= group:
        wrong = f"compacted_queries names query head {int(head_of.max())} of a group"
        raise TraceError(f"{wrong}, but the model has only {group} query heads per kv head")
    ends, parts = bounds.tolist(), []
    for part, (start, end) in enumerate(pairwise(ends)):
        tokens, heads = token_of[part_of == part], head_of[part_of == part]
        in_group = heads == GROUP
        whole_group = tokens[in_group]
        every_head = torch.arange(group).repeat_interleave(len(whole_group))
        heads = torch.cat([heads[~in_group], every_head])
        tokens = torch.cat([tokens[~in_group], whole_group.repeat(group)])
        parts.append(FittedPart(start, end, heads, tokens))
    return parts
