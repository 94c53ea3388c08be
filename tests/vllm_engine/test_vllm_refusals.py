"""The vLLM engine refuses invalid arguments, and continues to work after an error or an interrupt."""

from __future__ import annotations

import importlib.metadata
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judging import same
from tiny import directory_of, loaded, new_model, policy_of, random_prompts
from torch import distributed

from rollout import SamplingConfig, make_engine
from rollout.vllm.engine import OTHERWISE
from sparse_rl.attention.families import FAMILIES
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.policies import make_policy

SAMPLING = SamplingConfig(40, seed=0, ignore_eos=True)
SHARED = {"shared": True, "max_model_len": 512, "max_prompt": 300, "max_batch": 4, "max_num_batched_tokens": 64}
POLICY = policy_of("gkv", budget=64, window=8, period=16)


def test_invalid_requests_are_refused(open_engine: Callable) -> None:
    """Each invalid request raises a ValueError that names the mistake, before any token is sampled."""
    engine = open_engine(POLICY, **SHARED)
    good = random_prompts((100,))
    expected = engine.generate(good, SAMPLING)
    for prompts, sampling, message in (
        ([[3], []], SAMPLING, "prompt 1 is empty"),
        ([[3], [4] * 301], SAMPLING, "prompt 1 has 301 tokens, but max_prompt is 300"),
        ([[5, 6], ["x"]], SAMPLING, "prompt 1 is not a list of token ids.*'str'"),
        ([[5, 6], [1.5]], SAMPLING, "prompt 1 is not a list of token ids.*'float'"),
        ([[5], 6], SAMPLING, "prompt 1 is not a list of token ids.*'int'"),
        ([[5], [6, 64]], SAMPLING, "prompt 1 has token 64; the model's token ids are 0 to 63"),
        ([[5], [-1]], SAMPLING, "prompt 1 has token -1; the model's token ids are 0 to 63"),
        ([[4] * 300], SamplingConfig(213), r"prompt 0 has 300 tokens.*max_tokens 213.*max_model_len 512"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, sampling)
    assert engine.generate([], SAMPLING) == []
    assert same(engine.generate(good, SAMPLING), expected)
    longest = engine.generate([[4] * 300], SamplingConfig(212, seed=0, ignore_eos=True))
    assert len(longest[0].completion_ids) == 212


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"model": {"head_dim": size}}, rf"head size {size} .*use the hf engine") for size in (8, 16, 24)),
        ({"max_batch": 0}, "max_batch must be >= 1"),
        ({"tensor_parallel": 3}, "tensor_parallel 3 does not divide the model's 2 kv heads"),
        ({"max_bach": 3}, "no option 'max_bach'"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options: dict, message: str) -> None:
    folder = directory_of("qwen3", **options.get("model", {}))
    with pytest.raises(ValueError, match=message):
        make_engine("vllm", **{**options, "model": folder}, policy=POLICY)


