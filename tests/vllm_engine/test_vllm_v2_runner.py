"""With vLLM's V2 model runner, rollouts are those of V1, to the last bit. Triton's interpreter runs V2's kernels."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import pickle, sys
from types import SimpleNamespace

import triton.backends

runner, case, file = sys.argv[1:]
if runner == "V2":  # vLLM needs a Triton that compiles for CPUs
    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from test_vllm_not_finite import BAD, GOOD, POLICIES, poisoned, prompts, served
from test_vllm_preemption import preempting
from tiny import directory_of, policy_of
from rollout import SamplingConfig, make_engine
from rollout.engine import Turn

LENGTHS = [40, 90, 33, 200, 5, 64, 7, 12, 30, 120]


def opened(model, policy, **options):
    options = {"max_batch": 4, "max_model_len": 512, "max_num_batched_tokens": 128, **options}
    return make_engine("vllm", model=model, policy=policy, kv_cache_gb=0.03, **options)


def rows_of(rollouts):
    kept = ("completion_ids", "logprobs", "model_logprobs", "finish_reason")
    sections = [{name: section.tolist() for name, section in r.trace.sections.items()} for r in rollouts]
    return [[getattr(r, name) for name in kept] for r in rollouts], sections


def sampled(engine, lengths=LENGTHS):
    "Greedily, and with seeds and top-p; more prompts than sequences at once, so blocks are reused."
    texts = prompts(lengths)
    greedy = engine.generate(texts, SamplingConfig(24, temperature=0, ignore_eos=True))
    drawn = engine.generate(texts[1:4], SamplingConfig(10, n=2, top_p=0.9, seed=3, ignore_eos=True))
    return [rows_of(greedy), rows_of(drawn)]


def conversed(engine):
    held, rows = [None] * 3, []
    for lengths in ([40, 90, 5], [7, 150, 1], [30, 3, 0]):
        turns = [Turn(t, 12, h) for t, h in zip([*prompts(filter(None, lengths)), []], held)]
        pairs = engine.converse(turns, SamplingConfig(1, seed=3, ignore_eos=True))
        rows.append(rows_of([r for r, _ in pairs]))
        held = [h for _, h in pairs]
    return rows


if __name__ == "__main__":
    if case in ("not finite", "kvpop"):
        name = "gkv" if case == "not finite" else case
        engine = opened(poisoned(name), POLICIES[name])
        if name == "kvpop":
            results = sampled(engine)
        else:  # vLLM's own log-probs differ in the last bit
            results = [row[:2] for row in served(engine, [*GOOD[:2], *BAD, *GOOD[2:]])]
            assert sum(reason == ("error", "not finite") for reason, _ in results) == len(BAD)
    elif case == "experts":
        engine = opened(directory_of("qwen3_moe"), policy_of("gkv", budget=40, window=8, period=8))
        results = sampled(engine)
    else:
        name = case.split()[-1]
        engine = opened(directory_of("qwen2"), policy_of(name, budget=40, window=8, period=8))
        if case.startswith("late"):  # requests begin when V2 calls its connector
            from vllm.v1.worker.cpu_worker import CPUWorker
            from rollout.vllm.connector import EvictionConnector
            from rollout.vllm.worker import PolicyWorker

            PolicyWorker.execute_model = CPUWorker.execute_model
            EvictionConnector.handle_preemptions = lambda self, step: self.state.begin(step.ended, step.begun)
        if case.startswith("turns"):
            results = conversed(engine)
        elif case.startswith("preempted"):
            with preempting(engine, lambda step: step in (9, 20)):
                results = sampled(engine)
        else:
            results = sampled(engine)
    kind = type(engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    with open(file, "wb") as output:
        pickle.dump((kind.__module__, results), output)
    engine.close()
"""
MODULES = {"V1": "vllm.v1.worker.cpu_model_runner", "V2": "vllm.v1.worker.cpu.model_runner"}
CASES = ("full", "gkv", "h2o", "kvpop", "experts", "preempted gkv", "not finite", "turns gkv", "turns am")


def results_of(runner: str, case: str, folder: Path) -> Any:
    file = folder / runner
    chosen = {"V1": {}, "V2": {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}}[runner]
    settings = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", **chosen}
    paths = [str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1])]
    settings["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    script = folder / "sample.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), runner, case, str(file)]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module, results = pickle.loads(file.read_bytes())
    assert module == MODULES[runner]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_runners_give_the_same_rollouts(case: str, tmp_path: Path) -> None:
    assert results_of("V2", case, tmp_path) == results_of("V1", case, tmp_path)


@pytest.mark.slow
def test_control_requests_that_begin_late_give_other_rollouts(tmp_path: Path) -> None:
    assert results_of("V2", "late gkv", tmp_path) != results_of("V1", "gkv", tmp_path)
