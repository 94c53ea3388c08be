"""Conversations of several turns: what an engine samples, what tools answer, and the loop between the two.

A conversation is one row of a batch, whatever the number of its turns. Its tokens are never tokenized again: the answer
of a tool is tokenized once and appended. Between two turns the cache is kept, or the next turn prefills all tokens
(`cache.turns`). Parsing, templates and the schemas of tools are the caller's.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollout.config import SamplingConfig
from rollout.engine import Engine, Rollout, Turn
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.policies.base import Policy
from sparse_rl.trace import EvictionTrace

Message = dict[str, Any]  # {"role": ..., "content": ..., "tool_calls": ...}, as chat templates read it
RowTrace = EvictionTrace | tuple[tuple[int, EvictionTrace], ...]
"""The trace of a conversation or, if turns were prefilled, (number of prompt tokens, trace) of each turn."""
AT_ONCE = 256  # conversations whose tools run at the same time
MOST_LATE = 16  # calls without an answer in time, in all, after which the run stops


@dataclass
class Conversation:
    """A conversation so far.

    prompt : token ids of the first prompt
    kept : True if the cache is kept between turns; a conversation then has one trace, else one for each turn
    rollouts : the rollout of the whole conversation, if the cache is kept; else that of each turn
    turns : number of turns that were sampled
    held : what the engine keeps for the next turn
    messages : messages since the prompt, of the model and of tools
    failures : number of calls of tools that failed
    environment : environment whose methods are tools, if any
    """

    prompt: list[int]
    kept: bool
    rollouts: list[Rollout] = field(default_factory=list)
    turns: int = 0
    held: Any = None
    messages: list[Message] = field(default_factory=list)
    failures: int = 0
    environment: Any = None

    @property
    def tokens(self) -> list[int]:
        """Token ids of prompt and turns, with the answers of tools."""
        return [*self.rollouts[-1].prompt_ids, *self.rollouts[-1].completion_ids] if self.rollouts else self.prompt

    def last_turn(self) -> tuple[list[int], list[int]]:
        """Return the token ids before the last turn, and those that were sampled in it."""
        last = self.rollouts[-1]
        start = last.spans[-1][0] if last.spans else 0
        return [*last.prompt_ids, *last.completion_ids[:start]], last.completion_ids[start:]

    def whole(self) -> Rollout:
        """Return the conversation as one rollout. If turns were prefilled, its trace is that of the last one."""
        whole = self.rollouts[0]
        for turn in self.rollouts[1:]:
            read = turn.prompt_ids[len(whole.prompt_ids) + len(whole.completion_ids) :]
            numbers = turn.completion_ids, turn.logprobs, turn.model_logprobs
            whole = whole.then(read, *numbers, turn.trace, turn.finish_reason)
        return whole

    def traces(self) -> RowTrace:
        if self.kept:
            return self.rollouts[-1].trace
        return tuple((len(turn.prompt_ids), turn.trace) for turn in self.rollouts)


def sample_turns(
    engine: Engine,
    conversations: Sequence[Conversation],
    read: Sequence[Sequence[int]],
    limits: Sequence[int],
    sampling: SamplingConfig,
) -> None:
    """Sample the next turn of each conversation, all at once.

    read : token ids that each conversation reads first
    limits : maximum number of tokens that each one samples
    """
    kept, turns = conversations[0].kept, list[Turn]()
    for one, ids, most in zip(conversations, read, limits, strict=True):
        turns.append(Turn([*ids] if kept and one.rollouts else [*one.tokens, *ids], most, one.held))
    for one, (rollout, held) in zip(conversations, engine.converse(turns, sampling, keep=kept), strict=True):
        one.rollouts = [rollout] if kept else [*one.rollouts, rollout]
        one.held, one.turns = held, one.turns + 1


def turn_lengths(policy: Policy, prompt: int, completion: int) -> tuple[int, int]:
    """Return the maximum number of tokens that an engine reads before a turn, kept entries included, and that of the
    rest of a conversation: its parameters `prompt` and `completion`.

    policy : it says whether the cache is kept between turns
    prompt, completion : maximum numbers of tokens of the first prompt, and of all that follows it
    """
    whole, schedule = prompt + completion, policy.schedule
    reads = whole - 1  # all tokens, again or in a cache that holds them all
    if policy.config.turns == "kept" and schedule.evicts and schedule.peak is not None:
        entries = schedule.peak + completion * policy.reads_chunks  # the last sampled token is within the peak
        reads = max(prompt, min(entries, reads))
    return reads, whole - reads


def check_beginnings(environments: Any, rows: Any, key: str) -> None:
    """Raise UserError if conversations with tools cannot begin with the rows of a dataset: if the column `environment`
    has a name that a mapping of environments lacks, or if prompts are text."""
    if isinstance(environments, Mapping):
        named = set(rows["environment"]) if "environment" in rows.column_names else {None}
        if wrong := sorted(map(repr, named - environments.keys())):
            raise UserError(f"a row has environment {wrong[0]}, not one of {', '.join(environments)}", key)
    if isinstance(rows[0]["prompt"], str):
        raise UserError("with tools, prompts must be chat messages, but they are text", key)


# ---- tools -----------------------------------------------------------------------------------------------------------


class ToolCalls(threading.Thread):
    """Calls the tools that one turn asks for, one after another, in a thread of its own.

    A thread cannot be ended: a tool that is late goes on, and its conversation must use it no further.

    answers : messages of the tools so far; a tool that raises anything, SystemExit included, answers with the error
    calling, began : name of the present tool, and the time at which its call began
    ended : True if no further call is made, because the conversation has ended
    """

    def __init__(self, calls: Sequence[tuple[str, Message]], tools: Mapping[str, Callable], loop: Any) -> None:
        super().__init__(daemon=True)
        self.calls, self.tools, self.loop = calls, tools, loop
        self.answers: list[Message] = []
        self.calling, self.began = calls[0][0], time.monotonic()
        self.failures, self.ended = 0, False

    def run(self) -> None:
        for name, arguments in self.calls:
            if self.ended:
                return
            self.calling, self.began = name, time.monotonic()
            try:
                if name not in self.tools:
                    raise ValueError(f"Tool {name} not found.")
                result = self.tools[name](**arguments)
                if inspect.isawaitable(result) and self.loop is None:
                    result = asyncio.run(_awaited(result))
                elif inspect.isawaitable(result):
                    result = asyncio.run_coroutine_threadsafe(_awaited(result), self.loop).result()
                content = str(result)
            except BaseException as error:
                self.failures += 1
                text = type(error).__name__
                with suppress(Exception):  # an error whose text raises another one
                    text = str(error) or text
                content = str({"error": text})
            content = content.encode(errors="replace").decode()  # no tokenizer takes halves of surrogate pairs
            self.answers.append({"role": "tool", "name": name, "content": content})

    def late(self, seconds: float) -> bool:
        """Wait until all tools have answered. Returns True as soon as one has taken longer than `seconds`; those after
        it are then not called."""
        while self.is_alive():
            left = self.began + seconds - time.monotonic()
            if left <= 0:
                self.ended = True
                return True
            self.join(left)
        return False


async def _awaited(result: Any) -> Any:
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop, and so all asynchronous tools
        raise RuntimeError(str(error) or type(error).__name__) from error


def calls_of(message: Message) -> list[tuple[str, Message]]:
    """Return the calls (name, arguments) of a message; [] if it has none, or one that no tool could be called with."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return []
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        calls.append((name, arguments))
    return calls