def test_a_family_that_only_hf_samples_from_is_refused(open_engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, before vLLM loads the model."""
    monkeypatch.setitem(FAMILIES, "qwen3", "vllm has no code for it")
    monkeypatch.setattr("vllm.LLM", lambda **_: pytest.fail("vLLM was started"))
    with pytest.raises(UserError) as caught:
        open_engine(POLICY, directory_of("qwen3"))
    assert str(caught.value) == f"model: qwen3: vllm has no code for it{OTHERWISE}"


def test_a_live_module_is_refused() -> None:
    with pytest.raises(ValueError, match="pass the directory of a model, or use the engine hf"):
        make_engine("vllm", model=new_model("qwen2"), policy=POLICY)


@pytest.mark.parametrize(
    ("installed", "message"), [("0.30.1", r"needs vLLM 0\.32\.\*, found .* 0\.30\.1"), (None, "not installed")]
)
def test_another_version_of_vllm_is_refused(
    installed: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ValueError, match=message):
        make_engine("vllm", model=directory_of("qwen2"), policy=POLICY)


@pytest.mark.parametrize(("first", "second"), [("gkv", "full"), ("full", "gkv")])
@pytest.mark.few(1)
def test_a_second_engine_is_refused(first: str, second: str, open_engine: Callable) -> None:
    """The first one continues to work; after it is closed, another can be opened."""
    policies = {name: policy_of(name, budget=64, window=8, period=16) for name in (first, second)}
    engine, prompts = open_engine(policies[first]), random_prompts((90, 200))
    expected = engine.generate(prompts, SAMPLING)
    with pytest.raises(ValueError, match="has a vllm engine already; close it first"):
        make_engine("vllm", model=directory_of("qwen2"), policy=policies[second], kv_cache_gb=0.03)
    assert same(engine.generate(prompts, SAMPLING), expected)
    engine.close()
    engine.close()
    assert len(open_engine(policies[second]).generate(prompts, SAMPLING)) == 2


def test_an_interrupt_frees_all_requests_rows_and_blocks(
    open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any step; the engine then samples as a fresh engine does."""
    engine, prompts = open_engine(POLICY, **SHARED), random_prompts((90, 200, 17, 64, 300, 5))
    core = engine.llm.llm_engine.engine_core.engine_core
    pool, step = core.scheduler.kv_cache_manager.block_pool, engine.llm.llm_engine.step
    free = pool.get_num_free_blocks()
    expected = engine.generate(prompts, SAMPLING)
    steps_left = 0

    def interrupted() -> Any:
        nonlocal steps_left
        if not steps_left:
            raise KeyboardInterrupt
        steps_left -= 1
        return step()

    for steps in (0, 3, 60):
        steps_left = steps
        with monkeypatch.context() as patch:
            patch.setattr(engine.llm.llm_engine, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompts, SAMPLING)
        assert not core.scheduler.running
        assert not core.scheduler.requests
        assert pool.get_num_free_blocks() == free
        assert same(engine.generate(prompts, SAMPLING), expected)


@pytest.mark.slow
def test_an_error_while_adding_requests_frees_them(open_engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any of vLLM's steps of adding one, before or after the step's work."""
    engine, prompts, sampling = open_engine(POLICY, **SHARED), random_prompts((90, 5, 17)), SamplingConfig(8, seed=0)
    core, expected = engine.llm.llm_engine, engine.generate(prompts, sampling)
    steps = {core: "add_request", core.input_processor: "process_inputs", core.output_processor: "add_request"}
    cases = itertools.product((*steps.items(), (core.engine_core, "add_request")), (1, 3), (False, True))
    for (owner, name), number, after in cases:
        original, calls = getattr(owner, name), itertools.count(1)
        error = KeyboardInterrupt if after else RuntimeError

        def broken(*arguments: Any, **options: Any) -> Any:
            breaks = next(calls) == number  # noqa: B023
            result = None if breaks and not after else original(*arguments, **options)  # noqa: B023
            if breaks:
                raise error  # noqa: B023
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(error):
                engine.generate(prompts, sampling)
        assert not core.has_unfinished_requests(), (owner, name, number, after)
        assert same(engine.generate(prompts, sampling), expected), (owner, name, number, after)


@pytest.mark.slow
def test_calls_from_several_threads_wait_for_one_another(open_engine: Callable) -> None:
    """Each gets the rollouts that it gets alone."""
    engine = open_engine(POLICY, **SHARED)
    prompts_of_threads = [random_prompts((90, 200, 17), seed=i) for i in range(4)]
    expected = [engine.generate(prompts, SAMPLING) for prompts in prompts_of_threads]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda prompts: engine.generate(prompts, SAMPLING), prompts_of_threads))
    assert all(same(output, reference) for output, reference in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("name", ["gkv", "full"])
def test_a_sliding_window_set_by_an_override_is_refused(
    name: str, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our float32 attention would ignore it, and the check of the model's own configuration does not see it."""
    import vllm

    slides = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, hf_overrides=slides))
    policy = policy_of(name, budget=64, window=8, period=16)
    with pytest.raises(UserError, match="a sliding window"):
        open_engine(policy, "llama")


