"""The contract between a cache policy and an engine.

A policy is pure tensor code over R sequences and all kv heads of one layer. It never sees prompts, tokens, models or
engines, and it keeps nothing between calls: what it wants to remember about an entry it leaves in `Entries.state`,
which the engine moves along with the entry. When a compaction runs and how many entries it leaves is the schedule's
business (schedule.py). What a compaction drops after query q, the engine records with evict_at = q + 1.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_rl.errors import NotFiniteError
from sparse_rl.kernels.ranked import ranked
from sparse_rl.kernels.redundancy import redundancy_bytes
from sparse_rl.policies.entries import Arriving, Chunk, Entries, Kept
from sparse_rl.policies.schedule import Schedule


class Policy:
    """A cache policy: keep the sinks, the window, and the best-scored of the rest, `Entries.left` per kv head in all.

    A new policy is a subclass that writes `score`; docs/extending.md says what else, and what its tests are.

    `observe` and `compact` do not ask which layer they work on: `layer` there only names the place in an error, and
    several layers may be stacked along R in one call. `take_in` and `before_attending`, which may go by parameters of
    each layer (`layered_parameters`), are called layer by layer.

    config : its settings, a `sparse_rl.methods.config.PolicyConfig`
    """

    config: Any  # a subclass says which
    entry_memory: ClassVar[dict[str, float]] = {}  # memory per entry: name -> value of a new entry
    bias: ClassVar[str | None] = None  # the one of `entry_memory` that attention adds to the logits
    every_query: ClassVar[bool] = False  # True: `observe` is called after every forward, prefill and decode
    score_reads: ClassVar[tuple[str, ...]] = ("keys",)  # of "keys" and "values", what `score` looks at
    observe_reads: ClassVar[tuple[str, ...]] = ("keys",)  # and what `observe` does
    layered_parameters: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.schedule: Schedule = config.schedule

    @property
    def name(self) -> str:
        """The policy's name in recipes, such as gkv."""
        return self.config.name

    @property
    def last_queries(self) -> int:
        """How many of the last queries `score` needs in `Entries.queries`."""
        return 0

    def most_read(self, prompt: int, fed: int) -> int:
        """The most entries of a kv head that a query of decoding reads until `fed` tokens have been fed.

        prompt : its length in tokens, which count among those fed
        """
        return self.schedule.most_decoding(prompt, fed)

    @property
    def compares_keys(self) -> bool:
        """Whether a compaction compares every two keys (R-KV's redundancy)."""
        return False

    def by_layers(self, layers: int) -> list[tuple[Policy, int]]:
        """The policies of a model's layers, in order, each with how many of `layers` it has."""
        return [(self, layers)]

    def summaries(self, entries: int) -> int:
        """Keys and values that a kv head holds beside those of its entries."""
        return 0

    def compaction_bytes(
        self, rows: int, entries: int, kv_heads: int, head_dim: int, group: int, device: str, dtype: str
    ) -> dict[str, tuple[int, str]]:
        """What `compact` takes for a moment beside what it reads: a name -> bytes, and how many rows these are of.

        rows : compacted at once, of one layer or several; group : query heads of a kv head; dtype : of the cache
        """
        if not self.compares_keys:
            return {}
        return {
            "redundancy": (redundancy_bytes(entries, kv_heads, head_dim, rows, device, dtype), "similarities in tiles")
        }

    @property
    def delay(self) -> int:
        """So many tokens after an entry has come `take_in` and `before_attending` write its memory."""
        return 0

    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, Tensor]:
        """The policy's memory of one sequence in one layer, as the sequence begins: name -> [Hkv, ...], on the CPU.

        An engine forks, selects and releases it with its sequence. Empty, unless a policy says otherwise.
        """
        return {}

    def bound_to(self, model: Any) -> Policy:
        """The policy with what it takes from a model: its scorers, or how many layers it has. Engines sample under no
        other one.

        Raises UserError where the model has not what it needs.
        """
        return self

    # ---- what ---------------------------------------------------------------------------------------------------

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, Tensor]:
        """Read a chunk of prompts, where `schedule.before_attending` is true, and update `chunk.memory` in place.

        Returns name -> float32 [R, Hkv, T], the memory of the entries at the chunk's positions less `delay`.
        """
        raise NotImplementedError

    def masks(self, layer: int, state: dict[str, Tensor], lengths: Tensor) -> Tensor | None:
        """evict_at within prompts, int32 [R, Hkv, S]; None, unless a policy says otherwise: they are prefilled densely.

        state : name -> float32 [R, Hkv, S], the memory of all entries of the prompts
        lengths : int64 [R], tokens of each prompt
        """
        return None

    def before_attending(self, layer: int, entries: Entries, arriving: Arriving) -> Tensor:
        """Choose, as the query at q = entries.seen - 1 arrives and before it attends, what it still sees.

        Called for each query of decoding where `schedule.before_attending` is true. `entries` holds what the query
        before saw; the policy may write to their memory. Returns bool [R, Hkv, N], true for what stays. What is dropped
        gets evict_at = q, and gives its slot to the arriving token. After a dense prefill `compact` runs at the
        end of a prompt that is longer than the budget.
        """
        raise NotImplementedError

    def observe(self, layer: int, entries: Entries, queries: Tensor, query_positions: Tensor) -> None:
        """See the queries of a forward, and update `entries.state` in place. Called where `every_query` is true.

        queries : [R, Hq, T, D], after RoPE
        query_positions : int64 [R, T]; one that is >= `entries.seen` is padding
        """
        raise NotImplementedError

    def score(self, layer: int, entries: Entries) -> Tensor:
        """The worth of each entry, float32 [R, Hkv, N]; higher is kept. Only competing entries are looked at.

        A policy with memory replaces `entries.state[name]`; what it leaves there stays with the survivors.
        """
        raise NotImplementedError

    def compact(self, layer: int, entries: Entries) -> Kept:
        """Choose what stays: sinks, window, and those of the best `score`, `entries.left` in every kv head.

        Of equal scores the earlier position stays. Raises NotFiniteError where a competing entry's score is NaN.
        """
        scores = self.score(layer, entries).float()
        competing = entries.competing(self.config.sinks, self.config.window)
        if bool((scores.isnan() & competing).any()):
            raise NotFiniteError(
                f"{self.name}: a NaN score in layer {layer}; the model's keys or queries are not finite"
            )
        bounds = torch.iinfo(torch.int64)
        rank = ranked(scores, entries.positions).masked_fill_(~competing, bounds.max)
        rank.masked_fill_(~entries.valid(), bounds.min)
        most, least = max(entries.left), min(entries.left)
        best = rank.topk(most, sorted=least < most).indices  # sorted where some rows leave fewer than the others
        stays = torch.arange(most, device=best.device) < entries.left_tensor()[:, None, None]
        return Kept(torch.zeros_like(competing).scatter_(-1, best, stays.expand_as(best)), entries.state)

    def further(self, prompt: int, length: int) -> dict[str, Tensor]:
        """What a trace holds beside evict_at: section -> its tensor, such as refit_at int32 [C] (trace/sections.py).

        prompt : tokens of the prompt; length : of prompt and completion
        """
        return {}

    # ---- identity -------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Any]:
        """What the settings hold, as plain values: make_policy(name, **parameters) is the same policy."""
        return self.config.parameters()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.parameters().items())})"
