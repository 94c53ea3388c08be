"""Budgets that grow in vLLM: the same decisions as the hf engine, and blocks that are allocated as the cache grows."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from judging import wrong_traces
from test_vllm_memory import BLOCK, BLOCK_BYTES, with_blocks
from test_vllm_replay import TRAINED, quickstart_prompts
from ties import replay_gap
from tiny import policy_of, random_prompts
from watching import watched

from rollout import SamplingConfig, make_engine
from rollout.vllm.memory import pool_bytes
from rollout.vllm.scheduler import HOLDING, EvictingManager

GROWS = {"tokens": [30, 60, 120], "entries": [24, 40, 72]}


@pytest.mark.parametrize(("name", "period"), [("gkv", 8), ("h2o", 1), ("streaming", 16), ("am", 8)])
@pytest.mark.few(1)
def test_growing_rollouts_equal_those_of_hf_to_the_last_bit(name: str, period: int, open_engine: Callable) -> None:
    """Ragged prompts in chunks, two samples of one prefill each. Control: wrong traces have a gap."""
    policy = policy_of(name, budget=GROWS, window=8, period=period)
    prompts = [prompt * copies for prompt, copies in zip(quickstart_prompts(6), (1, 1, 2, 3, 4, 1), strict=True)]
    sampling = SamplingConfig(60, n=2, seed=2, ignore_eos=True)
    expected = make_engine("hf", model=TRAINED, policy=policy).generate(prompts, sampling)
    outputs = open_engine(policy, TRAINED, max_num_batched_tokens=48).generate(prompts, sampling)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.completion_ids == reference.completion_ids
        assert output.logprobs == reference.logprobs
        assert torch.equal(output.trace.evict_at, reference.trace.evict_at)
    assert replay_gap(outputs, TRAINED) <= 1e-5
    for wrong, rollouts in wrong_traces(outputs).items():
        assert replay_gap(rollouts, TRAINED) >= 1e-3, wrong


@pytest.mark.parametrize("entries", [[64, 160], [64, 64]])
@pytest.mark.few(1)
def test_blocks_are_allocated_as_the_budget_grows(entries: list[int], open_engine: Callable) -> None:
    """A request owns the blocks of its prompt, then those of its entries. Control: if the entries stay, so do they."""
    policy = policy_of("gkv", budget={"tokens": [100, 400], "entries": entries}, window=8, period=32)
    schedule, owned = policy.schedule, dict[str, list[int]]()
    engine = with_blocks(open_engine, policy, 60, 8)
    sizes = {"max_model_len": 1280, "max_prompt": 256, "max_batch": 8, "dtype": "float32", "exact": True}
    pool = pool_bytes(policy, {**sizes, "tensor_parallel": 1}, engine.config, False)
    assert pool == (9 * -(-max(256, schedule.peak) // BLOCK) + 1) * BLOCK_BYTES
    allocate = EvictingManager.allocate_new_blocks

    def watch(self: EvictingManager, request: str, tokens: int, own: int) -> list:
        new = allocate(self, request, tokens, own)
        if request not in HOLDING:
            prompt, count = self.prompts[request], len(self.req_to_blocks[request])
            needed = -(-(tokens if tokens <= prompt else schedule.attended(prompt, tokens)) // BLOCK)
            peak = -(-max(prompt, schedule.most_decoding(prompt, tokens)) // BLOCK)
            assert needed <= count <= peak
            owned.setdefault(request, []).append(count)
        return new

    with mock.patch.object(EvictingManager, "allocate_new_blocks", watch), watched(engine) as records:
        engine.generate(random_prompts((5, 70, 150, 250)), SamplingConfig(300, seed=0, ignore_eos=True))
    assert records.preempted == 0
    least, most = (-(-(count + 32) // BLOCK) for count in (64, schedule.left(5, 304)))
    shortest = min(owned.values(), key=lambda counts: counts[0])
    assert shortest[-1] in (most, most - 1)
    assert (shortest[-1] > least) is (entries[1] > entries[0])
