"""Read metrics.jsonl, the log of a run: one JSON object per line, each with a step. Tell if a run learns nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
ENVIRONMENT_FILE = "environment.json"  # beside the log: the versions of the packages
RECIPE_FILE = "recipe.yaml"  # beside the log in a run's directory: the run's recipe with every key written out

UNCHANGED = "weights_unchanged"  # a metric of the log's last line, only if the final weights equal the initial weights


def runs_below(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's directory; otherwise the run directories below it, sorted by name."""
    if (folder / METRICS_FILE).is_file():
        return [folder]
    return sorted(file.parent for file in folder.rglob(METRICS_FILE))


def read_metrics(folder: str | Path, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """Return the records of a run's log. Skip invalid lines, such as the incomplete last line of a killed run."""
    file, records = Path(folder) / name, []
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace", newline="\n") as log:
        for line in log:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(step := record.get("step")) is int and 0 <= step < 2**63:
                records.append(record)
    return records


def no_lesson(metrics: Mapping[str, Any], zero_truncated: bool) -> tuple[str, int] | None:
    """Return the reason, with its mend, why nothing can be learnt from the rewards of a GRPO batch. None: it may teach.

    metrics : TRL's metrics of the batch, or of a line of the log

    The second value is the number of such batches in a row that should be reported.
    """
    reward = metrics.get("reward", 0.0)
    if reward is None or reward != reward:
        return "no completion has a reward, because all are None: check the reward functions and their columns", 1
    if zero_truncated and metrics.get("completions/clipped_ratio") == 1:
        why = "every completion was cut off, and cut-off completions have advantage 0, so the gradient is 0"
        return f"{why}: raise max_completion_length, or set zero_truncated_advantages: false", 1
    if metrics.get("rejection/kept", 1.0) < 0.1:
        return "rejection keeps less than a tenth of the completions: raise cache.budget", 5
    if metrics.get("frac_reward_zero_std") == 1:
        why = "the rewards within each group are equal, so all advantages are 0"
        return f"{why}: check the reward functions, or use problems that the model solves sometimes but not always", 10
    return None


def why_unchanged(log: Sequence[Mapping[str, Any]], zero_truncated: bool) -> str | None:
    """Describe a run whose weights did not change, and the mend. None if they changed. The arguments are as above."""
    if not any(line.get(UNCHANGED) for line in log):
        return None
    reasons = [no_lesson(line, zero_truncated) for line in log if "reward" in line]
    mend = "raise learning_rate, or train in float32, which does not round small updates away"
    last = reasons[-1] if reasons and all(reasons) else None
    return f"the weights did not change, and the final model equals the start model: {last[0] if last else mend}"
