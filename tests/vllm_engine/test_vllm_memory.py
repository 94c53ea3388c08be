"""Evicted entries free memory: sequences run together in the blocks of their budgets, and none is preempted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ties import agrees_with_hf, replay_gap
from tiny import directory_of, policy_of, random_prompts
from watching import pool_of, watched

from rollout import SamplingConfig
from rollout.vllm.memory import Beside, beside_cache, pool_bytes
from sparse_rl.errors import UserError
from sparse_rl.policies import Policy

BLOCK = 32  # tokens
PEAK = 3  # blocks of a sequence with budget 64 and period 32
ONE_LAYER = {"num_hidden_layers": 1}
BLOCK_BYTES = 2 * BLOCK * 2 * 32 * 4  # keys and values, Hkv = 2, D = 32, float32
POLICY = policy_of("gkv", budget=64, window=8, period=32)


def with_blocks(open_engine: Callable, policy: Policy, blocks: int, max_batch: int) -> Any:
    """Return an engine of one layer with this number of blocks besides the null block."""
    memory, sizes = (blocks + 1) * BLOCK_BYTES / 2**30, {"max_model_len": 1280, "max_prompt": 256}
    folder = directory_of("qwen2", **ONE_LAYER)
    engine = open_engine(policy, folder, kv_cache_gb=memory, max_batch=max_batch, **sizes)
    assert pool_of(engine).get_num_free_blocks() == blocks
    return engine


@pytest.mark.slow
def test_the_pool_runs_one_request_for_each_peak_that_fits(open_engine: Callable) -> None:
    """64 sequences run in the blocks of 64 peaks and one long prompt. A full cache would need 1,000 blocks."""
    prompt_blocks = 7
    blocks = 64 * PEAK + prompt_blocks - PEAK
    engine = with_blocks(open_engine, POLICY, blocks, 64)
    prompts = random_prompts([5 + 3 * i for i in range(63)] + [prompt_blocks * BLOCK])
    with watched(engine) as records:
        rollouts = engine.generate(prompts, SamplingConfig(400, seed=0, ignore_eos=True))
    assert max(records.running) == 64
    assert records.running.count(64) > 350
    assert records.preempted == 0
    assert max(records.used) <= blocks
    decoding = [used for used, running in zip(records.used, records.running, strict=True) if running == 64]
    assert max(decoding[prompt_blocks:]) == 64 * PEAK
    chosen = [rollouts[i] for i in (0, 31, 63)]
    largest_gap = replay_gap(chosen, directory_of("qwen2", **ONE_LAYER))
    assert largest_gap <= 1e-5
    assert all(len(r.completion_ids) == 400 for r in rollouts)

    for tokens in (1, 90, 150):  # with this many tokens, requests are compacted never, once, and several times
        assert pool_of(engine).get_num_free_blocks() == blocks
        with watched(engine) as records:
            engine.generate(prompts, SamplingConfig(tokens, n=2, seed=0, ignore_eos=True))
        assert records.preempted == 0
        assert max(records.used) <= blocks
    assert pool_of(engine).get_num_free_blocks() == blocks


@pytest.mark.parametrize("policy_name", ["gkv", "h2o"])
@pytest.mark.few(1)
def test_fewer_blocks_run_fewer_requests_at_a_time(policy_name: str, open_engine: Callable) -> None:
    """With one block less than needed, one request waits; none is preempted, and the samples do not change."""
    policy = policy_of(policy_name, budget=64, window=8, period=32)
    prompts, sampling = random_prompts([20 + i for i in range(12)]), SamplingConfig(110, seed=0, ignore_eos=True)
    sampled = {}
    for blocks, running in ((12 * PEAK, 12), (12 * PEAK - 1, 11), (8, 2)):
        engine = with_blocks(open_engine, policy, blocks, 12)
        with watched(engine) as records:
            sampled[f"{blocks} blocks"] = engine.generate(prompts, sampling)
        assert max(records.running) == running
        assert records.preempted == 0
        assert max(records.used) <= running * PEAK
        assert pool_of(engine).get_num_free_blocks() == blocks
    agrees_with_hf(policy, prompts, sampling, sampled, directory_of("qwen2", **ONE_LAYER))


@pytest.mark.parametrize("policy_name", ["gkv", "h2o", "am"])
@pytest.mark.few(2)
def test_memory_outside_the_cache_is_counted(policy_name: str, open_engine: Callable) -> None:
    """Except for 32 bytes for each block and one byte for each request."""
    from rollout.vllm.compat.paged import live_state

    policy = policy_of(policy_name, budget=64, window=8, period=32)
    engine = with_blocks(open_engine, policy, 40, 5)
    counted, state = beside_cache(policy, engine.config, itemsize=4, max_batch=5), live_state()
    entries = state.positions.nbytes + sum(memory.nbytes for memory in state.state.values())
    assert entries == counted.per_byte * 41 * BLOCK_BYTES
    assert (0 if state.queries is None else state.queries.nbytes) == counted.requests
    by_block = state.prompt_length, state.gone, state.row, state.number
    assert sum(t.nbytes for t in by_block) == 32 * 41  # not counted
    assert state.failed.nbytes == 5 + 1 + 1  # not counted either: one byte for each request, and for the held prompt
    tensor_names = {"positions", "queries", "prompt_length", "gone", "row", "number", "failed"}
    tensor_names |= {"heads", "first_block", "first_row"}
    # the state has no other tensors
    assert {name for name, value in vars(state).items() if isinstance(value, torch.Tensor)} <= tensor_names


def test_the_share_given_to_vllm_leaves_room_for_other_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is used only on a GPU, if kv_cache_gb is not given."""
    from vllm.platforms import current_platform

    from rollout.vllm.compat import arguments

    beside, total = Beside(per_byte=0.02, requests=10**9, sampler=3 * 10**9), 80 * 10**9
    assert arguments.memory_arguments(None, 0.3, beside) == {"kv_cache_memory_bytes": 2**30}  # control: a CPU
    monkeypatch.setattr(arguments, "on_cpu", lambda: False)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: total)
    share = arguments.memory_arguments(None, 0.3, beside)["gpu_memory_utilization"]
    assert share * total * 1.02 + 4e9 == pytest.approx(0.3 * total)  # 1.02: as if all of the share were cache
    with_cache_size = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**30}
    assert arguments.memory_arguments(1, 0.3, beside) == with_cache_size
    with pytest.raises(UserError, match=r"^gpu_memory_utilization: 0\.04 of 75 GiB is too little: [^\n]*$"):
        arguments.memory_arguments(None, 0.04, beside)


