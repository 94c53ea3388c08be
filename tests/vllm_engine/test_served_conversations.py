"""A server goes on from the kept cache of a conversation if a prompt begins with its tokens: the turns are those of
`converse`. Here the server's scheduler and worker run in this process; test_serve_conversations.py asks over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from policy_cases import ON_VLLM
from test_vllm_conversations import GKV, case, kept_in_worker, texts
from test_vllm_groups import nothing_is_left
from test_vllm_preemption import preempting
from tiny import QUICKSTART
from watching import scheduler_of

from rollout import SamplingConfig, make_engine
from rollout.engine import Turn
from rollout.sampling import sequence_seed
from rollout.vllm.compat import arguments
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.memory import conversation_bytes
from rollout.vllm.scheduler import KEPT
from rollout.vllm.served import Conversations
from sparse_rl.models.load import load_config
from sparse_rl.policies import make_policy

GIB = 2**30
LENGTHS = (18, 41, 41), (30, 0, 12), (2, 25, 9)  # of prompts, then of answers; the last two prompts are the same
CASES = [name for name in (*ON_VLLM, "growing", "triattention", "experts", "delayed") if name != "full"]
FAST = ("gkv", "am", "delayed")


class Served:
    """The engine and the worker of a server, in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.llm, self.number = engine, engine.llm, 0
        self.connector = scheduler_of(engine).connector
        self.conversations, self.admitted = self.connector.conversations, list[bool]()
        self.connector.update_state_after_alloc = self.admit

    def admit(self, request: Any, *args: Any) -> None:
        type(self.connector).update_state_after_alloc(self.connector, request, *args)
        self.admitted.append(request.request_id in KEPT)

    def add(
        self,
        prompt: list[int],
        tokens: int = 24,
        owner: str = "a",
        seed: int | None = None,
        index: int = 0,
        **more: Any,
    ) -> str:
        import vllm

        settings: dict[str, Any] = {"owner": owner}
        if seed is not None:
            settings["seeds"] = [sequence_seed(seed, prompt, index)]
        words = {"temperature": 0 if seed is None else 1, "ignore_eos": True, "detokenize": False, **more}
        parameters = vllm.SamplingParams(max_tokens=tokens, extra_args={KEY: settings}, **words)
        self.number += 1
        return self.llm.llm_engine.add_request(str(self.number), {"prompt_token_ids": prompt}, parameters)

    def run(self) -> list[list[int]]:
        """Return the tokens of all requests that were added, in their order."""
        done: dict[int, list[int]] = {}
        for step in count():
            assert step < 1000, "no request ends"
            if not self.llm.llm_engine.has_unfinished_requests():
                break
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[int(output.request_id)] = list(output.outputs[0].token_ids)
        return [done[number] for number in sorted(done)]

    def ask(self, prompt: list[int], tokens: int = 24, owner: str = "a", **more: Any) -> list[int]:
        self.add(prompt, tokens, owner, **more)
        (answer,) = self.run()
        return answer

    def counts(self) -> tuple[int, int]:
        """Return how many requests have gone on, and how many were prefilled, since the last call."""
        admitted, self.admitted = self.admitted, []
        return sum(admitted), len(admitted) - sum(admitted)


@pytest.fixture
def serve_here(open_engine: Callable) -> Iterator[Callable[..., Served]]:
    def serve(policy: Any = GKV, model: Path = QUICKSTART, kept: int = GIB, **options: Any) -> Served:
        with mock.patch.object(arguments, "engine_arguments", partial(arguments.engine_arguments, kept=kept)):
            sizes = {"max_batch": 8, "max_model_len": 512, **options}
            return Served(open_engine(policy, model, shared=kept == GIB, **sizes))

    yield serve


