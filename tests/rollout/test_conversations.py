"""Conversations: over a cache that its earlier turns have left, each sampled token of each turn is replayed exactly.

Every policy, three turns with evictions in each, rows of different lengths. Controls: the conversation under the record
of a prefill of all earlier tokens, which a stateless server would have made; evictions one position too early or too
late; none at all; a turn that was tokenized again.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from judging import (
    gap,
    in_one_line,
    outcome,
    support_gaps,
    trainer_gap,
    wrong_routes,
    wrong_traces,
    wrong_windows,
)
from learned import learned_policy, with_scorers
from policy_cases import SAMPLED
from tiny import QUICKSTART, STORIES, centred, model_of, policy_of, prompts_of
from transformers import AutoTokenizer

from rollout import Rollout, SamplingConfig, make_engine
from rollout.config import COMPLETIONS, Origin
from rollout.engine import Turn
from rollout.files import RolloutFiles, written_rollouts
from rollout.measure.accuracy import summary
from rollout.measure.mismatch import score
from rollout.recorded import recorded_rows
from rollout.verify import verify
from sparse_rl.attention import cache_shape
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER, EvictionTrace

PROMPTS = (5, 18, 33, 12)
ANSWERS = ((9, 20, 1, 12), (14, 2, 23, 7))
TOKENS = (14, 11, 12, 9)  # to sample in each turn
GROWING = {"tokens": [8, 40, 80], "entries": [10, 14, 20]}
GKV = {"policy": "gkv", "budget": 12, "window": 4, "period": 2}
PAGES = {"policy": "clustered", "page": 4, "window": 4, "sinks": 1, "open_pages": 2}
OTHERS: dict[str, Any] = {
    "gkv, growing": lambda: policy_of("gkv", budget=GROWING, window=4, period=4),
    "kvpop": lambda: learned_policy("delayed", 12),
    "kvpop, masked": lambda: learned_policy("linear", 12, prefill="masked"),
    "dms": lambda: make_policy("dms", window=5, sinks=2, bias=0.1, scorer={"name": "linear"}),
    "clustered": lambda: make_policy(PAGES),
    "clustered, weighed": lambda: make_policy({**PAGES, "compressor": "attention"}),
    "layered": lambda: make_policy({"policy": "layered", "parts": [{"layers": 1, "cache": c} for c in (GKV, PAGES)]}),
    "layered, evictions": lambda: make_policy(
        {"policy": "layered", "parts": [{"layers": 1, "cache": c} for c in (GKV, {"policy": "lined", "window": 8})]}
    ),
    "press": lambda: make_policy("press", press="KnormPress", compression_ratio=0.5),
}
NAMES = [*SAMPLED, "triattention", *OTHERS]
PLAIN = [name for name in SAMPLED if name not in ("am", "lined")]  # read answers as chunks
PAGED = ("clustered", "clustered, weighed", "layered")
DENSE = ("full", *PAGED)  # no eviction tells a wrong record
Conversations = list[tuple[Rollout, Any]]


@cache
def lent(model_name: str, policy_name: str) -> tuple[Any, Any]:
    """Return (model, policy), both small."""
    if policy_name == "press" and importlib.util.find_spec("kvpress") is None:
        pytest.skip("kvpress is not installed")
    own = {"budget": 12, "window": 4, "period": 4}
    policy = OTHERS[policy_name]() if policy_name in OTHERS else policy_of(policy_name, **own)
    if policy.layered_parameters:
        return with_scorers(model_of(model_name), policy), policy
    return centred(model_name) if policy_name == "triattention" else model_of(model_name), policy


def sampling(**settings: Any) -> SamplingConfig:
    return SamplingConfig(max_tokens=1, seed=1, ignore_eos=True, **settings)


def talk(engine: Any, model_name: str, rows: Sequence[int] = range(4), **settings: Any) -> list[Conversations]:
    """Return, for each of three turns, the rollouts of these conversations so far, and what is held of each."""
    config, turns = sampling(**settings), list[Conversations]()
    for number, lengths in enumerate((PROMPTS, *ANSWERS)):
        texts, before = prompts_of(model_name, lengths, seed=number), turns[-1] if turns else [(None, None)] * len(rows)
        asked = [Turn(texts[row], TOKENS[row], held) for row, (_, held) in zip(rows, before, strict=True)]
        turns.append(engine.converse(asked, config))
    return turns


def rollouts_of(turns: list[Conversations], turn: int = -1) -> list[Rollout]:
    return [rollout for rollout, _ in turns[turn]]


@cache
def spoken(model_name: str, policy_name: str) -> tuple[Any, Any, list[Conversations]]:
    """Return (model, engine, turns)."""
    model, policy = lent(model_name, policy_name)
    engine = make_engine("hf", model=model, policy=policy)
    return model, engine, talk(engine, model_name)


def as_prefilled(engine: Any, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the conversations under the records of prefills of all tokens before their last turns."""
    wrong = []
    for r in rollouts:
        whole, ends = [*r.prompt_ids, *r.completion_ids], len(r.completion_ids) - r.spans[-1][0]
        (fresh,) = engine.simulate([whole[:-ends]], [whole[-ends:]])
        wrong.append(replace(r, trace=EvictionTrace(fresh.trace.evict_at, {}, False)))
    return wrong


