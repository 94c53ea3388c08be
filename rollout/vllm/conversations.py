"""Conversations of several turns in the vLLM engine: what is held between two turns, and a turn as a request.

Under a policy that evicts, the workers keep a conversation's entries in host memory, under a name, from one turn to the
next (state.py). The engine itself holds the tokens and the record. Under a full cache nothing is kept: a turn prefills
the whole conversation again, of which vLLM's prefix caching may still have the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.engine import Rollout, Turn
from rollout.sampling import Request, requests_to_sample
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.policies.schedule import NeverEvicts, Schedule
from sparse_rl.trace import EvictionTrace
from sparse_rl.trace.support import SUPPORT

NAMES = count(1)


@dataclass(eq=False)
class Held:
    """What is held of a conversation between two turns. The rest is set when a turn has ended.

    name : name of the entries in the workers
    used : True if the conversation has gone on, or if its entries are lost
    rollout : the conversation so far
    evict_at : int32 [L, Hkv, S], its evictions, also those that no query could observe so far
    entries : number of entries per kv head
    """

    name: int = field(default_factory=NAMES.__next__)
    used: bool = False
    rollout: Rollout | None = None
    evict_at: Tensor | None = None
    entries: int = 0

    @property
    def tokens(self) -> list[int]:
        assert self.rollout is not None
        return [*self.rollout.prompt_ids, *self.rollout.completion_ids]


@dataclass(frozen=True)
class TurnRequest(Request):
    """The request of one turn. `prompt` has all tokens before the first that is sampled or forced.

    begins : number of tokens of the conversation's own prompt
    answer : the tokens that came after the last sampled one
    held : what is held of the conversation, if it goes on
    next : what is to be held of it after this turn, if it is kept
    singly : True if the schedule counts tokens, so that `answer` is forced, token by token, before the turn is sampled
    evicts : True if the policy evicts
    """

    begins: int = 0
    answer: Sequence[int] = ()
    held: Held | None = None
    next: Held | None = None
    singly: bool = False
    evicts: bool = False

    @property
    def reads(self) -> int:
        """Maximum number of entries that the cache holds while the request reads its prompt."""
        if self.held is None or not self.evicts:
            return len(self.prompt)
        return self.held.entries + (1 if self.singly else 1 + len(self.answer))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings for the scheduler and the sampler."""
        settings: dict[str, Any] = {}
        if self.evicts and self.next is not None:
            settings["keep"] = self.next.name
        if self.evicts and self.held is not None:
            seen = len(self.held.tokens) - 1  # the last token was sampled, but not fed
            settings["kept"] = [self.held.name, seen, self.held.entries, self.begins if self.singly else 0]
        if self.singly and self.answer:
            settings["read"] = list(self.answer)
        return settings

    def joined(
        self,
        tokens: list[int],
        logprobs: list[float],
        model_logprobs: list[float],
        evict_at: Tensor,
        sections: Mapping[str, Tensor],
        finish_reason: Literal["stop", "length"],
        policy: Policy,
    ) -> Rollout:
        """Return the rollout of the whole conversation, and set `next`.

        tokens, logprobs, model_logprobs : what the request has sampled, after the tokens that it was forced to take
        evict_at, sections : the record of this turn, for all S tokens of the conversation
        """
        forced = len(self.answer) if self.singly else 0
        tokens, logprobs, model_logprobs = tokens[forced:], logprobs[forced:], model_logprobs[forced:]
        completion, spans = [*self.answer, *tokens], [(len(self.answer), len(self.answer) + len(tokens))]
        numbers = [[0.0] * len(self.answer) + values for values in (logprobs, model_logprobs)]
        if self.held is not None:
            assert self.held.rollout is not None
            assert self.held.evict_at is not None
            before = self.held.rollout
            known, start = len(before.trace), len(before.completion_ids)
            completion = [*before.completion_ids, *completion]
            spans = [*before.spans, *((a + start, b + start) for a, b in spans)]
            numbers = [[*before.logprobs, *numbers[0]], [*before.model_logprobs, *numbers[1]]]
            evict_at[..., :known] = torch.minimum(evict_at[..., :known], self.held.evict_at)
            sections = _after(before.trace.further, sections, known)
        length = evict_at.shape[-1]
        if self.next is not None:
            gone = 0 if self.held is None or self.singly else len(self.held.tokens) - 1 - self.held.entries
            read = self.begins if self.singly else len(self.prompt) - gone
            self.next.entries = int(policy.schedule.held(read, length - 1 - gone))
            self.next.evict_at = evict_at
        trace = EvictionTrace.recorded(evict_at, {**policy.further(self.begins, length), **sections})
        prompt = self.prompt[: self.begins]
        rollout = Rollout(prompt, completion, numbers[0], numbers[1], trace, finish_reason, spans)
        if self.next is not None:
            self.next.rollout = rollout
        return rollout


def held_of(request: Request) -> Held | None:
    """Return what is held of the conversation that a request continues, if it does."""
    return request.held if isinstance(request, TurnRequest) else None


def _after(before: Mapping[str, Tensor], now: Mapping[str, Tensor], known: int) -> dict[str, Tensor]:
    """Return the sections of a turn's record, after those of the `known` tokens before it."""
    sections = dict(now)
    if "routed" in now:
        sections["routed"] = torch.cat([before["routed"][:, : known - 1], now["routed"][:, known - 1 :]], dim=1)
    for name in SUPPORT:
        if name in before and name in now:
            new = now[name][known:] if name == SUPPORT[0] else now[name]
            sections[name] = torch.cat([before[name], new])
        else:
            sections.pop(name, None)
    return sections


def counts_tokens(policy: Policy) -> bool:
    """Return True if the policy's compactions, or their record, depend on how many tokens a sequence has seen, so that
    the tokens of a turn cannot be the end of another prompt.
    """
    plain = type(policy.schedule) in (Schedule, NeverEvicts)
    return not plain or type(policy).further is not Policy.further


def requests_of(
    turns: Sequence[Turn], sampling: SamplingConfig, keep: bool, policy: Policy, vocabulary: int
) -> Iterator[TurnRequest]:
    """Yield the request of each turn. Raises UserError for a conversation that cannot go on."""
    if sampling.n != 1:
        raise UserError(f"n must be 1 in a conversation, got {sampling.n}")
    going_on: list[Held] = [turn.held for turn in turns if turn.held is not None]
    if len({held for held in going_on if not held.used}) < len(going_on):
        once = "a conversation goes on once from what converse has returned, unless new weights or sleep come between"
        raise UserError(f"{once}; begin this conversation again")
    whole = [[*(turn.held.tokens if turn.held else ()), *turn.tokens] for turn in turns]
    for turn, request in zip(turns, requests_to_sample(whole, sampling, vocabulary), strict=True):
        tokens, held, answer = request.prompt, turn.held, list(turn.tokens) if turn.held else []
        singly = held is not None and counts_tokens(policy)
        yield TurnRequest(
            request.place,
            tokens[: len(tokens) - len(answer)] if singly else tokens,
            turn.max_tokens + len(answer) if singly else turn.max_tokens,
            request.seed,
            begins=len(held.rollout.prompt_ids) if held else len(tokens),
            answer=answer,
            held=held,
            next=Held() if keep else None,
            singly=singly,
            evicts=policy.schedule.evicts,
        )
