"""The tool loop: tools that raise, exit, hang, answer too much or are unknown, beside each other and without end."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from rollout.config import SamplingConfig
from rollout.engine import Rollout
from rollout.turns import (
    AT_ONCE,
    MOST_LATE,
    Conversation,
    ToolCalls,
    ToolLoop,
    calls_of,
    sample_turns,
    turn_lengths,
)
from sparse_rl.errors import StoppedError
from sparse_rl.policies import make_policy
from sparse_rl.trace import EvictionTrace

PROMPT, CALLS = [1, 2], {"get": [7, 3], "end": [8, 3], "unknown": [9, 3], "two": [5, 3], "broken": [6, 3]}
SAMPLING = SamplingConfig(32)
FOREVER = threading.Event()


class Engine:
    """Samples in each call the tokens that a script names."""

    policy, max_batch, shares_weights = None, 8, True

    def __init__(self, *script: str) -> None:
        self.script, self.read = list(script), []

    def converse(self, turns: Any, sampling: Any, keep: bool = True) -> list[tuple[Rollout, Any]]:
        out, tokens = [], CALLS[self.script.pop(0) if len(self.script) > 1 else self.script[0]]
        for turn in turns:
            self.read.append(list(turn.tokens))
            own, before = tokens[: turn.max_tokens], turn.held
            length = len(before.trace) if before else 0
            trace = EvictionTrace.dense(1, 1, length + len(turn.tokens) + len(own))
            numbers = own, [-1.0] * len(own), [-2.0] * len(own), trace, "stop"
            rollout = before.then(turn.tokens, *numbers) if before else Rollout(list(turn.tokens), *numbers)
            out.append((rollout, rollout if keep else None))
        return out


def parsed(row: int, before: list[int], ids: list[int]) -> dict[str, Any]:
    name = next(name for name, tokens in CALLS.items() if tokens[0] == ids[0])
    call = {"function": {"name": name, "arguments": {"key": "a"}}}
    calls = {"end": [], "two": [{"function": {"name": "get", "arguments": {"key": k}}} for k in "ab"]}.get(name, [call])
    calls = [{"function": ["get"]}] if name == "broken" else calls
    return {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}


def suffix(messages: list[dict[str, Any]]) -> list[int]:
    return [4] * (40 if any(message["content"] == "long" for message in messages) else 2)


def ran(tool: Any, *script: str, kept: bool = True, rows: int = 1, seconds: float = 5.0, **limits: Any) -> Any:
    """Return (conversations, loop, indices of those with a late tool, engine)."""
    engine, loop_ = Engine(*script), asyncio.new_event_loop()
    threading.Thread(target=loop_.run_forever, daemon=True).start()
    conversations = [Conversation(PROMPT, kept) for _ in range(rows)]

    def sample(some: Any, read: Any, most: Any) -> None:
        sample_turns(engine, some, read, most, SAMPLING)

    sample(conversations, [[] for _ in conversations], [8] * rows)
    loop = ToolLoop(parsed, suffix, seconds, **{"rounds": 5, "longest": 32, "loop": loop_, **limits})
    tools = [{"get": tool, "broken": tool} for _ in range(rows)]
    return conversations, loop, loop.run(conversations, tools, sample), engine


def answers(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == "tool"]


def raising(key: str) -> str:
    raise KeyError("no such key")


class Textless(Exception):
    def __str__(self) -> str:
        raise ValueError("this error has no text")


def without_text(key: str) -> str:
    raise Textless


async def slow_answer(key: str) -> str:
    await asyncio.sleep(0)
    return "later"


async def exits_later(key: str) -> str:
    sys.exit(3)


TOOLS = {
    "answers": (lambda key: "1e", "1e", 0),
    "asynchronous": (slow_answer, "later", 0),
    "asynchronous, and exits": (exits_later, str({"error": "3"}), 1),
    "raises": (raising, str({"error": "'no such key'"}), 1),
    "raises an error without a text": (without_text, str({"error": "Textless"}), 1),
    "answers with half a surrogate pair": (lambda key: "1\udcff", "1?", 0),
    "exits": (lambda key: sys.exit(3), str({"error": "3"}), 1),
    "of other arguments": (lambda: "1e", None, 1),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", TOOLS)
def test_what_a_tool_returns_or_raises_is_its_answer(name, kept):
    tool, answer, failures = TOOLS[name]
    (conversation,), loop, late, engine = ran(tool, "get", "end", kept=kept)
    assert (conversation.turns, loop.calls, loop.failures, loop.late, late) == (2, 1, failures, 0, [])
    (given,) = answers(conversation)
    assert given == answer if answer else "unexpected keyword argument" in given
    assert engine.read[1] == ([4, 4] if kept else [*PROMPT, 7, 3, 4, 4])  # tokens are never tokenized again
    whole = conversation.whole()
    assert (whole.prompt_ids, whole.completion_ids) == (PROMPT, [7, 3, 4, 4, 8, 3])
    assert whole.sampled == [True, True, False, False, True, True]
    assert whole.logprobs == [-1, -1, 0, 0, -1, -1] and whole.model_logprobs == [-2, -2, 0, 0, -2, -2]
    traces = conversation.traces()
    assert isinstance(traces, EvictionTrace) is kept
    if not kept:
        assert [(prompt, len(trace)) for prompt, trace in traces] == [(2, 4), (6, 8)]


def test_a_tool_that_is_unknown_is_an_answer_and_a_malformed_call_ends_the_conversation():
    (conversation,), loop, _, _ = ran(raising, "unknown", "end")
    assert answers(conversation) == [str({"error": "Tool unknown not found."})] and loop.failures == 1
    (conversation,), loop, _, _ = ran(raising, "broken", "end")
    assert (conversation.turns, loop.calls) == (1, 0)
    assert calls_of({"tool_calls": [{"function": {"name": "get", "arguments": "a"}}]}) == []
    assert calls_of({"tool_calls": [{"function": {"name": "get", "arguments": {"key": 1}}}]}) == [("get", {"key": 1})]


def test_asynchronous_tools_need_no_loop_of_the_caller_and_go_on_after_an_exit():
    (conversation,), *_ = ran(slow_answer, "get", "end", loop=None)
    assert answers(conversation) == ["later"]
    tools = iter([exits_later, slow_answer])
    (conversation,), _, late, _ = ran(lambda key: next(tools)(key), "get", "get", "end")
    assert (answers(conversation), late) == ([str({"error": "3"}), "later"], [])


def test_two_calls_of_a_turn_are_answered_in_order():
    (conversation,), loop, _, _ = ran(lambda key: key, "two", "end")
    assert answers(conversation) == ["a", "b"] and loop.calls == 2


def test_an_answer_that_does_not_fit_ends_the_conversation_as_it_is():
    for limits in ({"longest": 32}, {"longest": 99, "window": 30}):
        (conversation,), loop, late, _ = ran(lambda key: "long", "get", "end", **limits)
        assert (conversation.turns, answers(conversation), loop.calls, late) == (1, [], 1, [])
    (conversation,), *_ = ran(lambda key: "long", "get", "end", longest=99, window=200)  # control
    assert (conversation.turns, answers(conversation)) == (2, ["long"])
    (conversation,), *_ = ran(lambda key: "1e", "get", "end", longest=5)  # of the second turn one token fits
    assert conversation.whole().completion_ids == [7, 3, 4, 4, 8]


def test_endless_calls_end_after_the_given_rounds():
    (conversation,), loop, _, _ = ran(lambda key: "1e", "get", longest=1000)
    assert (conversation.turns, loop.calls, len(answers(conversation))) == (6, 5, 5)


def test_a_late_tool_ends_its_conversation_alone():
    calls = iter([FOREVER.wait, lambda: None])
    waits = threading.Lock()

    def tool(key: str) -> str:
        with waits:
            wait = next(calls, lambda: None)
        wait()
        return "1e"

    conversations, loop, late, _ = ran(tool, "get", "end", rows=3, seconds=0.3)
    assert len(late) == loop.late == loop.failures == 1
    assert sorted(c.turns for c in conversations) == [1, 2, 2] and conversations[late[0]].turns == 1
    assert answers(conversations[late[0]]) == []


def test_after_a_late_tool_the_turn_calls_no_other():
    began, goes_on = [], threading.Event()

    def tool(key: str) -> str:
        began.append(key)
        goes_on.wait()
        return "1e"

    _, loop, late, _ = ran(tool, "two", "end", seconds=0.2)
    assert (late, loop.late, began) == ([0], 1, ["a"])
    goes_on.set()
    for thread in [thread for thread in threading.enumerate() if isinstance(thread, ToolCalls) and thread.ended]:
        if thread.tools["get"] is tool:
            thread.join()
    assert began == ["a"]
    began.clear()
    ran(tool, "two", "end")  # control: none is late
    assert began == ["a", "b"]


def test_a_tool_that_answers_just_when_it_is_late_is_late(monkeypatch):
    def late(thread: ToolCalls, seconds: float) -> bool:
        thread.join()
        return True

    monkeypatch.setattr(ToolCalls, "late", late)
    _, loop, late_rows, _ = ran(lambda key: "1e", "get", "end")
    assert (late_rows, loop.late) == ([0], 1)


def test_an_engine_has_room_for_kept_entries_and_the_longest_answer():
    """A cache that is not kept, or does not evict, reads the whole conversation again; one that reads answers token by
    token needs no room for them."""
    sparse = {"budget": 20, "window": 4, "period": 8}

    def lengths(policy: str, **keys: Any) -> tuple[int, int]:
        return turn_lengths(make_policy(policy, **keys), 100, 50)

    assert lengths("gkv", **sparse) == (100, 50) and lengths("gkv", **{**sparse, "budget": 70}) == (128, 22)
    assert lengths("gkv", **{**sparse, "budget": 120}) == lengths("full") == (149, 1)
    assert lengths("gkv", **sparse, turns="prefilled") == (149, 1)
    assert lengths("am", **{**sparse, "budget": 70}) == (100, 50)


def test_many_late_tools_stop_the_run():
    with pytest.raises(StoppedError, match=f"tools: {MOST_LATE} calls had no answer within 0.05 seconds, the last one"):
        ran(lambda key: FOREVER.wait(), "get", "end", rows=MOST_LATE, seconds=0.05)
    _, loop, _, _ = ran(lambda key: FOREVER.wait(), "get", "end", rows=MOST_LATE - 1, seconds=0.05)  # control
    assert loop.late == MOST_LATE - 1


def test_tools_of_different_conversations_run_side_by_side():
    """Each waits until all have begun: one after another, none would end."""
    rows = 64
    assert rows <= AT_ONCE
    together = threading.Barrier(rows)
    conversations, _, late, _ = ran(lambda key: str(together.wait() >= 0), "get", "end", rows=rows)
    assert not late and all(answers(c) == ["True"] for c in conversations)
    alone = threading.Barrier(2)
    _, _, late, _ = ran(lambda key: alone.wait(), "get", "end", seconds=0.2)  # control
    assert late == [0]
