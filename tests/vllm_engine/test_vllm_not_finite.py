"""The vLLM engine refuses log-probs that are not finite, and a NaN in one sequence reaches no other sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from judging import same
from learned import learned_policy, save_learned, with_scorers
from tiny import FOLDER, HEADS_OF_32, new_model

from rollout import SamplingConfig, make_engine
from rollout.engine import Turn
from rollout.sampling import NotFiniteLogprobError
from sparse_rl.errors import NotFiniteError
from sparse_rl.models.load import load_model
from sparse_rl.policies import make_policy

POISON = 63  # the token whose embedding is not finite
TOKENS, CHUNK = 30, 128
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


@cache
def poisoned(name: str) -> Path:
    """Return a model with a NaN embedding for one token, which greedy sampling never chooses."""
    model, folder, policy = new_model("qwen3", **HEADS_OF_32), Path(mkdtemp(dir=FOLDER.name)), POLICIES[name]
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON], model.lm_head.weight[POISON] = math.nan, 0.0
    if name == "kvpop":
        save_learned(with_scorers(model, policy), policy, folder)
    else:
        model.save_pretrained(folder)
    return folder


def prompts(lengths: Sequence[int], poisoned_at: Sequence[int] = ()) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    results = [torch.randint(3, POISON, (n,), generator=generator).tolist() for n in lengths]
    for prompt, position in zip(results, poisoned_at, strict=False):
        prompt[position] = POISON
    return results


GOOD = prompts((40, 90, 33, 120, 5, 64))
BAD = prompts((70, 100, 45), (60, 3, 44))
FAILED = [(("error", "not finite"), [], [])] * len(BAD)


def served(engine: Any, texts: list[list[int]], spoil: Callable[[int], None] = lambda step: None) -> list[Any]:
    """Return each request's (finish reason, stop reason), tokens, log-probs; vLLM is called as by a server, `spoil`
    before each step."""
    import vllm

    sampling = vllm.SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    sampling.output_kind = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
    core, rows, step = engine.llm.llm_engine, {}, 0
    for number, text in enumerate(texts):
        core.add_request(str(number), {"prompt_token_ids": text}, sampling)
    while core.has_unfinished_requests():
        spoil(step)
        step += 1
        for output in core.step():
            completion = output.outputs[0]
            logprobs = [next(iter(item.values())).logprob for item in completion.logprobs]
            rows[int(output.request_id)] = (
                (completion.finish_reason, completion.stop_reason),
                list(completion.token_ids),
                logprobs,
            )
    return [rows[number] for number in range(len(texts))]


def abort_in_the_prompt(engine: Any) -> None:
    """Abort a request after a part of its prompt was read. No token was sampled, and the request's blocks hold NaN."""
    import vllm

    core = engine.llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": [POISON] * (3 * CHUNK)}, vllm.SamplingParams(max_tokens=1))
    core.step()
    core.abort_request(["gone"])


def in_one_batch() -> tuple[list[list[int]], list[bool]]:
    """Return the prompts of GOOD and BAD, mixed, and for each prompt True if it is of BAD."""
    mixed = [GOOD[0], BAD[0], GOOD[1], BAD[1], *GOOD[2:5], BAD[2], GOOD[5]]
    return mixed, [prompt in BAD for prompt in mixed]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.few(1)
def test_nan_does_not_spread_to_other_sequences(name: str, dtype: str, open_engine: Callable) -> None:
    """To the last bit: beside failing sequences, in blocks that they freed, and after an abort within a prompt."""
    engine = open_engine(POLICIES[name], poisoned(name), dtype=dtype, max_num_batched_tokens=CHUNK)
    clean = served(engine, GOOD)
    assert [reason for reason, *_ in clean] == [("length", None)] * len(GOOD)
    mixed, is_bad = in_one_batch()
    outputs = served(engine, mixed)
    # the control batch has the same lengths: in float16 a row may depend on the shape of its batch
    harmless = served(engine, [[7] * len(prompt) if prompt in BAD else prompt for prompt in mixed])
    for output, control, bad in zip(outputs, harmless, is_bad, strict=True):
        assert bad or output == control
    assert [failed for failed, bad in zip(outputs, is_bad, strict=True) if bad] == FAILED
    for _ in range(3):  # until the failing requests have used every block
        served(engine, BAD * 5)
    abort_in_the_prompt(engine)
    assert served(engine, GOOD) == clean
    assert served(engine, BAD[::-1]) == FAILED

    # our own engine names the sequence in its error, and then continues
    sampling = SamplingConfig(TOKENS, temperature=0, ignore_eos=True)
    expected = engine.generate(GOOD, sampling)
    with pytest.raises(NotFiniteError) as error:
        engine.generate([*GOOD[:2], BAD[0]], replace(sampling, n=2))
    assert isinstance(error.value, NotFiniteLogprobError)
    assert (error.value.prompt, error.value.step) == (2, 0)
    assert f"prompt 2, sample {error.value.sample}: the log-probability of token 0" in str(error.value)
    assert dtype in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(NotFiniteLogprobError) as error:
        engine.simulate(GOOD[:2], [[7] * 9, [7, 8, POISON, 9, 10]])
    assert (error.value.prompt, error.value.sample, error.value.step) == (1, 0, 3)
    assert same(engine.generate(GOOD, sampling), expected)


