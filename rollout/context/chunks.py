"""Text-based chunking (Attention Matching, section 3.5 and appendix C.3): parts of a context are read and compacted
alone.

A part is read between the context's first and last tokens, at positions that begin at 0, with reference queries of its
own. RoPE then turns its kept keys to the part's place in the context. The paper does not say which part gives the
entries of the last tokens; here it is the last part, because in the context these tokens follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from rollout.context.budgets import planned
from rollout.context.cache import Context, LayerEntries, joined
from rollout.context.compact import OnStage, Reader, Stages, Studied, study
from rollout.context.config import Part, PromptCacheConfig

OfPart = Callable[[Part, Studied], LayerEntries]


@dataclass
class StudiedChunks:
    """The parts of a context, each read alone, with its own reference queries. Compacts them as `Studied` does.

    tokens : token ids of the whole context
    first, last : number of tokens at the context's beginning and end, which every part is read between
    parts : each part, with the result of reading it
    reader : moves keys to other positions
    seconds : duration of each stage, summed over the parts
    """

    tokens: list[int]
    first: int
    last: int
    parts: list[tuple[Part, Studied]]
    reader: Reader
    seconds: Stages

    @property
    def whole(self) -> Context:
        """All entries of all parts, at their positions in the context. Each call makes them anew."""

        def entries_of(place: int) -> LayerEntries:
            def of_part(part: Part, studied: Studied) -> LayerEntries:
                tokens = len(studied.whole.tokens)
                order = [*range(self.first), *range(tokens - self.last, tokens), *range(self.first, tokens - self.last)]
                return LayerEntries(*(x[:, :, order] for x in studied.whole.layers[place]))

            return self._joined(of_part)

        layers = [entries_of(place) for place in range(len(self._first_part.whole.layers))]
        return Context(self.tokens, layers, self._read_apart, model=self._first_part.whole.model)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and biases of all tokens of the context."""
        read = self._first_part.whole
        return read.nbytes // len(read.tokens) * len(self.tokens)

    def compacted(self, config: PromptCacheConfig, counts: Sequence[Sequence[int]] | None = None) -> Context:
        """Compact the context; see `Studied.compacted`."""
        if config.policy == "full":
            return replace(self.whole, seconds=dict(self.seconds))
        if counts is None:
            layers = self._first_part.whole.layers
            counts = planned(
                config, len(self.tokens), len(layers), layers[0].keys.shape[1], self._first_part.whole.model
            )
        stages = Stages(self.seconds)
        with stages.timed("compaction"):
            kept = [self._layer(config, place, selected) for place, selected in enumerate(counts)]
        fitted = config.policy == "am" or self._read_apart
        return Context(self.tokens, kept, fitted, stages, self._first_part.whole.model)

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        """Implement `Studied.head` of budgets.py."""
        return self._joined(lambda part, studied: studied.head(config, place, head, part.share(count)))

    @property
    def _read_apart(self) -> bool:
        """True if the entries differ from those of a context that is read as a whole."""
        return len(self.parts) > 1

    @property
    def _first_part(self) -> Studied:
        return self.parts[0][1]

    def _layer(self, config: PromptCacheConfig, place: int, counts: Sequence[int]) -> LayerEntries:
        """Return the entries to keep in layer `place`; see `Studied.layer`."""
        if len(set(counts)) > 1:
            return joined([self.head(config, place, head, count) for head, count in enumerate(counts)])
        return self._joined(lambda part, studied: studied.layer(config, place, [part.share(count) for count in counts]))

    def _joined(self, of_part: OfPart) -> LayerEntries:
        """Join the parts' entries, in the order first, last, and the parts' own.

        of_part : function that returns the entries of a part in one layer, in the order first, last, and the part's own
        """
        edges, own = self.first + self.last, []
        for part, studied in self.parts:
            entries = self._moved(of_part(part, studied), part.start)
            if part is self.parts[0][0]:
                first = _sliced(entries, slice(0, self.first))
            if part is self.parts[-1][0]:
                last = _sliced(entries, slice(self.first, edges))
            own.append(_sliced(entries, slice(edges, None)))
        return LayerEntries(*(torch.cat(pieces, dim=2) for pieces in zip(first, last, *own, strict=True)))

    def _moved(self, entries: LayerEntries, by: int) -> LayerEntries:
        """Return entries whose positions are greater by `by`."""
        if not by:
            return entries
        positions = entries.positions + by
        return replace(entries, keys=self.reader.moved(entries.keys, entries.positions, positions), positions=positions)


def _sliced(entries: LayerEntries, selected: slice) -> LayerEntries:
    return LayerEntries(*(x[:, :, selected] for x in entries))


def _tell(on_stage: OnStage, part: str, stage: str) -> None:
    on_stage(f"{part}, {stage}")


def study_chunks(tokens: Sequence[int], config: PromptCacheConfig, reader: Reader, on_stage: OnStage) -> StudiedChunks:
    """Read the parts of a context one after another, and compute reference queries for each of them.

    The arguments are those of `study`.
    """
    tokens, parts, seconds = list(tokens), list[tuple[Part, Studied]](), Stages()
    inner, end = tokens[config.first : len(tokens) - config.last], tokens[len(tokens) - config.last :]
    split = config.parts(len(tokens))
    for number, part in enumerate(split, start=1):
        text = [*tokens[: config.first], *inner[part.start : part.end], *end]
        studied = study(text, config, reader, partial(_tell, on_stage, f"part {number} of {len(split)}"))
        for stage, taken in studied.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + taken
        parts.append((part, studied))
    return StudiedChunks(tokens, config.first, config.last, parts, reader, seconds)
