"""Sleep mode without a GPU: in a sleep, all memory of model, cache and our buffers is overwritten, as unmapped memory
may be. tests/gpu has the same test with the real allocator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from judging import same
from tiny import directory_of, loaded, policy_of, random_prompts

from rollout import SamplingConfig
from rollout.vllm.compat import paged

SAMPLING = SamplingConfig(30, seed=0, ignore_eos=True)
LENGTHS = (5, 70, 130)


OWNERS = ("torch.nn", "vllm.model_executor", "vllm.v1.attention", "rollout")


def tensors(value: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    """Yield every tensor that a model holds on its device: weights, buffers, and plain attributes of its modules."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if not str(name).endswith("_cpu"):  # vLLM's suffix for tensors in host memory
                yield from tensors(item, seen)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors(item, seen)
    elif type(value).__module__.startswith(OWNERS) and hasattr(value, "__dict__"):
        yield from tensors(vars(value), seen)


def storages(values: Any) -> list[torch.UntypedStorage]:
    every = (tensor.untyped_storage() for tensor in tensors(values, {}))
    return list({storage.data_ptr(): storage for storage in every}.values())


class Memory:
    """A substitute for vLLM's backend: "weights" are what `load` allocates, "kv_cache" is a runner's caches, "runtime"
    is what else is allocated with the caches."""

    def __init__(self) -> None:
        self.weights: list[torch.UntypedStorage] = []
        self.runner: Any = None
        self.kept: list[torch.UntypedStorage] | None = None
        self.runtime: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def load(self, runner: Any, load: Callable) -> None:
        load(runner)
        self.weights, self.runner = storages(runner.model), runner

    def suspend(self, level: int) -> None:
        self.kept = [storage.clone() for storage in self.weights] if level == 1 else None
        caches, builders = storages(self.runner.kv_caches), [g.metadata_builders for (g,) in self.runner.attn_groups]
        others = {storage.data_ptr() for storage in (*caches, *self.weights)}
        own = [s for s in storages([paged.live_state(), builders]) if s.data_ptr() not in others]
        self.runtime = [(storage, storage.clone()) for storage in own]
        for storage in (*self.weights, *own):
            storage.fill_(255)  # NaN, or -1
        for storage in caches:
            # as floats 48.6; not NaN, since the CPU kernel multiplies unused slots by 0
            storage.fill_(66)

    def resume(self, tags: list[str] | None) -> None:
        for storage, kept in self.runtime:
            storage.copy_(kept)
        if self.kept is not None and (tags is None or "weights" in tags):
            for storage, kept in zip(self.weights, self.kept, strict=True):
                storage.copy_(kept)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Install the memory of the next engine, and return it. The engine sleeps by the code that vLLM has for GPUs."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    memory, load = Memory(), CPUModelRunner.load_model
    monkeypatch.setattr(CPUModelRunner, "load_model", lambda runner, **_: memory.load(runner, load))
    monkeypatch.setattr(CPUWorker, "sleep", Worker.sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", Worker.wake_up)
    monkeypatch.setattr(CPUWorker, "sleep_mode_backend", memory)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 1))
    return memory


@pytest.mark.parametrize("policy_name", ["gkv", "full"])
@pytest.mark.few(1)
def test_an_engine_samples_the_same_tokens_after_a_sleep(
    policy_name: str, memory: Memory, open_engine: Callable
) -> None:
    """Level 2 drops the weights, and `load_weights` restores them; vLLM keeps the buffers."""
    engine = open_engine(policy_of(policy_name, budget=64, window=8, period=16), "qwen3")
    engine.can_sleep, prompts = True, random_prompts(LENGTHS)
    expected = engine.generate(prompts, SAMPLING)
    for level in (1, 2):
        engine.sleep(level)
        assert all(weight.isnan().all() for weight in memory.runner.model.parameters())
        assert policy_name == "full" or len(memory.runtime) > 10
        assert policy_name == "full" or int(paged.live_state().prompt_length.max()) == -1
        engine.wake_up(["weights"])
        if level == 2:
            assert all(weight.isnan().all() for weight in memory.runner.model.parameters())
            engine.load_weights(loaded(directory_of("qwen3")).named_parameters())
        engine.wake_up(["kv_cache"])
        assert len(memory.weights) > len(dict(memory.runner.model.named_parameters()))
        assert same(engine.generate(prompts, SAMPLING), expected)


def test_vllm_keeps_what_is_allocated_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our buffers are such: at every level of sleep they move to host memory, and waking any part brings them back."""
    from vllm import device_allocator
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.worker.gpu_worker import Worker

    moved: list[tuple[str, ...]] = []
    allocator = SimpleNamespace(sleep=lambda offload_tags: moved.append(offload_tags))
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    for level in (1, 2):
        CuMemBackend().suspend(level)
    assert all("runtime" in tags for tags in moved)
    assert ["weights" in tags for tags in moved] == [True, False]
    assert "runtime" not in device_allocator.DEFERRABLE_TAGS
    assert 'tag="runtime"' in inspect.getsource(Worker.initialize_from_config)
