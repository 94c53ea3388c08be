"""A run that is killed with SIGKILL, or that fails on a full disk, ends like an uninterrupted run after it is
resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import GRPO_KEYS, Bomb, craft, timeless

from sparse_rl.commands.main import main
from sparse_rl.metrics import read_metrics
from trainer.checkpoint import checkpoints, damage

ROOT = Path(__file__).parents[2]
COMMON = {
    "dtype": "float32",
    "gradient_checkpointing": False,
    "learning_rate": 1e-3,
    "max_steps": 6,
    "save_steps": 1,
    "per_device_train_batch_size": 4,
}
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"data": {"synthetic": {"task": "running_sum", "size": 16, "n": 3}}, "logging_steps": 2},
    "grpo": {
        "data": {"synthetic": {"task": "running_sum", "size": 2, "n": 3}},
        "cache": {"policy": "gkv", "budget": 8, "window": 3, "period": 2},
        **GRPO_KEYS,
        "importance_correction": "none",
    },
    "distill": {
        "data": {"synthetic": {"task": "running_sum", "size": 16, "n": 3}},
        "cache": {"policy": "gkv", "budget": 8, "window": 3, "period": 2},
        "rollout": {"engine": "hf"},
        "validation": {"data": {"synthetic": {"task": "running_sum", "size": 4, "n": 3, "seed": 5}}, "every": 3},
        "logging_steps": 2,
    },
    "kvpop": {
        "data": {"synthetic": {"task": "running_sum", "size": 24, "n": 3}},
        "cache": {"policy": "kvpop", "budget": 16, "window": 4, "scorer": "linear"},
        "max_length": 70,
        "boundary": {"queries": 8},
        "scorer_warmup_steps": 2,
    },
}


class Runs:
    """Runs `sparse-rl train` in forked children of one process. `whole` maps a kind to the results of its uninterrupted
    run."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        for kind, keys in RECIPES.items():
            recipe = {"kind": kind, "model": model, "output_dir": "unset", **COMMON, **keys}
            (folder / f"{kind}.yaml").write_text(json.dumps(recipe))
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("forked_runs.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **pipes, text=True, env=env, cwd=folder)  # type: ignore[call-overload]
        self.whole: dict[str, tuple] = {}
        self.operations: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}

    def __call__(self, kind: str, name: str, *words: str, **job: Any) -> tuple[int, str]:
        """Run the command; return (exit status or minus the signal, printed text)."""
        log = self.folder / f"{Path(name).name}.log"
        log.unlink(missing_ok=True)
        job |= {"words": ["train", f"{kind}.yaml", f"output_dir={name}", *words], "log": str(log)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        self.seconds[name] = answer["seconds"]
        return answer["status"], log.read_text()

    def end(self, name: str) -> tuple:
        """Return hashes of the weights, the mean loss of the last summary, all metrics but timings, and the
        completions.
        """
        folder = self.folder / name
        lines = read_metrics(folder)
        mean = [line["train_loss"] for line in lines if "train_loss" in line][-1]
        files = sorted((folder / "model").glob("*.safetensors"))  # scorers have a separate file
        weights = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
        logged = timeless([line for line in lines if "train_loss" not in line])
        return weights, mean, logged, read_metrics(folder, "completions.jsonl")

    def uninterrupted(self, kind: str) -> tuple:
        if kind not in self.whole:
            record = self.folder / "operations.json"
            status, output = self(kind, f"{kind}-whole", record=str(record))
            assert status == 0, output
            self.whole[kind] = self.end(f"{kind}-whole")
            self.operations[kind] = json.loads(record.read_text())
        return self.whole[kind]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    started = Runs(tmp_path_factory.mktemp("runs"), tiny("qwen3"))
    yield started
    started.process.stdin.close()
    started.process.wait()


def number_of(operations: list[str], *words: str, last: bool = False) -> int:
    results = [i for i, operation in enumerate(operations, 1) if all(word in operation for word in words)]
    return results[-1 if last else 0]


# kind, number of the operation at which to kill, step of the newest complete checkpoint
PLACES: dict[str, tuple[str, Callable[[list[str]], int], int]] = {
    "first file": ("sft", lambda done: number_of(done, "open", "_partial/checkpoint-3"), 2),
    "last file": ("grpo", lambda done: number_of(done, "open", "_partial/checkpoint-4/manifest.json"), 3),
    "before the rename": ("grpo", lambda done: number_of(done, "os.rename", "_partial/checkpoint-6"), 5),
    "while the oldest is removed": ("sft", lambda done: number_of(done, "os.r", "_partial/checkpoint-2", last=True), 4),
    "in the export": ("grpo", lambda done: number_of(done, "os.rename", "_partial/model"), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_at_a_checkpoint_resumes_exactly(place, runs):
    """The run is killed at one file operation (PLACES); complete checkpoints stay undamaged."""
    kind, where, newest = PLACES[place]
    expected = runs.uninterrupted(kind)
    name = place.replace(" ", "-")
    status, _ = runs(kind, name, kill_at=where(runs.operations[kind]))
    folder = runs.folder / name
    assert status == -9
    assert not (folder / "model").exists()
    assert (folder / "_partial").exists()
    assert checkpoints(folder)[-1].name == f"checkpoint-{newest}"
    assert all(damage(path) is None for path in checkpoints(folder))
    status, output = runs(kind, name, "--resume")
    assert status == 0, output
    assert "skipped" not in output, output
    assert runs.end(name) == expected
    assert not (folder / "_partial").exists()
    assert len(checkpoints(folder)) == 2


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_the_run_ends_like_an_uninterrupted_run(runs):
    expected = runs.uninterrupted("grpo")
    shutil.copytree(runs.folder / "grpo-whole", folder := runs.folder / "damaged")
    (folder / "checkpoint-6" / "progress_0.pt").unlink()
    status, text = runs("grpo", "damaged", "--resume")
    assert status == 0, text
    assert runs.end("damaged") == expected, text
    assert text.count("skipped") == 1
    assert "skipped damaged/checkpoint-6: progress_0.pt is missing" in text
    assert {path.name for path in folder.glob("*checkpoint-*")} == {f"{x}checkpoint-{n}" for x, n in PAIRS}
    status, text = runs("grpo", "damaged", "--resume", "damaged/later-checkpoint-6")
    line = "error: --resume: damaged/later-checkpoint-6 is not a complete checkpoint: progress_0.pt is missing"
    assert status == 2
    assert text == f"sparse-rl: {line}\n"


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """The folder of a recipe and its finished run, which has a checkpoint after each of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = {"kind": "sft", "model": tiny("qwen3"), "output_dir": "unset", **COMMON, **RECIPES["sft"], "max_steps": 2}
    (folder / "sft.yaml").write_text(json.dumps(recipe))
    assert main(["train", f"{folder}/sft.yaml", f"output_dir={folder}/run"]) == 0
    return folder


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "progress_0.pt"])
def test_no_code_in_a_checkpoint_runs(file, finished, tmp_path, capsys):
    place, touched_file = tmp_path / "crafted/checkpoint-1", tmp_path / "made"
    contents = (Bomb(touched_file), ["something", "else"], b"nothing that torch has written")
    for content in contents if file == "progress_0.pt" else contents[:1]:
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(finished / "run/checkpoint-1", place)
        craft(place / file, content)
        status = main(["train", f"{finished}/sft.yaml", f"output_dir={place.parent}", "--resume"])
        output = capsys.readouterr().err
        assert status == 2, output
        assert not touched_file.exists(), output
        assert only_line(output).startswith(f"sparse-rl: error: --resume: {place} cannot be loaded: "), output


PAIRS = (("", 5), ("", 6), ("later-", 6))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_full_disk_ends_the_run_with_one_line(kind, runs):
    """A limit on file sizes from step 4 on takes the place of a full disk."""
    expected, name = runs.uninterrupted(kind), f"{kind}-limited"
    status, output = runs(kind, name, full_after=4, largest_file=60_000)
    assert status == 1
    assert "Traceback" not in output
    line = (
        f"checkpoint-4 could not be written: .*File too large.*; in {name} checkpoint-3 is complete, --resume continues"
    )
    assert re.fullmatch(f"sparse-rl: stopped: {line} from it", only_line(output))
    assert [path.name for path in checkpoints(runs.folder / name)] == ["checkpoint-2", "checkpoint-3"]
    assert not (runs.folder / name / "_partial").exists()
    assert runs(kind, name, "--resume")[0] == 0
    assert runs.end(name) == expected


def only_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("sparse-rl:")]
    assert len(lines) == 1, text
    return lines[0]


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(bytes) returns a mounted file system of that size; the test is skipped if none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here; the limit on the size of files is tested")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.slow
def test_a_run_resumes_after_its_disk_was_full(small_disk, runs):
    expected = runs.uninterrupted("sft")
    size = sum(file.stat().st_size for file in (runs.folder / "sft-whole/checkpoint-6").rglob("*"))
    disk = small_disk(int(2.6 * size))  # two checkpoints and a part of the third
    status, output = runs("sft", str(disk / "run"))
    assert status == 1
    line = "sparse-rl: stopped: checkpoint-3 could not be written: the disk is full; in "
    assert only_line(output) == f"{line}{disk}/run checkpoint-2 is complete, --resume continues from it"
    subprocess.run(["mount", "-o", f"remount,size={9 * size}", str(disk)], check=True)
    assert runs("sft", str(disk / "run"), "--resume")[0] == 0
    assert runs.end(str(disk / "run")) == expected


KILLS, CHAIN = 25, 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_a_run_killed_at_random_moments_resumes_exactly(kind, runs):
    """25 kills at seeded moments: at a file operation up to the first checkpoint, at any of them, or at any time."""
    expected, operations = runs.uninterrupted(kind), runs.operations[kind]
    first = number_of(operations, "os.rename", "_partial/checkpoint-1")
    draw, kills, partial, fresh, chains = random.Random(f"moments of {kind}"), 0, 0, 0, 0
    while kills < KILLS:
        chains += 1
        name = f"{kind}-{chains}"
        for kills_left in reversed(range(CHAIN + 1)):
            complete = checkpoints(runs.folder / name)
            moment: dict[str, Any] = {}
            if kills_left and kills < KILLS:
                place = {"kill_at": draw.randint(1, first if kills % 3 == 0 else len(operations))}
                moment = {"kill_after": draw.uniform(0, runs.seconds[f"{kind}-whole"])} if kills % 3 == 2 else place
            status, output = runs(kind, name, *["--resume"] * bool(complete), **moment)
            if status == 0:
                break
            assert status == -9, output  # a run can always be resumed or started again
            kills += 1
            partial += (runs.folder / name / "_partial").exists()
            fresh += not checkpoints(runs.folder / name)
            assert all(damage(path) is None for path in checkpoints(runs.folder / name))
        assert runs.end(name) == expected, (chains, kills)
        shutil.rmtree(runs.folder / name)
    assert partial >= 3
    assert fresh >= 1
