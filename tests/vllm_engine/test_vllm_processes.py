"""A vLLM engine in separate processes, also if two share the heads, gives the results of one in this process. The
processes find the plugin by its entry point, so sparse-rl must be installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from judging import trainer_gap, wrong_traces
from ties import agrees_with_hf
from tiny import directory_of, new_model, policy_of, random_prompts

from rollout import SamplingConfig

LENGTHS = (5, 33, 64, 80, 81, 130, 200, 300)
APART = [{"multiprocess": True}, {"tensor_parallel": 2}]


@pytest.fixture(autouse=True)
def any_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's binding of each worker to its own NUMA node fails if there are fewer nodes than workers."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def test_the_plugin_is_installed() -> None:
    values = [e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "sparse_rl"]
    assert set(values) == {"rollout.vllm:register"}


PARENT = """
import multiprocessing, os, sys, time
from rollout.vllm.compat.processes import end_with_parent

def child(pipe):
    end_with_parent()
    pipe.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for name in ("another", "EngineCore_DP0", "VllmWorker-0"):
        ours, theirs = context.Pipe()
        context.Process(target=child, args=(theirs,), name=name).start()
        print(ours.recv(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.few(1)
def test_vllms_processes_end_if_their_parent_is_killed(method: str, tmp_path: Path) -> None:
    """Other child processes do not."""
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with subprocess.Popen([sys.executable, program, method], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(parent.stdout.readline())) for _ in range(3)]
        parent.kill()
        try:
            _, alive = psutil.wait_procs(children[1:], timeout=10)
            assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
            assert children[0].is_running()
        finally:
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


@pytest.mark.slow
@pytest.mark.parametrize("options", APART, ids=str)
@pytest.mark.parametrize("policy_name", ["streaming", "h2o", "tova", "gkv", "am"])
def test_an_engine_in_another_process_equals_hf(policy_name: str, options: dict, open_engine: Callable) -> None:
    """Prompts are prefilled in chunks, and some requests wait for others."""
    policy, prompts = policy_of(policy_name, budget=64, window=8, period=8), random_prompts(LENGTHS)
    engine = open_engine(policy, "qwen3", max_batch=6, max_num_batched_tokens=128, **options)
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(50, temperature=temperature, seed=4, ignore_eos=True)
        agrees_with_hf(policy, prompts, sampling, {f"at {temperature}": engine.generate(prompts, sampling)}, "qwen3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [*((family, APART[1]) for family in ("phi3", "olmo2", "starcoder2", "qwen3_moe")), ("ministral3", APART[0])],
)
def test_families_work_in_another_process(family: str, options: dict, open_engine: Callable) -> None:
    """Ministral 3 needs `model_arguments`; heads of fused weights and of norms over all are shared."""
    policy, prompts = policy_of("gkv", budget=64, window=8, period=8), random_prompts(LENGTHS)
    engine = open_engine(policy, family, max_batch=6, max_num_batched_tokens=128, **options)
    sampling = SamplingConfig(50, seed=4, ignore_eos=True)
    agrees_with_hf(policy, prompts, sampling, {family: engine.generate(prompts, sampling)}, family)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "tied"), [(APART[0], False), (APART[1], False), (APART[1], True)], ids=str)
def test_weights_reach_an_engine_in_another_process(options: dict, tied: bool, open_engine: Callable) -> None:
    """Also with top_p. Missing and unknown weights are refused."""
    folder = directory_of("llama", tie_word_embeddings=tied)
    model = type(new_model("llama")).from_pretrained(folder, dtype=torch.float32).eval()
    engine = open_engine(policy_of("gkv", budget=64, window=8, period=8), folder, **options)
    prompts, generator = random_prompts(LENGTHS), torch.Generator().manual_seed(0)
    for sampling in (SamplingConfig(50, seed=1), SamplingConfig(50, seed=1, top_p=0.8)):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
            engine.load_weights(model.named_parameters())
            rollouts = engine.generate(prompts, sampling)
            largest_gap = trainer_gap(model, rollouts)
            assert largest_gap <= 1e-5
            for name, wrong_rollouts in wrong_traces(rollouts).items():
                assert trainer_gap(model, wrong_rollouts) >= 1e-3, name
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match="were not handed over"):
        engine.load_weights((n, w) for n, w in weights.items() if n != "model.norm.weight")
    with pytest.raises(ValueError, match="nothing"):
        engine.load_weights({**weights, "model.nothing": torch.zeros(1)}.items())


@pytest.mark.slow
@pytest.mark.parametrize("options", APART, ids=str)
def test_an_engine_in_another_process_continues_after_errors(
    options: dict, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted and a refused call, with few blocks, so that some requests wait."""
    engine = open_engine(
        policy_of("h2o", budget=64, window=8, period=8),
        max_model_len=512,
        max_prompt=300,
        kv_cache_gb=0.0006,
        **options,
    )
    prompts, sampling = random_prompts(LENGTHS), SamplingConfig(50, seed=1, ignore_eos=True)
    expected = [r.completion_ids for r in engine.generate(prompts, sampling)]
    step, steps_left = engine.llm.llm_engine.step, 20

    def interrupted() -> object:
        nonlocal steps_left
        steps_left -= 1
        if not steps_left:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.llm_engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, sampling)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.generate([[]], sampling)
    assert [r.completion_ids for r in engine.generate(prompts, sampling)] == expected
