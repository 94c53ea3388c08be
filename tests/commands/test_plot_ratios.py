"""`plot` of an evaluation: a line for each method, its points at its own ratios, or budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparse_rl.analysis import ratios
from sparse_rl.analysis.ratios import method_names, plot_ratios
from sparse_rl.commands.main import main


def row(policy: str, accuracy: float | None, task: str = "one", **parameters: Any) -> dict[str, Any]:
    return {
        "task": task, "policy": policy, "parameters": parameters, "accuracy": accuracy, "standard_error": None,
    }  # fmt: skip


ROWS = [
    row("am", 0.7, ratio=0.1, select="omp", queries=["repeat"], last=0),
    row("am", 0.5, ratio=0.02, select="omp", queries=["repeat"], last=0),
    row("am", 0.6, ratio=0.1, select="attention", queries=["repeat", "random"], last=0),
    row("evict", 0.3, ratio=0.1, pool=3),
    row("evict", 0.2, ratio=0.1, pool=1),
    row("evict", None, ratio=0.5, pool=1),
    row("full", 0.9, first=0),
]


def test_methods_are_named_by_what_tells_them_apart() -> None:
    assert method_names(ROWS) == [
        "am, omp, repeat", "am, omp, repeat", "am, attention, repeat+random",
        "evict, pool 3", "evict, pool 1", "evict, pool 1", "full",
    ]  # fmt: skip
    assert method_names([row("am", 1, ratio=0.1), row("am", 1, "two", ratio=0.1)]) == ["one: am", "two: am"]


def test_a_line_for_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratios, "save_figure", lambda figure, out: figure)
    figure: Any = plot_ratios(ROWS, "unused")
    (axes,) = figure.axes
    drawn = [[tuple(map(float, xy)) for xy in zip(*line.get_data(), strict=True)] for line in axes.lines]
    assert [(0.1, 0.7), (0.02, 0.5)] in drawn and [(0.1, 0.6)] in drawn and [(0.1, 0.3)] in drawn
    assert [(0.1, 0.2)] in drawn  # without the row that has no accuracy
    flat = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert len(flat) == 1 and set(flat[0].get_ydata()) == {0.9}
    assert {text.get_text() for text in axes.texts} == {
        "am, omp, repeat", "am, attention,\nrepeat+random", "evict, pool 3", "evict, pool 1", "full"
    }  # fmt: skip


def test_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn like ratios: rows that differ in the budget alone are one line."""
    monkeypatch.setattr(ratios, "save_figure", lambda figure, out: figure)
    swept = [row("gkv", 0.1, budget=32, period=8), row("gkv", 0.4, budget=64, period=8)]
    swept += [row("streaming", 0.3, budget=40, period=p) for p in (1, 8)] + [row("full", 0.9)]
    swept += [row("h2o", 0.2, budget=b, window=b // 2) for b in (32, 40)]  # what h2o makes of no window
    figure: Any = plot_ratios(swept, "unused")
    (axes,) = figure.axes
    drawn = [[tuple(map(float, xy)) for xy in zip(*line.get_data(), strict=True)] for line in axes.lines]
    assert [(64, 0.4), (32, 0.1)] in drawn and [(40, 0.3)] in drawn
    assert {text.get_text() for text in axes.texts} == {
        "gkv", "streaming, period 1", "streaming, period 8", "full", "h2o"
    }  # fmt: skip
    assert method_names([row("h2o", 1, budget=b, window=16) for b in (32, 40)], "budget") == ["h2o", "h2o"]
    assert method_names([row("am", 1, budget=b, period=b) for b in (32, 40)], "budget") == ["am", "am"]
    assert method_names([row("am", 1, budget=b, period=32) for b in (32, 40)], "budget") == ["am", "am"]
    mixed = [row("am", 1, budget=32, period=p) for p in (32, 16)]
    assert method_names(mixed, "budget") == ["am, period 32", "am, period 16"]
    other = [row("h2o", 1, budget=32, window=w) for w in (16, 8)]
    assert method_names(other, "budget") == ["h2o, window 16", "h2o, window 8"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["32", "40", "64"]
    assert "budget" in axes.get_xlabel()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"rows": ROWS}))
    assert main(["plot", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "eval.png") and (tmp_path / "eval.png").stat().st_size
    for content, message in (
        ({"rows": ROWS[-1:]}, "no row of this evaluation has an accuracy, and a budget or a ratio"),
        ({"rows": ROWS[5:6]}, "no row of this evaluation"),
        ({"rows": [{"policy": "gkv", "parameters": {"budget": 8}, "perplexity": 2.0}]}, "no row of this evaluation"),
        ({"rows": [3]}, "is not the eval.json of an evaluation"),
        ([], "is not the eval.json of an evaluation"),
    ):
        file.write_text(json.dumps(content))
        assert main(["plot", str(file)]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    assert main(["plot", str(file), str(tmp_path)]) == 2 and "one file at a time" in capsys.readouterr().err