@pytest.mark.slow
def test_control_a_full_cache_uses_more_blocks(open_engine: Callable) -> None:
    """10 for each sequence instead of PEAK = 3."""
    prompts, sampling = random_prompts([20] * 8), SamplingConfig(300, seed=0, ignore_eos=True)
    most_used = {}
    for name, blocks in (("full", 100), ("gkv", 64)):
        engine = with_blocks(open_engine, policy_of(name, budget=64, window=8, period=32), blocks, 8)
        with watched(engine) as records:
            engine.generate(prompts, sampling)
        most_used[name] = max(records.used)
    assert most_used == {"full": 8 * 10, "gkv": 8 * PEAK}


@pytest.mark.parametrize(
    ("policy_name", "longest", "max_prompt", "blocks", "held"),
    [("full", 320, 256, 10, 0), ("gkv", 320, 256, 8, 1), ("gkv", 320, 40, PEAK, 1), ("gkv", 64, 40, 2, 1)],
)
@pytest.mark.few(2)
def test_a_pool_is_no_larger_than_all_sequences_can_fill(
    policy_name: str, longest: int, max_prompt: int, blocks: int, held: int, open_engine: Callable
) -> None:
    """Room for each sequence's longer one of prompt and peak, or for the longest sequence, and for a prompt held
    for its samples; the rest of 1 GiB stays."""
    policy = policy_of(policy_name, budget=64, window=8, period=32)
    sizes: dict[str, Any] = {"max_batch": 4, "max_model_len": longest, "max_prompt": max_prompt}
    engine = open_engine(policy, directory_of("qwen2", **ONE_LAYER), kv_cache_gb=None, **sizes)
    assert pool_of(engine).get_num_free_blocks() == (4 + held) * blocks
    options = {**sizes, "dtype": "float32", "exact": True, "tensor_parallel": 1}
    # the same bytes as in `doctor`
    assert pool_bytes(policy, options, engine.config, False) == ((4 + held) * blocks + 1) * BLOCK_BYTES
    with watched(engine) as records:
        prompts = random_prompts([min(max_prompt, longest - 24)] * 4)
        engine.generate(prompts, SamplingConfig(24, seed=0, ignore_eos=True))
    assert max(records.running) == 4
    assert records.preempted == 0


def test_a_pool_too_small_for_one_prompt_is_refused(open_engine: Callable) -> None:
    """max_prompt 256 needs 8 blocks. After the error another engine can be started."""
    with pytest.raises(ValueError, match="KV cache"):
        with_blocks(open_engine, POLICY, 6, 4)
    prompts, sampling = random_prompts([256, 7]), SamplingConfig(40, seed=0, ignore_eos=True)
    sampled = with_blocks(open_engine, POLICY, 8, 4).generate(prompts, sampling)
    agrees_with_hf(POLICY, prompts, sampling, {"8 blocks": sampled}, directory_of("qwen2", **ONE_LAYER))
