"""The quickstart's own decisions: which budget, and what it reports. Its stages are tested where they live."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_rl.commands.quickstart import AIM, LABELS, LEAST, QuickstartError, choose_budget, report


def test_the_smallest_budget_in_the_aim_is_taken() -> None:
    assert choose_budget({32: 0.1, 40: 0.3, 48: 0.45, 64: 0.9}) == 40
    assert choose_budget({64: 0.5, 32: 0.25}) == 32


def test_else_the_nearest_that_is_not_at_chance() -> None:
    assert choose_budget({32: 0.12, 40: 0.2, 48: 0.7, 64: 0.9}) == 40  # .05 below the aim, .2 above it
    assert choose_budget({32: 0.12, 40: 0.17, 48: 0.55, 64: 0.9}) == 48  # .17 is nearer than .9, but at chance


def test_all_at_chance_is_an_error_that_says_what_was_found() -> None:
    with pytest.raises(QuickstartError, match=r"no budget .* 0\.18 .*32: 0\.10, 40: 0\.17"):
        choose_budget({32: 0.10, 40: 0.17})
    assert LEAST < AIM[0] < AIM[1]


def test_results_name_the_largest_gap_of_the_replayed_runs(tmp_path: Path) -> None:
    rows = []
    for seed in (0, 1):
        for name in LABELS:
            folder = tmp_path / f"seed{seed}" / name
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
    assert {p.name for p in tmp_path.glob("*.png")} == {"learning_curves.png", "replay_gap.png"}