def check_record(turns: list[Conversations]) -> None:
    """Check that each turn's tokens, log-probs and evictions stay in the later turns' rollouts, and the spans. An
    eviction that no query of a turn could observe (at S - 1) is in the records of the later turns.
    """
    for row, prompt in enumerate(PROMPTS):
        first, second, third = (turn[row][0] for turn in turns)
        n = TOKENS[row]
        between = [len(first.completion_ids) + ANSWERS[0][row], len(second.completion_ids) + ANSWERS[1][row]]
        assert first.spans == () and third.spans == [(0, n), *((start, start + n) for start in between)]
        for earlier, later in ((first, second), (second, third)):
            length = len(earlier.trace)
            assert len(earlier.prompt_ids) == prompt and earlier.prompt_ids == later.prompt_ids
            for name in ("completion_ids", "logprobs", "model_logprobs"):
                assert getattr(later, name)[: length - prompt] == getattr(earlier, name)
            so_far = later.trace.policy_part().evict_at[..., :length]
            assert torch.equal(earlier.trace.policy_part().evict_at, so_far.where(so_far < length - 1, NEVER))
        read = [x for x, sampled in zip(third.model_logprobs, third.sampled, strict=True) if not sampled]
        assert sum(third.sampled) == 3 * n and len(read) == ANSWERS[0][row] + ANSWERS[1][row] and not any(read)


@pytest.mark.parametrize("model_name", ["qwen3", "quickstart", "stories260K"])
@pytest.mark.parametrize("policy_name", NAMES)
@pytest.mark.few(4)
def test_replay_equals_sampling_in_every_turn(policy_name: str, model_name: str, tally: Any) -> None:
    if "layered" in policy_name and len(model_of(model_name).model.layers) != 2:
        pytest.skip("the layers of this policy are those of a model of two")
    model, engine, turns = spoken(model_name, policy_name)
    rollouts, trained = rollouts_of(turns), model_name != "qwen3"
    check_record(turns)
    true_gap = trainer_gap(model, rollouts)
    tally(policy_name, gap=true_gap)
    assert true_gap <= 1e-5
    if policy_name not in ("full", "press", *PAGED):  # a press evicts once, at the end of the prompt
        for row in range(len(PROMPTS)):
            ends = [0, *(len(turn[row][0].trace) for turn in turns)]
            evict_at = rollouts[row].trace.evict_at
            for start, end in pairwise(ends):
                assert bool(((evict_at > start) & (evict_at < end)).any()), "a turn without evictions tests nothing"
    wrong = wrong_traces(rollouts)
    if policy_name != "kvpop, masked":  # whose prefill evicts as decoding does
        wrong["prefilled"] = as_prefilled(engine, rollouts)
    for name, with_wrong_trace in wrong.items():
        if policy_name != "full" and (policy_name not in PAGED or name == "causal"):
            assert trainer_gap(model, with_wrong_trace) >= max(100 * true_gap, 1e-2 if trained else 1e-4), name


