"""Conversations in vLLM go on from the entries that their last turn has left, as in the reference engine: the same
tokens, log-probs and records, to the last bit. Then nothing is left of them, neither blocks nor host memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from judging import wrong_traces
from learned import SCORERS
from policy_cases import ON_VLLM
from test_vllm_groups import nothing_is_left
from test_vllm_learned import learned
from test_vllm_preemption import preempting
from test_vllm_processes import any_core as any_core
from test_vllm_triattention import calibrated
from tiny import QUICKSTART, directory_of, policy_of
from watching import pool_of, watched

from rollout import Rollout, SamplingConfig, make_engine
from rollout.engine import Turn
from rollout.turns import turn_lengths
from rollout.vllm.memory import kept_bytes
from rollout.vllm.state import CacheState
from sparse_rl.attention import replay_logprobs
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_model

SAMPLING = SamplingConfig(1, seed=3, ignore_eos=True)
LENGTHS = (5, 18, 33, 41, 12, 12), (9, 30, 1, 12, 25, 0), (14, 2, 40, 70, 26, 3)  # of prompts, then of answers
GKV = policy_of("gkv", budget=20, window=8, period=8)
GROWING = {"policy": "gkv", "budget": {"tokens": [0, 60], "entries": [20, 32]}, "window": 8, "period": 8}
CASES = [*ON_VLLM, "growing", "triattention", "experts", *SCORERS]
FAST = ("full", "gkv", "h2o", "am", "growing", "experts", "delayed")


def texts(lengths: Sequence[Sequence[int]], seed: int = 0) -> list[list[list[int]]]:
    """Return random tokens, one text per length; the last two prompts are the same."""
    g = torch.Generator().manual_seed(seed)
    drawn = [[torch.randint(2, 60, (n,), generator=g).tolist() for n in row] for row in lengths]
    drawn[0][-1] = drawn[0][-2]
    return drawn


def talk(
    engine: Any, read: Sequence[Sequence[list[int]]], sampling: SamplingConfig = SAMPLING, most: int = 24
) -> list[list[Rollout]]:
    """Return the rollouts of each turn. Within a turn, conversations end at different lengths."""
    held: list[Any] = [None] * len(read[0])
    rollouts = []
    for turn, tokens in enumerate(read):
        turns = [Turn(t, most + i % 3, h) for i, (t, h) in enumerate(zip(tokens, held, strict=True))]
        pairs = engine.converse(turns, replace(sampling, seed=turn), keep=turn < len(read) - 1)
        rollouts.append([rollout for rollout, _ in pairs])
        held = [kept for _, kept in pairs]
    assert held == [None] * len(held)
    return rollouts


def outcome(rollouts: Sequence[Rollout]) -> list[Any]:
    names = ("prompt_ids", "completion_ids", "logprobs", "model_logprobs", "finish_reason")
    spans = [list(map(tuple, r.spans)) for r in rollouts]
    sections = [{name: section.tolist() for name, section in r.trace.sections.items()} for r in rollouts]
    return [[[getattr(r, name) for name in names] for r in rollouts], spans, sections]


@torch.no_grad()
def sampled_gap(folder: Path, rollouts: Sequence[Rollout]) -> float:
    """Return the largest gap of a replay over the tokens that were sampled."""
    gaps = []
    for logprobs, r in zip(replay_logprobs(load_model(folder), rollouts), rollouts, strict=True):
        sampled = torch.tensor(r.sampled)
        gaps.append(float((logprobs - torch.tensor(r.model_logprobs))[sampled].abs().max()))
    return max(gaps)


def case(name: str) -> tuple[Path, Any]:
    """Return (directory of a model, policy)."""
    if name in SCORERS:
        return learned(name), None
    if name == "triattention":
        return calibrated(QUICKSTART), policy_of(name, budget=20, window=8, period=8)
    if name == "experts":
        return directory_of("qwen3_moe"), GKV
    if name == "growing":
        return QUICKSTART, GROWING
    return QUICKSTART, policy_of(name, budget=20, sinks=1, window=6, period=8, reference_queries=12)


@pytest.mark.parametrize("chunk", [2048, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
@pytest.mark.few(2)
def test_conversations_equal_those_of_the_reference_engine(name: str, chunk: int, open_engine: Callable) -> None:
    """Also the supports of top-p, and if what is read comes in chunks. Each turn evicts; the replay is that of the
    sampler, and of no other trace."""
    folder, policy = case(name)
    read, sampling = texts(LENGTHS), replace(SAMPLING, top_p=0.9, record_support=True)
    expected = talk(make_engine("hf", model=folder, policy=policy), read, sampling)
    engine = open_engine(policy, folder, max_batch=8, max_model_len=512, max_num_batched_tokens=chunk)
    turns = talk(engine, read, sampling)
    for rollouts, reference in zip(turns, expected, strict=True):
        assert outcome(rollouts) == outcome(reference)
    largest_gap = sampled_gap(folder, turns[-1])
    assert largest_gap <= 1e-5
    if name != "full":
        assert nothing_is_left(engine)
        wrong = wrong_traces(turns[-1])
        for control in ("evict_at + 1", "causal") if name == "am" else ("evict_at + 1", "evict_at - 1", "causal"):
            assert sampled_gap(folder, wrong[control]) >= 1e-2, control
        for before, after in pairwise(turns):
            for a, b in zip(before, after, strict=True):
                later = b.trace.evict_at[..., : len(a.trace)]
                assert torch.equal(a.trace.evict_at, later.masked_fill(later >= len(a.trace) - 1, 2**30))


def kept_in_worker() -> int:
    """Return the bytes that the worker of this process keeps of conversations."""
    from rollout.vllm.compat.paged import live_state

    return sum(part.nbytes for parts in live_state().kept.values() for part in parts)


def test_a_small_pool_is_enough_and_nothing_is_left(open_engine: Callable) -> None:
    """12 blocks for 40 conversations, of which at most 8 run at a time. Their entries wait in host memory."""
    g = torch.Generator().manual_seed(1)
    lengths = [torch.randint(low, high, (40,), generator=g).tolist() for low, high in ((5, 60), (1, 90), (1, 90))]
    read = texts(lengths)
    expected = talk(make_engine("hf", model=QUICKSTART, policy=GKV), read)
    sizes = {"max_batch": 8, "max_model_len": 512, "max_prompt": 128}
    engine = open_engine(GKV, QUICKSTART, kv_cache_gb=0.0004, **sizes)
    assert pool_of(engine).get_num_free_blocks() == 12
    with watched(engine) as records:
        turns = talk(engine, read)
    assert [outcome(rollouts) for rollouts in turns] == [outcome(reference) for reference in expected]
    assert records.preempted == 0
    assert nothing_is_left(engine)
    assert 0 < kept_in_worker() <= kept_bytes(engine.policy, engine.config, 40, itemsize=4, cuda=False) / 2
    engine.generate(read[0][:1], SAMPLING)
    assert kept_in_worker() == 0


def test_the_turn_before_may_be_continued_several_times(open_engine: Callable) -> None:
    """With another continuation, all that is not sampled is the same; with the same one, all is."""
    read = texts(LENGTHS)
    engine = open_engine(GKV, QUICKSTART, shared=True, max_batch=8, max_model_len=512)
    pairs = engine.converse([Turn(t, 24) for t in read[0]], SAMPLING)
    turns = [Turn(t, 24, held) for t, (_, held) in zip(read[1], pairs, strict=True)]
    once, again, other = (
        [r for r, _ in engine.converse(turns, replace(SAMPLING, seed=seed), keep=False)] for seed in (4, 4, 5)
    )
    assert outcome(once) == outcome(again) != outcome(other)
    greedy = replace(SAMPLING, temperature=0)
    with pytest.raises(
        UserError, match=r"the earlier turns of a conversation have temperature 1\.0, but this one has 0"
    ):
        engine.converse(turns[:1], greedy)
    held = engine.converse([Turn(read[0][0], 24)], greedy)[0][1]
    twice = engine.converse([Turn(read[1][0], 24, held)] * 2, greedy, keep=False)
    assert outcome([twice[0][0]]) == outcome([twice[1][0]])


def test_workers_let_go_of_conversations(open_engine: Callable) -> None:
    """If they are no longer referenced, if a run fails, and if the weights change; then they cannot go on."""
    read = texts(LENGTHS)
    engine = open_engine(GKV, QUICKSTART, shared=True, max_batch=8, max_model_len=512)
    pairs = engine.converse([Turn(t, 24) for t in read[0]], SAMPLING)
    engine.generate(read[0][:1], SAMPLING)  # the last step's conversations are kept in the next step
    whole = kept_in_worker()
    assert whole > 0
    del pairs[1:]
    gc.collect()
    engine.generate(read[0][:1], SAMPLING)
    assert 0 < kept_in_worker() < whole / 3
    held = pairs[0][1]
    with pytest.raises(UserError, match="a conversation goes on only in the engine that holds it"):
        engine.converse([Turn([5], 4, copy.copy(held))], SAMPLING)  # as that of another engine
    assert len(engine.converse([Turn([5], 4, held)], SAMPLING)) == 1
    weights = load_model(QUICKSTART).state_dict()
    engine.load_weights((name, weight) for name, weight in weights.items() if name in engine._weights.required)
    assert kept_in_worker() == 0
    with pytest.raises(UserError, match="a conversation is lost when the engine takes new weights"):
        engine.converse([Turn([5], 4, held)], SAMPLING)
    engine.generate(read[0][:1], SAMPLING)
    assert kept_in_worker() == 0


@pytest.mark.parametrize(
    ("name", "steps"),
    [("gkv", (45,)), *(pytest.param(name, (30, 45, 60), marks=pytest.mark.slow) for name in ("gkv", "am"))],
    ids=str,
)
def test_a_preempted_turn_is_sampled_again(name: str, steps: Sequence[int], open_engine: Callable) -> None:
    """From the entries that the turn before has left, read in chunks or one by one."""
    policy = policy_of(name, budget=20, sinks=1, window=6, period=8, reference_queries=12)
    read, engine = texts(LENGTHS), open_engine(policy, QUICKSTART, max_batch=8, max_model_len=512)
    expected = talk(engine, read)
    for step in steps:
        with watched(engine) as records, preempting(engine, lambda now, step=step: now == step):
            turns = talk(engine, read)
        assert records.preempted == 1
        assert [outcome(r) for r in turns] == [outcome(r) for r in expected]
        assert nothing_is_left(engine)


def test_equal_prompts_of_conversations_are_prefilled_once(open_engine: Callable) -> None:
    """In their first turn; what they go on from is read by each."""
    prompts = [[7] * 50] * 4 + [[8] * 30]
    engine = open_engine(GKV, QUICKSTART, shared=True, max_batch=8, max_model_len=512)
    with watched(engine) as records:
        pairs = engine.converse([Turn(p, 4) for p in prompts], SAMPLING)
    assert sum(records.fed) == 50 - 1 + 4 + 30 + 5 * 3
    with watched(engine) as records:
        engine.converse([Turn([9, 9], 4, held) for _, held in pairs], SAMPLING)
    assert sum(records.fed) == 5 * (1 + 2 + 3)


@pytest.mark.parametrize("name", ["gkv", "am"])
def test_a_stop_token_ends_a_turn_only_if_it_is_sampled(name: str, open_engine: Callable) -> None:
    """A tool's answer may contain it, wherever a schedule reads the answer one by one."""
    policy = policy_of(name, budget=20, sinks=1, window=6, period=8, reference_queries=12)
    read, sampling = [[[5] * 9], [[6, 7, 8] * 9]], replace(SAMPLING, stop_token_ids=[7])
    engine = open_engine(policy, QUICKSTART, max_batch=8, max_model_len=512)
    assert outcome(talk(engine, read, sampling)[1]) == outcome(
        talk(make_engine("hf", model=QUICKSTART, policy=policy), read, sampling)[1]
    )


