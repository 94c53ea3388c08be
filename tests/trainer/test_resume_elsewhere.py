"""A run goes on with another number of processes, or at another ZeRO stage, with the losses of an uninterrupted run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python
from trainer_runs import GRPO_KEYS, Bomb, craft, steps

from sparse_rl.metrics import read_metrics
from trainer.reshard import Layout, spread

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,  # differs between the groups of weights
    "max_steps": 6,
    "save_steps": 1,
    "save_total_limit": None,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
}
GKV = {"policy": "gkv", "budget": 16, "window": 4, "period": 4}
KINDS: dict[str, dict[str, Any]] = {
    "sft": {},
    "distill": {"cache": GKV, "rollout": {"engine": "hf"}, "top_k": 8},
    "kvpop": {
        "cache": {"policy": "kvpop", "budget": 16, "window": 4, "scorer": "mlstm"},
        "max_length": 70,
        "packing": False,
    },
    "grpo": {"cache": GKV, **GRPO_KEYS},  # one generation serves four updates
}
HALF = ("per_device_train_batch_size=2", "launch.processes=4")
ALONE = ("gradient_accumulation_steps=2", "launch.processes=1")


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """whole(kind, *words) returns (the command, the folder of an uninterrupted run on two processes)."""
    runs: dict[tuple, tuple] = {}

    def make(kind: str, *words: str) -> tuple:
        if (kind, *words) not in runs:
            folder = tmp_path_factory.mktemp(kind)
            data = {"synthetic": {"task": "running_sum", "size": 8 if kind == "grpo" else 32, "n": 3}}
            recipe = {"kind": kind, "model": tiny("qwen3"), "data": data, "output_dir": "whole", **COMMON}
            (folder / "recipe.yaml").write_text(json.dumps({**recipe, **KINDS[kind], "launch": {"processes": 2}}))

            def command(*more: str) -> Any:
                line = ("-m", "sparse_rl.cli", "train", "recipe.yaml", *words, *more)
                return python(*line, cwd=folder, path=[Path(__file__).parent])

            process = command()
            assert process.returncode == 0, process.stderr[-3000:]
            runs[kind, *words] = command, folder
        return runs[kind, *words]

    return make


def copied(folder: Path, at: int) -> Path:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / f"whole/checkpoint-{at}", run / f"checkpoint-{at}")
    shutil.copy(folder / "whole/metrics.jsonl", run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "at", "words"),
    [
        ("sft", 2, 3, ("per_device_train_batch_size=8", "launch.processes=1")),
        ("sft", 2, 3, HALF),
        ("sft", 2, 3, ("launch.zero_stage=3",)),
        ("sft", 1, 3, ("launch.zero_stage=2", *ALONE)),
        ("sft", 3, 3, ("launch.zero_stage=2", *ALONE)),
        ("sft", 3, 3, HALF),
        ("sft", 0, 3, HALF),
        ("sft", 0, 3, ALONE),
        ("distill", 2, 3, ("launch.zero_stage=3", *ALONE)),
        ("kvpop", 2, 3, ("launch.zero_stage=3", *ALONE)),
        ("grpo", 2, 1, ("launch.zero_stage=3", *HALF)),
        ("grpo", 2, 3, (*ALONE, "steps_per_generation=4")),
        ("grpo", 0, 1, (*ALONE, "steps_per_generation=4")),
    ],
)
def test_a_run_goes_on_elsewhere(kind, stage, at, words, whole):
    command, folder = whole(kind, f"launch.zero_stage={stage}")
    run = copied(folder, at)
    process = command("output_dir=run", *words, "--resume")
    assert process.returncode == 0, process.stderr[-3000:]
    assert not (run / "_partial").exists()
    expected, resumed = steps(folder / "whole"), steps(run)
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    same = 4 if kind == "grpo" else 6  # the next generation is sampled with other seeds
    for before, after in zip(expected[at:same], resumed[at:same], strict=True):
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-6)
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5)
        assert after["learning_rate"] == before["learning_rate"]
    assert abs(expected[at]["loss"] - expected[at - 1]["loss"]) > 1e-3  # the control: rows and losses differ
    if kind == "grpo":
        measured = [line["replay/gap_max"] for line in resumed[same:] if "replay/gap_max" in line]
        assert len(measured) == 1  # of the one generation after the resume
        assert measured[0] <= 1e-5
        asked, again = (
            [line["prompt"] for line in read_metrics(place, "completions.jsonl") if line["step"] > 4]
            for place in (folder / "whole", run)
        )
        assert asked == again != []


@pytest.mark.slow
def test_what_cannot_go_on_elsewhere_is_refused_in_one_line(whole):
    command, folder = whole("sft", "launch.zero_stage=2", "optim=sgd")
    shard = "checkpoint-1/global_step1/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    for file, wrong in (
        ("checkpoint-1/progress_1.pt", "one of its files holds more than plain data"),
        (shard, "one of its files holds more than plain data"),
        (None, "DeepSpeed cannot convert run/checkpoint-1 (KeyError: 'exp_avg')"),
    ):
        run = copied(folder, 1)
        if file is not None:
            craft(run / file, Bomb(folder / "made"))
        process = command("output_dir=run", *HALF, "--resume")
        lines = [line for line in process.stderr.splitlines() if line.startswith("sparse-rl: error")]
        assert process.returncode == 2, process.stderr[-3000:]
        assert len(lines) == 1
        assert wrong in lines[0]
        assert not (folder / "made").exists()


def state(rank: int, widths: tuple[int, ...]) -> dict[str, Any]:
    """The state of a process of two, with micro-batches of 2 rows; a row's tokens are its number."""
    buffer = []
    for micro, width in enumerate(widths):
        ids = [100 * micro + 10 * rank + row for row in (1, 2)]
        rows = torch.tensor([[number] * width for number in ids])
        columns = {"prompt_mask": rows.clamp(max=1), "completion_ids": rows, "num_items_in_batch": torch.tensor(9)}
        buffer.append({**columns, "advantages": rows[:, 0].float(), "traces": ids})
    own = {"loss": torch.tensor(float(rank)), "initial": [3], "step": 2, "buffer": buffer, "reference": {"w": rank}}
    return {**own, "ahead": {"step": 1, "rows": list(range(8 * rank, 8 * rank + 8))}}


