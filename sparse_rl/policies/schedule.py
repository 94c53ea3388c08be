"""When a cache is compacted, and how many entries it holds: pure functions of counts, the same for every layer.

`prompt` is the length of the prompt, `seen` (or `fed`) the tokens of prompt and completion that the cache has seen.
All of them take ints, or int64 tensors of one shape, and so are written without branches; without torch too.

Cadence: a compaction runs right after a query has attended, when the cache holds `period` entries more than
a compaction leaves, or at the end of a prefill that is at least that long. A prompt is held whole until its prefill
ends. Everything is counted per sequence, so that a trace never depends on the batch.

This module knows neither scores nor tensors' contents: WHICH entries stay is the policy's choice (base.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

NEVER = 1 << 30  # more tokens than any sequence has


@dataclass(frozen=True)
class Schedule:
    """A compaction leaves `budget` entries, and the next one runs `period` tokens later.

    For a budget that grows, override `left`, and `first` with it (this one holds for a constant budget alone);
    everything else follows from these two.

    budget : entries per kv head that a compaction leaves
    period : tokens between two compactions
    """

    budget: int
    period: int = 1

    evicts: ClassVar[bool] = True
    before_attending: ClassVar[bool] = False  # True: an entry goes before each query of decoding attends
    counts_vary: ClassVar[bool] = False  # True: kv heads hold different numbers of entries; counts here are bounds

    def left(self, prompt: Any, seen: Any) -> Any:
        """Entries per kv head that a compaction leaves after `seen` tokens. It never falls as `seen` grows."""
        return self.budget

    def first(self, prompt: Any) -> Any:
        """The tokens seen at the first compaction: the least n >= prompt that is at least left(prompt, n) + period."""
        return _larger(prompt, self.left(prompt, prompt) + self.period)

    @property
    def peak(self) -> int | None:
        """The most entries that decoding ever holds, however long a sequence is; None where they grow with it."""
        constant = type(self).left is Schedule.left
        return self.left(0, 0) + self.period if constant else None

    def due(self, prompt: Any, seen: Any) -> Any:
        """Whether a compaction runs once `seen` tokens have been seen."""
        over = seen - self.first(prompt)
        return (over >= 0) & (over % self.period == 0)

    def next_due(self, prompt: int, seen: int) -> int:
        """The least count of tokens after `seen` at which a compaction runs."""
        over = seen - self.first(prompt)
        return seen + (self.period - over % self.period if over >= 0 else -over)

    def held(self, prompt: Any, seen: Any) -> Any:
        """Entries held once `seen` tokens have been seen and a compaction, if one is due, has run."""
        over = seen - self.first(prompt)
        since = over % self.period  # tokens since the last compaction
        return seen + (over >= 0) * (self.left(prompt, seen - since) + since - seen)

    def attended(self, prompt: Any, seen: Any) -> Any:
        """Entries that the last of `seen` tokens attends to, itself included: those held before a compaction runs."""
        return self.held(prompt, seen - 1) + 1

    def most_decoding(self, prompt: Any, fed: Any) -> Any:
        """No query of decoding attends to more entries until `fed` tokens have been fed."""
        return _smaller(fed, self.left(prompt, fed) + self.period)

    def most_held(self, prompt: Any, fed: Any) -> Any:
        """No more entries are held until `fed` tokens have been fed, the prompt's while it is prefilled among them."""
        return _smaller(fed, _larger(prompt, self.most_decoding(prompt, fed)))


@dataclass(frozen=True)
class KeepsAFraction(Schedule):
    """A compaction leaves `budget` entries, and one for every `compression` tokens.

    compression : >= 2
    of_prompt : counts all tokens of the prompt; else those seen behind the `budget`, so that what is left grows
    """

    compression: int = 2
    of_prompt: bool = False

    def left(self, prompt: Any, seen: Any) -> Any:
        counted = prompt if self.of_prompt else _larger(seen, seen * 0 + self.budget) - self.budget
        return self.budget + counted // self.compression

    def first(self, prompt: Any) -> Any:
        if self.of_prompt:
            return _larger(prompt, self.left(prompt, 0) + self.period)
        # of m tokens behind the budget m - m // compression have to be `period`
        least = self.budget + (self.compression * self.period - 1) // (self.compression - 1)
        return _larger(prompt, prompt * 0 + least)


