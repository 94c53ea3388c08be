"""Fixtures of the vLLM engine's tests, which are skipped if vLLM is not installed. Heads have size 32, as vLLM's CPU
kernel requires.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from judging import gap
from ties import Decisions, check_same, sample_alone
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout import Rollout, SamplingConfig, make_engine
from rollout.engine import Engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.policies import Policy

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 2048}


@pytest.fixture(scope="session", autouse=True)
def vllm_is_here() -> Iterator[None]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def imports_are_set_aside() -> None:
    """Exclude imported modules from garbage collection: vLLM collects six times per engine, each time 0.3 s or more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Set variables with which a tiny engine starts quickly, and restore the environment that vLLM changes."""
    fast = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with mock.patch.dict(os.environ, fast):
        yield


@contextmanager
def quickly(engines_before: int) -> Iterator[None]:
    """Skip the work at the start and the end of an engine that is needed only once in a process.

    After the first engine, the objects of imported modules stay excluded from garbage collection. The search of every
    module for vLLM's kernels, which takes 0.4 s, is skipped too.
    """
    if engines_before == 1:
        gc.collect()
        gc.freeze()
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"), ExitStack() as stack:
        if engines_before:
            stack.enter_context(mock.patch("vllm.triton_utils.dispatcher.register_kernels"))
        yield


@pytest.fixture(scope="session")
def directory_of(new_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """directory_of(family, seed=0, **config) -> the directory of a tiny model. Tests must not change its files."""

    @cache
    def make(family: str, seed: int = 0, **config: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        new_model(family, seed=seed, **{**SIZES, **config}).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def loaded() -> Callable[[Path], PreTrainedModel]:
    """loaded(folder) -> the model in that directory, in float32, for replays."""
    return cache(lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="session")
def opened() -> list[int]:
    """Return a list with one entry for each engine that this process has had, except engines in separate processes."""
    return []


@pytest.fixture
def open_engine(directory_of: Callable[..., Path], opened: list[int]) -> Iterator[Callable[..., Any]]:
    """open_engine(policy, model="qwen2", **options) -> a vllm engine. Each call closes the previous engine; the last
    engine is closed when the test ends.
    """
    engines: list[Engine] = []

    def close() -> None:
        while engines:
            engine: Any = engines.pop()
            with quickly(len(opened)):
                engine.close()
            if not engine.separate:
                opened.append(1)

    def make(policy: Any, model: str | Path = "qwen2", **options: Any) -> Engine:
        close()
        folder = model if isinstance(model, Path) else directory_of(model)
        defaults = {"kv_cache_gb": 0.03, "max_batch": 16, "max_model_len": 1024}
        with quickly(len(opened)):
            engines.append(make_engine("vllm", model=folder, policy=policy, **{**defaults, **options}))
        return engines[-1]

    yield make
    close()


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """random_prompts(lengths, seed=0) -> prompts of random tokens."""

    def make(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]

    return make


@pytest.fixture
def replay_gap(directory_of: Callable[..., Path], loaded: Callable) -> Callable[..., float]:
    """replay_gap(rollouts, model="qwen2", temperature=1.0) -> max |replayed log-prob - engine's log-prob| under the
    rollouts' traces.
    """

    def measure(rollouts: Sequence[Rollout], model: str | Path = "qwen2", temperature: float = 1.0) -> float:
        folder = model if isinstance(model, Path) else directory_of(model)
        with torch.no_grad():
            return gap(replay_logprobs(loaded(folder), rollouts, temperature, batch_size=1), rollouts)

    return measure


@pytest.fixture
def agrees_with_hf(
    directory_of: Callable[..., Path],
    loaded: Callable,
    replay_gap: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable,
) -> Callable[..., None]:
    """agrees_with_hf(policy, prompts, sampling, {name: rollouts}, model="qwen2") checks that the rollouts equal those
    of the hf engine.

    Tokens and evictions must be equal except for ties, and the replay gap must be within 1e-5.
    """

    def check(
        policy: Policy,
        prompts: list[list[int]],
        sampling: SamplingConfig,
        sampled: dict[str, list[Rollout]],
        model: str | Path = "qwen2",
    ) -> None:
        reference = loaded(model if isinstance(model, Path) else directory_of(model))
        expected = make_engine("hf", model=reference, policy=policy).generate(prompts, sampling)

        def alone(i: int) -> tuple[Rollout, Decisions]:
            return sample_alone(monkeypatch, reference, policy, prompts[i], sampling)

        for label, rollouts in sampled.items():
            record_property(f"{label}: ties", check_same(expected, rollouts, alone, sampling.temperature, label))
            assert [r.prompt_ids for r in rollouts] == [r.prompt_ids for r in expected]
            largest_gap = replay_gap(rollouts, model, sampling.temperature)
            record_property(f"{label}: gap", largest_gap)
            assert largest_gap <= 1e-5, label

    return check