@pytest.mark.parametrize(("processes", "rows", "factor"), [(1, 4, 1), (1, 2, 2), (4, 1, 1), (2, 2, 1), (4, 2, 0.5)])
def test_an_update_keeps_its_rows(processes, rows, factor):
    then = Layout(2, 2, 2, 2, 4)
    now = Layout(processes, 2, rows, int(2 * factor), int(4 * factor))
    assert now.follows(then) is (processes != 2)
    states = [state(0, (3, 2, 4, 3)), state(1, (1, 5, 2, 2))]
    dealt = spread(states, then, now)
    assert [len(one["buffer"]) for one in dealt] == [now.generation] * processes
    assert [one["step"] for one in dealt] == [int(2 * factor)] * processes
    assert {float(one["loss"]) for one in dealt} == {0.5}
    assert [row for one in dealt for row in one["ahead"]["rows"]] == list(range(16))  # of the next generation
    assert {(one["ahead"]["step"], len(one["ahead"]["rows"])) for one in dealt} == {(1, 16 // processes)}

    def update(parts: list[dict[str, Any]], accumulation: int, number: int) -> list[int]:
        chosen = [one["buffer"][number * accumulation : (number + 1) * accumulation] for one in parts]
        return sorted(row for buffer in chosen for part in buffer for row in part["traces"])

    for number in (0, 1):
        assert update(dealt, now.accumulation, number) == update(states, 2, number)
    assert update(dealt, now.accumulation, 0) != update(states, 2, 1)  # the control
    for part in (part for one in dealt for part in one["buffer"]):
        assert len(part["traces"]) == len(part["completion_ids"]) == rows
        assert part["advantages"].tolist() == part["traces"] == part["completion_ids"][:, 0].tolist()
        assert part["prompt_mask"][:, -1].all()
