"""The contract between a cache policy and an engine.

A policy is tensor code over R sequences and all kv heads of one layer. It sees no prompts, tokens, models or engines.
It keeps nothing between calls: its memory of an entry is in `Entries.state`, which the engine moves along with the
entry. The schedule (schedule.py) sets when a compaction runs and how many entries the compaction leaves. If a
compaction drops an entry after query q, the engine records evict_at = q + 1.

Sizes in shapes: R rows (sequences), Hkv kv heads, Hq query heads, N entries of a kv head, S tokens of a prompt,
T tokens or queries of a call, D head_dim.
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
    """A cache policy: a compaction keeps the sinks, the window, and the other entries with the best scores.

    A new policy is a subclass that implements `score`; docs/extending.md lists the other steps and the tests.

    In `observe` and `compact`, the argument `layer` only names the layer in error messages, and several layers may be
    stacked along R in one call. `take_in` and `before_attending` are called layer by layer, because they may use
    parameters of each layer (`layered_parameters`).

    config : the policy's settings, a `sparse_rl.methods.config.PolicyConfig`
    """

    config: Any  # a subclass narrows the type
    entry_memory: ClassVar[dict[str, float]] = {}  # memory per entry: name -> initial value
    bias: ClassVar[str | None] = None  # the name in `entry_memory` whose values attention adds to the logits
    every_query: ClassVar[bool] = False  # True: `observe` is called after every forward pass of prefill and decoding
    score_reads: ClassVar[tuple[str, ...]] = ("keys",)  # the tensors that `score` reads: "keys", "values"
    observe_reads: ClassVar[tuple[str, ...]] = ("keys",)  # the tensors that `observe` reads
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
        """Number of most recent queries that the policy needs in `Entries.queries`."""
        return 0

    def most_read(self, prompt: int, fed: int) -> int:
        """Return the maximum number of entries of a kv head that a decoding query reads until `fed` tokens are fed.

        The `fed` tokens include the `prompt` tokens of the prompt.
        """
        return self.schedule.most_decoding(prompt, fed)

    @property
    def compares_keys(self) -> bool:
        """True if a compaction compares every pair of keys (R-KV's redundancy)."""
        return False

    def by_layers(self, layers: int) -> list[tuple[Policy, int]]:
        """Return the policies of a model's layers, in order, each with the number of layers that it covers."""
        return [(self, layers)]

    def summaries(self, entries: int) -> int:
        """Return the number of summaries (each a key and a value) that a kv head holds besides `entries` entries."""
        return 0

    def compaction_bytes(
        self, rows: int, entries: int, kv_heads: int, head_dim: int, group: int, device: str, dtype: str
    ) -> dict[str, tuple[int, str]]:
        """Return the temporary memory that `compact` needs besides its inputs: name -> (bytes, a note on their use).

        rows : number of rows that are compacted together, from one layer or several
        group : number of query heads per kv head
        dtype : dtype of the cache
        """
        if not self.compares_keys:
            return {}
        return {
            "redundancy": (redundancy_bytes(entries, kv_heads, head_dim, rows, device, dtype), "similarities in tiles")
        }

    @property
    def delay(self) -> int:
        """Number of tokens that arrive after an entry before the policy writes its memory of that entry."""
        return 0

    def sequence_memory(self, kv_heads: int, head_dim: int) -> dict[str, Tensor]:
        """Return the policy's initial memory of one sequence in one layer: name -> [Hkv, ...], on the CPU.

        An engine forks, selects and releases this memory together with its sequence. By default it is empty.
        """
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

        queries : [R, Hq, T, D], after RoPE
        query_positions : int64 [R, T], positions of the queries; those >= `entries.seen` are padding
        """
        raise NotImplementedError

    def score(self, layer: int, entries: Entries) -> Tensor:
        """Return the score of each entry, float32 [R, Hkv, N]. A compaction keeps the entries with the highest scores.

        Only the scores of competing entries matter. A policy that has memory of its entries replaces
        `entries.state[name]`; the new values stay with the kept entries.
        """
        raise NotImplementedError

    def compact(self, layer: int, entries: Entries) -> Kept:
        """Choose the entries that stay in a compaction: sinks, window, and the entries with the highest `score`.

        In every kv head, `entries.left` entries stay. Among equal scores, the entry at the earlier position stays.
        Raises NotFiniteError if a competing entry's score is NaN.
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
        best = rank.topk(most, sorted=least < most).indices  # sorted only if rows leave different counts
        stays = torch.arange(most, device=best.device) < entries.left_tensor()[:, None, None]
        return Kept(torch.zeros_like(competing).scatter_(-1, best, stays.expand_as(best)), entries.state)

    def further(self, prompt: int, length: int) -> dict[str, Tensor]:
        """Return the trace sections of a sequence, except evict_at: name -> tensor, such as refit_at int32 [C].

        prompt, length : number of tokens of the prompt, and of prompt and completion
        """
        return {}

    # ---- identity -------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Any]:
        """Return the settings as plain values: make_policy(name, **parameters) makes the same policy."""
        return self.config.parameters()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.parameters().items())})"
