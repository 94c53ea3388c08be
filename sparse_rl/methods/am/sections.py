"""The sections of a trace that record Attention Matching, and their checks.

Of compactions while sampling: their times, and the settings with which the trainer recomputes the fits (`Record`). Of a
context that was compacted once: the settings, parts and reference queries of its fits (`ContextRecord`). Only queries
of the context's own tokens can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_rl.methods.am.match import Fit
from sparse_rl.trace import TraceError
from sparse_rl.trace.sections import NEVER, Section, Sections, batch_times, last_query, numbers


@dataclass(frozen=True)
class Record:
    """The settings that, together with the entries that stay, determine a fit. A trace holds them as numbers.

    sinks, window : number of first tokens, and of most recent tokens, that are not fitted
    refitted : t, the number of entries per kv head that a compaction keeps and fits; 0 if the budget grows, and then as
        many as stay
    reference_queries : number of last tokens whose queries are the reference queries
    ridge : ridge of the value fit
    pursuit : True if keys are chosen by orthogonal matching pursuit (omp or omp_fast), False if by attention
    paper : True if the fit uses the paper's own solvers, which cannot be replayed
    """

    sinks: int
    window: int
    refitted: int
    reference_queries: int
    ridge: float
    pursuit: bool
    paper: bool

    @classmethod
    def of(cls, config: Any) -> Record:
        """Make the record from a policy's settings, an AMConfig."""
        pursuit, paper = config.select != "attention", config.fit == "paper"
        refitted = config.refitted if isinstance(config.budget, int) else 0
        return cls(config.sinks, config.window, refitted, config.reference_queries, config.ridge, pursuit, paper)

    @classmethod
    def read(cls, settings: Tensor) -> Record:
        """Read `settings`, the section refit_with, float64 [7]. Raises TraceError if the paper's solvers were used."""
        sinks, window, refitted, queries, ridge, pursuit, paper = settings.tolist()
        if paper:
            raise TraceError("`fit: paper` is only for comparison and cannot be replayed; use `fit: ridge`")
        return cls(int(sinks), int(window), int(refitted), int(queries), ridge, bool(pursuit), False)

    @property
    def fit(self) -> Fit:
        """Settings for `refit`; those that only affect the choice of entries have default values."""
        return Fit("omp" if self.pursuit else "attention", ridge=self.ridge, paper=self.paper)

    def sections(self, times: Sequence[int]) -> dict[str, Tensor]:
        """Return the trace sections refit_with, float64 [7], and refit_at, int32, the counts of tokens `times`."""
        settings = torch.tensor(astuple(self), dtype=torch.float64)
        return {"refit_at": torch.tensor(times, dtype=torch.int32), "refit_with": settings}


OF_CONTEXTS = ("compacted_with", "compacted_parts", "compacted_queries")  # sections
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
        """Read `settings`, the trace section compacted_with, float64 [4]."""
        ridge, pursuit, biases, values = settings.tolist()
        return cls(ridge, bool(pursuit), bool(biases), bool(values))

    @property
    def fit(self) -> Fit:
        """Settings for `refit`; those that only affect the choice of entries have default values."""
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
    """A part of a context, the tokens from `start` to `end` - 1, whose entries are fitted together."""

    start: int
    end: int
    heads: Tensor  # int64 [n], the query head within the group of each reference query of a kv head
    tokens: Tensor  # int64 [n], the token of each reference query