@pytest.mark.slow
def test_control_without_cleared_blocks_a_nan_spreads(open_engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from rollout.vllm.compat import plugin

    plugin.register()
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", property(lambda self: False))
    engine = open_engine(POLICIES["full"], poisoned("full"))
    clean = served(engine, GOOD)
    for _ in range(3):
        served(engine, BAD * 5)
    assert served(engine, GOOD) != clean


def test_a_nan_in_the_scores_of_an_eviction_ends_the_request(open_engine: Callable) -> None:
    """Here in a stored query of the last layer, which influences no logit; other requests are unchanged."""
    from rollout.vllm.compat.paged import live_state

    engine = open_engine(POLICIES["gkv"], poisoned("gkv"))
    clean, spoilt_blocks = served(engine, GOOD), []

    def spoil(step: int) -> None:
        state = live_state()
        if step == 10:
            first = sorted(state.row_of)[2]
            state.queries[-1, state.row_of[first]] = math.nan
            spoilt_blocks.append(first)

    sampled_again = served(engine, GOOD, spoil)
    failed = [number for number, output in enumerate(sampled_again) if output[0] == ("error", "not finite")]
    assert len(failed) == len(spoilt_blocks) == 1
    assert 10 <= len(sampled_again[failed[0]][1]) <= 10 + GKV["period"]
    assert all(sampled_again[number] == output for number, output in enumerate(clean) if number not in failed)
    assert served(engine, GOOD) == clean


@pytest.mark.slow
def test_nan_scorers_fail_only_requests_that_evict(open_engine: Callable) -> None:
    """After finite scorers are loaded, all requests succeed again."""
    policy = POLICIES["kvpop"]
    folder = poisoned("kvpop")
    engine = open_engine(policy, folder)
    sampling = SamplingConfig(TOKENS, temperature=0, ignore_eos=True)
    expected = engine.generate(GOOD, sampling)
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
    assert same(engine.generate(GOOD, sampling), expected)


def test_a_token_that_overflows_only_in_the_last_layer_fails_no_sample_that_it_precedes(open_engine: Callable) -> None:
    """It overflows behind the cache, and nothing is sampled from its logits, although a group's prompt is held up to
    this token. Control: samples that follow it directly fail, and the error names them.
    """
    model, folder = new_model("qwen3", num_hidden_layers=1, **HEADS_OF_32), Path(mkdtemp(dir=FOLDER.name))
    (layer,) = model.model.layers
    with torch.no_grad():  # only this token has a first coordinate, which no other weight reads or writes
        embedding = model.model.embed_tokens.weight
        embedding[:, 0], embedding[POISON, 0], layer.self_attn.o_proj.weight[0] = 0.0, 10.0, 0.0
        model.lm_head.weight[POISON] = 0.0  # greedy sampling never chooses it
        for gate_or_up in (layer.mlp.gate_proj, layer.mlp.up_proj):
            gate_or_up.weight[0] = 0.0
            gate_or_up.weight[0, 0] = 1e30
    model.save_pretrained(folder)
    policy, sampling = POLICIES["gkv"], SamplingConfig(TOKENS, n=3, temperature=0, ignore_eos=True)
    texts = prompts((50, 60), poisoned_at=(48, 30))
    engine = open_engine(policy, folder, max_model_len=256)
    single = [engine.generate([text], replace(sampling, n=1))[0] for text in texts]
    assert same(engine.generate(texts, sampling)[:: sampling.n], single)
    with pytest.raises(NotFiniteLogprobError, match=r"^prompt 1, sample 0: the log-probability of token 0 "):
        engine.generate([texts[0], [*texts[0][:48], POISON]], sampling)
    assert same(engine.generate(texts, sampling)[:: sampling.n], single)


def test_a_turn_of_a_conversation_is_named_by_its_own_tokens(open_engine: Callable) -> None:
    """If its log-probs are not finite because a token that was read one by one is damaged; as by the hf engine."""
    policy, folder = POLICIES["am"], poisoned("am")
    for engine in (
        open_engine(policy, folder, max_batch=2, max_model_len=256),
        make_engine("hf", model=folder, policy=policy),
    ):
        ((_, held),) = engine.converse([Turn(GOOD[0], 4)], SamplingConfig(1, temperature=0, ignore_eos=True))
        with pytest.raises(NotFiniteLogprobError, match="prompt 0, sample 0: the log-probability of token 0 of"):
            engine.converse([Turn([5, POISON], 4, held)], SamplingConfig(1, temperature=0, ignore_eos=True))
