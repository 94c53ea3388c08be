"""W&B and TensorBoard get a table of the last completions and maps of their caches at the end of a GRPO run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_runs import GKV, SAMPLED, small

from sparse_rl.commands import last_rollouts
from sparse_rl.commands.train import train
from sparse_rl.metrics import read_metrics
from sparse_rl.recipe import make_recipe

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"
MAPS = ["evict_ratio", "kept_heads", "positions"]
COLUMNS = ["prompt", "completion", "tokens", "ended_by", "retention", "digits", "advantage"]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    wandb.finish()
    wandb.teardown()


def run(folder: Path, cache: dict[str, Any], report_to: list[str]) -> list[dict[str, Any]]:
    """Train two steps, with a validation after the last one, and return the lines of the log."""
    validation = {"data": {"synthetic": {"task": "running_sum", "size": 4, "n": 6, "split": "evaluation"}}, "every": 2}
    keys = small(str(QUICKSTART), folder, cache=cache, report_to=report_to, max_steps=2, validation=validation)
    train(make_recipe({**keys, **SAMPLED["grpo"], "zero_truncated_advantages": False}))  # all are truncated
    assert (folder / "model" / "model.safetensors").is_file()
    return read_metrics(folder)


def test_both_get_the_last_completions_of_training_and_maps(tmp_path: Path) -> None:
    lines = run(tmp_path / "run", GKV, ["wandb", "tensorboard"])
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/last_completions_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == COLUMNS
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table["data"]]
    logged = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    last = [line for line in logged if line["step"] == 2]
    assert len(last) == 4  # the log has the first four
    assert len({line["advantage"] for line in last}) > 1
    for row, line in zip(rows, last, strict=False):
        assert row["prompt"].endswith(line["prompt"])
        assert line["completion"] in row["completion"]
        assert row["digits"] == pytest.approx(line["rewards/digits"])
        assert row["advantage"] == pytest.approx(line["advantage"])
    (retention,) = [line["cache/retention"] for line in lines if line["step"] == 2 and "loss" in line]
    assert sum(row["retention"] for row in rows) / len(rows) == pytest.approx(retention, abs=1e-4)
    pictures = sorted(p.name.rsplit("_", 2)[0] for p in tmp_path.glob("wandb/offline-run-*/files/media/images/cache/*"))
    assert pictures == MAPS

    (folder,) = {file.parent for file in (tmp_path / "run").rglob("events.out.*")}
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0}).Reload()
    assert sorted(events.Tags()["images"]) == [f"cache/{name}" for name in MAPS]
    (tag,) = [tag for tag in events.Tags()["tensors"] if tag.startswith("last_completions")]
    (event,) = events.Tensors(tag)
    text = event.tensor_proto.string_val[0].decode()
    assert text.count("\n") == 1 + len(rows)
    assert event.step == 2


def test_a_full_cache_has_no_maps(tmp_path: Path) -> None:
    run(tmp_path / "run", {"policy": "full"}, ["wandb"])
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))) == 1
    assert not list(tmp_path.glob("wandb/offline-run-*/files/media/images"))


def test_a_failure_does_not_cost_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(last_rollouts, "draw_evict_ratios", failing)
    with caplog.at_level(logging.WARNING, "sparse_rl"):
        run(tmp_path / "run", GKV, ["wandb"])
    assert "the table of the last completions was not logged: no space left on device" in caplog.text
