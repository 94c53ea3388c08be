"""Contexts that are compacted in parts (Attention Matching, section 3.5 and appendix C.3).

Each part gets reference queries of its own. The texts of these queries see the context's first tokens, the part and the
context's last tokens. With `chunking: kv`, the whole context is read, and the entries of these tokens are taken from
it, at their positions. With `chunking: text`, these tokens are read alone, at positions that begin at 0, and RoPE then
turns the kept keys to the part's place in the context. The paper does not say which part gives the entries of the last
tokens when it is read alone; here it is the last part, because in the context these tokens follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rollout.context.budgets import planned
from rollout.context.cache import Context, LayerEntries, joined
from rollout.context.cartridge import trained
from rollout.context.compact import Counts, OnStage, Studied, prefill, study_places
from rollout.context.config import Part, PromptCacheConfig
from rollout.context.conversations import Reader, summarized
from rollout.context.record import recorded
from rollout.context.stages import Stages
from sparse_rl.models.identity import Identity


@dataclass
class StudiedParts:
    """The parts of a context, each with its own reference queries. Compacts them as `Studied` does.

    tokens : token ids of the whole context
    first, last : number of tokens at the context's beginning and end, which all parts share
    parts : each part, with the result of studying it
    reader : moves keys to other positions
    seconds : duration of each stage, summed over the parts
    read_whole : the context that was read as a whole; None if each part was read alone
    """

    tokens: list[int]
    first: int
    last: int
    parts: list[tuple[Part, Studied]]
    reader: Reader
    seconds: Stages
    read_whole: Context | None

    @property
    def whole(self) -> Context:
        """All entries of all parts, at their positions in the context. If parts were read alone, each call joins them
        anew.
        """
        if self.read_whole is not None:
            return self.read_whole
        first, last = self.first, self.last
        of_parts = []
        for _, studied in self.parts:
            count = studied.whole.entries
            order = [*range(first), *range(count - last, count), *range(first, count - last)]
            of_parts.append([_sliced(layer, order) for layer in studied.whole.layers])
        return Context(self.tokens, self._joined(of_parts), True, model=self._model)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and biases of all tokens of the context."""
        entries = self.parts[0][1].whole
        return entries.nbytes // entries.entries * len(self.tokens)

    @property
    def length(self) -> int:
        """Number of tokens of the context."""
        return len(self.tokens)

    @property
    def _model(self) -> Identity:
        return self.parts[0][1].whole.model

    def compacted(self, config: PromptCacheConfig, counts: Counts | None = None) -> Context:
        """Compact the context; see `Studied.compacted`. With `heads: global`, the heads compete in each part."""
        if config.policy == "full":
            return replace(self.whole, seconds=dict(self.seconds))
        if config.policy == "cartridge":
            return trained(self.whole, config, self.reader, self.seconds)
        if counts is None:
            whole = self.parts[0][1].whole
            heads = whole.layers[0].keys.shape[1]
            counts = planned(config, self.length, whole.compacted_layers, heads, self._model)
        stages = Stages(self.seconds)
        with stages.timed("compaction"):
            of_parts = [
                studied.entries(config, [[part.share(count) for count in of_layer] for of_layer in counts])
                for part, studied in self.parts
            ]
            layers = [without_padding(layer) for layer in self._joined(of_parts)]
        fitted = config.fits or self.read_whole is None
        of_windows = None if self.read_whole is None else self.read_whole.of_windows
        return Context(self.tokens, layers, fitted, stages, self._recorded(config), self._model, of_windows)

    def _recorded(self, config: PromptCacheConfig) -> dict[str, Tensor]:
        """Return the trace sections of the fits (record.py); {} if parts were read alone."""
        if self.read_whole is None:
            return {}
        parts = [(self.first + part.start, self.first + part.end) for part, _ in self.parts]
        return recorded(config, parts, [studied.recorded for _, studied in self.parts])

    def scores(self, config: PromptCacheConfig) -> Tensor:
        """Return the scores of the entries that compete, part by part; see `Studied.scores`."""
        return torch.cat([studied.scores(config) for _, studied in self.parts], dim=2)

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        """Implement `Studied.head` of budgets.py."""
        of_parts = [[studied.head(config, place, head, part.share(count))] for part, studied in self.parts]
        return self._joined(of_parts)[0]

    def _joined(self, of_parts: Sequence[Sequence[LayerEntries]]) -> list[LayerEntries]:
        """Join the parts' entries of each layer, in the order first, last, and the parts' own.

        of_parts : for each part, its entries in each layer, in the order first, last, and the part's own
        """
        edges, layers = self.first + self.last, []
        for of_layer in zip(*of_parts, strict=True):
            moved = [self._moved(x, part.start) for x, (part, _) in zip(of_layer, self.parts, strict=True)]
            first, last = _sliced(moved[0], slice(0, self.first)), _sliced(moved[-1], slice(self.first, edges))
            pieces = [first, last, *(_sliced(entries, slice(edges, None)) for entries in moved)]
            layers.append(LayerEntries(*(torch.cat(tensors, dim=2) for tensors in zip(*pieces, strict=True))))
        return layers

    def _moved(self, entries: LayerEntries, by: int) -> LayerEntries:
        """Return the entries of a part that was read alone, at positions that are greater by `by`."""
        if self.read_whole is not None or not by:
            return entries
        positions = entries.positions + by
        return replace(entries, keys=self.reader.moved(entries.keys, entries.positions, positions), positions=positions)


