"""Supports: the set of tokens from which each token was drawn, where top-p, top-k or min-p truncated the distribution.

The set is a decision of the sampler, and only its record restores it: a log-prob near the border, or a rank near the
border, rounds differently in another forward pass. The drawn token's log-prob within the set is a number, which replay
computes again. The record stands beside that of any cache policy, in three sections; V is the size of the vocabulary:

    support_sizes  int32 [S]               number of tokens in the support; 0 if the token was not drawn from one
    support        int32 [ids]             the supports of at most W = ceil(V / 32) tokens, draw by draw, ids ascending
    support_bits   int32 [wide draws, W]   the larger supports; bit b of word w stands for token 32 w + b
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.trace.record import EvictionTrace, pinned
from sparse_rl.trace.sections import SUPPORT, Check, Section, Sections, TraceError

HELD = 16  # steps whose supports are held on the device
AT_ONCE = 2**18  # words of 32 bits that are unpacked at a time


def packed(kept: Tensor) -> Tensor:
    """Return supports as bits, int32 [B, W], from a mask of the tokens in each, bool [B, V]. Never waits."""
    words = F.pad(kept, (0, -kept.shape[-1] % 32)).unflatten(-1, (-1, 32)).int()
    bit = torch.arange(32, dtype=torch.int32, device=kept.device)
    return words.bitwise_left_shift_(bit).sum(-1, dtype=torch.int32)


def unpacked(bits: Tensor, sizes: Tensor) -> Tensor:
    """Return the token ids of supports, ascending in each: int32 [sum of sizes], on the same device. Never waits.

    bits : int32 [N, W]
    sizes : numbers of tokens in the supports, int64 [N] in host memory
    """
    ids = [torch.empty(0, dtype=torch.int32, device=bits.device)]
    rows = max(1, AT_ONCE // max(1, bits.shape[1]))
    for some, counts in zip(bits.split(rows), sizes.split(rows), strict=True):
        bit = torch.arange(32, dtype=torch.int32, device=bits.device)
        flags = (some[..., None] >> bit).bitwise_and_(1).flatten()
        places = torch.nonzero_static(flags, size=int(counts.sum()))[:, 0]
        ids.append((places % (32 * bits.shape[1])).int())
    return torch.cat(ids)


def _count(words: Tensor) -> Tensor:
    """Return the number of set bits of each int32: sums of 2, of 4 and of 8 bits, and of the 4 bytes."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).long()


@dataclass(frozen=True)
class Supports:
    """The supports of all N draws of a batch of sequences, row by row and token by token, on one device.

    rows, tokens : row of each draw's sequence, and position of the drawn token in the sequence: int64 [N]
    sizes : number of tokens in each support, int64 [N]
    ids : token ids of all supports, draw by draw, ascending in each: int32 [sum of sizes]
    """

    rows: Tensor
    tokens: Tensor
    sizes: Tensor
    ids: Tensor

    @classmethod
    def of(
        cls, traces: Sequence[EvictionTrace], vocabulary: int, device: torch.device | str = "cpu"
    ) -> Supports | None:
        """Return the supports that traces record, one trace for each row, or None if they record none. Never waits.

        Raises TraceError if a support was recorded over another vocabulary, or has a token outside it.
        """
        if any(name not in trace.further for trace in traces for name in SUPPORT):
            return None
        by_token, ids, bits = (torch.cat([trace.further[name] for trace in traces]) for name in SUPPORT)
        drawn, lengths = by_token.nonzero()[:, 0], torch.tensor(list(map(len, traces)))
        sizes, row = by_token[drawn].long(), torch.arange(len(traces)).repeat_interleave(lengths)[drawn]
        token = drawn - (lengths.cumsum(0) - lengths)[row]
        words, unused = bits.shape[1], 32 * bits.shape[1] - vocabulary
        if not 0 <= unused < 32:
            raise TraceError(f"supports over {32 * words} tokens do not fit a model with {vocabulary}; sample again")
        last = bits[:, -1:].long() & 0xFFFFFFFF
        if bool((ids >= vocabulary).any()) or bool((last >= 1 << (32 - unused)).any()):
            raise TraceError(f"a support has a token id of {vocabulary} or more, but the model has no such token")

        def sent(values: Tensor) -> Tensor:
            return pinned(values, device).to(device, non_blocking=True)

        joined = sent(ids)
        if len(bits):
            large = sizes > words
            of_large = large.repeat_interleave(sizes)
            joined = joined.new_empty(len(of_large)).index_copy_(0, sent((~of_large).nonzero()[:, 0]), joined)
            joined.index_copy_(0, sent(of_large.nonzero()[:, 0]), unpacked(sent(bits), sizes[large]))
        return cls(sent(row), sent(token), sent(sizes), joined)

    @property
    def draws(self) -> Tensor:
        """The draw to which each of `ids` belongs: int64 [sum of sizes]."""
        draw = torch.arange(len(self.sizes), device=self.ids.device)
        return draw.repeat_interleave(self.sizes, output_size=len(self.ids))


