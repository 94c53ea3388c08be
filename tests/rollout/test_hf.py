"""The reference engine `hf`: how sequences end, independence from the batch, several samples of a prompt, and seeds."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from dense_matched import dense_logprobs
from judging import same, shortened
from policy_cases import BOUNDED, SAMPLED
from tiny import model_of, new_model, policy_of, prompts_of

from rollout import Rollout, SamplingConfig, make_engine
from rollout.engine import least_rows
from sparse_rl.methods.config import TovaConfig
from sparse_rl.policies import Entries, Kept
from sparse_rl.policies.rules import Tova
from sparse_rl.trace import NEVER

BUDGET = 12
LENGTHS = (1, 5, 12, 16, 30, 44, 7)  # ragged prompt lengths: below, at and beyond the budget, one of them 1
MODEL = model_of("qwen3")
POLICY = policy_of("gkv", budget=BUDGET, window=4, period=4)
PROMPTS = prompts_of("qwen3", LENGTHS)


# ---- ends of sequences -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_name", SAMPLED)
@pytest.mark.few(5)
def test_a_stopped_row_equals_the_beginning_of_an_endless_row(policy_name: str) -> None:
    """The shortest row sampled alone equals it too."""
    engine = make_engine("hf", model=MODEL, policy=policy_of(policy_name, budget=BUDGET, window=4, period=4))
    endless = engine.generate(PROMPTS, SamplingConfig(30, seed=2, ignore_eos=True))
    assert [len(r.completion_ids) for r in endless] == [30] * len(PROMPTS)
    tokens = {r.completion_ids[at] for at in (3, 7, 12, 20) for r in endless}
    pairs = ({a, b} for a, b in combinations(sorted(tokens), 2))
    stop = next(pair for pair in pairs if differ([shortened(r, pair) for r in endless]))
    expected = [shortened(r, stop) for r in endless]

    stopping = SamplingConfig(30, seed=2, stop_token_ids=sorted(stop))
    batched = engine.generate(PROMPTS, stopping)
    assert same(batched, expected)
    assert not same(batched, endless)
    early = min(range(len(PROMPTS)), key=lambda i: len(expected[i].completion_ids))
    assert same(engine.generate([PROMPTS[early]], stopping), [expected[early]])


def differ(rollouts: list[Rollout]) -> bool:
    """Return True if the rollouts have at least three lengths, and some end early and some do not."""
    lengths = {len(r.completion_ids) for r in rollouts}
    return len(lengths) >= 3 and {r.finish_reason for r in rollouts} == {"stop", "length"}


class CountingTova(Tova):
    """A TOVA policy that counts the sequences that it compacts, over all layers."""

    count = 0

    def compact(self, layer: int, entries: Entries) -> Kept:
        self.count += len(entries.lengths)
        return super().compact(layer, entries)


def test_finished_rows_are_not_compacted() -> None:
    """The number of compacted sequences is that of the schedule, counted over each row's own tokens."""
    policy = CountingTova(TovaConfig(budget=BUDGET, period=3))
    engine = make_engine("hf", model=MODEL, policy=policy)
    tokens = engine.generate(PROMPTS, SamplingConfig(30, seed=2, ignore_eos=True))[0].completion_ids
    policy.count = 0
    rollouts = engine.generate(PROMPTS, SamplingConfig(30, seed=2, stop_token_ids=[tokens[1], tokens[13]]))
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    seen_by = [(len(r.prompt_ids), seen) for r in rollouts for seen in range(len(r.prompt_ids), len(r.trace))]
    due = sum(policy.schedule.due(prompt, seen) for prompt, seen in seen_by)
    assert policy.count == MODEL.config.num_hidden_layers * due
    assert due > 20


def test_end_of_sequence_tokens_stop_a_row() -> None:
    """The row keeps the stop token. With `ignore_eos`, or an empty list of stop tokens, rows do not stop."""
    model = new_model("llama")
    engine = make_engine("hf", model=model, policy=POLICY)
    endless = engine.generate(PROMPTS, SamplingConfig(30, seed=4, ignore_eos=True))
    tokens = [endless[0].completion_ids[8], endless[3].completion_ids[15]]
    for eos in (tokens[0], tokens):
        model.generation_config.eos_token_id = eos
        stop = {eos} if isinstance(eos, int) else set(eos)
        expected = [shortened(r, stop) for r in endless]
        rollouts = engine.generate(PROMPTS, SamplingConfig(30, seed=4))
        assert same(rollouts, expected)
        assert any(r.finish_reason == "stop" for r in rollouts)
        assert all(r.completion_ids[-1] in stop for r in rollouts if r.finish_reason == "stop")
        assert same(engine.generate(PROMPTS, SamplingConfig(30, seed=4, ignore_eos=True)), endless)
        assert same(engine.generate(PROMPTS, SamplingConfig(30, seed=4, stop_token_ids=[])), endless)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = tokens[0]
    rollouts = engine.generate(PROMPTS, SamplingConfig(30, seed=4))
    assert same(rollouts, [shortened(r, {tokens[0]}) for r in endless])


def test_a_completion_of_one_token_has_no_observable_eviction() -> None:
    """It has the dense reference's log-prob."""
    engine = make_engine("hf", model=MODEL, policy=POLICY)
    rollouts = engine.generate(PROMPTS, SamplingConfig(1, seed=0, ignore_eos=True))
    for r in rollouts:
        assert len(r.completion_ids) == len(r.logprobs) == len(r.model_logprobs) == 1
        assert r.finish_reason == "length"
        assert len(r.trace) == len(r.prompt_ids) + 1
        assert bool((r.trace.evict_at == NEVER).all())
        with torch.no_grad():
            dense = dense_logprobs(MODEL, r.prompt_ids, r.completion_ids, r.trace)
        assert abs(float(dense[0]) - r.logprobs[0]) <= 1e-5