def _sliced(entries: LayerEntries, selected: slice | list[int]) -> LayerEntries:
    return LayerEntries(*(x[:, :, selected] for x in entries))


def without_padding(entries: LayerEntries) -> LayerEntries:
    """Remove masked entries, so that the padding of a layer follows its longest kv head alone."""
    real = entries.bias[0] > float("-inf")
    if bool(real.all()):
        return entries
    heads = range(real.shape[0])
    return joined([LayerEntries(*(x[:, head : head + 1, real[head]] for x in entries)) for head in heads])


def study(
    tokens: Sequence[int], config: PromptCacheConfig, reader: Reader, on_stage: OnStage
) -> Studied | StudiedParts:
    """Read a context and compute its reference queries, other than on-policy queries, part by part.

    on_stage : called with the name of each stage when it begins

    Raises UserError if the context has at most `config.first` + `config.last` tokens.
    """
    tokens, stages = list(tokens), Stages()
    config.kept(len(tokens))  # raises UserError if the context is too short
    if config.summary is not None:
        on_stage("summary")
        with stages.timed("summary"):
            tokens, config = summarized(tokens, config, reader)
    split = config.parts(len(tokens)) if config.chooses else []
    apart = config.by_text and len(split) > 1
    if not apart:
        on_stage("prefill")
        prefilled = prefill(tokens, config, reader, stages)
    if len(split) <= 1:
        return study_places(prefilled, torch.arange(len(tokens)), config, reader, on_stage, stages, release=True)
    parts = []
    for number, part in enumerate(split, start=1):
        tell = partial(_tell, on_stage, f"part {number} of {len(split)}")
        own = [*range(config.first), *range(config.first + part.start, config.first + part.end)]
        places = torch.tensor([*own, *range(len(tokens) - config.last, len(tokens))])
        if apart:
            tell("prefill")
            text = [tokens[place] for place in places.tolist()]
            prefilled, places = prefill(text, config, reader, stages), torch.arange(len(text))
        release = apart or number == len(split)
        parts.append((part, study_places(prefilled, places, config, reader, tell, stages, release)))
    read_whole = None if apart else prefilled.whole
    return StudiedParts(tokens, config.first, config.last, parts, reader, stages, read_whole)


def _tell(on_stage: OnStage, part: str, stage: str) -> None:
    on_stage(f"{part}, {stage}")