@pytest.mark.parametrize("name", ["gkv", "am"])
@pytest.mark.few(1)
def test_the_cache_must_have_room_for_what_is_read(name: str, open_engine: Callable) -> None:
    """The entries that are held, and the tokens read at once; not the whole conversation. `turn_lengths` says it."""
    policy = policy_of(name, budget=20, sinks=1, window=6, period=8, reference_queries=12)
    engine = open_engine(policy, QUICKSTART, max_batch=8, max_model_len=512, max_prompt=64)
    answer = 64 - engine.policy.schedule.peak
    lengths = range(101, 101 + 8)
    pairs = engine.converse([Turn([5] * 60, length) for length in lengths], SAMPLING)
    rollouts = engine.converse([Turn([5] * answer, 4, held) for _, held in pairs], SAMPLING)
    assert [len(r.trace) for r, _ in rollouts] == [60 + length + answer + 4 for length in lengths]
    longer = [Turn([5] * (answer + 1), 4, held) for _, held in pairs]
    if name == "am":  # it reads them one by one
        assert turn_lengths(engine.policy, 1, 100)[0] == 64 - answer
        engine.converse(longer, SAMPLING)
        return
    with pytest.raises(
        UserError, match=r"conversation \d holds 65 entries with those of the tokens that it reads, but"
    ):
        engine.converse(longer, SAMPLING)


