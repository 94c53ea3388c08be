"""Eviction in vLLM on a GPU. NOT RUN YET: written from vLLM 0.32's source, on a machine without a GPU.

    pip install ".[vllm,test]" && python -m pytest tests/gpu -m ""

tests/vllm_engine/test_cuda_backend.py and test_cuda_layout.py test all code that runs without a GPU. This file tests
the kernels, CUDA graphs, sleep mode and several GPUs.

In 16 bits, different kernels give different results, so that a trace is tested by its effect on log-probs: under an
engine's traces, the gap between trainer and sampler is as small as without evictions, and under wrong traces it is
large.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import wrong_traces
from ties import first_difference, same_decisions, sample_alone
from tiny import directory_of, policy_of, random_prompts
from transformers import AutoModelForCausalLM

from rollout import Rollout, SamplingConfig, make_engine
from rollout.context import PromptCacheConfig
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.policies import Policy
from sparse_rl.trace import NEVER

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SIZES = {
    **{"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.05},
}
PROMPTS = random_prompts((5, 33, 64, 79, 80, 81, 130, 256, 450))
BUDGET = {"budget": 64, "window": 8, "period": 16}
SAMPLED = SamplingConfig(120, n=4, seed=0, ignore_eos=True)
GREEDY = SamplingConfig(120, temperature=0, ignore_eos=True)
KERNELS = ("Flash", "Triton")
ONE, TWO = pytest.mark.first(1), pytest.mark.first(2)  # run first on a new GPU; the number of engines
TIE = 2e-2  # Triton multiplies float32 in TF32


def folder() -> Path:
    return directory_of("qwen3", **SIZES)


@contextmanager
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    engines: list[Any] = []

    def close() -> None:
        while engines:
            engines.pop().close()
        torch.cuda.empty_cache()

    def make(policy: Policy, *, kernels: str = "Flash", eager: bool = False, **options: Any) -> Any:
        close()
        from rollout.vllm.compat import arguments

        arguments.prepare_environment()
        from vllm import envs
        from vllm.v1.attention import selector

        from rollout.vllm.compat import backend

        envs.disable_envs_cache()  # the previous engine has already read the environment
        selector._cached_get_attn_backend.cache_clear()
        if kernels == "Triton":
            off = classmethod(lambda cls, **_: ["off for this test"])
            monkeypatch.setattr(backend.EvictingFlashBackend, "validate_configuration", off)
        if eager:
            original = arguments.engine_arguments
            monkeypatch.setattr(
                arguments, "engine_arguments", lambda *a, **k: original(*a, **k) | {"enforce_eager": True}
            )
        defaults = {"dtype": "bfloat16", "kv_cache_gb": 0.25, "gpu_memory_utilization": 0.1, "max_model_len": 1024}
        engines.append(make_engine("vllm", model=folder(), policy=policy, **{**defaults, **options}))
        return engines[-1]

    try:
        yield make
    finally:
        close()


@pytest.fixture
def open_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """open_engine(policy, kernels="Flash" or "Triton", eager=, **options) -> an engine. The previous one is closed."""
    with opening(monkeypatch) as make:
        yield make


@pytest.fixture(scope="module")
def gap_of_full_cache() -> Callable[[str], float]:
    """gap_of_full_cache(dtype) -> the 99th percentile of the gap, measured once for each dtype."""

    @cache
    def gap(dtype: str) -> float:
        with pytest.MonkeyPatch.context() as monkeypatch, opening(monkeypatch) as make:
            return p99(replayed(make(policy_of("full"), dtype=dtype).generate(PROMPTS, SAMPLED), dtype))

    return gap


def replayed(rollouts: Sequence[Rollout], dtype: str = "bfloat16", temperature: float = 1.0) -> torch.Tensor:
    """Return |trainer's log-prob - sampler's log-prob| of every token."""
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=getattr(torch, dtype)).cuda().eval()
    with torch.no_grad():
        trainer_logprobs = replay_logprobs(model, rollouts, temperature)
    sampler_logprobs = [torch.tensor(r.model_logprobs) for r in rollouts]
    return torch.cat([(a.float().cpu() - b).abs() for a, b in zip(trainer_logprobs, sampler_logprobs, strict=True)])


def p99(gaps: torch.Tensor) -> float:
    return float(gaps.quantile(0.99))


def evicts(rollouts: Sequence[Rollout]) -> bool:
    return all(bool((r.trace.evict_at < NEVER).any()) for r in rollouts)


# ---- the invariant --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy_name", "kernels", "dtype"),
    [
        pytest.param("gkv", "Flash", "bfloat16", marks=TWO),  # also that of a full cache
        pytest.param("gkv", "Triton", "bfloat16", marks=ONE),
        pytest.param("h2o", "Flash", "bfloat16", marks=ONE),
        pytest.param("streaming", "Flash", "bfloat16", marks=ONE),
        ("tova", "Flash", "bfloat16"),
        *((policy_name, "Triton", "bfloat16") for policy_name in ("h2o", "tova", "streaming")),
        *(("gkv", kernels, "float16") for kernels in KERNELS),
    ],
)
def test_the_gap_is_as_small_as_without_evictions(
    policy_name: str,
    kernels: str,
    dtype: str,
    open_engine: Callable,
    gap_of_full_cache: Callable,
    record_property: Callable,
) -> None:
    """At most 1.5 times, by the 99th percentile. Control: wrong traces give more than 3 times."""
    full = gap_of_full_cache(dtype)
    rollouts = open_engine(policy_of(policy_name, **BUDGET), kernels=kernels, dtype=dtype).generate(PROMPTS, SAMPLED)
    assert evicts(rollouts)
    gap = p99(replayed(rollouts, dtype))
    record_property("p99 of a full cache", full)
    record_property("p99", gap)
    assert gap <= 1.5 * full
    for name, traces in wrong_traces(rollouts).items():
        if name in ("causal", "heads swapped"):
            wrong_gap = p99(replayed(traces, dtype))
            record_property(name, wrong_gap)
            assert wrong_gap > 3 * full, f"{name}: {wrong_gap:.1e} against {full:.1e}"


@pytest.mark.parametrize("policy_name", [pytest.param("snapkv", marks=ONE), "morphkv", "tova", "streaming"])
def test_decisions_equal_those_of_the_reference_engine(
    policy_name: str,
    open_engine: Callable,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable,
) -> None:
    """In float32 (Triton). The only allowed difference is a tie, up to TIE."""
    policy = policy_of(policy_name, **BUDGET)
    rollouts = open_engine(policy, dtype="float32").generate(PROMPTS, GREEDY)
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32).eval()
    margins = []
    for prompt, sampled in zip(PROMPTS, rollouts, strict=True):
        alone, decisions = sample_alone(model, policy, prompt, GREEDY)
        if not same_decisions(alone, sampled):
            margins.append(first_difference(alone, sampled, decisions, 0.0))
    record_property("sequences that differ", len(margins))
    record_property("greatest margin", max(margins, default=0.0))
    assert max(margins, default=0.0) <= TIE


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        pytest.param("Flash", "bfloat16", marks=ONE),
        ("Triton", "bfloat16"),
        *((kernels, "float16") for kernels in KERNELS),
    ],
)
def test_a_compacted_context_does_not_widen_the_gap_to_hf(
    kernels: str, dtype: str, open_engine: Callable, record_property: Callable
) -> None:
    """By more than 1.5 times. A coordinate of the keys holds the biases; shorter heads are padded with -inf."""
    hf = make_engine("hf", model=folder(), policy="full", dtype=dtype)
    context, dropped = PROMPTS[-1], len(PROMPTS[-1]) // 10
    ragged = [[dropped + 7 * layer + 3 * head for head in range(2)] for layer in range(4)]
    contexts = [
        hf.compact(context, PromptCacheConfig(policy="full")),
        hf.compact(context, PromptCacheConfig(ratio=0.1)),
        hf.study(context, PromptCacheConfig()).compacted(PromptCacheConfig(), ragged),
    ]
    engine = open_engine(policy_of("full"), kernels=kernels, dtype=dtype, context_entries=700)
    gaps = []
    for continued in contexts:
        sampled = hf.generate(PROMPTS[:4], GREEDY, continued)
        simulated = engine.simulate(PROMPTS[:4], [r.completion_ids for r in sampled], context=continued)
        pairs = zip(simulated, sampled, strict=True)
        differences = [(torch.tensor(a.model_logprobs) - torch.tensor(b.model_logprobs)).abs() for a, b in pairs]
        gaps.append(p99(torch.cat(differences)))
    record_property("p99 of whole, compacted, ragged", gaps)
    assert max(gaps) <= 1.5 * gaps[0]


# ---- graphs and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [pytest.param("Flash", marks=TWO), "Triton"])
def test_the_gap_does_not_depend_on_piecewise_graphs(
    kernels: str, open_engine: Callable, record_property: Callable
) -> None:
    """By more than a factor of 1.5. Prompts are read in chunks."""
    policy = policy_of("gkv", **BUDGET)
    options = {"kernels": kernels, "max_num_batched_tokens": 256}
    results = []
    for eager in (False, True):
        engine = open_engine(policy, eager=eager, **options)
        config = engine.llm.llm_engine.vllm_config
        assert config.use_v2_model_runner is False  # the V2 runner has no place for our sampler
        assert config.compilation_config.cudagraph_mode.name == ("NONE" if eager else "PIECEWISE")
        for _ in range(2):  # the second time, blocks are reused
            rollouts = engine.generate(PROMPTS, GREEDY)
            assert evicts(rollouts)
            results.append(p99(replayed(rollouts, temperature=0.0)))
    record_property("p99", results)
    assert max(results) <= 1.5 * min(results)


@pytest.mark.parametrize(
    ("kernels", "policy_name"),
    [
        *(pytest.param("Flash", policy_name, marks=TWO) for policy_name in ("gkv", "am")),
        *(("Flash", policy_name) for policy_name in ("streaming", "h2o")),
        *(("Triton", policy_name) for policy_name in ("gkv", "streaming", "am", "h2o")),
    ],
)
def test_the_gap_does_not_depend_on_graphs_of_whole_decode_steps(
    kernels: str, policy_name: str, open_engine: Callable, record_property: Callable
) -> None:
    """Also for batch sizes that graphs must pad. Decode steps then run no Python code."""
    from rollout.vllm.compat.paged import live_state

    policy, result = policy_of(policy_name, **BUDGET), []
    for full_graphs in (False, True):
        engine = open_engine(policy, kernels=kernels, full_graphs=full_graphs, max_num_batched_tokens=256)
        mode = engine.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
        assert mode == ("FULL_AND_PIECEWISE" if full_graphs else "PIECEWISE")
        state, calls = live_state(), []
        after_layer = state.after_layer
        state.after_layer = lambda name, query, run=after_layer, calls=calls: (calls.append(name), run(name, query))
        for batch in (PROMPTS, PROMPTS[:3]):  # no graph has the batch sizes 9 and 3
            calls.clear()
            rollouts = engine.generate(batch, GREEDY)
            assert (len(calls) > SIZES["num_hidden_layers"] * 100) is not full_graphs
            assert evicts(rollouts)
            result.append(p99(replayed(rollouts, temperature=0.0)))
    record_property("p99", result)
    assert max(result) <= 1.5 * min(result)


@ONE
def test_blocks_of_evicted_entries_are_freed(open_engine: Callable) -> None:
    """All sequences run together in a pool that is too small for a full cache, and all blocks are free at the end."""
    engine = open_engine(policy_of("gkv", **BUDGET), max_batch=36, kv_cache_gb=0.02, max_prompt=450)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    pool, size = scheduler.kv_cache_manager.block_pool, scheduler.block_size
    free, records, step = pool.get_num_free_blocks(), [], engine.llm.llm_engine.step

    def watched() -> Any:
        outputs = step()
        records.append((len(scheduler.running), pool.get_num_free_blocks()))
        return outputs

    engine.llm.llm_engine.step = watched
    rollouts = engine.generate(PROMPTS, replace(SAMPLED, max_tokens=500))
    del engine.llm.llm_engine.step
    tokens = sum(len(r.trace) for r in rollouts)
    assert tokens > 1.5 * size * free
    running, free_blocks = records[len(records) // 2]
    assert running == len(rollouts)
    assert free - free_blocks <= running * -(-80 // size)
    assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize(("policy_name", "blocks"), [pytest.param("gkv", 29, marks=ONE), ("full", 64)])
def test_a_pool_is_no_larger_than_all_sequences_can_fill(policy_name: str, blocks: int, open_engine: Callable) -> None:
    """Prompts of 450 tokens need 29 blocks of 16 each, the 1,024 tokens of a full cache 64; the share has room for
    more."""
    policy = policy_of(policy_name, **BUDGET)
    engine = open_engine(policy, kv_cache_gb=None, gpu_memory_utilization=0.3, max_batch=9, max_prompt=450)
    config = engine.llm.llm_engine.vllm_config.cache_config
    assert config.block_size == 16
    assert config.num_gpu_blocks == 9 * blocks + 1
    assert len(engine.generate(PROMPTS, GREEDY)) == len(PROMPTS)


# ---- sleep ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=ONE)])
def test_an_engine_samples_the_same_tokens_after_a_sleep(level: int, open_engine: Callable) -> None:
    """It frees at least 0.9 GiB of GPU memory."""
    engine = open_engine(policy_of("gkv", **BUDGET), sleep_mode=True, kv_cache_gb=1.0)
    expected = engine.generate(PROMPTS, GREEDY)
    free_before = torch.cuda.mem_get_info()[0]
    engine.sleep(level)
    assert torch.cuda.mem_get_info()[0] - free_before >= 0.9 * 2**30
    engine.wake_up(["weights"])
    model = AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.bfloat16)
    if level == 2:
        engine.load_weights(model.named_parameters())
    engine.wake_up(["kv_cache"])
    repeated = engine.generate(PROMPTS, GREEDY)
    assert [r.completion_ids for r in repeated] == [r.completion_ids for r in expected]
    assert all(torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(repeated, expected, strict=True))


def test_without_sleep_mode_a_sleep_has_no_effect(open_engine: Callable) -> None:
    engine = open_engine(policy_of("gkv", **BUDGET))
    engine.sleep()
    engine.wake_up()
    assert len(engine.generate([[5, 6, 7]], SamplingConfig(3, seed=0, ignore_eos=True))) == 1


# ---- several GPUs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
@pytest.mark.parametrize("policy_name", ["gkv", "tova"])
def test_the_gap_on_two_gpus_is_as_small_as_on_one(
    policy_name: str, open_engine: Callable, record_property: Callable
) -> None:
    """So the heads of the two processes are joined in the right order."""
    policy = policy_of(policy_name, **BUDGET)
    gap_on_one = p99(replayed(open_engine(policy).generate(PROMPTS, SAMPLED)))
    rollouts = open_engine(policy, tensor_parallel=2).generate(PROMPTS, SAMPLED)
    gap_on_two = p99(replayed(rollouts))
    record_property("p99 on one GPU", gap_on_one)
    record_property("p99 on two", gap_on_two)
    assert evicts(rollouts)
    assert gap_on_two <= 1.5 * gap_on_one
    if policy_name == "tova":  # it keeps the same entries in every head, so both processes must evict the same
        assert all(torch.equal(r.trace.evict_at, r.trace.evict_at[:, :1].expand_as(r.trace.evict_at)) for r in rollouts)