class SupportRecord:
    """Records the supports of draws while sequences are sampled. A key stands for a sequence."""

    def __init__(self) -> None:
        self._held: list[tuple[Sequence[tuple[Hashable, int]], Tensor]] = []
        self.drawn: dict[Hashable, dict[int, tuple[int, Tensor]]] = {}  # key -> step -> size, and ids or bits

    def draw(self, places: Sequence[tuple[Hashable, int]], bits: Tensor) -> None:
        """Record the supports of one step as bits, int32 [B, W]; 0 for a token that was not drawn. Waits for the device
        once in HELD calls.

        places : key of each row, and index of its token in the completion; the last record of a token counts
        """
        self._held.append((places, bits))
        if len(self._held) >= HELD:
            self.settle()

    def settle(self) -> None:
        """Fetch from the device what it holds."""
        if not self._held:
            return
        bits = torch.cat([bits for _, bits in self._held])
        self.words = bits.shape[1]
        row, word = bits.nonzero(as_tuple=True)  # words without bits, which are most, are skipped
        counts = _count(bits[row, word])
        by_row = torch.zeros(len(bits), dtype=torch.int64, device=bits.device).index_add_(0, row, counts)
        large = by_row > self.words
        row, word, counts = (values[~large[row]] for values in (row, word, counts))
        ids = unpacked(bits[row, word][:, None], counts.cpu()) + 32 * word.repeat_interleave(counts).int()
        sizes = by_row.cpu()
        of_large = iter(bits[large].cpu().split(1))
        of_small = iter(ids.cpu().split(sizes[sizes <= self.words].tolist()))
        places = (place for places, _ in self._held for place in places)
        for (key, step), size in zip(places, sizes.tolist(), strict=True):
            support = next(of_large if size > self.words else of_small)
            self.drawn.setdefault(key, {})[step] = size, support
        self._held.clear()

    def take(self, key: Hashable, length: int, earlier: Mapping[str, Tensor] = {}) -> dict[str, Tensor]:
        """Return the sections of a sequence of `length` tokens, the last of which were drawn, and forget it; {} if
        nothing was recorded.

        earlier : the sections of its first tokens, if it is a conversation that went on
        """
        self.settle()
        by_step, before = self.drawn.pop(key, {}), [earlier[name] for name in SUPPORT if name in earlier]
        if not (by_step or before):
            return {}
        drawn = [by_step[step] for step in range(len(by_step))]
        sizes = torch.tensor([size for size, _ in drawn], dtype=torch.int32)
        words = before[2].shape[1] if before else self.words
        small, large = ([x for size, x in drawn if (size > words) is wide] for wide in (False, True))
        none = sizes.new_empty(0, words)
        before = before or [none[:, 0], none[:, 0], none]
        read = sizes.new_zeros(length - len(before[0]) - len(drawn))
        parts = [before[0], read, sizes], [before[1], *small], [before[2], *large]
        return dict(zip(SUPPORT, map(torch.cat, parts), strict=True))


def check_drawn(trace: EvictionTrace, tokens: Sequence[int]) -> None:
    """Raise TraceError if a token id of a sequence does not belong to the support that its trace records for it."""
    if SUPPORT[0] not in trace.further or not trace.validate:
        return
    if len(tokens) != len(trace):
        raise TraceError(f"a trace of {len(trace)} tokens does not fit a sequence of {len(tokens)}")
    sizes, ids, bits = (trace.further[name] for name in SUPPORT)
    drawn, sizes = torch.tensor(tokens)[sizes > 0], sizes[sizes > 0]
    large = sizes > bits.shape[1]
    small, wide = drawn[~large].repeat_interleave(sizes[~large]), drawn[large, None]
    within = (wide >= 0) & (wide < 32 * bits.shape[1])
    flags = bits.gather(1, wide.where(within, 0) // 32) >> wide % 32 & within
    hits = int((ids == small).sum()) + int(flags.sum())
    if hits < len(drawn):  # an id occurs once in a support
        raise TraceError(f"{len(drawn) - hits} sampled tokens are not in the supports that they were drawn from")


# ---- the sections ---------------------------------------------------------------------------------------------------


def _check(bits: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """No token of the prompt was drawn; the supports have the sizes that are recorded; their ids ascend, within V."""
    sizes, ids, words = sections["support_sizes"].long(), sections["support"], bits.shape[1]
    small, wide = sizes[(sizes > 0) & (sizes <= words)], sizes[sizes > words]
    if bool((sizes < 0).any()) or bool(sizes[: prompt or 1].any()):
        return "support_sizes has a number below 0, or a support of a token of the prompt, which was not drawn"
    if (len(ids), len(bits)) != (int(small.sum()), len(wide)):
        wanted = f"{int(small.sum())} ids and {len(wide)} rows of bits"
        return f"the supports have {len(ids)} ids and {len(bits)} rows of bits, but support_sizes says {wanted}"
    if bool((_count(bits).sum(-1) != wide).any()):
        return "support_bits has a row with more or fewer tokens than support_sizes says"
    same = torch.arange(len(small)).repeat_interleave(small).diff() == 0
    if bool((same & (ids.diff() <= 0)).any()) or bool(((ids < 0) | (ids >= 32 * words)).any()):
        return f"support has ids of one draw that do not ascend, or an id outside 0 to {32 * words - 1}"
    return None


def _section(name: str, *axes: str, check: Check = lambda *_: None) -> Section:
    def joined(rows: Sequence[Tensor], *_: object) -> Tensor:
        return torch.cat(list(rows))  # `Supports.of` reads the traces themselves

    shape: dict[str, Any] = {"dtype": torch.int32, "axes": axes, "joined": axes[0]}
    return Section(name=name, **shape, check=check, batch=joined, pack=joined, needs=SUPPORT)


SIZES, IDS, BITS = SUPPORT
SECTIONS = _section(SIZES, "token"), _section(IDS, "id"), _section(BITS, "wide_draw", "word", check=_check)
