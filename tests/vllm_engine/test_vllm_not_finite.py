"""The vLLM engine refuses log-probs that are not finite, and a NaN in one sequence reaches no other sequence.

Tests that look at several failing requests at once call vLLM directly, as a server does, since our engine stops at the
first failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import same
from learned import learned_policy, save_learned, with_scorers

from rollout import SamplingConfig
from rollout.requests import NotFiniteLogprobError
from sparse_rl.errors import NotFiniteError
from sparse_rl.models.load import load_model
from sparse_rl.policies import Policy, make_policy

POISON = 63  # the token whose embedding is not finite
TOKENS, CHUNK = 30, 128
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2048}
GKV = {"budget": 40, "window": 8, "period": 8}
POLICIES = {
    "full": make_policy("full"),
    "gkv": make_policy("gkv", **GKV),
    "h2o": make_policy("h2o", budget=40, period=8),
    "am": make_policy("am", **GKV),
    "kvpop": learned_policy("delayed", 40),
}
FAST = [("full", "float32"), ("h2o", "float32"), ("full", "bfloat16")]
OTHERS = [(name, dtype) for name in POLICIES for dtype in ("float32", "bfloat16", "float16")]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case not in FAST)]


@pytest.fixture(scope="module")
def poisoned(new_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Policy], Path]:
    """poisoned(policy) -> a model with a NaN embedding of one token; greedy sampling never chooses that token."""

    def make(policy: Policy) -> Path:
        model, folder = new_model("qwen3", **SIZES), tmp_path_factory.mktemp(policy.name)
        with torch.no_grad():
            model.model.embed_tokens.weight[POISON], model.lm_head.weight[POISON] = math.nan, 0.0
        if policy.name == "kvpop":
            save_learned(with_scorers(model, policy), policy, folder)
        else:
            model.save_pretrained(folder)
        return folder

    return make


def prompts(lengths: Sequence[int], poisoned_at: Sequence[int] = ()) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    results = [torch.randint(3, POISON, (n,), generator=generator).tolist() for n in lengths]
    for prompt, place in zip(results, poisoned_at, strict=False):
        prompt[place] = POISON
    return results


GOOD = prompts((40, 90, 33, 120, 5, 64))
BAD = prompts((70, 100, 45), (60, 3, 44))
FAILED = [(("error", "not finite"), [], [])] * len(BAD)


def served(engine: Any, texts: list[list[int]], spoil: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Return vLLM's output for each request: finish reason, tokens and log-probs. spoil : called with the step's number
    before each step
    """
    import vllm

    sampling = vllm.SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    sampling.output_kind = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
    inner, rows, step = engine.llm.llm_engine, {}, 0
    for number, text in enumerate(texts):
        inner.add_request(str(number), {"prompt_token_ids": text}, sampling)
    while inner.has_unfinished_requests():
        spoil(step)
        step += 1
        for output in inner.step():
            one = output.outputs[0]
            logprobs = [next(iter(item.values())).logprob for item in one.logprobs]
            rows[int(output.request_id)] = (one.finish_reason, one.stop_reason), list(one.token_ids), logprobs
    return [rows[number] for number in range(len(texts))]


def abort_in_the_prompt(engine: Any) -> None:
    """Abort a request after only a part of its prompt was read: no token was sampled, and its blocks hold NaN."""
    import vllm

    inner = engine.llm.llm_engine
    inner.add_request("gone", {"prompt_token_ids": [POISON] * (3 * CHUNK)}, vllm.SamplingParams(max_tokens=1))
    inner.step()
    inner.abort_request(["gone"])


