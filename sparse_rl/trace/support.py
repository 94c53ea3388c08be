"""Supports: the set of tokens from which each token was drawn, where top-p, top-k or min-p truncated the distribution.

The set is a decision of the sampler, and only its record restores it: a log-prob near the border, or a rank near the
border, rounds differently in another forward pass. The drawn token's log-prob within the set is a number, which replay
computes again. The record stands beside that of any cache policy, in three sections; V is the size of the vocabulary:

    support_sizes  int32 [S]               number of tokens in the support; 0 if the token was not drawn from one
    support        int32 [ids]             the supports of at most W = ceil(V / 32) tokens, draw by draw, ids ascending
    support_bits   int32 [wide draws, W]   the larger supports; bit b of word w stands for token 32 w + b
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.trace.record import EvictionTrace, pinned
from sparse_rl.trace.sections import SUPPORT, Section, Sections, TraceError

HELD = 16  # steps whose supports are held on the device
ROWS = 64  # supports that are unpacked at a time, each of V bits


def packed(kept: Tensor) -> Tensor:
    """Return supports as bits, int32 [B, W], from a mask of the tokens in each, bool [B, V]. Never waits."""
    words = F.pad(kept, (0, -kept.shape[-1] % 32)).unflatten(-1, (-1, 32)).int()
    return words.bitwise_left_shift_(_bit_numbers(kept)).sum(-1, dtype=torch.int32)


def unpacked(bits: Tensor, sizes: Tensor) -> Tensor:
    """Return the token ids of supports, ascending in each: int32 [sum of sizes], on the same device. Never waits.

    bits : int32 [N, W]
    sizes : numbers of tokens in the supports, int64 [N] in host memory
    """
    ids = [torch.empty(0, dtype=torch.int32, device=bits.device)]
    for some, counts in zip(bits.split(ROWS), sizes.split(ROWS), strict=True):
        flags = (some[..., None] >> _bit_numbers(bits)).bitwise_and_(1).flatten()
        places = torch.nonzero_static(flags, size=int(counts.sum()))[:, 0]
        ids.append((places % (32 * bits.shape[1])).int())
    return torch.cat(ids)


def _bit_numbers(like: Tensor) -> Tensor:
    return torch.arange(32, dtype=torch.int32, device=like.device)


def _count(bits: Tensor) -> Tensor:
    """Return the number of tokens in each support, int64 [N], from bits [N, W]: sums of 2, of 4, and of 8 bits."""
    x = bits - ((bits >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return sum(((x >> shift) & 0xFF).sum(-1) for shift in (0, 8, 16, 24))  # type: ignore[return-value]


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
        by_token, ids, bits = ([trace.further[name] for trace in traces] for name in SUPPORT)
        of_row = [sizes.nonzero()[:, 0] for sizes in by_token]
        counts = torch.tensor(list(map(len, of_row)))
        sizes = torch.cat([sizes[tokens] for sizes, tokens in zip(by_token, of_row, strict=True)]).long()
        small, wide = torch.cat(ids), torch.cat(bits)
        words, beyond = wide.shape[1], 32 * wide.shape[1] - vocabulary
        if not 0 <= beyond < 32:
            raise TraceError(f"supports over {32 * words} tokens do not fit a model with {vocabulary}; sample again")
        last = wide[:, -1] >> (31 - beyond) >> 1  # a shift by 32 is not defined
        if bool((small >= vocabulary).any()) or bool((beyond > 0) & (last != 0).any()):
            raise TraceError(f"a support has a token id of {vocabulary} or more, but the model has no such token")

        def sent(values: Tensor) -> Tensor:
            return pinned(values, device).to(device, non_blocking=True)

        joined = sent(small)
        if len(wide):
            large = sizes > words
            of_wide = large.repeat_interleave(sizes)
            joined = joined.new_empty(len(of_wide)).index_copy_(0, sent((~of_wide).nonzero()[:, 0]), joined)
            joined.index_copy_(0, sent(of_wide.nonzero()[:, 0]), unpacked(sent(wide), sizes[large]))
        rows = torch.arange(len(traces)).repeat_interleave(counts)
        return cls(sent(rows), sent(torch.cat(of_row)), sent(sizes), joined)

    @property
    def draws(self) -> Tensor:
        """The draw to which each of `ids` belongs: int64 [sum of sizes]."""
        draw = torch.arange(len(self.sizes), device=self.ids.device)
        return draw.repeat_interleave(self.sizes, output_size=len(self.ids))

    def logprobs(self, logits: Tensor, drawn: Tensor) -> Tensor:
        """Return the log-prob of each drawn token among its support, float32 [N].

        logits : float32 [N, V], divided by the sampling temperature
        drawn : token ids, int64 [N]
        """
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept[self.draws, self.ids.long()] = True
        return logits.masked_fill(~kept, float("-inf")).log_softmax(-1).gather(-1, drawn[:, None])[:, 0]


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
            self._settle()

    def _settle(self) -> None:
        if not self._held:
            return
        bits = torch.cat([bits for _, bits in self._held])
        counts = _count(bits)
        sizes, large = counts.cpu(), counts > bits.shape[1]
        wide, ids = bits[large].cpu(), unpacked(bits[~large], sizes[~large.cpu()]).cpu()
        of_wide, of_small = iter(wide), iter(ids.split(sizes[sizes <= bits.shape[1]].tolist()))
        places = (place for places, _ in self._held for place in places)
        for (key, step), size in zip(places, sizes.tolist(), strict=True):
            support = next(of_wide if size > bits.shape[1] else of_small)
            self.drawn.setdefault(key, {})[step] = size, support
        self.words = bits.shape[1]
        self._held.clear()

    def take(self, key: Hashable, length: int) -> dict[str, Tensor]:
        """Return the sections of a sequence of `length` tokens, which ends with those drawn, and forget it; {} if
        nothing was recorded.
        """
        self._settle()
        if not (by_step := self.drawn.pop(key, None)):
            return {}
        drawn = [by_step[step] for step in range(len(by_step))]
        sizes = torch.zeros(length, dtype=torch.int32)
        sizes[length - len(drawn) :] = torch.tensor([size for size, _ in drawn])
        ids = [support for size, support in drawn if size <= self.words]
        bits = [support for size, support in drawn if size > self.words]
        none = sizes.new_empty(0)
        wide = torch.stack(bits) if bits else none.new_empty(0, self.words)
        return dict(zip(SUPPORT, (sizes, torch.cat([none, *ids]), wide), strict=True))


def check_drawn(trace: EvictionTrace, tokens: Sequence[int]) -> None:
    """Raise TraceError if a token id of a sequence does not belong to the support that its trace records for it."""
    if SUPPORT[0] not in trace.further or not trace.validate:
        return
    sizes, ids, bits = (trace.further[name] for name in SUPPORT)
    places, words = sizes.nonzero()[:, 0], bits.shape[1]
    drawn, large = torch.tensor(tokens)[places], sizes[places] > words
    has, small = torch.zeros(len(places), dtype=torch.bool), (~large).nonzero()[:, 0]
    draw = small.repeat_interleave(sizes[places][small])
    has[draw[ids == drawn[draw]]] = True
    of_wide = drawn[large]
    has[large] = (bits.gather(1, (of_wide // 32)[:, None])[:, 0] >> (of_wide % 32) & 1).bool()
    if not bool(has.all()):
        place = int(places[~has][0])
        raise TraceError(f"token {place} of the sequence, id {tokens[place]}, is not in the support it was drawn from")


# ---- the sections ---------------------------------------------------------------------------------------------------


def _check_sizes(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Sizes are not negative, and no token of the prompt was drawn."""
    if bool((values < 0).any()):
        return f"support_sizes has {int(values.min())}, but a support has no less than 0 tokens"
    if prompt is not None and bool(values[:prompt].any()):
        return f"support_sizes has a support for token {int(values.nonzero()[0])}, which is in the prompt"
    return None