def talk(
    served: Served, read: Sequence[Sequence[list[int]]], seeds: Sequence[int | None], owner: str
) -> tuple[list[Any], list[list[int]]]:
    """Return the tokens of each turn, and the prompts of the last. The conversations of a turn run together."""
    whole, turns = [list[int]() for _ in read[0]], list[Any]()
    for tokens, seed in zip(read, seeds, strict=True):
        prompts = [before + t for before, t in zip(whole, tokens, strict=True)]
        for i, prompt in enumerate(prompts):
            served.add(prompt, 16 + i, owner, seed, prompts[:i].count(prompt))
        turns.append(served.run())
        whole = [before + answer for before, answer in zip(prompts, turns[-1], strict=True)]
    return turns, prompts


def conversed(folder: Path, policy: Any, read: Sequence[Sequence[list[int]]], seeds: Sequence[int | None]) -> list[Any]:
    """Return the tokens of each turn in the reference engine."""
    engine, held, turns = make_engine("hf", model=folder, policy=policy), [None] * len(read[0]), []
    for tokens, seed in zip(read, seeds, strict=True):
        sampling = SamplingConfig(1, temperature=float(seed is not None), seed=seed, ignore_eos=True)
        asked = [Turn(t, 16 + i, h) for i, (t, h) in enumerate(zip(tokens, held, strict=True))]
        pairs = engine.converse(asked, sampling)
        held = [kept for _, kept in pairs]
        turns.append([r.completion_ids[-turn.max_tokens :] for (r, _), turn in zip(pairs, asked, strict=True)])
    return turns


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.few(2)
def test_turns_equal_those_of_converse(name: str, serve_here: Callable) -> None:
    """Greedy or seeded, of all three turns of concurrent conversations, of which two begin alike. Control: turns that
    are prefilled, because another owner asks, have other tokens."""
    folder, policy = case(name)
    read, seeds = texts(LENGTHS), (None, None, None) if name == "am" else (3, 1, 2)
    served = serve_here(policy, folder)
    turns, prompts = talk(served, read, seeds, "a")
    assert served.counts() == (6, 3)
    assert turns == conversed(folder, policy, read, seeds)
    for prompt, answer in zip(prompts, turns[-1], strict=True):
        served.add(prompt, len(answer), "b", seed=2)
    assert served.run() != turns[-1]
    assert served.counts() == (0, 3)
    assert nothing_is_left(served)


def index(most: int = GIB) -> Conversations:
    """Return conversations of a model and a policy for which no engine runs."""
    config = SimpleNamespace(hf_text_config=load_config(str(QUICKSTART)), dtype=torch.float32)
    return Conversations(make_policy(GKV), SimpleNamespace(model_config=config), 32, most)


def test_the_longest_beginning_counts_and_every_token_of_it() -> None:
    conversations = index()
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 5], [256]):
        conversations.add("a", tokens, 2, 1)
    assert [kept.name for kept, _ in conversations.ended.values()] == [1, 2, 3, 4]
    for prompt, longest in (
        *(([1, 2, 3, 4, 9], 2), ([1, 2, 3, 5], 3), ([1, 2, 3, 6, 9], 1), ([1, 2], 1), ([256, 1], 4)),
        *(([1], None), ([2, 1, 2], None), ([1, 3, 2], None), ([0, 1, 2], None), ([1, 0], None)),
    ):
        kept = conversations.longest("a", prompt)
        assert (kept and kept.name) == longest, prompt
        assert conversations.longest("b", prompt) is None
    assert conversations.longest("a", [1, 2, 3, 4, 9]).seen == 3  # the last sampled token is not in the cache
    name, let_go = conversations.add("a", [1, 2], 2, 1)  # its cache may differ: another one was prefilled
    assert (name, let_go) == (5, [1])
    assert sorted(conversations.clear()) == [2, 3, 4, 5]
    assert conversations.bytes == 0 == len(conversations.ended)


