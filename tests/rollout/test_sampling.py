"""The sampler draws from the right distribution, reports the right log-probs, and depends on its seed alone."""

from __future__ import annotations

import math

import pytest
import torch
from dense_matched import DenseMatchedView, dense_logprobs
from tiny import model_of, policy_of, prompts_of

from rollout import SamplingConfig, make_engine
from rollout.sampling import BLOCK, Uniforms, sample, sequence_seed
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.attention.logprobs import replay_logprobs

SETTINGS = [
    *({}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_k": 1}, {"top_k": 1000}),
    *({"top_p": 0.8}, {"top_p": 0.05}, {"top_p": 0.95, "top_k": 3}, {"top_p": 0.7, "top_k": 9, "temperature": 0.8}),
    *({"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 0.3, "top_k": 6, "top_p": 0.8, "temperature": 1.3}),
]


def reference(
    logits: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = None, min_p: float = 0.0
) -> list[float]:
    """Return the distribution to sample from, in Python floats: temperature, min-p, top-k, and top-p, as in vLLM."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    weights = [weight if weight >= min_p else 0.0 for weight in weights]
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])[:top_k]
    total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_follow_the_distribution(setting: dict) -> None:
    """On an even grid of N uniform numbers, a token of probability p occurs N p times, up to one."""
    torch.manual_seed(0)
    logits, n = 2 * torch.randn(40), 20_000
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs, model_logprobs = sample(logits.expand(n, -1), SamplingConfig(max_tokens=1, **setting), grid)
    counts = torch.bincount(tokens, minlength=40).double()
    expected = torch.tensor(reference(logits.tolist(), **setting), dtype=torch.float64)
    assert (counts - n * expected).abs().max() <= 1.01
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], rtol=0, atol=1e-5)
    before_truncation = torch.tensor(reference(logits.tolist(), setting.get("temperature", 1.0)), dtype=torch.float64)
    torch.testing.assert_close(model_logprobs.double(), before_truncation.log()[tokens], rtol=0, atol=1e-5)

    other = torch.tensor(reference(logits.tolist(), 1.1, 0.9, 8), dtype=torch.float64)  # control
    assert (counts - n * other).abs().max() > 20


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_sampled_token_has_a_positive_probability(uniform: float) -> None:
    """Also for a uniform number at an end of the unit interval."""
    logits = torch.tensor([[-3.0, 1.0, 1.1, -4.0]])
    draw = torch.tensor([uniform], dtype=torch.float64)
    token, logprob, _ = sample(logits, SamplingConfig(max_tokens=1, top_k=2), draw)
    assert int(token) == (1 if uniform == 0 else 2)
    assert logprob.isfinite().all()


def test_greedy_takes_the_first_best_token_and_reports_log_probs_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 0.0, 5.0]])
    tokens, logprobs, model_logprobs = sample(logits, SamplingConfig(max_tokens=1, temperature=0, top_k=1), None)
    assert tokens.tolist() == [1, 0]
    assert torch.equal(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])
    assert torch.equal(logprobs, model_logprobs)


def test_uniforms_depend_only_on_the_seed() -> None:
    """Any step may be read in any order."""
    steps = BLOCK + 40
    stream, other_stream = Uniforms(13), Uniforms(12)
    ours = [stream.at(step) for step in range(steps)]
    assert [stream.at(step) for step in (steps - 1, 3, BLOCK)] == [ours[-1], ours[3], ours[BLOCK]]
    second_stream = Uniforms(13)
    assert second_stream.at(BLOCK + 1) == ours[BLOCK + 1]  # a whole block is skipped
    assert len(set(ours)) == steps
    assert [other_stream.at(step) for step in range(100)] != ours[:100]  # control: another seed


def test_seeds_depend_on_seed_prompt_and_sample() -> None:
    """Lists and tuples give the same seed."""
    cases = [
        (seed, tuple(prompt), i) for seed in (0, 1) for prompt in ([1, 23], [12, 3], [123], [1, 2, 3]) for i in (0, 1)
    ]
    assert len({sequence_seed(*case) for case in cases}) == len(cases)
    assert sequence_seed(7, [1, 2], 3) == sequence_seed(7, (1, 2), 3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "^n: expected"),
    ],
)
def test_invalid_settings_are_refused(setting: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**{"max_tokens": 4, **setting})


def test_top_p_or_top_k_truncates_the_support_except_at_temperature_0() -> None:
    assert not SamplingConfig(max_tokens=1).truncated_support
    assert SamplingConfig(max_tokens=1, top_p=0.9).truncated_support
    assert SamplingConfig(max_tokens=1, top_k=4).truncated_support
    assert SamplingConfig(max_tokens=1, min_p=0.1).truncated_support
    assert not SamplingConfig(max_tokens=1, top_k=4, temperature=0).truncated_support


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_an_engine_reports_the_distribution_that_it_sampled_from(setting: dict) -> None:
    """`model_logprobs` are after temperature alone. Control: another temperature."""
    model = model_of("qwen3")
    engine = make_engine("hf", model=model, policy=policy_of("morphkv", budget=12, window=4, period=3))
    rollouts = engine.generate(prompts_of("qwen3", [17, 3]), SamplingConfig(20, seed=3, ignore_eos=True, **setting))
    temperature = setting.get("temperature", 1.0)
    with torch.no_grad():
        for r in rollouts:
            ids = torch.tensor([r.prompt_ids + r.completion_ids])
            view = DenseMatchedView(r.trace)
            logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0]
            for token, row, ours in zip(r.completion_ids, logits[len(r.prompt_ids) - 1 :], r.logprobs, strict=False):
                assert abs(math.log(reference(row.tolist(), **setting)[token]) - ours) <= 1e-5
        for r, replayed in zip(rollouts, replay_logprobs(model, rollouts, temperature), strict=True):
            model_logprobs = torch.tensor(r.model_logprobs)
            assert (replayed - model_logprobs).abs().max() <= 1e-5
            dense = dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace, temperature)
            assert (dense - model_logprobs).abs().max() <= 1e-5
        at_other_temperature = replay_logprobs(model, rollouts, temperature * 1.05)  # control
        assert (at_other_temperature[0] - torch.tensor(rollouts[0].model_logprobs)).abs().max() > 1e-3


def test_log_probs_of_greedy_rollouts_are_those_at_temperature_1() -> None:
    """Control: at 0.9 they are not."""
    model = model_of("qwen3")
    engine = make_engine("hf", model=model, policy=policy_of("tova", budget=12))
    (r,) = engine.generate(prompts_of("qwen3", [17]), SamplingConfig(20, temperature=0, ignore_eos=True))
    with torch.no_grad():
        for temperature in (0.0, 1.0):
            assert (replay_logprobs(model, [r], temperature)[0] - torch.tensor(r.logprobs)).abs().max() <= 1e-5
            dense = dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace, temperature)
            assert (dense - torch.tensor(r.logprobs)).abs().max() <= 1e-5
        assert (replay_logprobs(model, [r], 0.9)[0] - torch.tensor(r.logprobs)).abs().max() > 1e-3