def fitted_parts(bounds: Tensor, queries: Tensor, group: int) -> list[FittedPart]:
    """Return the parts of a compacted context, from the trace sections compacted_parts and compacted_queries.

    Raises TraceError if a reference query is of a query head that a group of `group` heads does not have.
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


# ---- checks, and the declarations of the sections -------------------------------------------------------------------


def _check_refit_at(times: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """The times ascend, from the end of the prompt to the last query, and tokens are evicted only at these times. Each
    compaction keeps the sinks, the window, and as many other entries as `refit_with` says; if the budget grows, as many
    in every kv head, and no fewer than the compaction before.
    """
    evict_at, last, shown = sections["evict_at"], last_query(sections), times.tolist()[:20]
    if bool((times.diff() <= 0).any()) or bool(((times < 1) | (times > last)).any()):
        return f"refit_at {shown} is not ascending from 1 to {last}, the position of the last query"
    if prompt is not None and bool((times < prompt).any()):
        return f"refit_at {shown} has a compaction inside the prompt of {prompt} tokens"
    evicted = evict_at < NEVER
    stray = evicted & ~torch.isin(evict_at, times)
    if bool(stray.any()):
        return f"a token is evicted at {int(evict_at[stray][0])}, but refit_at {shown} has no compaction there"
    sinks, window, refitted, queries = (int(number) for number in sections["refit_with"][:4])
    if len(times) and int(times[0]) < queries:
        return f"refit_at {shown} has a compaction before token {queries}; refit_with has {queries} reference queries"
    if bool(evicted[..., :sinks].any()):
        return f"one of the {sinks} sinks of refit_with is evicted"
    age = evict_at - torch.arange(evict_at.shape[-1], dtype=torch.int32)
    if bool((evicted & (age <= window)).any()):
        return f"a token is evicted while it is one of the last {window}, the window of refit_with"
    by_time = torch.zeros(*evict_at.shape[:2], len(times) + 1, dtype=torch.int64)
    by_time.scatter_add_(-1, torch.searchsorted(times, evict_at), torch.ones_like(evict_at, dtype=torch.int64))
    held = times - by_time[..., :-1].cumsum(-1)
    least = held[0, 0].cummax(0).values.clamp(min=sinks + window + 1)  # of a budget that grows
    expected = (torch.full_like(least, sinks + refitted + window) if refitted else least).expand_as(held)
    if bool((held != expected).any()):
        layer, head, place = (int(i) for i in (held != expected).nonzero()[0])
        says = f"refit_with says {sinks} + {refitted} + {window}"
        grows = f"a budget that grows leaves {int(least[place])} or more, in every kv head as many"
        return (
            f"the compaction at {int(times[place])} leaves {int(held[layer, head, place])} entries in layer {layer}, "
            f"kv head {head}, but {says if refitted else grows}"
        )
    return None


def _check_refit_with(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    message = f"refit_with {values.tolist()[:20]} is not a valid list of fit settings"
    if (
        len(values) != len(fields(Record))
        or not bool((values.isfinite() & (values >= 0)).all())
        or int(values[:4].max()) >= NEVER
    ):
        return message
    sinks, window, refitted, queries, ridge, *flags = values.tolist()
    whole = all(number == int(number) for number in (sinks, window, refitted, queries))
    return None if whole and queries and ridge and set(flags) <= {0.0, 1.0} else message


def _check_compacted_with(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    if len(values) == len(fields(ContextRecord)) and bool(values.isfinite().all()):
        ridge, pursuit, *fitted = values.tolist()
        if ridge > 0 and {pursuit, *fitted} <= {0.0, 1.0} and any(fitted):
            return None
    return f"compacted_with {values.tolist()[:20]} is not a valid list of fit settings"


def _check_compacted_parts(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """The bounds ascend inside the context, and tokens outside the parts stay."""
    end, shown = int(sections["compacted_at"]), values.tolist()[:20]
    if len(values) < 2 or bool((values.diff() <= 0).any()) or int(values[0]) < 0 or int(values[-1]) > end:
        return f"compacted_parts {shown} is not a list of at least two ascending positions from 0 to {end}"
    outside = sections["evict_at"].clone()
    outside[..., int(values[0]) : int(values[-1])] = NEVER
    if bool((outside != NEVER).any()):
        return f"a token is evicted that is in none of the parts of compacted_parts {shown}"
    return None


def _check_compacted_queries(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Each row is a part, a token of the context, and a query head within its group or -1 for all of them."""
    end, parts = int(sections["compacted_at"]), len(sections["compacted_parts"]) - 1
    if values.shape[1] != 3:
        return f"compacted_queries has {values.shape[1]} numbers per reference query, not 3"
    low, high = torch.tensor([0, 0, GROUP]), torch.tensor([parts - 1, end - 1, NEVER - 1])
    if bool((wrong := ((values < low) | (values > high)).any(1)).any()):
        place = int(wrong.nonzero()[0])
        bounds = f"{parts} parts and {end} tokens"
        return f"compacted_queries[{place}] = {values[place].tolist()} is not a query of a context with {bounds}"
    if missing := sorted(set(range(parts)) - set(values[:, 0].tolist())):
        return f"compacted_queries has no reference query for part {missing[0]}"
    return None


def _batch_queries(rows: Sequence[Tensor], starts: Sequence[int], width: int) -> Tensor:
    """Batch reference queries, int32 [rows, longest row, 3]; the padding is a query of part -1, which is none."""
    shifts = [torch.tensor([0, start, 0], dtype=torch.int32) for start in starts]
    shifted = [values + shift for values, shift in zip(rows, shifts, strict=True)]
    return pad_sequence(shifted, batch_first=True, padding_value=-1)


def _others(name: str) -> tuple[str, ...]:
    return ("compacted_at", *(other for other in OF_CONTEXTS if other != name))


SECTIONS = (
    # the settings under which entries got new biases and values: `Record`
    numbers("refit_with", torch.float64, "setting", _check_refit_with, needs=("refit_at",)),
    # the number of tokens seen at each compaction that fits entries
    numbers("refit_at", torch.int32, "compaction", _check_refit_at, batch_times, ("refit_with",)),
    # the settings of the fits of a compacted context: `ContextRecord`
    numbers("compacted_with", torch.float64, "context_setting", _check_compacted_with, needs=_others("compacted_with")),
    # the positions at which the parts of a compacted context begin, and the end of the last part
    numbers(
        "compacted_parts", torch.int32, "part_bound", _check_compacted_parts, batch_times, _others("compacted_parts")
    ),
    # the reference queries of the parts of a compacted context
    Section(
        name="compacted_queries",
        dtype=torch.int32,
        axes=("reference", "column"),
        joined="reference",
        check=_check_compacted_queries,
        batch=_batch_queries,
        needs=_others("compacted_queries"),
    ),
)
