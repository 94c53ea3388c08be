"""`sparse-rl plot` of an evaluation draws one line per method, with points at the method's ratios or budgets; if no
method has two points, it prints a table.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pandas
import pytest

from sparse_rl.analysis import results
from sparse_rl.analysis.drawing import COLOURS
from sparse_rl.analysis.results import Sweep, method_names, plot_sweep, read_sweep
from sparse_rl.commands.main import main
from sparse_rl.errors import UserError


def row(policy: str, accuracy: Any, task: str = "one", **parameters: Any) -> dict[str, Any]:
    """Return a row of eval.json."""
    return {
        "task": task, "policy": policy, "parameters": parameters, "accuracy": accuracy, "standard_error": None,
    }  # fmt: skip


def perplexity_row(policy: str, nll: float | None, **parameters: Any) -> dict[str, Any]:
    """Return a row of perplexity.json."""
    return {"policy": policy, "parameters": parameters, "nll": nll, "standard_error": 0.1}


def names(rows: list[dict[str, Any]], axis: str = "ratio") -> list[str]:
    return method_names(pandas.DataFrame(rows), axis)


def axes_of(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, axis: str | None = None) -> Any:
    """Return the axes drawn from those rows that have an accuracy."""
    monkeypatch.setattr(results, "save_figure", lambda figure, out: figure)
    frame = (
        pandas.DataFrame(rows).rename(columns={"accuracy": "value", "standard_error": "error"}).dropna(subset="value")
    )
    figure: Any = plot_sweep(Sweep("accuracy", "one; a model", frame), "unused", axis)
    (axes,) = figure.axes
    return axes


def lines(axes: Any) -> list[list[tuple[float, float]]]:
    """Return the points (x, y) of each drawn line."""
    return [[tuple(map(float, xy)) for xy in zip(*line.get_data(), strict=True)] for line in axes.lines]


ROWS = [
    row("am", 0.7, ratio=0.1, select="omp", queries=["repeat"], last=0),
    row("am", 0.5, ratio=0.02, select="omp", queries=["repeat"], last=0),
    row("am", 0.6, ratio=0.1, select="attention", queries=["repeat", "random"], last=0),
    row("evict", 0.3, ratio=0.1, pool=3),
    row("evict", 0.2, ratio=0.1, pool=1),
    row("evict", None, ratio=0.5, pool=1),
    row("full", 0.9, first=0),
]


def test_methods_are_labelled_by_the_settings_in_which_they_differ():
    assert names(ROWS) == [
        "am, omp, repeat", "am, omp, repeat", "am, attention, repeat+random",
        "evict, pool 3", "evict, pool 1", "evict, pool 1", "full",
    ]  # fmt: skip
    assert names([row("am", 1, ratio=0.1), row("am", 1, "two", ratio=0.1)]) == ["one: am", "two: am"]


def test_each_method_has_a_line_through_its_points(monkeypatch):
    axes = axes_of(ROWS, monkeypatch)
    drawn = lines(axes)
    assert [(0.02, 0.5), (0.1, 0.7)] in drawn
    assert [(0.1, 0.6)] in drawn
    assert [(0.1, 0.3)] in drawn
    assert [(0.1, 0.2)] in drawn  # without the row that has no accuracy
    flat = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert len(flat) == 1
    assert set(flat[0].get_ydata()) == {0.9}
    assert {text.get_text() for text in axes.figure.legends[0].get_texts()} == {
        "am, omp, repeat", "am, attention, repeat+random", "evict, pool 3", "evict, pool 1", "full"
    }  # fmt: skip


def test_any_swept_setting_can_be_the_x_axis(monkeypatch):
    """The x axis is one whose values are numbers (here alpha), unless the user names another (form)."""
    rows = [row("gkv", a / 10 + (f == "sum"), budget=64, alpha=a, form=f) for f in ("max", "sum") for a in (0.0, 0.8)]
    rows += [row("morphkv", 0.5, budget=64)]
    axes = axes_of(rows, monkeypatch)
    assert axes.get_xlabel() == "alpha"
    assert axes.get_xscale() == "linear"
    assert lines(axes)[-1] == [(0.0, 0.5), (0.8, 0.5)]
    assert [(0.0, 0.0), (0.8, 0.08)] in lines(axes)
    by_form = axes_of(rows, monkeypatch, "form")
    assert [label.get_text() for label in by_form.get_xticklabels()] == ["max", "sum"]
    assert [(0.0, 0.0), (1.0, 1.0)] in lines(by_form)
    with pytest.raises(UserError, match="no method has two values of window; settings with several values: alpha"):
        axes_of(rows, monkeypatch, "window")


def test_each_of_several_models_has_lines_of_its_own(tmp_path):
    rows = [{**row("gkv", 0.1 * b, budget=b), "model": model} for model in ("runs/a/model", "org/b") for b in (1, 2)]
    (tmp_path / "eval.json").write_text(json.dumps({"rows": rows}))
    sweep = read_sweep(tmp_path / "eval.json")
    assert method_names(sweep.rows, "budget") == ["a, one: gkv", "a, one: gkv", "b, one: gkv", "b, one: gkv"]


def test_rows_that_differ_only_in_the_budget_form_one_line(monkeypatch):
    """Parameters that follow from the budget by default (h2o's window, am's period) are no differences."""
    swept = [row("gkv", 0.1, budget=32, period=8), row("gkv", 0.4, budget=64, period=8)]
    swept += [row("streaming", 0.3, budget=40, period=p) for p in (1, 8)] + [row("full", 0.9)]
    swept += [row("h2o", 0.2, budget=b, window=b // 2) for b in (32, 40)]  # h2o's default window
    axes = axes_of(swept, monkeypatch)
    drawn = lines(axes)
    assert [(32, 0.1), (64, 0.4)] in drawn
    assert [(40, 0.3)] in drawn
    assert {text.get_text() for text in axes.figure.legends[0].get_texts()} == {
        "gkv", "streaming, period 1", "streaming, period 8", "full", "h2o"
    }  # fmt: skip
    assert names([row("h2o", 1, budget=b, window=16) for b in (32, 40)], "budget") == ["h2o", "h2o"]
    assert names([row("am", 1, budget=b, period=b) for b in (32, 40)], "budget") == ["am", "am"]
    assert names([row("am", 1, budget=b, period=32) for b in (32, 40)], "budget") == ["am", "am"]
    mixed = [row("am", 1, budget=32, period=p) for p in (32, 16)]
    assert names(mixed, "budget") == ["am, period 32", "am, period 16"]
    with_other_windows = [row("h2o", 1, budget=32, window=w) for w in (16, 8)]
    assert names(with_other_windows, "budget") == ["h2o, window 16", "h2o, window 8"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["32", "40", "64"]
    assert "budget" in axes.get_xlabel()
    assert axes.get_xlim()[0] < axes.get_xlim()[1]
    assert axes.get_title(loc="left") == "Accuracy on one; a model"


def test_a_method_has_one_colour_and_its_lines_are_shades(monkeypatch):
    two_methods = [row(p, a, budget=b) for p in ("gkv", "streaming") for b, a in ((8, 0.1), (16, 0.2))]
    for rows in (two_methods, two_methods[::-1], [*two_methods, row("full", 0.9)]):
        named = {text.get_text(): text.get_color() for text in axes_of(rows, monkeypatch).figure.legends[0].get_texts()}
        assert named == {name: COLOURS[name] for name in named}
        assert {"gkv", "streaming"} <= named.keys()
    periods = [row("gkv", 0.1 * b, budget=b, period=p) for p in (1, 2, 3) for b in (1, 2)]
    shades = [text.get_color() for text in axes_of(periods, monkeypatch).figure.legends[0].get_texts()]
    assert COLOURS["gkv"] in shades
    assert len(set(shades)) == 3
    assert not set(shades) & {*COLOURS.values()} - {COLOURS["gkv"]}
    unknown_methods = {text.get_text(): text.get_color() for text in axes_of(
        [row(p, 0.1 * b, budget=b) for p in ("gkv", "mine", "yours") for b in (1, 2)], monkeypatch
    ).figure.legends[0].get_texts()}  # fmt: skip
    assert len(set(unknown_methods.values())) == 3
    assert unknown_methods["gkv"] == COLOURS["gkv"]


def plot(capsys: pytest.CaptureFixture, *words: object, status: int = 0) -> str:
    """Return the output of `sparse-rl plot`, or its error."""
    assert main(["plot", *map(str, words)]) == status
    output = capsys.readouterr()
    return output.err if status else output.out


def test_plot_writes_a_picture_beside_one_evaluation(tmp_path, capsys):
    file, picture = tmp_path / "eval.json", tmp_path / "eval.png"
    file.write_text(json.dumps({"rows": ROWS}))
    for source in (file, tmp_path):
        assert plot(capsys, source).strip() == str(picture)
        assert picture.stat().st_size
        picture.unlink()
    assert "give a single file" in plot(capsys, file, tmp_path, status=2)
    refused = plot(capsys, file, "--metric", "reward", status=2)
    assert "has no metric reward; use accuracy, log_perplexity, retention, retention_correct" in refused


def test_growing_budgets_with_equal_ends_are_different_points(tmp_path, monkeypatch):
    """Also if they begin and end at the same lengths. Control: the same budget twice is one place on the axis."""
    middles = [(40, 50), (40, 60), (44, 50), (44, 50)]
    budgets = [{"tokens": [20, at, 90], "entries": [30, middle, 70]} for middle, at in middles]
    budgets.append({"tokens": [30, 90], "entries": [30, 70]})
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"rows": [row("gkv", 0.1 * n, budget=b) for n, b in enumerate(budgets)]}))
    monkeypatch.setattr(results, "save_figure", lambda figure, out: figure)
    figure: Any = plot_sweep(read_sweep(file, "accuracy"), "unused")
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert len(labels) == len({*labels}) == 4
    assert "30 at 30 to 70 at 90" in labels


@pytest.mark.parametrize("metric", ["retention", "retention_correct"])
def test_token_retention_is_drawn_against_the_budget(metric, tmp_path, capsys, monkeypatch):
    """G-KV figures 6 and 19. A row without right answers has no point, a full cache no line."""
    rows = [
        {**row(policy, 0.5, budget=budget), "standard_error": 0.1, metric: share}
        for policy, budget, share in [
            ("gkv", 8, 0.25), ("gkv", 16, 0.5), ("rkv", 8, None), ("rkv", 16, 0.75), ("rkv", 32, 0.875),
        ]
    ]  # fmt: skip
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"rows": [*rows, {**row("full", 1.0), metric: 1.0}]}))
    assert plot(capsys, file, "--metric", metric).strip() == str(tmp_path / f"eval_{metric}.png")
    monkeypatch.setattr(results, "save_figure", lambda figure, out: figure)
    sweep = read_sweep(file, metric)
    assert sweep.rows.error.isna().all()
    figure: Any = plot_sweep(sweep, "unused")
    (axes,) = figure.axes
    assert [(8.0, 0.25), (16.0, 0.5)] in lines(axes)
    assert [(16.0, 0.75), (32.0, 0.875)] in lines(axes)
    assert {text.get_text() for text in axes.figure.legends[0].get_texts()} == {"gkv", "rkv"}
    assert axes.get_title(loc="left").startswith("Token retention")
    assert axes.get_ylabel().startswith("share of the tokens held at the end")
    file.write_text(json.dumps({"rows": rows[:1]}))
    assert "25.0" in plot(capsys, file, "--metric", metric)
    file.write_text(json.dumps({"rows": [row("gkv", 0.0, budget=8)]}))
    assert f"no row of {file} has a {metric}" in plot(capsys, file, "--metric", metric, status=2).replace("\n", "")


def test_perplexities_are_drawn_or_printed(tmp_path, capsys, monkeypatch):
    """Losses in nats are drawn like accuracies; with one point per method they are printed as a table."""
    rows = [perplexity_row(p, 2.0 + s / b, budget=b) for p, s in (("gkv", 1), ("h2o", 2)) for b in (8, 4)]
    rows += [perplexity_row("full", 1.9), perplexity_row("h2o", None, budget=2)]
    recipe = {"model": "/somewhere/org/a-model", "text": "books/novel.txt"}
    (tmp_path / "perplexity.json").write_text(json.dumps({"recipe": recipe, "rows": rows}))
    assert plot(capsys, tmp_path).strip() == str(tmp_path / "perplexity.png")
    monkeypatch.setattr(results, "save_figure", lambda figure, out: figure)
    figure: Any = plot_sweep(read_sweep(tmp_path / "perplexity.json"), "unused")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Perplexity of novel.txt; a-model"
    assert "nats" in axes.get_ylabel()
    assert [(4, 2.25), (8, 2.125)] in lines(axes)
    assert [(4, 1.9), (8, 1.9)] in lines(axes)
    (tmp_path / "perplexity.json").write_text(json.dumps({"rows": rows[:1] + rows[4:]}))
    output = plot(capsys, tmp_path)
    assert "2.1250 ± 0.1000" in output
    assert "8.37" in output
    assert "full" in output


COMPACTIONS = [  # policy, parameters, accuracy, log-perplexity, seconds
    ("am", {"ratio": 0.1, "select": "omp", "queries": ["self_study"], "budgets": None}, 0.7, 0.3, 20.0),
    ("am", {"ratio": 0.02, "select": "omp", "queries": ["self_study"], "budgets": None}, 0.6, 0.5, 8.0),
    ("am", {"ratio": 0.02, "select": "omp", "queries": ["repeat"], "budgets": None}, 0.55, 0.6, 4.0),
    ("am", {"ratio": 0.02, "select": "omp", "queries": ["repeat"], "budgets": "b.json"}, 0.58, 0.55, 4.5),
    ("evict", {"ratio": 0.02, "aggregate": "max"}, 0.4, 0.9, 2.0),
    ("evict", {"ratio": 0.02, "aggregate": "mean"}, 0.35, 1.0, 2.5),
    ("full", {"first": 0}, 0.8, 0.2, 1.0),
    ("none", {"first": 0}, 0.3, 1.5, 1.0),
]


def compaction_rows() -> list[dict[str, Any]]:
    """Return rows of eval.json of compacted contexts."""
    costs = lambda seconds: {"seconds": {"prefill": 0.5, "compaction": seconds - 0.5}}  # noqa: E731
    return [
        {**row(policy, accuracy, **parameters), "contexts": costs(seconds), "log_perplexity": nll,
         "log_perplexity_error": 0.01}
        for policy, parameters, accuracy, nll, seconds in COMPACTIONS
    ]  # fmt: skip


@pytest.mark.parametrize("axis", ["seconds", "log_perplexity"])
@pytest.mark.parametrize("metric", ["accuracy", "log_perplexity"])
def test_rows_are_drawn_at_their_measured_numbers(metric, axis, tmp_path, capsys, monkeypatch):
    """Rows that differ only in the ratio are joined; contexts that are not compacted are lines across."""
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"rows": compaction_rows()}))
    sweep = read_sweep(file, metric)
    if metric == axis:
        assert "log_perplexity cannot be the axis of this log_perplexity" in plot(
            capsys, file, "--metric", metric, "--axis", axis, status=2
        )
        return
    monkeypatch.setattr(results, "save_figure", lambda figure, out: figure)
    figure: Any = plot_sweep(sweep, "unused", axis)
    (axes,) = figure.axes
    of = lambda row: {"accuracy": row[2], "log_perplexity": row[3], "seconds": row[4]}  # noqa: E731
    places = [(of(row)[axis], of(row)[metric]) for row in COMPACTIONS]
    drawn = lines(axes)
    assert [places[1], places[0]] in drawn
    assert all([place] in drawn for place in places[2:6])
    for place in places[6:]:
        if axis == "seconds":
            assert [(2.0, place[1]), (20.0, place[1])] in drawn
        else:
            assert [place] in drawn
    assert axes.get_xscale() == ("log" if axis == "seconds" else "linear")
    named = [
        "full", "am, self_study, no budgets", "am, repeat, b.json", "am, repeat, no budgets",
        "evict, max", "evict, mean", "none",
    ]  # fmt: skip
    if metric == "log_perplexity":  # its order is the reverse, but for the two ratios of one method
        named = ["none", "evict, mean", "evict, max", "am, repeat, no budgets", "am, repeat, b.json", named[1], "full"]
    assert [text.get_text().replace("\n", " ") for text in axes.figure.legends[0].get_texts()] == named


def test_rows_without_a_measured_number_are_refused(tmp_path, capsys):
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"rows": ROWS}))
    assert "only rows of an evaluation with prompt_cache have it" in plot(capsys, file, "--axis", "seconds", status=2)
    assert "has a log_perplexity" in plot(capsys, file, "--metric", "log_perplexity", status=2)
    assert "eval_accuracy.png" in plot(capsys, file, "--metric", "accuracy")
    file.write_text(json.dumps({"rows": compaction_rows()[-2:]}))
    assert "0.2000 ± 0.0100" in plot(capsys, file, "--metric", "log_perplexity")
    for damage in ({"log_perplexity": "low"}, {"contexts": {}}, {"contexts": {"seconds": {"prefill": "long"}}}):
        file.write_text(json.dumps({"rows": [{**compaction_rows()[0], **damage}]}))
        assert "damaged" in plot(capsys, file, "--axis", "seconds", status=2)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[-1:], [ROWS[0], ROWS[3], ROWS[-1]]])
def test_methods_with_a_single_point_are_printed_as_a_table(rows, tmp_path, capsys):
    file = tmp_path / "eval.json"
    file.write_text(json.dumps({"rows": rows}))
    output = plot(capsys, file)
    assert "pass@1" in output
    assert all(f"{100 * result['accuracy']:.1f}" in output for result in rows)
    assert not (tmp_path / "eval.png").exists()


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rows": ROWS[5:6]}, "no row of .* has an accuracy"),
        ({"rows": []}, "no row of .* has an accuracy"),
        ({"rows": [{"policy": "gkv", "parameters": {"budget": 8}, "perplexity": 2.0}]}, "it has no 'accuracy'"),
        ({"rows": [{**ROWS[0], "policy": None}]}, "damaged"),
        ({"rows": [{**ROWS[0], "task": ["a"]}]}, "damaged"),
        ({"rows": [{**ROWS[0], "parameters": "a"}]}, "damaged"),
        ({"rows": [{**ROWS[0], "standard_error": "a"}]}, "damaged"),
        ({"rows": [row("gkv", "high", budget=8)]}, "damaged"),
        ({"rows": [row("gkv", True, budget=8)]}, "damaged"),
        ({"rows": [row("gkv", float("nan"), budget=8)]}, "damaged"),
        ({"rows": [row("gkv", 0.5, budget=b) for b in (8, 0)]}, "damaged"),
        ({"rows": [row("gkv", 0.5, budget=b) for b in (8, "many")]}, "damaged"),
        ({"rows": [row("gkv", 0.5, budget=b) for b in (8, int(HUGE))]}, "damaged"),
        ({"rows": [3]}, "damaged"),
        ({"rows": ["accuracy"]}, "damaged"),
        ({"rows": None}, "damaged"),
        ({"rows": ROWS, "recipe": 3}, "damaged"),
        ([], "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"rows": [', "damaged"),
        ("\udcff", "damaged"),
        ({HUGE: 1}, "it has no 'rows'"),
    ],
)
def test_a_damaged_file_gives_one_short_line(content, message, tmp_path, capsys):
    file = tmp_path / "eval.json"
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_bytes(text.encode(errors="surrogateescape"))
    output = plot(capsys, file, status=2)
    assert re.search(message, output), output
    assert output.count("\n") == 1, output
    assert len(output) < 300, output