def test_a_completion_is_never_empty() -> None:
    """If every token is a stop token, each row has one token and the reason "stop"."""
    engine = make_engine("hf", model=MODEL, policy=POLICY)
    for max_tokens in (1, 9):
        rollouts = engine.generate(PROMPTS, SamplingConfig(max_tokens, seed=0, stop_token_ids=range(64)))
        assert [(len(r.completion_ids), r.finish_reason) for r in rollouts] == [(1, "stop")] * len(PROMPTS)


def test_a_budget_beyond_the_sequence_equals_the_full_cache() -> None:
    """Control: a budget of 12 gives other rollouts."""
    sampling = SamplingConfig(20, seed=0, ignore_eos=True)
    full = make_engine("hf", model=MODEL, policy="full").generate(PROMPTS, sampling)
    for name in BOUNDED:
        wide = make_engine("hf", model=MODEL, policy=policy_of(name, budget=64, window=4, period=4))
        assert same(wide.generate(PROMPTS, sampling), full)
    narrow = make_engine("hf", model=MODEL, policy=policy_of("morphkv", budget=BUDGET, window=4, period=4))
    assert not same(narrow.generate(PROMPTS, sampling), full)


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.few(1)
def test_results_do_not_depend_on_max_batch(temperature: float) -> None:
    """A prompt's samples may be split between waves."""
    sampling = SamplingConfig(20, temperature=temperature, n=2, seed=3, stop_token_ids=[9, 10, 11])
    whole = make_engine("hf", model=MODEL, policy=POLICY).generate(PROMPTS, sampling)
    for max_batch in (1, 3, 5):
        engine = make_engine("hf", model=MODEL, policy=POLICY, max_batch=max_batch)
        assert same(engine.generate(PROMPTS, sampling), whole)
    # samples of the first prompt come first
    assert [r.prompt_ids for r in whole] == [p for p in PROMPTS for _ in range(2)]


def test_forked_prompts_equal_repeated_prompts() -> None:
    """In any order; each prompt is prefilled once. At temperature 0 the three samples are equal."""
    engine = make_engine("hf", model=MODEL, policy=POLICY)
    prefilled: list[int] = []

    def record_prefill(_: object, __: tuple, kwargs: dict) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            prefilled.append(len(kwargs["input_ids"]))

    hook = MODEL.get_decoder().register_forward_pre_hook(record_prefill, with_kwargs=True)
    try:
        forked = engine.generate(PROMPTS[:4], SamplingConfig(20, n=3, seed=3, ignore_eos=True))
        repeated = [p for p in PROMPTS[:4] for _ in range(3)]
        separate = engine.generate(repeated, SamplingConfig(20, seed=3, ignore_eos=True))
    finally:
        hook.remove()
    assert same(forked, separate)
    assert prefilled == [4, 4]
    assert len({tuple(r.completion_ids) for r in forked}) == 12
    scattered = engine.generate(PROMPTS[:4] * 3, SamplingConfig(20, seed=3, ignore_eos=True))
    assert same([scattered[4 * sample + i] for i in range(4) for sample in range(3)], forked)

    greedy = engine.generate(PROMPTS[4:5], SamplingConfig(20, temperature=0, n=3, ignore_eos=True))
    assert same(greedy[:1], greedy[1:2])
    assert same(greedy[1:2], greedy[2:])


def test_the_seed_determines_the_rollouts() -> None:
    """Another seed, or no seed, gives others. torch's global generator is not advanced."""
    engine = make_engine("hf", model=MODEL, policy=POLICY)

    def run(seed: int | None) -> list[Rollout]:
        return engine.generate(PROMPTS, SamplingConfig(12, seed=seed, ignore_eos=True))

    state = torch.get_rng_state()
    assert same(run(7), run(7))
    for another_seed in (8, None):
        for a, b in zip(run(7), run(another_seed), strict=True):
            assert a.completion_ids != b.completion_ids
    assert not same(run(None), run(None))
    assert torch.equal(state, torch.get_rng_state())


def test_no_prompts_give_no_rollouts_and_an_empty_prompt_is_refused() -> None:
    engine = make_engine("hf", model=MODEL, policy=POLICY)
    assert engine.generate([], SamplingConfig(3)) == []
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[3], []], SamplingConfig(3))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lengths", [[1], [2, 17], [9, 3, 30, 5, 12, 7]])
def test_every_forward_pass_has_at_least_the_minimum_number_of_rows(
    lengths: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than 4 rows round differently on a CPU. On another device nothing is padded."""
    model, shapes = model_of("qwen3"), []
    monkeypatch.setattr("rollout.hf.least_rows", lambda _: least_rows(device))
    decoder = model.get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        engine = make_engine("hf", model=model, policy=policy_of("streaming", budget=12, period=4))
        engine.generate(prompts_of("qwen3", lengths), SamplingConfig(24, seed=0))
    finally:
        hook.remove()
    assert len(shapes) > 1
    assert min(rows * width for rows, width in shapes) >= least_rows(device) == (4 if device == "cpu" else 1)
    if device != "cpu":
        assert max(rows for rows, _ in shapes) == len(lengths)