@dataclass
class ToolLoop:
    """Runs tools and samples turns until no conversation calls a tool.

    parse : (index of a conversation, token ids before a turn, token ids of the turn) -> the turn as a message
    suffix : messages of tools -> the token ids from the end of the turn that called to the start of the next one
    seconds : time limit of a call. A conversation with a late tool ends
    rounds : maximum number of times that a conversation calls tools
    longest : maximum number of tokens since the first prompt; a conversation ends if answers do not fit
    window : context length of the model in tokens; None means unlimited
    loop : event loop of asynchronous tools, in a thread of its own; None: each call has one of its own
    calls, failures, late : counts so far
    """

    parse: Callable[[int, list[int], list[int]], Message]
    suffix: Callable[[list[Message]], list[int]]
    seconds: float
    rounds: int
    longest: int
    window: int | None = None
    loop: Any = None
    calls: int = 0
    failures: int = 0
    late: int = 0

    def run(
        self,
        conversations: Sequence[Conversation],
        tools: Sequence[Mapping[str, Callable]],
        sample: Callable[[list[Conversation], list[list[int]], list[int]], None],
    ) -> list[int]:
        """Go on with conversations whose first turns were sampled. Returns the indices of those with a late tool.
        Afterwards, the engine holds nothing of them.

        tools : the tools of each conversation by name
        sample : `sample_turns`, with an engine and settings

        Raises StoppedError after MOST_LATE late calls.
        """
        for i, conversation in enumerate(conversations):
            conversation.messages = [self.parse(i, *conversation.last_turn())]
        late: list[int] = []
        going = list(range(len(conversations)))
        for _ in range(self.rounds):
            asked = {i: calls for i in going if (calls := calls_of(conversations[i].messages[-1]))}
            answered = self._answers(asked, conversations, tools)
            late += sorted(asked.keys() - answered.keys())
            going, read, limits = [], [], []
            for i, answers in answered.items():
                tokens = self.suffix(answers)
                since = len(conversations[i].tokens) - len(conversations[i].prompt) + len(tokens)
                left = self.longest - since
                if self.window is not None:
                    left = min(left, self.window - len(conversations[i].prompt) - since)
                if left < 1:
                    continue
                conversations[i].messages += answers
                going.append(i)
                read.append(tokens)
                limits.append(left)
            if not going:
                break
            sample([conversations[i] for i in going], read, limits)
            for i in going:
                conversations[i].messages.append(self.parse(i, *conversations[i].last_turn()))
        for conversation in conversations:
            conversation.held = None
        return late

    def _answers(
        self,
        asked: Mapping[int, Sequence[tuple[str, Message]]],
        conversations: Sequence[Conversation],
        tools: Sequence[Mapping[str, Callable]],
    ) -> dict[int, list[Message]]:
        """Return the answers of tools, by conversation, without those of conversations with a late tool."""
        answered: dict[int, list[Message]] = {}
        rows = list(asked)
        for part in (rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE)):
            threads = {i: ToolCalls(asked[i], tools[i], self.loop) for i in part}
            for thread in threads.values():
                thread.start()
            for i, thread in threads.items():
                late = thread.late(self.seconds)
                self.calls, self.late = self.calls + len(asked[i]), self.late + late
                self.failures += thread.failures + late
                conversations[i].failures += thread.failures + late
                if not late:
                    answered[i] = thread.answers
                elif self.late >= MOST_LATE:
                    wrong = f"had no answer within {self.seconds:g} seconds, the last one to {thread.calling}"
                    mend = "each leaves a thread that cannot be ended. Mend the tool, or raise tool_seconds"
                    raise StoppedError(f"tools: {self.late} calls {wrong}; {mend}")
        return answered