def _check_ids(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """The supports of at most W tokens have as many ids as support_sizes says, ascending and below 32 W."""
    sizes, words = sections["support_sizes"].long(), sections["support_bits"].shape[1]
    sizes = sizes[(sizes > 0) & (sizes <= words)]
    if int(sizes.sum()) != len(values):
        return f"support has {len(values)} token ids, but support_sizes says {int(sizes.sum())}"
    outside = (values < 0) | (values >= 32 * words)
    if bool(outside.any()):
        return f"support has the token id {int(values[outside][0])}, but its vocabulary has at most {32 * words} tokens"
    draw = torch.arange(len(sizes)).repeat_interleave(sizes)
    wrong = (values[1:] <= values[:-1]) & (draw[1:] == draw[:-1])
    if bool(wrong.any()):
        before, after = values[int(wrong.nonzero()[0]) :][:2].tolist()
        return f"support has the token id {after} after {before} in one draw: ids ascend, and none occurs twice"
    return None


def _check_bits(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """There are bits for each support of more than W tokens, and as many as support_sizes says."""
    sizes = sections["support_sizes"].long()
    sizes = sizes[sizes > values.shape[1]]
    if len(sizes) != len(values):
        wide = f"{len(sizes)} draws of more than {values.shape[1]} tokens"
        return f"support_bits has {len(values)} rows, but support_sizes has {wide}"
    wrong = (_count(values) != sizes).nonzero()[:, 0]
    if len(wrong):
        draw = int(wrong[0])
        return f"support_bits[{draw}] has {int(_count(values)[draw])} tokens, but support_sizes says {int(sizes[draw])}"
    return None


def _joined(rows: Sequence[Tensor], starts: Sequence[int], ends: object) -> Tensor:
    return torch.cat(list(rows))  # `Supports.of` reads the traces themselves


SECTIONS = tuple(
    Section(
        name=name,
        dtype=torch.int32,
        axes=axes,
        joined=axes[0],
        check=check,
        batch=_joined,
        pack=_joined,
        needs=tuple(other for other in SUPPORT if other != name),
    )
    for name, axes, check in zip(
        SUPPORT, (("token",), ("id",), ("wide_draw", "word")), (_check_sizes, _check_ids, _check_bits), strict=True
    )
)
