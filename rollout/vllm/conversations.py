"""Conversations of several turns in the vLLM engine: what is held between two turns, and a turn as a request.

Under a policy that evicts, the workers keep a conversation's entries in host memory, under a name, from one turn to the
next (state.py). The engine itself holds the tokens and the record. Under a full cache nothing is kept: a turn prefills
the whole conversation again, of which vLLM's prefix caching may still have the blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.engine import Rollout, Turn, requests_of_turns
from rollout.sampling import Request
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.trace import EvictionTrace
from sparse_rl.trace.support import SUPPORT

NAMES = count(1)


@dataclass(eq=False)
class KeptConversation:
    """A conversation between two turns. `rollout`, `evict_at` and `entries` are set when the turn before has ended.

    sampling : settings of its turns so far
    lost : True if the workers no longer have them
    evict_at : int32 [L, Hkv, S], the evictions of `rollout`, also those that no query could observe so far
    entries : number of entries per kv head
    """

    sampling: SamplingConfig
    name: int = field(default_factory=NAMES.__next__)
    lost: bool = False
    rollout: Rollout = field(init=False)
    evict_at: Tensor = field(init=False)
    entries: int = 0

    @property
    def seen(self) -> int:
        """Number of tokens that the cache has seen: all but the last, which was sampled."""
        return len(self.rollout.trace) - 1


@dataclass(frozen=True)
class TurnRequest(Request):
    """The request of one turn.

    next : what is to be held of the conversation after this turn, if it is kept
    """

    policy: Policy = field(kw_only=True)
    next: KeptConversation | None = None

    @property
    def answer(self) -> list[int]:
        """The tokens that came after the last sampled one, if the conversation goes on."""
        return [] if self.held is None else self.prompt[len(self.held.rollout.trace) :]

    @property
    def singly(self) -> bool:
        """True if `answer` is read token by token (served.py): the schedule counts tokens."""
        return self.held is not None and not self.policy.reads_chunks

    @property
    def gone(self) -> int:
        """Number of tokens that the schedule does not count (`Kept.gone`)."""
        return 0 if self.held is None or self.singly else self.held.seen - self.held.entries

    @property
    def reads(self) -> int:
        """Maximum number of entries that the cache holds while it reads what comes before the turn."""
        return self.held.entries + 1 if self.singly else len(self.prompt) - self.gone

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if self.policy.schedule.evicts and self.next is not None:
            settings["keep"] = self.next.name
        if self.policy.schedule.evicts and self.held is not None:
            prompt = len(self.held.rollout.prompt_ids) if self.singly else 0
            settings["kept"] = [self.held.name, self.held.seen, self.held.entries, prompt]
        return settings

    def rollout(
        self,
        tokens: list[int],
        logprobs: list[float],
        model_logprobs: list[float],
        evict_at: Tensor,
        sections: Mapping[str, Tensor],
        finish_reason: Literal["stop", "length"],
    ) -> Rollout:
        """Return the rollout of the whole conversation, and set `next`.

        tokens, logprobs, model_logprobs : what the request has sampled
        evict_at, sections : the record of this turn, for all S tokens of the conversation
        """
        length = evict_at.shape[-1]
        before: Rollout | None = None if self.held is None else self.held.rollout
        prompt = len(self.prompt if before is None else before.prompt_ids)
        if before is not None:
            earlier = len(before.trace)
            evict_at[..., :earlier] = torch.minimum(evict_at[..., :earlier], self.held.evict_at)
            sections = _after(before.trace.further, sections, earlier, length)
        trace = EvictionTrace.recorded(evict_at, {**self.policy.further(prompt, length), **sections})
        numbers = tokens, logprobs, model_logprobs, trace, finish_reason
        rollout = Rollout(self.prompt, *numbers) if before is None else before.then(self.answer, *numbers)
        if self.next is not None:
            read = prompt if self.singly else len(self.prompt) - self.gone
            self.next.entries = self.policy.schedule.held(read, length - 1 - self.gone)
            self.next.rollout, self.next.evict_at = rollout, evict_at
        return rollout


def _after(before: Mapping[str, Tensor], now: Mapping[str, Tensor], earlier: int, length: int) -> dict[str, Tensor]:
    """Return the sections of a turn's record, after those of the first `earlier` tokens."""
    sections = dict(now)
    if "routed" in now:
        sections["routed"] = torch.cat([before["routed"][:, : earlier - 1], now["routed"][:, earlier - 1 :]], dim=1)
    sizes, *others = SUPPORT
    if sizes in before:
        new = now.get(sizes, torch.zeros(length, dtype=torch.int32))
        sections[sizes] = torch.cat([before[sizes], new[earlier:]])
        sections |= {name: torch.cat([x[name] for x in (before, now) if name in x]) for name in others}
    return sections


def turn_requests(
    turns: Sequence[Turn],
    sampling: SamplingConfig,
    keep: bool,
    policy: Policy,
    vocabulary: int,
    own: Collection[KeptConversation],
) -> list[TurnRequest]:
    """Return the request of each turn. own : conversations that the engine holds

    Raises UserError for a conversation that cannot go on.
    """
    for held in (turn.held for turn in turns if turn.held is not None):
        if not isinstance(held, KeptConversation) or held not in own:
            raise UserError("a conversation goes on only in the engine that holds it; begin it again")
        if held.lost:
            raise UserError("a conversation is lost when the engine takes new weights or sleeps; begin it again")
    requests = []
    for given in requests_of_turns(turns, sampling, vocabulary):
        next_turn = KeptConversation(sampling) if keep else None
        requests.append(TurnRequest(**vars(given), policy=policy, next=next_turn))
    return requests
