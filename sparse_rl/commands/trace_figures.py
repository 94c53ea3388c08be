"""Numbers of the figures of kept tokens: they need traces, and some of them the texts of tokens, but no model."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_rl.analysis import cloud as of_cloud
from sparse_rl.analysis import kept_heads as of_heads
from sparse_rl.analysis import kept_text as of_text
from sparse_rl.analysis.heads import evict_ratios
from sparse_rl.analysis.positions import compared_positions
from sparse_rl.commands.figures import Choice, Numbers
from sparse_rl.commands.sources import Source


def evict_ratio(sources: Sequence[Source], choice: Choice) -> Numbers:
    (source,) = sources
    return evict_ratios(source.traces, source.named)


def positions(sources: Sequence[Source], choice: Choice) -> Numbers:
    return compared_positions(
        [("/".join(source.path.absolute().parts[-2:]), source.named, source.each_trace()) for source in sources]
    )


def kept_heads(sources: Sequence[Source], choice: Choice) -> Numbers:
    (source,) = sources
    line, rollout = source.longest() if choice.line is None else (choice.line, source.rollout(choice.line))
    ids = rollout.prompt_ids + rollout.completion_ids
    return of_heads.kept_heads(rollout.trace, ids, source.named, source.strings, line, choice.last)


def cloud(sources: Sequence[Source], choice: Choice) -> Numbers:
    (source,) = sources
    sequences = ((r.prompt_ids + r.completion_ids, r.trace) for r in source.each())
    return of_cloud.cloud(sequences, source.strings, source.named, choice.layer, choice.head)


def kept_text(sources: Sequence[Source], choice: Choice) -> Numbers:
    (source,) = sources
    line = choice.line or 1
    rollout = source.rollout(line)
    ids = rollout.prompt_ids + rollout.completion_ids
    return of_text.kept_text(rollout.trace, ids, source.named, source.strings, line, choice.layer, choice.head)