@pytest.mark.slow
def test_control_entries_of_another_conversation_give_another_record(open_engine: Callable) -> None:
    read = texts(LENGTHS)
    engine = open_engine(GKV, QUICKSTART, max_batch=8, max_model_len=512)
    expected, keep = talk(engine, read), CacheState.keep

    def keep_others(self: CacheState, finished: Sequence[Any]) -> None:
        keep(self, finished)
        for turn in finished:
            if turn.name in self.kept:
                self.kept[turn.name] = [part.roll(1, 0) for part in self.kept[turn.name]]  # of another layer

    with mock.patch.object(CacheState, "keep", keep_others):
        assert outcome(talk(engine, read)[-1]) != outcome(expected[-1])


@pytest.mark.slow
@pytest.mark.parametrize("apart", [{"multiprocess": True}, {"tensor_parallel": 2}], ids=str)
@pytest.mark.parametrize("name", ["gkv", "am"])
def test_conversations_in_separate_processes(name: str, apart: dict, open_engine: Callable) -> None:
    policy = policy_of(name, budget=20, sinks=1, window=6, period=8, reference_queries=12)
    read, sizes = texts(LENGTHS), {"max_batch": 8, "max_model_len": 512}
    expected = talk(open_engine(policy, QUICKSTART, **sizes), read)
    turns = talk(open_engine(policy, QUICKSTART, **sizes, **apart), read)
    for rollouts, reference in zip(turns, expected, strict=True):
        assert [r.completion_ids for r in rollouts] == [r.completion_ids for r in reference]
        assert all(torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(rollouts, reference, strict=True))
    assert sampled_gap(QUICKSTART, turns[-1]) <= 1e-5
