"""The quickstart chooses a budget, runs stages (other commands) and writes a report. The commands have other tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_rl.commands import quickstart
from sparse_rl.commands.quickstart import (
    AIM,
    LABELS,
    LEAST,
    METHODS,
    START,
    QuickstartError,
    Stages,
    choose_budget,
    report,
    shipped_budget,
)
from sparse_rl.recipe import load_recipe


def test_the_smallest_budget_with_an_accuracy_in_the_aim_is_chosen():
    assert choose_budget({32: 0.1, 40: 0.3, 48: 0.45, 64: 0.9}) == 40
    assert choose_budget({64: 0.5, 32: 0.25}) == 32


def test_if_no_budget_is_in_the_aim_the_nearest_above_chance_is_chosen():
    assert choose_budget({32: 0.12, 40: 0.2, 48: 0.7, 64: 0.9}) == 40  # .05 below the aim, .2 above it
    assert choose_budget({32: 0.12, 40: 0.17, 48: 0.55, 64: 0.9}) == 48  # .17 is nearer than .9, but at chance


def test_budgets_all_at_chance_are_an_error_with_their_accuracies():
    with pytest.raises(QuickstartError, match=r"no budget .* 0\.18 .*32: 0\.10, 40: 0\.17"):
        choose_budget({32: 0.10, 40: 0.17})
    assert LEAST < AIM[0] < AIM[1]


def test_results_give_the_largest_gap_of_the_replayed_runs(tmp_path):
    """The gap of the mismatched run, 9 or more, does not count, since this run has no replay."""
    rows = []
    for seed in (0, 1):
        for name in LABELS:
            folder = tmp_path / f"seed{seed}" / METHODS.get(name, name)
            folder.mkdir(parents=True)
            lines = [{"step": s, "reward": 0.1 * s, "replay/gap_mean": 1e-7, "replay/gap_max": 1e-6} for s in (1, 2)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            gap = None if name == "sft" else {"rl_sparse": 1e-6, "rl_full": 0.0, "rl_mismatch": 9.0}[name] * (seed + 1)
            rows.append(
                {"name": name, "seed": seed, "policy": "streaming", "budget": 40, "n": 1024, "accuracy_evicted": 0.5,
                 "accuracy_full": 0.9, "standard_error_evicted": 0.01, "standard_error_full": 0.01, "retention": 0.4,
                 "max_abs_dlogp": gap}
            )  # fmt: skip
    report(rows, tmp_path, 60.0, "hf")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["max_abs_dlogp"] == 2e-6
    assert len(results["rows"]) == 8
    assert {p.name for p in tmp_path.glob("*.png")} == {"accuracy.png", "learning_curves.png", "replay_gap.png"}


def test_run_directories_follow_the_recipe_names():
    for name in METHODS.values():
        recipe = load_recipe(f"quickstart/{name}")
        assert Path(recipe.output_dir).name == name
        assert recipe.model == "quickstart/model"
    assert shipped_budget() == load_recipe("quickstart/grpo_mismatch").cache.budget == 40
    assert list(LABELS) == [START, *METHODS]


TRAINING_PROGRAM = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
for step in (1, 2):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward": 0.25 * step}) + "\\n")
    time.sleep(0.7)
sys.exit(int(sys.argv[2]))
"""


def run_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Run one stage whose command is TRAINING_PROGRAM."""
    script = tmp_path / "works.py"
    script.write_text(TRAINING_PROGRAM)
    popen = quickstart.subprocess.Popen
    start_program = lambda command, **keys: popen([command[0], str(script), str(tmp_path / "run"), str(status)], **keys)  # noqa: E731
    monkeypatch.setattr(quickstart.subprocess, "Popen", start_program)
    Stages().run("seed 0: RL-Sparse", tmp_path / "run", ["train"])


def test_a_stage_prints_its_start_and_end(tmp_path, monkeypatch, capsys):
    run_stage(tmp_path, monkeypatch, 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["start", "seed", "0:", "RL-Sparse"]
    assert lines[-1].split()[:4] == ["done", "seed", "0:", "RL-Sparse"]


def test_a_stage_that_fails_stops_the_quickstart_and_names_its_log(tmp_path, monkeypatch):
    with pytest.raises(QuickstartError, match=r"seed 0: RL-Sparse failed \(log: .*log.txt\): no output"):
        run_stage(tmp_path, monkeypatch, 3)