def test_those_that_were_not_used_for_the_longest_time_are_let_go() -> None:
    unit = conversation_bytes(make_policy(GKV), load_config(str(QUICKSTART)), 20, itemsize=4, block=32) + 4 * 2
    conversations = index(3 * unit)
    for token in range(3):
        assert conversations.add("a", [token, 0], 20, 1) == (token + 1, [])
    assert conversations.bytes == 3 * unit
    assert conversations.longest("a", [0, 0, 7]) is not None  # used, so the second is let go
    assert conversations.add("b", [3, 0], 20, 1) == (4, [2])
    assert conversations.add("b", [4, 0], 33, 1) == (5, [3, 1])  # 33 entries need two blocks
    assert conversations.bytes <= conversations.most
    assert conversations.add("b", [5] * unit, 20, 1) == (None, [])
    assert conversations.longest("b", [4, 0, 1]) is not None


def test_several_requests_go_on_from_one_conversation(serve_here: Callable) -> None:
    """At the same time and later, each with the same tokens as alone; and not those of another owner, one that needs
    the log-probs of its prompt, or one with another token."""
    first, served = texts(LENGTHS)[0][1], serve_here()
    begun = first + served.ask(first, owner="c")
    served.counts()
    one, two = begun + [5] * 12, begun + [6] * 9
    alone = [served.ask(one, owner="c"), served.ask(two, owner="c")]
    for prompt in (one, two, one):
        served.add(prompt, owner="c")
    assert served.run() == [*alone, alone[0]]
    assert served.counts() == (5, 0)
    prefilled = served.ask(one, owner="d")
    assert prefilled != alone[0]
    assert served.ask(one, owner="c", prompt_logprobs=0) == prefilled
    assert served.ask([first[0] ^ 1, *one[1:]], owner="c") != alone[0]
    assert served.counts() == (0, 3)
    assert served.ask(begun, owner="c") == served.ask(begun, owner="c")  # nothing is read but the last token
    assert served.counts() == (2, 0)


def test_the_memory_of_conversations_is_computed_and_limited(serve_here: Callable) -> None:
    """Workers hold the computed bytes, and after a reset none."""
    unit = conversation_bytes(make_policy(GKV), load_config(str(QUICKSTART)), 24, itemsize=4, block=32)
    served = serve_here(kept=3 * unit + 2000)
    prompts = [[7 + i] * 40 for i in range(5)]
    begun = [prompt + served.ask(prompt) for prompt in prompts]
    served.ask([9], 1)  # the entries of the last request are kept in the next step
    tokens = sum(len(key[1]) for key in served.conversations.ended)
    assert served.conversations.bytes - tokens - kept_in_worker() in (0, unit)
    assert kept_in_worker() in (2 * unit, 3 * unit)
    served.counts()
    served.ask([*begun[0], 5])
    assert served.counts() == (0, 1)
    served.ask([*begun[4], 5])
    assert served.counts() == (1, 0)
    assert served.connector.reset_cache()
    served.ask([*begun[4], 5], owner="b")
    assert served.counts() == (0, 1)
    assert served.conversations.bytes > 0 == kept_in_worker()
    assert nothing_is_left(served)


def test_what_ends_early_or_under_other_weights_is_not_kept(serve_here: Callable) -> None:
    """An aborted and a preempted request, and one that ran while methods of the workers were called."""
    served, prompt = serve_here(), texts(LENGTHS)[0][2]
    llm, begun = served.llm.llm_engine, prompt + served.ask(prompt, owner="e")
    expected, count_before = served.ask([*begun, 5], owner="e"), len(served.conversations.ended)
    number = served.add([*begun, 5], owner="e")
    for _ in range(9):
        llm.step()
    llm.abort_request([number], internal=True)
    assert served.run() == []
    with preempting(served, lambda now: now == 9):
        served.add([*begun, 5], owner="e")
        (answer,) = served.run()
    assert answer == expected[: len(answer)] != expected
    assert len(served.conversations.ended) == count_before
    assert served.ask([*begun, 5], owner="e") == expected
    served.counts()
    served.add([*begun, 5], owner="e")
    for _ in range(9):
        llm.step()
    served.llm.collective_rpc("scorer_digests")
    assert served.run() == [expected]
    assert served.conversations.ended == {}
    assert served.ask([*begun, 5], owner="e") != expected
    assert served.counts() == (1, 1)
    assert nothing_is_left(served)