@pytest.mark.parametrize("model_name", ["qwen3", "quickstart"])
@pytest.mark.parametrize("policy_name", NAMES)
@pytest.mark.few(3)
def test_a_conversation_alone_equals_the_same_in_a_batch(policy_name: str, model_name: str) -> None:
    """Bit for bit. Control: other conversations differ."""
    if "layered" in policy_name and len(model_of(model_name).model.layers) != 2:
        pytest.skip("the layers of this policy are those of a model of two")
    _, engine, turns = spoken(model_name, policy_name)
    for row in (1, 3):
        alone = talk(engine, model_name, rows=[row])
        assert [outcome(rollouts_of(alone, i)) for i in range(3)] == [outcome([turn[row][0]]) for turn in turns]
    assert outcome([turns[-1][1][0]]) != outcome([turns[-1][3][0]])


@pytest.mark.parametrize("policy_name", [name for name in NAMES if name not in PLAIN and name != "triattention"])
@pytest.mark.few(2)
def test_what_is_read_token_by_token_equals_one_long_completion(policy_name: str) -> None:
    """Log-probs and traces, bit for bit. Control: a policy that reads chunks has another record."""
    _, engine, turns = spoken("qwen3", policy_name)
    rollouts = rollouts_of(turns)

    def continuous(engine: Any, rollouts: Sequence[Rollout]) -> bool:
        given = engine.simulate([r.prompt_ids for r in rollouts], [r.completion_ids for r in rollouts])
        one = [replace(r, logprobs=r.model_logprobs) for r in masked(given, rollouts)]
        return outcome(one) == outcome(rollouts)

    assert continuous(engine, rollouts)
    _, chunks, turns = spoken("qwen3", "gkv")
    assert not continuous(chunks, rollouts_of(turns))


