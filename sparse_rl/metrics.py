"""Read metrics.jsonl, the log of a run: one JSON object per line, each with a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
RECIPE_FILE = "recipe.yaml"  # beside the log in a run's directory: the run's recipe with every key written out


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
