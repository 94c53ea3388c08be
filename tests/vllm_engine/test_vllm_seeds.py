"""Requests to a server that bring a seed get the tokens of a rollout with that seed, whatever else is in the batch.

vLLM's own engine runs in this process and is fed requests as the server feeds its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting import DEVICE, Counted
from watching import watched

from rollout import SamplingConfig, make_engine
from rollout.sampling import Uniforms, sample

SUPPORTS = [(0.7, 1.0, None), (1.0, 0.9, None), (1.3, 1.0, 5), (1.0, 0.8, 12), (1.0, 1.0, None)]
TOKENS = 20


@pytest.fixture
def as_a_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process handle seeds as a server does, and restore it afterwards."""
    from vllm.v1.engine.output_processor import OutputProcessor

    from rollout.vllm.compat.seeds import give_sequences_their_seeds

    monkeypatch.setattr(OutputProcessor, "add_request", OutputProcessor.add_request)
    give_sequences_their_seeds()
    yield


def served(engine: Any, prompts: Sequence[list[int]], asked: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
    """Return the tokens of each request's samples."""
    import vllm

    core = engine.llm.llm_engine
    for i, (prompt, item) in enumerate(zip(prompts, asked, strict=True)):
        given = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False, **item}
        parameters = vllm.SamplingParams(**given, output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY)
        core.add_request(str(i), {"prompt_token_ids": prompt}, parameters)
    results: dict[int, list[list[int]]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                results[int(output.request_id)] = [list(one.token_ids) for one in output.outputs]
    return [results[i] for i in range(len(prompts))]


def test_rows_with_a_seed_are_sampled_without_a_wait() -> None:
    """As on a GPU, rows with a seed are sampled without a wait, each at its own step, even before the sampled tokens
    have reached the host; vLLM samples the other rows.
    """
    pytest.importorskip("vllm")
    from rollout.vllm.compat.arguments import KEY
    from rollout.vllm.samplers import SeededSampler

    def plain(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        """Overwrites the logits and returns int32, as vLLM's sampler may."""
        return logits.fill_(-1).argmax(-1).int(), None

    asked = [None, (5, 1.0, 0), (6, 0.9, 0), None, (7, 1.0, 4), (5, 1.0, 0)]
    steps = [3, 0, 700, 1, 2, 9]
    requests = {
        str(i): SimpleNamespace(
            output_token_ids=[-1] * step,
            sampling_params=SimpleNamespace(
                extra_args={KEY: {"seed": one[0]}} if one else {"seed": 3},
                top_p=one[1] if one else 1,
                top_k=one and one[2],
            ),
        )
        for i, (one, step) in enumerate(zip(asked, steps, strict=True))
    }
    sampler = SeededSampler(
        SimpleNamespace(input_batch=SimpleNamespace(req_ids=list(requests)), requests=requests), plain
    )
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    wanted = [0] * 6
    for i, one in enumerate(asked):
        if one is not None:
            uniform = torch.tensor([Uniforms(one[0]).at(steps[i])], dtype=torch.float64)
            support = SamplingConfig(1, top_p=one[1], top_k=one[2] or None)
            wanted[i] = int(sample(logits[i : i + 1], support, uniform)[0])
    for _ in range(2):  # a step whose token was discarded is sampled again
        with Counted() as counted:
            there = logits.to(DEVICE)
            counted.taken()
            sampled, _ = sampler(there, {}, None, None)
            assert counted.taken()[1] == 0
            assert sampled.tolist() == wanted
    assert len(set(wanted)) > 3


@pytest.mark.usefixtures("as_a_server")
@pytest.mark.parametrize("name", ["gkv", "full"])
def test_a_seed_gives_the_tokens_of_a_rollout(
    name: str, policy_of: Callable, open_engine: Callable, loaded: Callable, directory_of: Callable, random_prompts: Any
) -> None:
    """Requests with a seed get the tokens of a rollout: prompts of many chunks, two samples of each, with their own
    top_p and top_k, beside greedy requests and requests without a seed. With vLLM's own generators the engine would end
    at the first chunk.
    """
    policy = policy_of(name, budget=48, window=8, period=16)
    engine = open_engine(policy, max_num_batched_tokens=64, max_batch=12)
    reference = make_engine("hf", model=loaded(directory_of("qwen2")), policy=policy)
    prompts = random_prompts([130, 30, 70, 64, 65, 90, 20])
    seeds = [0, 2**63 - 1, -7, 1, 1]
    asked: list[dict[str, Any]] = [
        {"seed": seed, "n": 2, "temperature": temperature, "top_p": top_p, "top_k": top_k or 0}
        for seed, (temperature, top_p, top_k) in zip(seeds, SUPPORTS, strict=True)
    ]
    asked += [{"seed": 1, "temperature": 0}, {"temperature": 1, "top_p": 0.9}]
    outputs = served(engine, prompts, asked)
    again = served(engine, prompts[5:], asked[5:])
    for i, (seed, (temperature, top_p, top_k)) in enumerate(zip(seeds, SUPPORTS, strict=True)):
        sampling = SamplingConfig(TOKENS, temperature, top_p, top_k, n=2, seed=seed, ignore_eos=True)
        assert outputs[i] == [one.completion_ids for one in reference.generate([prompts[i]], sampling)], i
        assert outputs[i][0] != outputs[i][1]
    greedy = reference.generate([prompts[5]], SamplingConfig(TOKENS, temperature=0, ignore_eos=True))
    assert outputs[5] == again[0] == [greedy[0].completion_ids]
    assert outputs[6] != again[1]  # control: a request without a seed


@pytest.mark.usefixtures("as_a_server")
def test_preempted_requests_keep_their_random_numbers(
    policy_of: Callable, open_engine: Callable, loaded: Callable, directory_of: Callable, random_prompts: Callable
) -> None:
    """A preempted request continues with its own random numbers, under a full cache, for which a recomputed cache
    equals the lost one.
    """
    policy = policy_of("full")
    engine = open_engine(policy, kv_cache_gb=0.0008, max_model_len=160, max_num_batched_tokens=64)
    prompts = random_prompts([70] * 8)
    with watched(engine) as seen:
        sampled_again = served(engine, prompts, [{"seed": 3, "max_tokens": 60}] * 8)
    assert seen.preempted
    reference = make_engine("hf", model=loaded(directory_of("qwen2")), policy=policy)
    wanted = reference.generate(prompts, SamplingConfig(60, seed=3, ignore_eos=True))
    assert sampled_again == [[one.completion_ids] for one in wanted]
