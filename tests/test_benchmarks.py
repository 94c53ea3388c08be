"""Every benchmark starts as documented from any folder, and every file of results says how it was measured."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("caches", "contexts", "exactness", "servers", "speed", "training")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_starts_in_any_folder_and_leaves_no_file(script: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / f"benchmarks/{script}.py", "--help"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert f"usage: {script}.py" in process.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module benchmarks.results."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.results")


def test_a_row_has_its_size_its_numbers_and_medians_after_a_warm_up(results: ModuleType) -> None:
    """Each run reads the clock twice. The first run, which takes 99 seconds, is the warm-up."""
    readings = iter([0, 99, 100, 101, 200, 203, 300, 310])
    case = results.Case(
        lambda size: {"twice": 2 * size, "work": lambda: None}, ("size",), [(3,)], lambda: next(readings)
    )
    assert case.row((3,), runs=3) == {"size": 3, "twice": 6, "work": 3}


def test_every_results_file_says_how_it_was_measured(results: ModuleType) -> None:
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    rows = [line.strip("| ").split(" | ") for line in results.provenance().splitlines()[2:]]
    assert [stem for stem, *_ in rows] == [file.stem for file in files]
    assert all(all(row) and len(row) == 5 for row in rows)
    assert len(files) > 20


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
