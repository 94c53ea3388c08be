"""A request to a server with a seed gets the tokens of a rollout with that seed, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting import DEVICE, Counted
from tiny import directory_of, loaded, policy_of, random_prompts
from watching import watched

from rollout import SamplingConfig, make_engine
from rollout.sampling import Uniforms, sample

SUPPORTS = [(0.7, 1.0, None), (1.0, 0.9, None), (1.3, 1.0, 5), (1.0, 0.8, 12), (1.0, 1.0, None)]
TOKENS = 20


@pytest.fixture
def as_a_server(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Make this process handle the requests of an engine as a server does, until the test ends; return the engine."""
    from vllm.v1.engine.input_processor import InputProcessor

    from rollout.vllm.compat.server import check_requests

    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)

    def check(engine: Any) -> Any:
        check_requests(engine.llm.llm_engine.vllm_config)
        return engine

    return check


def served(engine: Any, prompts: Sequence[list[int]], requests: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
    """Return the tokens of each request's samples."""
    import vllm

    core = engine.llm.llm_engine
    for i, (prompt, fields) in enumerate(zip(prompts, requests, strict=True)):
        all_fields = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False, **fields}
        parameters = vllm.SamplingParams(**all_fields, output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY)
        core.add_request(str(i), {"prompt_token_ids": prompt}, parameters)
    results: dict[int, list[list[int]]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                results[int(output.request_id)] = [list(sample.token_ids) for sample in output.outputs]
    return [results[i] for i in range(len(prompts))]


def test_rows_with_a_seed_are_sampled_without_a_wait() -> None:
    """Each at its own step, even before earlier tokens reach the host. vLLM samples the other rows."""
    pytest.importorskip("vllm")
    from rollout.vllm.compat.arguments import KEY
    from rollout.vllm.compat.runner import Row
    from rollout.vllm.sampling import SeededSampler

    def vllm_sampler(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        """Overwrite the logits and return int32, as vLLM's sampler may do."""
        return logits.fill_(-1).argmax(-1).int(), None

    settings = [None, (5, 1.0, 0), (6, 0.9, 0), None, (7, 1.0, 4), (5, 1.0, 0)]
    steps = [3, 0, 700, 1, 2, 9]
    rows = []
    for i, (row_settings, step) in enumerate(zip(settings, steps, strict=True)):
        seed, top_p, top_k = row_settings or (None, 1, None)
        extra = {KEY: {"seeds": [seed]}} if row_settings else {"seed": 3}
        parameters = SimpleNamespace(extra_args=extra, top_p=top_p, top_k=top_k)
        rows.append(Row(str(i), parameters, step))
    sampler = SeededSampler(SimpleNamespace(rows=lambda count: rows[:count]), vllm_sampler)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    expected = [0] * 6
    for i, row_settings in enumerate(settings):
        if row_settings is not None:
            uniform = torch.tensor([Uniforms(row_settings[0]).at(steps[i])], dtype=torch.float64)
            support = SamplingConfig(1, top_p=row_settings[1], top_k=row_settings[2] or None)
            expected[i] = int(sample(logits[i : i + 1], support, uniform)[0])
    for _ in range(2):  # a step whose token was discarded is sampled again
        with Counted() as counter:
            on_device = logits.to(DEVICE)
            counter.taken()
            sampled, _ = sampler(on_device, {}, None, None)
            assert counter.taken()[1] == 0
            assert sampled.tolist() == expected
    assert len(set(expected)) > 3


@pytest.mark.parametrize("name", ["gkv", "full"])
@pytest.mark.few(1)
def test_a_seed_gives_the_tokens_of_a_rollout(name: str, open_engine: Callable, as_a_server: Callable) -> None:
    """Prompts have several chunks, and two samples each; greedy and unseeded requests run beside them."""
    policy = policy_of(name, budget=48, window=8, period=16)
    engine = as_a_server(open_engine(policy, max_num_batched_tokens=64, max_batch=12))
    reference = make_engine("hf", model=loaded(directory_of("qwen2")), policy=policy)
    prompts = random_prompts([130, 30, 70, 64, 65, 90, 20])
    seeds = [0, 2**63 - 1, -7, 1, 1]
    requests: list[dict[str, Any]] = [
        {"seed": seed, "n": 2, "temperature": temperature, "top_p": top_p, "top_k": top_k or 0}
        for seed, (temperature, top_p, top_k) in zip(seeds, SUPPORTS, strict=True)
    ]
    requests += [{"seed": 1, "temperature": 0}, {"temperature": 1, "top_p": 0.9}]
    outputs = served(engine, prompts, requests)
    repeated = served(engine, prompts[5:], requests[5:])
    for i, (seed, (temperature, top_p, top_k)) in enumerate(zip(seeds, SUPPORTS, strict=True)):
        sampling = SamplingConfig(TOKENS, temperature, top_p, top_k, n=2, seed=seed, ignore_eos=True)
        assert outputs[i] == [rollout.completion_ids for rollout in reference.generate([prompts[i]], sampling)], i
        assert outputs[i][0] != outputs[i][1]
    greedy = reference.generate([prompts[5]], SamplingConfig(TOKENS, temperature=0, ignore_eos=True))
    assert outputs[5] == repeated[0] == [greedy[0].completion_ids]
    assert outputs[6] != repeated[1]  # control: a request without a seed


def test_preempted_requests_keep_their_random_numbers(open_engine: Callable, as_a_server: Callable) -> None:
    """The cache is full, since only then a recomputed cache equals the lost one."""
    policy = policy_of("full")
    engine = as_a_server(open_engine(policy, kv_cache_gb=0.0008, max_model_len=160, max_num_batched_tokens=64))
    prompts = random_prompts([70] * 8)
    with watched(engine) as records:
        sampled_again = served(engine, prompts, [{"seed": 3, "max_tokens": 60}] * 8)
    assert records.preempted
    reference = make_engine("hf", model=loaded(directory_of("qwen2")), policy=policy)
    expected = reference.generate(prompts, SamplingConfig(60, seed=3, ignore_eos=True))
    assert sampled_again == [[rollout.completion_ids] for rollout in expected]