def masked(rollouts: Sequence[Rollout], like: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts with the log-probs 0 where the tokens of `like` were read."""
    return [
        replace(ours, model_logprobs=[x * s for x, s in zip(ours.model_logprobs, theirs.sampled, strict=True)])
        for ours, theirs in zip(rollouts, like, strict=True)
    ]


@pytest.mark.parametrize("policy_name", ["full", "gkv", "h2o", "streaming", "am", "kvpop", "dms", "clustered"])
@pytest.mark.few(3)
def test_a_turn_that_reads_nothing_goes_on_as_if_it_had_not_ended(policy_name: str) -> None:
    """Greedy, 12 + 9 + 1 tokens are 22 tokens, bit for bit. Control: an answer in between changes them."""
    model, policy = lent("qwen3", policy_name)
    engine, greedy = make_engine("hf", model=model, policy=policy), sampling(temperature=0)
    prompts = prompts_of("qwen3", PROMPTS)
    whole = engine.generate(prompts, replace(greedy, max_tokens=22))

    def in_three(text: list[int]) -> list[Rollout]:
        first = engine.converse([Turn(prompt, 12) for prompt in prompts], greedy)
        second = engine.converse([Turn(text, 9, held) for _, held in first], greedy)
        return [r for r, _ in engine.converse([Turn(text, 1, held) for _, held in second], greedy)]

    assert outcome(in_three([])) == outcome(whole)
    assert outcome(in_three([7])) != outcome(whole)


def test_a_turn_without_a_cache_is_a_sampled_prompt() -> None:
    """With `keep=False` as with it, bit for bit as `generate`. What is held may be used again, and is not changed."""
    _, engine, turns = spoken("qwen3", "gkv")
    prompts, held = prompts_of("qwen3", PROMPTS), [held for _, held in turns[0]]
    generated = outcome(engine.generate(prompts, SamplingConfig(22, seed=1, ignore_eos=True)))
    for keep in (True, False):
        conversed = engine.converse([Turn(prompt, 22) for prompt in prompts], sampling(), keep=keep)
        assert outcome([r for r, _ in conversed]) == generated
        assert [h is not None for _, h in conversed] == [keep] * len(prompts)
    again = [Turn(text, n, h) for text, n, h in zip(prompts_of("qwen3", ANSWERS[0], seed=1), TOKENS, held, strict=True)]
    for _ in range(2):
        assert outcome([r for r, _ in engine.converse(again, sampling(), keep=False)]) == outcome(rollouts_of(turns, 1))
    begun = [Turn(prompt, n) for prompt, n in zip(prompts, TOKENS, strict=True)]
    mixed = [turn for pair in zip(begun, again, strict=True) for turn in pair]
    with mock.patch.object(engine, "max_batch", 2):
        results = [r for r, _ in engine.converse(mixed, sampling())]
    assert outcome(results[::2]) == outcome(rollouts_of(turns, 0))
    assert outcome(results[1::2]) == outcome(rollouts_of(turns, 1))


def test_a_kept_cache_holds_only_its_own_entries() -> None:
    """Whatever the batch was: as many entries as the schedule leaves, and no spare slot."""
    for _, held in spoken("qwen3", "gkv")[2][-1]:
        layers, kv_heads, dim = 2, 2, 8
        (entries,) = held.cache.of_policy.lengths
        assert entries < 16
        assert held.cache.allocated_bytes() == 2 * layers * kv_heads * dim * entries * 4
        assert held.cache.seen == [len(held.rollout.trace) - 1]  # the last sampled token is not in it yet


@pytest.mark.parametrize("policy_name", ["gkv", "am", "h2o"])
@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.few(1)
def test_sliding_windows_move_on_over_turns(family: str, policy_name: str) -> None:
    model, _, turns = spoken(family, policy_name)
    rollouts = rollouts_of(turns)
    check_record(turns)
    assert trainer_gap(model, rollouts) <= 1e-5
    for name, with_wrong_windows in wrong_windows(rollouts).items():
        assert trainer_gap(model, with_wrong_windows) >= 0.1, name
    alone = talk(make_engine("hf", model=model, policy=lent(family, policy_name)[1]), family, rows=[2])
    assert outcome(rollouts_of(alone)) == outcome(rollouts[2:3])


@pytest.mark.parametrize("policy_name", ["gkv", "am"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.few(1)
def test_the_record_of_experts_goes_on_over_turns(family: str, policy_name: str) -> None:
    """A turn's last token had no experts yet; the next turn's record has them. Control: wrong experts."""
    model, _, turns = spoken(family, policy_name)
    rollouts = rollouts_of(turns)
    for r in rollouts:
        layers = [layer for layer in r.trace.further["routed"] if bool((layer >= 0).any())]
        assert layers and all(bool((layer[:-1] >= 0).all()) for layer in layers)
    assert trainer_gap(model, rollouts) <= 1e-5
    for name, with_wrong_routes in wrong_routes(rollouts, 8).items():
        assert trainer_gap(model, with_wrong_routes) >= 0.1, name


@pytest.mark.parametrize("policy_name", ["gkv", "lined"])
@pytest.mark.few(1)
def test_supports_of_truncated_draws_are_recorded_over_turns(policy_name: str) -> None:
    """Controls: no supports; a turn that is not truncated is refused."""
    model, policy = lent("quickstart", policy_name)
    engine = make_engine("hf", model=model, policy=policy)
    truncated = {"top_p": 0.8, "record_support": True}
    last = talk(engine, "quickstart", **truncated)[-1]
    rollouts = [r for r, _ in last]
    for r in rollouts:
        sizes = r.trace.further["support_sizes"][len(r.prompt_ids) :]
        assert [bool(size) for size in sizes] == r.sampled
    whole, kept = support_gaps(model, rollouts, 1.0)
    assert whole <= 1e-5 and kept <= 2e-6
    lost = [replace(r, trace=EvictionTrace(r.trace.evict_at)) for r in rollouts]
    assert support_gaps(model, lost, 1.0)[1] >= 0.1
    with pytest.raises(UserError, match=r"earlier turns of a conversation have top_p 0\.8, but this one has 1\.0"):
        engine.converse([Turn([5], 8, held) for _, held in last], sampling())


def test_a_turn_that_is_tokenized_again_is_another_turn() -> None:
    """Some sampled turns come back as other tokens; their record then fits no longer."""
    if not STORIES.exists():
        pytest.skip("the trained model stories260K is not here")
    model, _, turns = spoken("stories260K", "gkv")
    tokenizer, gaps = AutoTokenizer.from_pretrained(STORIES), []
    for r in rollouts_of(turns):
        for (start, end), (later, _) in pairwise(r.spans):
            ids = tokenizer(tokenizer.decode(r.completion_ids[start:end]), add_special_tokens=False)["input_ids"]
            if ids != r.completion_ids[start:end]:
                other = (ids + [ids[-1]] * end)[: end - start]
                changed = replace(r, completion_ids=[*r.completion_ids[:start], *other, *r.completion_ids[end:]])
                with torch.no_grad():
                    (logprobs,) = replay_logprobs(model, [changed])
                gaps.append(float((logprobs - torch.tensor(r.model_logprobs))[later:].abs().max()))
    assert gaps and min(gaps) > 0.1


def test_wrong_turns_are_refused_in_one_line() -> None:
    _, engine, turns = spoken("qwen3", "gkv")
    with pytest.raises(UserError, match="each turn of a conversation is sampled once, but n is 2"):
        engine.converse([Turn([3], 4)], SamplingConfig(4, n=2))
    with pytest.raises(UserError, match="max_tokens of a turn must be >= 1, got 0"):
        engine.converse([Turn([3], 0)], sampling())
    with pytest.raises(UserError, match="prompt 0 is empty"):
        engine.converse([Turn([], 4)], sampling())
    with pytest.raises(UserError, match="prompt 0 has token 999"):
        engine.converse([Turn([999], 4, turns[0][0][1])], sampling())
    for setting, was in ({"temperature": 0.5}, 1.0), ({"top_p": 0.9}, 1.0), ({"top_k": 3}, None), ({"min_p": 0.1}, 0.0):
        ((name, value),) = setting.items()
        wrong = f"the earlier turns of a conversation have {name} {was}, but this one has {value}; go on with theirs"
        with pytest.raises(UserError, match=wrong):
            engine.converse([Turn([3], 4), Turn([3], 4, turns[0][0][1])], sampling(**setting))
    engine.converse([Turn([3], 4, turns[0][0][1])], replace(sampling(), seed=5, stop_token_ids=[7]))  # control


def test_a_conversation_goes_on_only_where_it_began_and_under_its_weights() -> None:
    """Its keys are those of other weights. Weights change by a synchronisation, or by a step of the live module."""
    model = copy.deepcopy(model_of("qwen3"))
    engine, other = (make_engine("hf", model=model, policy=policy_of("gkv", budget=12, window=4)) for _ in range(2))

    def begun() -> Turn:
        return Turn([3], 4, engine.converse([Turn([3, 4, 5], 4)], sampling())[0][1])

    def refused(asked: Any, turn: Turn) -> None:
        with pytest.raises(UserError, match="a conversation goes on only in the engine that holds it, and only under"):
            asked.converse([Turn([3, 4, 5], 4), turn], sampling())

    first = begun()
    refused(other, first)
    engine.converse([first], sampling())
    engine.load_weights(model.state_dict().items())
    refused(engine, first)
    weights = list(model.parameters())
    for fused in (False, True):
        later, optimizer = begun(), torch.optim.AdamW(weights, fused=fused)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        refused(engine, later)
    engine.converse([begun()], sampling())


@pytest.mark.parametrize(
    "spans", [[(3, 2)], [(0, 4), (3, 9)], [(4, 4)], [(-1, 4)], [(0, 999)], [(9, 12), (0, 4)], [(0, 4)]]
)
def test_wrong_spans_are_refused_in_one_line(spans: list[tuple[int, int]]) -> None:
    """Also one that leaves a token with a log-prob outside. Control: the right ones."""
    rollout = rollouts_of(spoken("qwen3", "gkv")[2])[0]
    replace(rollout, spans=list(rollout.spans))
    with pytest.raises(UserError, match=r"are not parts, in order and not empty|was read, not sampled"):
        replace(rollout, spans=spans)


def test_measures_of_a_rollout_count_sampled_tokens_alone() -> None:
    model, _, turns = spoken("quickstart", "gkv")
    rollout = rollouts_of(turns)[2]
    sampled = [x for x, s in zip(rollout.model_logprobs, rollout.sampled, strict=True) if s]
    assert (summary(rollout)["tokens"], len(sampled)) == (36, 36)
    assert summary(rollout)["mean_logprob"] == pytest.approx(sum(sampled) / 36)
    scored = score(model, rollout, 1.0)
    positions = [len(rollout.prompt_ids) + place for place, s in enumerate(rollout.sampled) if s]
    assert scored.seen.tolist() == positions and len(scored.ratio) == len(scored.entries) == 36
    (ours,) = replay_logprobs(model, [rollout])
    (whole,) = replay_logprobs(model, [replace(rollout, spans=(), model_logprobs=[0.0] * len(rollout.completion_ids))])
    assert gap([ours], [rollout]) <= 1e-5 < gap([whole], [rollout])


def test_files_keep_spans_and_verify_compares_sampled_tokens_alone(tmp_path: Path) -> None:
    """Controls: without the spans, the gap is that of tokens that were read; damaged spans are refused in one line."""
    model, _, turns = spoken("quickstart", "gkv")
    rollouts = [*rollouts_of(turns), *rollouts_of(turns, 0)]
    facts: Any = {
        "model": "m",
        "vocabulary": model.config.vocab_size,
        "engine": "hf",
        "dtype": "float32",
        "exact": True,
    }
    origin = Origin(**facts, sampling=sampling(), evicts=True, made_by={"policy": "gkv"})
    with written_rollouts(tmp_path, origin) as add:
        add(rollouts, [{}] * len(rollouts))
    files, lines = RolloutFiles(tmp_path, origin), (tmp_path / COMPLETIONS).read_text().splitlines()
    (part,) = files.parts(*cache_shape(model.config)[:2])
    assert [list(r.spans) for r in part.rollouts] == [list(r.spans) for r in rollouts]
    for ours, theirs in zip(part.rollouts, rollouts, strict=True):
        assert torch.equal(*(torch.tensor(r.logprobs) for r in (ours, theirs)))
        assert torch.equal(ours.trace.evict_at, theirs.trace.evict_at)
    assert ["spans" in json.loads(line) for line in lines] == [True] * 4 + [False] * 4
    ((_, gaps),) = verify(model, files, 1e-5)
    assert gaps.tokens == 4 * sum(TOKENS) and gaps.largest <= 1e-5

    def with_spans(spans: Any) -> str:
        changed = json.dumps({**json.loads(lines[0]), "spans": spans})
        (tmp_path / COMPLETIONS).write_text("\n".join([changed, *lines[1:]]) + "\n")
        return str(in_one_line(lambda: list(verify(model, files, 1e-5))))

    for wrong in ("abc", [[0]], [[0, "x"]], [3], None, {"0": 4}, [[True, 4]]):
        assert "line 1: spans is not a list of pairs of whole numbers" in with_spans(wrong)
    assert "line 1: spans [[4, 2]] are not parts, in order and not empty" in with_spans([[4, 2]])
    assert "line 1: a token outside the spans was read" in with_spans([[0, 4]])
    (tmp_path / COMPLETIONS).write_text("\n".join(lines) + "\n")
    config = DataConfig(traces=[str(tmp_path)])
    with pytest.raises(UserError, match=r"line 1: a conversation of several turns, .* remove it"):
        recorded_rows(config, model.config, AutoTokenizer.from_pretrained(QUICKSTART))
    with_spans([])
    ((_, gaps),) = verify(model, files, 1e-5)
    assert gaps.largest > 0.1 and gaps.line == 1


def test_a_chunk_is_compacted_only_when_that_is_due() -> None:
    """To the schedule, a chunk's end is the end of a prompt of as many tokens as entries are held: 18 of 20 here."""
    engine = make_engine(
        "hf", model=str(QUICKSTART), policy={"policy": "streaming", "sinks": 1, "budget": 12, "period": 8}
    )
    sampling = SamplingConfig(max_tokens=9, seed=0, ignore_eos=True)
    ((_, held),) = engine.converse([Turn(list(range(3, 28)), 4)], sampling)
    ((rollout, _),) = engine.converse([Turn([5, 6], 6, held)], sampling)
    counts = rollout.trace.decoding_counts(25)[0, 0].tolist()
    assert counts == [13, 14, 15, 16, 17, 18, 19, 20, 13, 14, 15]