@dataclass(frozen=True)
class NeverEvicts(Schedule):
    """A full cache: the first compaction never comes."""

    budget: int = NEVER
    evicts: ClassVar[bool] = False

    def left(self, prompt: Any, seen: Any) -> Any:
        return seen

    def first(self, prompt: Any) -> Any:
        return NEVER


@dataclass(frozen=True)
class EvictsBeforeAttending(Schedule):
    """In decoding an entry goes as each query arrives, and before it attends: a kv head never holds more than `budget`.

    A compaction runs but once, at the end of a longer prompt.
    """

    before_attending: ClassVar[bool] = True

    def due(self, prompt: Any, seen: Any) -> Any:
        return (seen == prompt) & (prompt > self.budget)

    def next_due(self, prompt: int, seen: int) -> int:
        return prompt if seen < prompt and prompt > self.budget else NEVER

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
class NothingCompacts(NeverEvicts):
    """No compaction ever runs, but something is no longer read, from `begins` tokens on where the prompt is shorter.

    begins : the tokens seen when that can happen first
    """

    evicts: ClassVar[bool] = True
    begins: int = 1

    def due(self, prompt: Any, seen: Any) -> Any:
        return (seen < 0) & (prompt < 0)

    def next_due(self, prompt: int, seen: int) -> int:
        return NEVER

    def held(self, prompt: Any, seen: Any) -> Any:
        return seen

    def attended(self, prompt: Any, seen: Any) -> Any:
        return seen

    @property
    def peak(self) -> int | None:
        return None

    def most_decoding(self, prompt: Any, fed: Any) -> Any:
        return fed


@dataclass(frozen=True)
class ReadsPages(NothingCompacts):
    """Everything is held; tokens of closed pages are read as summaries, from the first query after the prompt on."""

    def first(self, prompt: Any) -> Any:
        return _larger(prompt + 1, prompt * 0 + self.begins)


@dataclass(frozen=True)
class PerLayer(NothingCompacts):
    """Each layer is compacted by a schedule of its own; this one only counts: the mean over layers, rounded up.

    parts : (layers, their schedule)
    """

    parts: tuple[tuple[int, Schedule], ...] = ()

    def first(self, prompt: Any) -> Any:
        """The tokens seen at the first compaction of any layer."""
        first, *others = (schedule.first(prompt) for _, schedule in self.parts)
        for other in others:
            first = _smaller(first, other)
        return first

    def most_decoding(self, prompt: Any, fed: Any) -> Any:
        return self._mean([schedule.most_decoding(prompt, fed) for _, schedule in self.parts])

    def most_held(self, prompt: Any, fed: Any) -> Any:
        return self._mean([schedule.most_held(prompt, fed) for _, schedule in self.parts])

    def _mean(self, counts: Sequence[Any]) -> Any:
        total = sum(layers for layers, _ in self.parts)
        return -(-sum(n * layers for n, (layers, _) in zip(counts, self.parts, strict=True)) // total)


@dataclass(frozen=True)
class GatesDecide(NothingCompacts):
    """Entries go before queries attend, how many is not known: kv heads hold different numbers. Counts are bounds."""

    before_attending: ClassVar[bool] = True
    counts_vary: ClassVar[bool] = True

    def first(self, prompt: Any) -> Any:
        return _larger(prompt, prompt * 0 + self.begins)


def _larger(a: Any, b: Any) -> Any:
    return a + (b > a) * (b - a)


def _smaller(a: Any, b: Any) -> Any:
    return a + (b < a) * (b - a)
