"""The command on several CPU processes, also with DeepSpeed: the invariant holds, and a killed run can be resumed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, python
from safetensors.torch import load_file
from standin import StandIn, serving
from trainer_runs import steps, timeless

from sparse_rl.models.load import load_config
from sparse_rl.models.weights import check_weights
from trainer.checkpoint import locked

pytestmark = pytest.mark.slow
GKV = {"policy": "gkv", "budget": 16, "window": 4, "period": 4}
GSM8K = ROOT.parent / "shared/data/gsm8k_train.jsonl"
REWARDS = """
import os, signal

def digits(completions, trainer_state, **columns):
    '''The share of digits; kills its process, of the rank DYING or of any, in the step that follows DIE_AFTER.'''
    rank = os.environ.get("RANK", "0")
    dying = os.environ.get("DYING", rank) == rank
    if dying and trainer_state.global_step >= int(os.environ.get("DIE_AFTER", 1000)):
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
"""


@pytest.fixture
def command(tiny, tmp_path):
    """command(output, *words, launcher=(), timeout=600, **environment) runs `sparse-rl train` on GSM8K with 2
    processes.
    """
    problems = tmp_path / "problems.jsonl"
    if GSM8K.is_file():
        with GSM8K.open() as file:
            rows = [json.loads(next(file)) for _ in range(32)]
    else:
        rows = [
            {"problem": f"Ada has {i} apples and gets {i} more. How many?", "answer": str(2 * i)} for i in range(32)
        ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    recipe: dict[str, Any] = {
        "kind": "grpo",
        "model": tiny("qwen3"),
        "output_dir": "unset",
        "dtype": "float32",
        "data": {"path": str(problems), "columns": {"prompt": "problem"}, "chat": False, "max_prompt_tokens": 300},
        "cache": GKV,
        "rewards": ["math", {"name": "my_rewards:digits", "weight": 0.5}],
        "rollout": {"engine": "hf"},
        "importance_correction": "none",
        "learning_rate": 1e-3,
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 20,
        "launch": {"processes": 2, "zero_stage": 2},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML

    def run(output, *words, launcher=("-m", "sparse_rl.cli"), timeout=600, **environment):
        words = (*launcher, "train", "recipe.yaml", f"output_dir={tmp_path / output}", *words)
        return python(*words, cwd=tmp_path, path=[tmp_path], timeout=timeout, **environment)

    return run


def check_run(process: subprocess.CompletedProcess, folder: Path, count: int) -> list[dict[str, Any]]:
    assert process.returncode == 0, process.stderr[-3000:]
    lines = steps(folder)
    assert [line["step"] for line in lines] == list(range(1, count + 1))
    assert all(line["replay/gap_max"] <= 1e-5 and line["grad_norm"] > 0 for line in lines)
    return lines


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_synced_reference_model_is_restored_by_a_resume(stage, command, tmp_path):
    words = ("beta=0.1", "sync_ref_model=true", "ref_model_sync_steps=2", f"launch.zero_stage={stage}")
    whole = killed_and_resumed(command, tmp_path, *words)
    assert whole[0]["kl"] < 1e-8 < whole[2]["kl"]


def killed_and_resumed(command: Callable, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the steps of an uninterrupted run. Check that a run that is killed in step 3 and resumed from checkpoint 2
    repeats these steps bit for bit.
    """
    whole = check_run(command("whole", *words), folder / "whole", 4)
    killed = command("killed", *words, DIE_AFTER="2")
    assert killed.returncode not in (0, 2)
    assert [line["step"] for line in steps(folder / "killed")] == [1, 2]
    resumed = check_run(command("killed", *words, "--resume"), folder / "killed", 4)
    assert timeless(resumed) == timeless(whole)
    weights, expected = (load_file(folder / name / "model/model.safetensors") for name in ("killed", "whole"))
    assert all((weights[name] == expected[name]).all() for name in expected)
    return whole


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_run_with_vllm_equals_a_run_with_the_live_module(stage, command, tiny, tmp_path):
    model = tiny("qwen3", head_dim=32)  # a head_dim that vLLM supports on a CPU
    words = (f"model={model}", "max_steps=3", "save_steps=0", f"launch.zero_stage={stage}")
    with_vllm = check_run(command("own", *words, "rollout.engine=vllm", TORCHDYNAMO_DISABLE="1"), tmp_path / "own", 3)
    assert all(line["sync/probe_gap"] <= 1e-5 for line in with_vllm)
    live = check_run(command("live", *words), tmp_path / "live", 3)
    assert [(line["reward"], line["grad_norm"]) for line in with_vllm] == [(x["reward"], x["grad_norm"]) for x in live]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_processes_share_two_servers(stage, command, tiny, tmp_path):
    """The run is that of the live module; one step ahead, it is the same whatever the servers do. One of the processes
    gives a server the weights. Control: one step ahead is another run.
    """
    fewer = (f"launch.zero_stage={stage}", "max_steps=3", "save_steps=0", "data.max_prompt_tokens=200")

    def run(name: str, pushes: int, *words: str, faults: Any = ((), ())) -> tuple[list[Any], dict[str, Any]]:
        one, other = (StandIn(tiny("qwen3"), GKV, faults=some) for some in faults)
        with serving(one, other) as urls:
            if words:
                words = (*words, "rollout.engine=server", f"rollout.servers=[{','.join(urls)}]")
            process = command(name, *fewer, *words)
        assert process.returncode == 0, process.stderr[-3000:]
        assert one.pushes == other.pushes == pushes
        lines = [{n: v for n, v in x.items() if n[:5] != "sync/"} for x in timeless(steps(tmp_path / name))]
        assert len(lines) == 3
        return lines, load_file(tmp_path / name / "model/model.safetensors")

    def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
        return all((left[name] == right[name]).all() for name in left)

    live, served = run("live", 0), run("served", 3, "rollout.ahead=0", faults=(["", "reset"], ["500"]))
    assert live[0] == served[0] and equal(live[1], served[1])
    words = "rollout.ahead=1", "importance_correction=token_truncate"
    ahead, again = run("ahead", 2, *words), run("again", 2, *words, faults=(["", "slow", "reset"], ["slow", "409"]))
    assert ahead[0] == again[0] and equal(ahead[1], again[1])
    assert not equal(live[1], ahead[1])


