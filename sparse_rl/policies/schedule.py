"""Schedules: when a cache is compacted, and how many entries it then holds, as functions of token counts alone.

In all methods, `prompt` is the length of the prompt, and `seen` (or `fed`) is the number of prompt and completion
tokens that the cache has seen. All methods take ints or int64 tensors of one shape, and therefore do not branch on
counts. The module does not import torch.

Under `Schedule` a compaction runs right after a query has attended, when the cache holds `period` entries more than it
leaves. If the prompt has at least that many tokens, the first compaction runs at the end of the prefill; no prompt is
compacted earlier, and all layers have the same counts. A subclass says in what it differs. Counts are per sequence, so
that a trace never depends on the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, ClassVar

NEVER = 1 << 30  # more tokens than any sequence has


@dataclass(frozen=True)
class Schedule:
    """A compaction leaves `budget` entries, and the next one runs `period` tokens later.

    A subclass for a growing budget overrides `left`, `first` and `peak`; all other methods follow from these.

    budget : number of entries per kv head that a compaction leaves
    period : number of tokens between two compactions
    """

    budget: int
    period: int = 1

    evicts: ClassVar[bool] = True
    before_attending: ClassVar[bool] = False  # True: an entry is dropped before each decoding query attends
    counts_vary: ClassVar[bool] = False  # True: kv heads hold different numbers of entries; the counts are upper bounds

    @property
    def reads_chunks(self) -> bool:
        """True if what a conversation reads in mid-sequence, such as a tool's answer, is read in one piece, as a prompt
        is. To the schedule, this chunk's end is the end of a prompt with as many tokens as entries are held. If counts
        depend on more than the entries held, the tokens are read one at a time.
        """
        return type(self) is Schedule

    def left(self, prompt: Any, seen: Any) -> Any:
        """Return the number of entries per kv head that a compaction after `seen` tokens leaves.

        This number must not decrease when `seen` increases.
        """
        return self.budget

    def first(self, prompt: Any) -> Any:
        """Return the number n of tokens seen at the first compaction.

        It is the smallest n >= prompt with n >= left(prompt, n) + period.
        """
        return _larger(prompt, self.left(prompt, prompt) + self.period)

    @property
    def peak(self) -> int | None:
        """Maximum number of entries held in decoding at any sequence length; None if it grows with the length."""
        constant = type(self).left is Schedule.left
        return self.left(0, 0) + self.period if constant else None

    def due(self, prompt: Any, seen: Any) -> Any:
        """Return True if a compaction runs when `seen` tokens have been seen."""
        over = seen - self.first(prompt)
        return (over >= 0) & (over % self.period == 0)

    def held(self, prompt: Any, seen: Any) -> Any:
        """Return the number of entries held after `seen` tokens; if a compaction is due then, after that compaction."""
        over = seen - self.first(prompt)
        since = over % self.period  # tokens since the last compaction
        return seen + (over >= 0) * (self.left(prompt, seen - since) + since - seen)

    def attended(self, prompt: Any, seen: Any) -> Any:
        """Return the number of entries that the last of `seen` tokens attends to, its own included.

        The token attends before a compaction runs.
        """
        return self.held(prompt, seen - 1) + 1

    def most_decoding(self, prompt: Any, fed: Any) -> Any:
        """Return the maximum number of entries that a decoding query attends to until `fed` tokens have been fed."""
        return _smaller(fed, self.left(prompt, fed) + self.period)

    def most_held(self, prompt: Any, fed: Any) -> Any:
        """Return the maximum number of entries held until `fed` tokens have been fed, including the prefill."""
        return _smaller(fed, _larger(prompt, self.most_decoding(prompt, fed)))


@dataclass(frozen=True)
class GrowingSchedule(Schedule):
    """The number of entries left is a function of the tokens seen: linear between knots, rounded down, else constant.

    `budget` is the smallest number of entries.

    knots : pairs (tokens seen, entries left) in ascending order. From one to the next, the entries never fall, and grow
        by at most one per token, because a cache gains no more
    """

    knots: tuple[tuple[int, int], ...] = ()

    def left(self, prompt: Any, seen: Any) -> Any:
        left = seen * 0 + self.knots[0][1]
        for (start, low), (end, high) in pairwise(self.knots):
            since = _smaller(_larger(seen, start), end) - start
            left = left + since * (high - low) // (end - start)
        return left

    def first(self, prompt: Any) -> Any:
        return _larger(prompt, prompt * 0 + self._first)

    @cached_property
    def _first(self) -> int:
        return bisect_left(range(self.peak), True, key=lambda seen: seen >= self.left(0, seen) + self.period)

    @property
    def peak(self) -> int:
        return self.knots[-1][1] + self.period


@dataclass(frozen=True)
class KeepsAFraction(Schedule):
    """A compaction leaves `budget` entries, and one more entry for every `compression` tokens that count.

    compression : number of tokens per additional entry, >= 2
    of_prompt : if True, all tokens of the prompt count; if False, the tokens seen beyond `budget` count, so that the
        number of entries left grows
    """

    compression: int = 2
    of_prompt: bool = False

    def left(self, prompt: Any, seen: Any) -> Any:
        counted = prompt if self.of_prompt else _larger(seen, seen * 0 + self.budget) - self.budget
        return self.budget + counted // self.compression

    def first(self, prompt: Any) -> Any:
        if self.of_prompt:
            return _larger(prompt, self.left(prompt, 0) + self.period)
        # budget + m, with the smallest m for which m - m // compression >= period
        least = self.budget + (self.compression * self.period - 1) // (self.compression - 1)
        return _larger(prompt, prompt * 0 + least)


@dataclass(frozen=True)
class EvictsBeforeAttending(Schedule):
    """In decoding, an entry is dropped before each query attends, so that a kv head never holds more than `budget`.

    The only compaction runs at the end of a prompt that is longer than `budget`.
    """

    before_attending: ClassVar[bool] = True

    def due(self, prompt: Any, seen: Any) -> Any:
        return (seen == prompt) & (prompt > self.budget)

    def held(self, prompt: Any, seen: Any) -> Any:
        return seen + (seen >= prompt) * (_smaller(seen, self.budget) - seen)

    def attended(self, prompt: Any, seen: Any) -> Any:
        return seen + (seen > prompt) * (_smaller(seen, self.budget) - seen)

    @property
    def peak(self) -> int | None:
        return self.budget

    def most_decoding(self, prompt: Any, fed: Any) -> Any:
        return _smaller(fed, self.budget)


@dataclass(frozen=True)
class CompactsPrompts(Schedule):
    """The only compaction runs at the end of the prompt, and leaves `share` of the prompt's entries, but at least one.

    share : fraction of the prompt's entries, between 0 and 1; the number of entries is rounded down
    """

    budget: int = NEVER
    period: int = NEVER
    share: float = 0.5

    def left(self, prompt: Any, seen: Any) -> Any:
        exact = prompt.double() if hasattr(prompt, "double") else prompt  # as Python multiplies
        kept = exact * self.share
        return _larger(kept.long() if hasattr(kept, "long") else int(kept), prompt * 0 + 1)

    def first(self, prompt: Any) -> Any:
        return prompt

    def due(self, prompt: Any, seen: Any) -> Any:
        return (seen == prompt) & (self.left(prompt, seen) < prompt)

    def most_decoding(self, prompt: Any, fed: Any) -> Any:
        return self.held(prompt, fed)


# ---- schedules without compactions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HoldsAll(Schedule):
    """No compaction ever runs. From `begins` tokens on, the policy hides entries in another way; `first` says when."""

    budget: int = NEVER
    begins: int = NEVER

    def left(self, prompt: Any, seen: Any) -> Any:
        return seen

    def first(self, prompt: Any) -> Any:
        return _larger(prompt, prompt * 0 + self.begins)

    def due(self, prompt: Any, seen: Any) -> Any:
        return seen >= NEVER

    def held(self, prompt: Any, seen: Any) -> Any:
        return seen


@dataclass(frozen=True)
class NeverEvicts(HoldsAll):
    """A full cache: all queries see all tokens."""

    evicts: ClassVar[bool] = False

    @property
    def reads_chunks(self) -> bool:
        return True


@dataclass(frozen=True)
class GatesDecide(HoldsAll):
    """Before a query attends, the gates of each kv head decide which entries are dropped. Counts are upper bounds."""

    before_attending: ClassVar[bool] = True
    counts_vary: ClassVar[bool] = True


@dataclass(frozen=True)
class ReadsPages(HoldsAll):
    """The cache holds all entries; from the first query after the prompt on, closed pages are read as summaries."""

    def first(self, prompt: Any) -> Any:
        return _larger(prompt + 1, prompt * 0 + self.begins)


@dataclass(frozen=True)
class PerLayer(HoldsAll):
    """The schedules of a policy for each range of layers, whose caches follow their own schedules, not this one.

    Here, `first` is that of the first layer to be compacted, and counts are means over the layers, rounded up.

    parts : number of layers and schedule of each range of layers
    """

    parts: tuple[tuple[int, Schedule], ...] = ()

    def first(self, prompt: Any) -> Any:
        return reduce(_smaller, (schedule.first(prompt) for _, schedule in self.parts))

    def most_decoding(self, prompt: Any, fed: Any) -> Any:
        return self._mean([schedule.most_decoding(prompt, fed) for _, schedule in self.parts])

    def most_held(self, prompt: Any, fed: Any) -> Any:
        return self._mean([schedule.most_held(prompt, fed) for _, schedule in self.parts])

    def _mean(self, counts: Sequence[Any]) -> Any:
        total = sum(layers for layers, _ in self.parts)
        return -(-sum(n * layers for n, (layers, _) in zip(counts, self.parts, strict=True)) // total)


def _larger(a: Any, b: Any) -> Any:
    return a + (b > a) * (b - a)


def _smaller(a: Any, b: Any) -> Any:
    return a + (b < a) * (b - a)
