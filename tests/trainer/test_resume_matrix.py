"""A run resumed in mid-buffer, in the first or second epoch, equals an uninterrupted run bit for bit.

This holds for all ZeRO stages on one and two processes, for LoRA, and for both engines. Further tests are about a full
disk on one rank, and about code in checkpoint files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from learned import learned_policy
from processes import python
from safetensors.torch import load_file
from trainer_runs import GRPO_KEYS, Bomb, craft, timeless

from sparse_rl.metrics import read_metrics

pytestmark = pytest.mark.slow
FULL_DISK = """
import os, resource
from trainer_runs import digits as plain

def digits(completions, trainer_state, **columns):
    '''The share of digits; from the step that follows FULL_AFTER on, the rank FULL can write no large file.'''
    if trainer_state.global_step >= int(os.environ["FULL_AFTER"]) and os.environ["RANK"] == os.environ["FULL"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    return plain(completions)
"""
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
    "max_steps": 8,
    "save_steps": 1,
    "save_total_limit": None,
    "logging_steps": 2,
    "per_device_train_batch_size": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "sft": {"lr_scheduler_type": "linear"},
    "distill": {
        "cache": {"policy": "gkv", "budget": 16, "window": 4, "period": 4},
        "rollout": {"engine": "hf"},
        "packing": True,
        "top_k": 8,
        "refresh_every": 1,
    },
    "kvpop": {
        "cache": {"policy": "kvpop", "budget": 16, "window": 4, "scorer": "mlstm"},
        "max_length": 70,
        "boundary": {"queries": 8},
        "scorer_warmup_steps": 2,
    },
    "grpo": {"cache": {"policy": "gkv", "budget": 16, "window": 4, "period": 4}, **GRPO_KEYS},
}


@pytest.fixture
def command(tiny, tmp_path):
    """command(kind, output, *words, processes=1, model=None, **environment) runs `sparse-rl train` with 4 steps an
    epoch.
    """

    def run(kind, output, *words, processes=1, model=None, **environment):
        size = {"grpo": 2, "sft": 16, "distill": 16, "kvpop": 24}[kind] * processes
        data = {"synthetic": {"task": "running_sum", "size": size, "n": 3}}
        recipe = {"kind": kind, "model": model or tiny("qwen3"), "output_dir": output, "data": data, **COMMON}
        (tmp_path / "recipe.yaml").write_text(json.dumps({**recipe, **KINDS[kind], "launch": {"processes": processes}}))
        words = ("-m", "sparse_rl.cli", "train", "recipe.yaml", *words)
        return python(*words, cwd=tmp_path, path=[Path(__file__).parent, tmp_path], **environment)

    return run


def end(folder: Path) -> tuple:
    """Return hashes of the weights, the mean loss of the last summary, all metrics but timings, and the completions."""
    lines = read_metrics(folder)
    mean = [line["train_loss"] for line in lines if "train_loss" in line][-1]
    files = sorted((folder / "model").glob("*.safetensors"))  # scorers have a separate file
    assert all(file.stat().st_size > 500 for file in files)  # none is empty
    weights = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    logged = timeless([line for line in lines if "train_loss" not in line])
    return weights, mean, logged, read_metrics(folder, "completions.jsonl")


def check_resume(command, tmp_path, kind, *words, stops=(7,), **options):
    process = command(kind, "whole", *words, **options)
    assert process.returncode == 0, process.stderr[-3000:]
    expected = end(tmp_path / "whole")
    assert [line["step"] for line in expected[2]] == [2, 4, 6, 8]
    for step in stops:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "model")
        process = command(kind, "run", *words, "--resume", f"run/checkpoint-{step}", **options)
        assert process.returncode == 0, process.stderr[-3000:]
        assert end(tmp_path / "run") == expected, (step, end(tmp_path / "run"), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "processes"), [(0, 1), (0, 2), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_resume_is_exact_under_every_zero_stage(kind, stage, processes, command, tmp_path):
    stops = (3, 4, 7) if stage == 0 else (7,)  # mid-buffer; end of the first epoch; mid-buffer in the second
    check_resume(command, tmp_path, kind, f"launch.zero_stage={stage}", stops=stops, processes=processes)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_is_exact_if_bfloat16_gradients_are_added_up_in_float32(stage, command, tmp_path):
    words = (f"launch.zero_stage={stage}", "dtype=bfloat16", "gradient_accumulation_steps=2", "max_steps=8")
    check_resume(command, tmp_path, "sft", *words, stops=(3,), processes=2)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", ["grpo", "distill"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_resume_is_exact_under_a_learned_policy(stage, kind, learn, command, learned, tmp_path):
    policy = learned_policy("delayed", 16, window=4)
    folder = Path(learned(policy))
    words = [f"cache={json.dumps(policy.config.as_block())}", f"launch.zero_stage={stage}"]
    words += ["packing=false"] if kind == "distill" else []
    words += ["scorers={weight: 1.0, learning_rate: 1e-3, boundary: {queries: 8}}"] if learn else []
    check_resume(command, tmp_path, kind, *words, processes=2, model=str(folder))
    before, after = (load_file(place / "cache_scorer.safetensors") for place in (folder, tmp_path / "run" / "model"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before) is not learn
    lines = read_metrics(tmp_path / "run")
    retention = [line["cache/retention"] for line in lines if "cache/retention" in line]
    assert retention
    assert all(0 < share < 1 for share in retention)
    gaps = [line["replay/gap_max"] for line in lines if "replay/gap_max" in line]
    assert bool(gaps) is (kind == "grpo")
    assert all(gap <= 1e-5 for gap in gaps)


@pytest.mark.parametrize("kind", ["grpo", "distill"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_resume_is_exact_under_attention_matching(stage, kind, command, tmp_path):
    words = ["cache={policy: am, budget: 16, sinks: 1, window: 4, period: 8}", f"launch.zero_stage={stage}"]
    words += ["packing=false"] if kind == "distill" else []
    check_resume(command, tmp_path, kind, *words, processes=2)
    lines = read_metrics(tmp_path / "run")
    gaps = [line["replay/gap_max"] for line in lines if "replay/gap_max" in line]
    assert bool(gaps) is (kind == "grpo")
    assert all(gap <= 1e-5 for gap in gaps)
    assert any("match/output" in line for line in lines) is (kind == "grpo")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kvpop"])
def test_resume_is_exact_with_lora(kind, command, tmp_path):
    check_resume(command, tmp_path, kind, "lora={r: 4}")
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("kind", ["grpo", "distill"])
def test_resume_is_exact_with_the_vllm_engine(kind, command, tiny, tmp_path):
    pytest.importorskip("vllm")
    model = tiny("qwen3", head_dim=32)
    words = ["rollout.engine=vllm", "rollout.kv_cache_gb=0.1", "data.max_prompt_tokens=40"]
    words += ["max_completion_length=64"] if kind == "distill" else []
    check_resume(command, tmp_path, kind, *words, model=model)


@pytest.mark.parametrize(("stage", "full"), [(0, "1"), (2, "0"), (2, "1"), (3, "1")])
def test_a_full_disk_of_one_rank_ends_the_run(stage, full, command, tmp_path):
    (tmp_path / "full_disk.py").write_text(FULL_DISK)
    words = (f"launch.zero_stage={stage}", "rewards=[full_disk:digits]")
    process = command("grpo", "run", *words, processes=2, FULL_AFTER="4", FULL=full)
    assert process.returncode == 1
    lines = [line for line in process.stderr.splitlines() if line.startswith("sparse-rl:")]
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith("sparse-rl: stopped: checkpoint-5 could not be written: ")
    assert lines[0].endswith("in run checkpoint-4 is complete, --resume continues from it")
    process = command("grpo", "run", *words, "--resume", processes=2, FULL_AFTER="100", FULL=full)
    assert process.returncode == 0, process.stderr[-3000:]
    assert [line["step"] for line in end(tmp_path / "run")[2]] == [2, 4, 6, 8]


@pytest.mark.parametrize("stage", [2, 3])
def test_no_code_in_a_deepspeed_checkpoint_runs(stage, command, tmp_path):
    """DeepSpeed reads its files with weights_only=False."""
    words = (f"launch.zero_stage={stage}", "max_steps=2")
    process = command("sft", "whole", *words)
    assert process.returncode == 0, process.stderr[-3000:]
    files = [file.relative_to(tmp_path / "whole") for file in (tmp_path / "whole/checkpoint-2").rglob("*_states.pt")]
    assert len(files) == 2
    for file in files:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "whole/checkpoint-2", tmp_path / "run/checkpoint-2")
        craft(tmp_path / "run" / file, Bomb(tmp_path / "made"))
        process = command("sft", "run", *words, "--resume")
        assert process.returncode == 2, process.stderr[-3000:]
        assert not (tmp_path / "made").exists(), process.stderr[-3000:]
        lines = [line for line in process.stderr.splitlines() if line.startswith("sparse-rl:")]
        assert len(lines) == 1
        assert "--resume: run/checkpoint-2 cannot be loaded: one of its files holds more than plain data" in lines[0]
