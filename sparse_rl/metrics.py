"""metrics.jsonl, the log of a run: one JSON object per line, each with its step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
RECIPE_FILE = "recipe.yaml"  # beside it in the directory of a run: what was asked for, every key written out


def runs_below(folder: Path) -> list[Path]:
    """The folder, where it is that of a run; else those of the runs below it, in the order of their names."""
    if (folder / METRICS_FILE).is_file():
        return [folder]
    return sorted(file.parent for file in folder.rglob(METRICS_FILE))


def read_metrics(folder: str | Path, name: str = METRICS_FILE) -> list[dict[str, Any]]:
    """The lines of a run's log; what is none, such as a torn last line (a killed run), is left out."""
    file, lines = Path(folder) / name, []
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace", newline="\n") as log:
        for text in log:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and type(step := line.get("step")) is int and 0 <= step < 2**63:
                lines.append(line)
    return lines