def in_one_batch() -> tuple[list[list[int]], list[bool]]:
    """Return good and bad prompts in alternation, and for each prompt whether it is bad."""
    mixed = [GOOD[0], BAD[0], GOOD[1], BAD[1], *GOOD[2:5], BAD[2], GOOD[5]]
    return mixed, [prompt in BAD for prompt in mixed]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_nan_does_not_spread_to_other_sequences(
    name: str, dtype: str, poisoned: Callable, open_engine: Callable, record_property: Callable
) -> None:
    """Good sequences are equal bit for bit to a clean run: beside failing sequences, in blocks that these have freed,
    and after a request that was aborted within its prompt.
    """
    engine = open_engine(POLICIES[name], poisoned(POLICIES[name]), dtype=dtype, max_num_batched_tokens=CHUNK)
    clean = served(engine, GOOD)
    assert [why for why, *_ in clean] == [("length", None)] * len(GOOD)
    mixed, is_bad = in_one_batch()
    outputs = served(engine, mixed)
    # the control batch has the same lengths: in float16 a row may depend on the shape of its batch
    harmless = served(engine, [[7] * len(prompt) if prompt in BAD else prompt for prompt in mixed])
    for output, control, bad in zip(outputs, harmless, is_bad, strict=True):
        assert bad or output == control
    assert [one for one, bad in zip(outputs, is_bad, strict=True) if bad] == [(("error", "not finite"), [], [])] * len(
        BAD
    )
    for _ in range(3):  # until the failing requests have used every block
        served(engine, BAD * 5)
    abort_in_the_prompt(engine)
    assert served(engine, GOOD) == clean
    assert served(engine, BAD[::-1]) == FAILED

    # our own engine names the sequence in its error, and then continues
    sampling = SamplingConfig(TOKENS, temperature=0, ignore_eos=True)
    wanted = engine.generate(GOOD, sampling)
    with pytest.raises(NotFiniteError) as error:
        engine.generate([*GOOD[:2], BAD[0]], replace(sampling, n=2))
    assert isinstance(error.value, NotFiniteLogprobError) and (error.value.prompt, error.value.step) == (2, 0)
    assert f"prompt 2, sample {error.value.sample}: the log-probability of token 0" in str(error.value)
    assert dtype in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(NotFiniteLogprobError) as error:
        engine.simulate(GOOD[:2], [[7] * 9, [7, 8, POISON, 9, 10]])
    assert (error.value.prompt, error.value.sample, error.value.step) == (1, 0, 3)
    assert same(engine.generate(GOOD, sampling), wanted)


@pytest.mark.slow
def test_without_clean_blocks_nan_spreads(
    poisoned: Callable, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above: if vLLM does not clear new blocks, a NaN does spread."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rollout.vllm.compat import plugin

    plugin.register()
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", property(lambda self: False))
    engine = open_engine(POLICIES["full"], poisoned(POLICIES["full"]))
    clean = served(engine, GOOD)
    for _ in range(3):
        served(engine, BAD * 5)
    assert served(engine, GOOD) != clean


def test_a_nan_that_decides_an_eviction_ends_the_request(poisoned: Callable, open_engine: Callable) -> None:
    """A NaN that decides an eviction ends its request, even if all logits are finite: a query of the last layer reaches
    no other token. The other requests are as without the NaN.
    """
    from rollout.vllm.compat.paged import live_state

    engine = open_engine(POLICIES["gkv"], poisoned(POLICIES["gkv"]))
    clean, spoilt = served(engine, GOOD), []

    def spoil(step: int) -> None:
        state = live_state()
        if step == 10:
            first = sorted(state.row_of)[2]
            state.queries[-1, state.row_of[first]] = math.nan
            spoilt.append(first)

    sampled_again = served(engine, GOOD, spoil)
    failed = [number for number, one in enumerate(sampled_again) if one[0] == ("error", "not finite")]
    assert len(failed) == len(spoilt) == 1
    assert 10 <= len(sampled_again[failed[0]][1]) <= 10 + GKV["period"]
    assert [one for number, one in enumerate(sampled_again) if number not in failed] == [
        one for number, one in enumerate(clean) if number not in failed
    ]
    assert served(engine, GOOD) == clean


@pytest.mark.slow
def test_scorers_that_are_not_finite(poisoned: Callable, open_engine: Callable) -> None:
    """With NaN scorers, only requests that evict entries fail; after good scorers are loaded again, all requests
    succeed.
    """
    policy = POLICIES["kvpop"]
    folder = poisoned(policy)
    engine = open_engine(policy, folder)
    sampling = SamplingConfig(TOKENS, temperature=0, ignore_eos=True)
    wanted = engine.generate(GOOD, sampling)
    good = dict(load_model(folder, "float32").named_parameters())
    bad = {name: weight.clone() for name, weight in good.items()}
    for name, weight in bad.items():
        if "cache_scorers" in name:
            weight.fill_(math.nan)
    with torch.no_grad():
        engine.load_weights(bad.items())
    with pytest.raises(NotFiniteError):
        engine.generate(GOOD, sampling)
    short = engine.generate(prompts((5,)), replace(sampling, max_tokens=10))
    assert len(short[0].completion_ids) == 10
    with torch.no_grad():
        engine.load_weights(good.items())
    assert same(engine.generate(GOOD, sampling), wanted)
