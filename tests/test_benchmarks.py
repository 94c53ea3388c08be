"""Every benchmark starts as documented from any folder, and no benchmark folder shadows one of our packages."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = [
    path for path in sorted(Path(__file__).parents[1].glob("benchmarks/*.py")) if "def main(" in path.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_benchmark_starts_in_any_folder_and_leaves_no_file(script: Path, tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert f"usage: {script.name}" in process.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module benchmarks.results."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    return importlib.import_module("benchmarks.results")


def test_over_seeds_returns_mean_and_standard_error(results: ModuleType) -> None:
    assert results.over_seeds([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7 / 3)))
    assert math.isnan(results.over_seeds([1.0])[1])


def test_seeds_are_added_only_to_a_file_of_the_same_settings(results: ModuleType, tmp_path: Path) -> None:
    """`with_rows_before` merges new rows with those of the results file; a new row replaces the old row of its seed. A
    file with other settings is refused. Each row records the commit and date of its own measurement.
    """

    def key(row: dict[str, Any]) -> Any:
        return row["seed"]

    out, first = tmp_path / "deep" / "found.json", [{"seed": 0, "right": 1}, {"seed": 1, "right": 2}]
    assert [(row["seed"], row["right"]) for row in results.with_rows_before(out, {}, first, key)] == [(0, 1), (1, 2)]
    results.write(out, settings={"steps": [1]}, rows=[{**row, "commit": "old", "date": "1999-01-01"} for row in first])
    merged = results.with_rows_before(out, {"steps": [1]}, [{"seed": 1, "right": 9}, {"seed": 2, "right": 3}], key)
    assert [(row["seed"], row["right"]) for row in merged] == [(0, 1), (1, 9), (2, 3)]
    assert [row["commit"] == "old" for row in merged] == [True, False, False]
    results.write(out, settings={"steps": [1]}, rows=merged)
    *_, line = results.provenance(out.parent).splitlines()
    assert "old" in line
    assert merged[1]["commit"] in line
    assert f"1999-01-01, {merged[1]['date']}" in line
    with pytest.raises(SystemExit, match="other settings"):
        results.with_rows_before(out, {"steps": [2]}, [], key)
    assert json.loads(out.read_text())["measured"].keys() >= {"command", "commit", "date", "machine", "torch"}


def test_the_docs_list_how_every_results_file_was_measured(results: ModuleType) -> None:
    files = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("*.json"))
    assert len(results.provenance().splitlines()) == 2 + len(files) > 20
    assert results.provenance() in (Path(__file__).parents[1] / "docs/benchmarks.md").read_text()


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("2 ba? 7", 1.0), ("2 ba? 7 ba? 1", 1.0), ("2 ba? 1 ba? 7", 0.5), ("2", 0.5), ("2 ba?", 0.5), ("", 0.0),
        ("7 du? 2", 0.0),
    ],
)  # fmt: skip
def test_a_fact_counts_by_its_first_answer(results: ModuleType, completion: str, share: float) -> None:
    """The prompt asks for `du`, whose answer is 2. After this answer the completion may state the other known fact,
    ba=7. `facts_said` returns the share of the two facts that the completion states correctly; only the first mention
    of a fact counts.
    """
    facts_said = importlib.import_module("benchmarks.facts_said").facts_said
    assert facts_said(["known: ba=7 the of du=2 asked: du?"], [completion]) == [share]
