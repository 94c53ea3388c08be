"""The contract between a cache policy and an engine: `Policy`, what it receives, and what it returns.

A policy is tensor code over R sequences and all kv heads of one layer. It sees no prompts, tokens, models or engines,
and keeps nothing between calls (the presses of `press` do): its memory of an entry is in `Entries.state`, which the
engine moves along with the entry. The schedule (schedule.py) sets when a compaction runs and how many entries it
leaves. If a compaction drops an entry after query q, the engine records evict_at = q + 1.

Sizes in shapes: R rows (sequences), Hkv kv heads, Hq query heads, G = Hq / Hkv, N entries of a kv head, S tokens of a
prompt, T tokens or queries of a call, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError, StoppedError
from sparse_rl.kernels.topk import ranked
from sparse_rl.policies.schedule import Schedule


@dataclass
class Entries:
    """The entries of one layer's cache for R sequences, right-padded to N entries, in any order.

    `valid` marks the real entries; the contents of padding are meaningless. Several layers may be stacked along R.

    keys, values : [R, Hkv, N, D], keys after RoPE; None if `Policy.score_reads` (in `observe`: `observe_reads`) does
        not name them
    positions : int64 [R, Hkv, N], positions of the entries' tokens in prompt and completion
    lengths : int64 [R], number of entries held; the slots after them are padding
    seen : int64 [R], number of tokens seen so far; the last query is at position seen - 1
    queries : [R, Hq, W, D], the last W queries after RoPE, oldest first (W = policy.last_queries); None if W is 0
    scaling : the factor on q . k, usually D ** -0.5
    state : name -> float32 [R, Hkv, N], the policy's memory per entry
    left : number of entries that a compaction leaves in each kv head, per row (ints, so that reading them needs no
        synchronization with a device)
    older : number of first slots whose entries are real, and older than all of `queries`, if the engine knows some
    mean_over_ranks : function that averages a tensor over the tensor-parallel ranks, each of which holds Hkv of the
        layer's kv heads
    """

    keys: Tensor | None
    values: Tensor | None
    positions: Tensor
    lengths: Tensor
    seen: Tensor
    queries: Tensor | None
    scaling: float
    state: dict[str, Tensor]
    left: Sequence[int] = ()
    older: int = 0
    mean_over_ranks: Callable[[Tensor], Tensor] = lambda value: value  # one rank

    def __post_init__(self) -> None:
        self._masks: dict[Any, Tensor] = {}  # results of `valid` and `competing`

    def valid(self) -> Tensor:
        """Return a mask of the slots that hold an entry: bool [R, 1, N]. Do not write to it."""
        if None not in self._masks:
            slots = torch.arange(self.positions.shape[2], device=self.positions.device)
            self._masks[None] = (slots < self.lengths[:, None])[:, None]
        return self._masks[None]

    def left_tensor(self) -> Tensor:
        """Return `left` as a tensor on the entries' device: int64 [R]."""
        return torch.tensor(self.left).to(self.positions.device, non_blocking=True)

    def by_position(self) -> Tensor:
        """Return the slots sorted by the positions of their entries, with padding last: int64 [R, Hkv, N]."""
        return self.positions.masked_fill(~self.valid(), torch.iinfo(torch.int64).max).argsort(-1)

    def at(self, positions: Tensor) -> Tensor:
        """Return the slots of the entries at `positions`, int64 [R]: int64 [R, Hkv]; 0 for one that is not held."""
        return ((self.positions == positions[:, None, None]) & self.valid()).int().argmax(-1)

    def read(self, slots: Tensor) -> Tensor:
        """Return key and value, concatenated, [R, Hkv, 2 D], of the entries in the slots int64 [R, Hkv]."""
        assert self.keys is not None and self.values is not None
        at = slots[..., None, None].expand(-1, -1, 1, self.keys.shape[-1])
        return torch.cat([self.keys.gather(2, at), self.values.gather(2, at)], dim=-1)[:, :, 0]

    def competing(self, sinks: int, window: int) -> Tensor:
        """Return a mask of the entries that may be dropped, all but the sinks and the window: bool [R, Hkv, N]. Do not
        write to it.
        """
        if (sinks, window) not in self._masks:
            older = self.positions < (self.seen - window)[:, None, None]
            self._masks[sinks, window] = self.valid() & (self.positions >= sinks) & older
        return self._masks[sinks, window]

    def attention(self, queries: Tensor, query_positions: Tensor, seen_by_all: int = 0) -> Tensor:
        """Return the attention softmax(`scaling` q K^T) of T queries over the entries: float32 [R, Hkv, G, T, N].

        The attention to padding, and to entries later than the query, is 0.

        queries : [R, Hq, T, D], after RoPE, of all Hq query heads
        query_positions : int64 [R, T], positions of the queries
        seen_by_all : number of first slots that need no mask: their entries are real, and not later than any query
        """
        assert self.keys is not None
        rows, q_heads, count, dim = queries.shape
        kv_heads = self.keys.shape[1]
        grouped = queries.reshape(rows, kv_heads, -1, dim).float() * self.scaling  # G x T queries: no key is repeated
        logits = (grouped @ self.keys.float().transpose(-1, -2)).view(rows, kv_heads, q_heads // kv_heads, count, -1)
        rest = slice(seen_by_all, None)
        seen = self.positions[:, :, None, rest] <= query_positions[:, None, :, None]  # [R, Hkv, T, N - seen_by_all]
        hidden = ~(seen & self.valid()[:, :, None, rest]).unsqueeze(2)
        logits[..., rest].masked_fill_(hidden, float("-inf"))
        return logits.softmax(-1)

    def window_attention(self, window: int) -> Tensor:
        """Return the attention of the last `window` queries over the entries: float32 [R, Hkv, G, window, N]."""
        assert self.queries is not None and self.queries.shape[2] >= window
        query_positions = self.seen[:, None] + torch.arange(-window, 0, device=self.seen.device)
        return self.attention(self.queries[:, :, -window:], query_positions, self.older)


@dataclass
class Arriving:
    """The arriving token of each of R rows, at position `Entries.seen` - 1, before it is one of the entries.

    keys, values : [R, Hkv, D], keys after RoPE
    state : name -> float32 [R, Hkv], the policy's memory of the new entries; the policy may write to it
    memory : name -> [R, Hkv, ...], the policy's memory of these sequences; the policy updates it in place
    """

    keys: Tensor
    values: Tensor
    state: dict[str, Tensor]
    memory: dict[str, Tensor]


@dataclass
class Chunk:
    """T consecutive tokens of R prompts; a prompt is read in one chunk or in several.

    keys, values : [R, Hkv, T, D], keys after RoPE
    earlier_keys, earlier_values : [R, Hkv, `Policy.delay`, D], keys and values of the tokens right before the chunk;
        meaningless before position 0
    start : int64 [R], position of the first token
    lengths : int64 [R], number of real tokens of each row; the rest is padding. None means T tokens in every row
    memory : name -> [R, Hkv, ...], the policy's memory of these sequences; the policy updates it in place
    """

    keys: Tensor
    values: Tensor
    earlier_keys: Tensor
    earlier_values: Tensor
    start: Tensor
    lengths: Tensor | None
    memory: dict[str, Tensor]


@dataclass
class Kept:
    """The outcome of a compaction: the entries that stay, and the policy's memory of them.

    keep : bool [R, Hkv, N], True for entries that stay: `Entries.left` in each kv head (`check_counts`)
    state : name -> float32 [R, Hkv, N], the policy's memory after the compaction
    values : [R, Hkv, N, D], the values of the kept entries after the compaction; None means unchanged
    failed : bool [R], True for rows with a NaN score, whose sequences must end; None means that no row has failed
    """

    keep: Tensor
    state: dict[str, Tensor]
    values: Tensor | None = None
    failed: Tensor | None = None

    def check_finite(self, layer: int, policy: str) -> None:
        """Raise NotFiniteError, with the policy's name, if a row has failed."""
        if self.failed is not None and bool(self.failed.any()):
            why = "the model's keys, values or queries are not finite, or the policy's score is wrong"
            raise NotFiniteError(f"{policy}: a NaN score in layer {layer}; {why}")

    def check_counts(self, entries: Entries, policy: str) -> None:
        """Raise StoppedError, with the policy's name, if a kv head does not keep `Entries.left` entries."""
        left = entries.left_tensor()[:, None]
        if bool((counts := self.keep.sum(-1)).ne(left).any()):
            row = int(counts.ne(left).any(1).nonzero()[0, 0])
            raise StoppedError(
                f"{policy}: a compaction left {counts[row].tolist()} entries in the kv heads of a sequence, but the "
                f"schedule says {entries.left[row]}; this engine needs exactly that number in every kv head"
            )


def slots_of(chosen: Tensor, most: int) -> Tensor:
    """Return the slots for which bool [R, Hkv, N] is True, at most `most` in a head, ascending: int64 [R, Hkv, most],
    padded with 0.
    """
    rank = chosen.cumsum(-1).mul_(chosen)  # from 1; 0 for other slots
    slot = torch.arange(chosen.shape[-1], device=rank.device).expand_as(rank)
    return rank.new_zeros(*rank.shape[:2], most + 1).scatter_(-1, rank, slot)[..., 1:]


class Policy:
    """A cache policy: a compaction keeps the sinks, the window, and the other entries with the best scores.

    A new policy is a subclass that implements `score` (docs/extending.md). In `observe` and `compact`, the argument
    `layer` only names the layer in error messages, and several layers may be stacked along R in one call, unless
    `scores_by_layer` is true: `score` then reads data of each layer. `take_in` and `before_attending` are called layer
    by layer, because they may use parameters of each layer (`layered_parameters`).

    config : the policy's settings, a `sparse_rl.methods.config.PolicyConfig`
    """

    config: Any  # a subclass narrows the type
    entry_memory: ClassVar[dict[str, float]] = {}  # memory per entry: name -> initial value
    bias: ClassVar[str | None] = None  # the name in `entry_memory` whose values attention adds to the logits
    every_query: ClassVar[bool] = False  # True: `observe` is called after every forward pass of prefill and decoding
    score_reads: ClassVar[tuple[str, ...]] = ("keys",)  # the tensors that `score` reads: "keys", "values"
    observe_reads: ClassVar[tuple[str, ...]] = ("keys",)  # the tensors that `observe` reads
    layered_parameters: ClassVar[bool] = False
    scores_by_layer: ClassVar[bool] = False  # True: `layer` is the index of the only layer among those of the policy

    def __init__(self, config: Any) -> None:
        self.config = config
        self.schedule: Schedule = config.schedule

    @property
    def name(self) -> str:
        """The policy's name in recipes, such as gkv."""
        return self.config.name

    @property
    def last_queries(self) -> int:
        """Number of most recent queries that the policy needs in `Entries.queries`; at most budget + period."""
        return 0

    @property
    def reads_chunks(self) -> bool:
        """See `Schedule.reads_chunks`. False with a bias: the times of its fits follow from counts of tokens."""
        return self.schedule.reads_chunks and self.bias is None

    def most_read(self, prompt: int, fed: int) -> int:
        """Return the maximum number of entries of a kv head that a decoding query reads until `fed` tokens are fed."""
        return self.schedule.most_decoding(prompt, fed)

    @property
    def delay(self) -> int:
        """Number of tokens that arrive after an entry before the policy writes its memory of that entry."""
        return 0

    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, Tensor]:
        """Return the policy's initial memory of one sequence in one layer: name -> [Hkv, ...], on the CPU."""
        return {}

    def bound_to(self, model: Any) -> Policy:
        """Return the policy with the data that it needs from a model: the model's scorers, or its number of layers.

        Engines sample only under a bound policy. Raises UserError if the model lacks something that the policy needs.
        """
        return self

    # ---- decisions ----------------------------------------------------------------------------------------------

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, Tensor]:
        """Read a chunk of prompts, and update `chunk.memory` in place. Called if `schedule.before_attending` is true.

        Returns name -> float32 [R, Hkv, T], the memory of the entries at the chunk's positions minus `delay`.
        """
        raise NotImplementedError

    def masks(self, layer: int, state: dict[str, Tensor], lengths: Tensor) -> Tensor | None:
        """Return evict_at within prompts, int32 [R, Hkv, S], or None (the default) if prompts are prefilled densely.

        state : name -> float32 [R, Hkv, S], the memory of all entries of the prompts
        lengths : int64 [R], number of tokens of each prompt
        """
        return None

    def before_attending(self, layer: int, entries: Entries, arriving: Arriving) -> Tensor:
        """Choose the entries that an arriving decoding query sees: bool [R, Hkv, N], True for entries that stay.

        Called for each decoding query, at position q = entries.seen - 1, if `schedule.before_attending` is true.
        `entries` holds the entries that the previous query saw; the policy may write to their memory. A dropped entry
        gets evict_at = q, and its slot goes to the arriving token. If a prompt that is prefilled densely is longer than
        the budget, `compact` runs at the end of this prompt.
        """
        raise NotImplementedError

    def observe(self, layer: int, entries: Entries, queries: Tensor, query_positions: Tensor) -> None:
        """Process the queries of a forward pass, and update `entries.state` in place. Called if `every_query` is true.

        queries, query_positions : [R, Hq, T, D], after RoPE, and int64 [R, T]; positions >= `entries.seen` are padding
        """
        raise NotImplementedError

    def score(self, layer: int, entries: Entries) -> Tensor:
        """Return the score of each entry, float32 [R, Hkv, N]. A compaction keeps the entries with the highest scores.

        Only the scores of competing entries matter. A policy that has memory of its entries replaces
        `entries.state[name]`; the new values stay with the kept entries.
        """
        raise NotImplementedError

    def compact(self, layer: int, entries: Entries) -> Kept:
        """Choose the `entries.left` entries that stay in a compaction: sinks, window, and those with the highest
        `score`.

        Among equal scores, the entry at the earlier position stays, so that neither the order of slots nor the engine
        or device decides. A row has failed if a competing entry's score is NaN. Does not wait for a GPU.
        """
        scores = self.score(layer, entries).float()
        competing = entries.competing(self.config.sinks, self.config.window)
        failed = (scores.isnan() & competing).flatten(1).any(1)
        bounds = torch.iinfo(torch.int64)
        rank = ranked(scores, entries.positions).masked_fill_(~competing, bounds.max)
        rank.masked_fill_(~entries.valid(), bounds.min)
        most, least = max(entries.left), min(entries.left)
        best = rank.topk(most, sorted=least < most).indices  # sorted only if rows leave different counts
        keep = torch.zeros_like(competing).scatter_(-1, best, True)
        if least < most:
            stays = torch.arange(most, device=best.device) < entries.left_tensor()[:, None, None]
            keep.scatter_(-1, best, stays.expand_as(best))
        return Kept(keep, entries.state, failed=failed)

    def further(self, prompt: int, length: int) -> dict[str, Tensor]:
        """Return name -> trace section [...], except evict_at, of a sequence of `length` tokens, with `prompt` in the
        prompt.
        """
        return {}

    def metrics(self, model: Any, rollout: Any) -> dict[str, float]:
        """Return diagnostic metrics of one sampled sequence, name -> value, for GRPO's log; by default there are none.

        model : the trainer's model, without wrappers
        rollout : the sequence, with its `prompt_ids`, `completion_ids` and `trace`
        """
        return {}

    def parameters(self) -> dict[str, Any]:
        """Return the settings as plain values: make_policy(name, **parameters) makes the same policy."""
        return self.config.parameters()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.parameters().items())})"