@pytest.mark.parametrize(("processes", "stages"), [(1, (0, 2)), (2, (0, 1, 2, 3))])
def test_zero_stages_give_the_same_results(processes, stages, command, tmp_path):
    """DeepSpeed needs a process group even for one process, and the command creates this group."""
    first = {}
    for stage in stages:
        words = ("max_steps=2", "save_steps=0", f"launch.processes={processes}", f"launch.zero_stage={stage}")
        process = command(f"zero{stage}", *words, "gradient_checkpointing=true")
        first[stage] = check_run(process, tmp_path / f"zero{stage}", 2)[0]
    for line in first.values():
        assert line["reward"] == first[0]["reward"]
        assert line["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=1e-4)


def test_truncated_draws_are_replayed_at_every_zero_stage(command, tmp_path):
    """With the old policy's and a reference model's log-probs, and a head that ZeRO-3 partitions."""
    first = {}
    for stage in (0, 2, 3):
        words = ("max_steps=2", "save_steps=0", "top_p=0.8", "beta=0.1", "importance_correction=token_truncate")
        process = command(f"zero{stage}", *words, f"launch.zero_stage={stage}", "gradient_checkpointing=true")
        lines = check_run(process, tmp_path / f"zero{stage}", 2)
        assert all(line["support/gap_max"] <= 1e-5 and line["support/size"] > 1 for line in lines)
        assert lines[0]["kl"] < 1e-8 < lines[1]["kl"]
        first[stage] = lines[0]
    for line in first.values():
        assert [line[name] for name in ("reward", "support/size")] == [first[0]["reward"], first[0]["support/size"]]
        assert line["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=1e-4)


def test_without_checkpointing_truncated_draws_are_replayed_in_two_processes(command, tmp_path):
    """DDP then looks for unused parameters, and rebuilds the model's output from its fields."""
    words = ("max_steps=2", "save_steps=0", "top_p=0.8", "launch.zero_stage=0", "gradient_checkpointing=false")
    lines = check_run(command("ddp", *words), tmp_path / "ddp", 2)
    assert all(line["support/gap_max"] <= 1e-5 and line["support/mass"] < 1 for line in lines)


def test_zero_3_trains_experts_as_zero_0_does(command, tiny, tmp_path):
    lines = {}
    for stage in (0, 3):
        words = (f"model={tiny('qwen3_moe')}", "max_steps=2", "save_steps=0", f"launch.zero_stage={stage}")
        lines[stage] = check_run(command(f"zero{stage}", *words), tmp_path / f"zero{stage}", 2)
        model = str(tmp_path / f"zero{stage}/model")
        check_weights(load_config(model), model)
    for without, sharded in zip(lines[0], lines[3], strict=True):
        assert without["reward"] == sharded["reward"]
        assert without["grad_norm"] == pytest.approx(sharded["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_zero_trains_layers_with_a_state_as_one_process_does(family, command, tiny, tmp_path):
    """Mixers read the weight of their convolution without calling it, which ZeRO-3 has in parts."""
    first = {}
    for stage in (0, 2, 3):
        words = (f"model={tiny(family)}", "max_steps=2", "save_steps=0", f"launch.zero_stage={stage}")
        process = command(f"zero{stage}", *words, "gradient_checkpointing=true")
        first[stage] = check_run(process, tmp_path / f"zero{stage}", 2)[0]
    for line in first.values():
        assert line["reward"] == first[0]["reward"]
        assert line["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=1e-4)


def test_two_machines_make_one_run(command, tmp_path):
    """The test imitates two machines by starting the command twice on this machine."""
    words = ("max_steps=1", "save_steps=0", "launch.machines=2", "launch.main_process_ip=127.0.0.1")
    words += ("launch.main_process_port=29643",)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(command, "run", *words, f"launch.machine_rank={rank}") for rank in (0, 1)]
        for job in jobs:
            check_run(job.result(), tmp_path / "run", 1)


def test_a_dead_process_ends_the_whole_run(command, tmp_path):
    process = command("run", "save_steps=0", timeout=150, DIE_AFTER="0", DYING="1")
    assert process.returncode not in (0, -signal.SIGKILL)
    assert not steps(tmp_path / "run")


@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")])
def test_a_directory_in_use_is_refused(launcher, command, tmp_path):
    """Our launcher checks before it starts processes; under other launchers, rank 0 checks."""
    with locked(str(tmp_path / "run")):
        process = command("run", launcher=(*launcher, "-m", "sparse_rl.cli"))
    lines = [line for line in process.stderr.splitlines() if line.startswith("sparse-rl: error:")]
    assert process.returncode == (1 if launcher else 2), process.stderr[-3000:]
    assert len(lines) == 1, process.stderr[-3000:]
    assert lines[0].startswith(
        f"sparse-rl: error: output_dir: {tmp_path}/run is in use by a run: process {os.getpid()} on "
    )
    assert not (tmp_path / "run" / "recipe.yaml").exists()


@pytest.mark.parametrize(("config", "stage"), [("zero2", 2), ("zero3", 3)])
def test_accelerate_starts_the_same_run(config, stage, command, tmp_path):
    """The shipped accelerate configurations start the same run as our launcher, here with two processes and no GPU."""
    file = str(ROOT / f"recipes/accelerate_configs/{config}.yaml")
    launcher = ("-m", "accelerate.commands.launch", "--config_file", file, "--num_processes", "2")
    words = ("max_steps=1", "save_steps=0", f"launch.zero_stage={stage}")
    process = command("run", *words, launcher=(*launcher, "-m", "sparse_rl.cli"))
    check_run(process, tmp_path / "run", 1)