@cache
def configuration_of(dtype: str) -> Any:
    from vllm import EngineArgs

    from rollout.vllm.compat.arguments import engine_arguments

    arguments = engine_arguments(make_policy("full"), dtype=dtype)
    return EngineArgs(str(directory_of("llama")), dtype=dtype, **arguments).create_engine_config()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"sliding_window": 16}, "a sliding window"),
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"logits_soft_cap": 30.0}, "soft-capped logits"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "keys and values of another layer"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_our_attention_does_not_support_are_refused(
    dtype: str, given: dict[str, Any], what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, also with a full cache. In other dtypes vLLM's own kernel supports them."""
    from vllm.config import set_current_vllm_config

    from rollout.vllm.compat import backend

    monkeypatch.setattr(backend.EvictingImpl, "config", None)
    monkeypatch.setattr(backend.EvictingImpl, "longest", 0)
    supported = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    refused = what is not None and dtype == "float32"
    message = f"which does not support {what}; set another dtype"
    with (
        set_current_vllm_config(configuration_of(dtype)),
        pytest.raises(UserError, match=message) if refused else nullcontext(),
    ):
        backend.EvictingCPUImpl(4, 32, 1.0, 2, **{**supported, **given})


def test_the_start_of_an_engine_uses_only_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading another GPU's random state would create a CUDA context of half a gigabyte there."""
    from rollout.vllm.compat import plugin

    touched: list[Any] = []
    state = torch.zeros(8, dtype=torch.uint8)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 3,
        "get_rng_state": lambda device: touched.append(device) or state,
        "set_rng_state": lambda new_state, device: touched.append(device),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with plugin.undisturbed(False):
        pass
    assert touched == [3, 3]


def test_weights_that_are_not_finite_raise_an_error(open_engine: Callable) -> None:
    """Keys become NaN; no trace is returned. After finite weights are loaded, the engine works again."""
    engine, prompts = open_engine(POLICY, **SHARED), random_prompts((90, 200))
    expected = engine.generate(prompts, SAMPLING)
    good = {name: weight.detach().clone() for name, weight in loaded(directory_of("qwen2")).named_parameters()}
    bad = {name: weight.clone() for name, weight in good.items()}
    bad["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    engine.load_weights(bad.items())
    with pytest.raises(NotFiniteError, match=r"^prompt 0, sample 0: the log-probability of token 0 .* is not finite"):
        engine.generate(prompts, SAMPLING)
    engine.load_weights(good.items())
    assert same(engine.generate(prompts, SAMPLING), expected)


@pytest.mark.parametrize("with_group", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.slow
def test_an_engine_does_not_change_its_process(with_group: bool, tmp_path: Path) -> None:
    """Random state, number of threads, default dtype and process group."""
    if with_group:
        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)

    def state() -> tuple:
        return (
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            distributed.is_initialized(),
        )

    try:
        before = state()
        assert before[-1] is with_group
        with pytest.raises(ValueError, match="KV cache"):  # fails after vLLM has made its process groups
            make_engine("vllm", model=directory_of("qwen2"), policy=POLICY, kv_cache_gb=1e-4, max_model_len=2048)
        assert state() == before
        for _ in range(2):
            sizes = {"kv_cache_gb": 0.03, "max_model_len": 512}
            engine = make_engine("vllm", model=directory_of("qwen2"), policy=POLICY, **sizes)
            engine.generate(random_prompts((90, 200)), SAMPLING)
            engine.close()
            assert state() == before
            torch.set_num_threads(torch.get_num_threads())
        if with_group:
            distributed.all_reduce(torch.ones(1))
    finally:
        if with_group:
            distributed.destroy_process_group()
