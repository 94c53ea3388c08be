"""`sparse-rl plot` of runs and of traces writes the right pictures, with the right colours, titles and legends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from matplotlib.colors import to_hex
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollout.context import PromptCacheConfig
from sparse_rl.analysis import drawing, results, traces
from sparse_rl.analysis.results import Group, plot_metric
from sparse_rl.commands import quickstart
from sparse_rl.commands.main import main
from sparse_rl.commands.plot import others, run_method
from sparse_rl.commands.recordings import token_texts
from sparse_rl.methods.config import CONFIGS
from sparse_rl.trace import NEVER, EvictionTrace, save_traces


def run(folder: Path, values: Sequence[float], recipe: str = "", **further_metrics: float) -> Path:
    """Write the metrics and the recipe of a run with these rewards, and return its folder."""
    folder.mkdir(parents=True)
    lines = [{"step": i + 1, "reward": v, "replay/gap_mean": 1e-7, **further_metrics} for i, v in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def plot(capsys: pytest.CaptureFixture, *words: object, status: int = 0) -> str:
    """Return the output of `sparse-rl plot`, which lists the written files, or its error."""
    assert main(["plot", *map(str, words)]) == status
    output = capsys.readouterr()
    return output.err if status else output.out


@pytest.fixture
def figures(monkeypatch):
    """Collect the drawn figures instead of writing them to files."""
    drawn: list[Any] = []
    for module in (results, traces):
        monkeypatch.setattr(module, "save_figure", lambda figure, out: drawn.append(figure) or out)
    return drawn


def test_pictures_of_several_runs_are_saved_in_the_first_runs_folder(tmp_path, capsys):
    first, second, third = (run(tmp_path / "runs" / name / "grpo", [0.1, 0.2]) for name in ("one", "two", "three"))
    written: list[str] = []
    for words in (
        [first],
        [first, second],
        [first, third, "--metric", "reward"],
        [first, second, third, "--metric", "reward"],
    ):
        written += plot(capsys, *words).split()
    assert len(set(written)) == len(written) == 6
    assert all(Path(file).is_file() for file in written)
    assert str(first / "plots" / "learning_with_two_grpo.png") in written
    assert plot(capsys, first, first).split() == written[:2]  # a run that is named twice counts once
    many = [f"a run with a long name {i}" for i in range(20)]
    all_names, all_but_one = others(many), others(many[:-1])
    assert all_names != all_but_one
    assert len(all_names) < 150


def test_a_run_has_the_colour_of_its_method(tmp_path, capsys, figures):
    grpo = "kind: grpo\ncache: {policy: %s}\ntrain_attention: %s\n"
    recipes = {
        "gkv": grpo % ("gkv", "replay"),
        "mismatched": grpo % ("streaming", "full"),
        "full": grpo % ("full", "full"),
        "streaming": grpo % ("streaming", "replay"),
        "sft": "kind: sft\n",
    }
    runs = {name: run(tmp_path / name, [0.1, 0.4, 0.2], recipe) for name, recipe in recipes.items()}
    assert {name: run_method(folder) for name, folder in runs.items()} == {name: name for name in recipes}
    for order in (list(runs.values()), list(runs.values())[::-1]):
        plot(capsys, *order)
    for figure in figures:
        named = {text.get_text().partition(",")[0]: text.get_color() for text in figure.legends[0].get_texts()}
        assert named == {name: drawing.COLOURS[name] for name in recipes}
    for damage in ("kind: [", "[]", "cache: 3", "cache: {policy: [a]}"):
        (runs["gkv"] / "recipe.yaml").write_text(damage)
        plot(capsys, runs["gkv"])
    (runs["gkv"] / "recipe.yaml").unlink()
    plot(capsys, runs["gkv"])


def test_the_quickstart_draws_a_method_in_one_colour(tmp_path, figures):
    rows = []
    for name in quickstart.LABELS:
        rows.append({"name": name, "seed": 0, "budget": 40, "n": 8, "accuracy_evicted": 0.2, "accuracy_full": 0.9})
        if name in quickstart.METHODS:
            run(tmp_path / "seed0" / quickstart.METHODS[name], [0.1, 0.2, 0.1])
    quickstart.draw(rows, tmp_path)
    bars, *lines = figures
    names = [text.get_text() for text in bars.axes[0].get_yticklabels()]
    solid = [to_hex(bar.get_facecolor()).upper() for bar in bars.axes[0].patches[::2]]
    colour_of = dict(zip(names, solid, strict=True))
    assert len(set(solid)) == 4
    assert len(lines) == 2
    for figure in lines:
        for text in figure.legends[0].get_texts():
            label = text.get_text().replace("\n", " ").removesuffix(", mean").partition(" (")[0]
            assert text.get_color() == colour_of[label]


def test_each_method_has_a_different_colour():
    methods = {*CONFIGS, *get_args(get_type_hints(PromptCacheConfig)["policy"])}
    methods |= {*quickstart.DRAWN_AS.values()}
    assert {"streaming", "evict", "none", "mismatched"} <= methods == {*drawing.COLOURS}
    assert len(set(drawing.COLOURS.values())) == len(drawing.COLOURS)


@pytest.mark.parametrize("steps", [2, 3, 4, 9, 10, 40])
@pytest.mark.few(2)
def test_curves_have_titles_and_labels(steps, tmp_path, capsys, figures):
    plot(capsys, run(tmp_path / "a", [0.1 * (i % 3) for i in range(steps)]))
    assert len(figures) == 2
    for figure in figures:
        (axes,) = figure.axes
        figure.canvas.draw()
        assert axes.get_title(loc="left")
        assert all(float(tick).is_integer() for tick in axes.get_xticks())
    (axes,) = figures[0].axes
    assert ("bold" in axes.get_xlabel()) == (len(axes.lines) == 2) == (steps >= 10)


@pytest.mark.parametrize("metric", ["kl", "entropy", "eval_reward"])
def test_a_metric_of_two_runs_has_faint_values_and_a_bold_mean(metric, tmp_path, capsys, figures):
    """G-KV figures 13 and 14: the logged values, and over them their moving average, in one colour."""
    runs, values = [], [1 / (step + 1) + 0.1 * (step % 2) for step in range(20)]
    for name in ("sparse", "full"):
        runs.append(run(tmp_path / name, []))
        lines = [{"step": 5 * step, metric: value} for step, value in enumerate(values, start=1)]
        (runs[-1] / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plot(capsys, *runs, "--metric", metric)
    (axes,) = figures[0].axes
    for faint, bold in (axes.lines[:2], axes.lines[2:]):
        assert faint.get_color() == bold.get_color()
        assert faint.get_alpha() < 0.5
        assert bold.get_alpha() is None
        assert list(faint.get_ydata()) == values
        assert list(bold.get_ydata())[1:-1] == pytest.approx([sum(values[i - 1 : i + 2]) / 3 for i in range(1, 19)])
        assert bold.get_linewidth() > faint.get_linewidth()
    titles = {"kl": "KL divergence", "entropy": "Entropy", "eval_reward": "Reward on validation problems"}
    assert axes.get_title(loc="left") == f"{titles[metric]} during training"


def test_runs_of_a_single_step_are_points(tmp_path: Path, capsys: pytest.CaptureFixture, figures: list) -> None:
    plot(capsys, run(tmp_path / "one", [0.125]), run(tmp_path / "two", [0.5]))
    (axes,) = figures[0].axes
    assert [(line.get_ydata().tolist(), line.get_marker()) for line in axes.lines] == [([0.125], "o"), ([0.5], "s")]


@pytest.mark.parametrize("runs", [1, 12])
@pytest.mark.parametrize("metric", ["rewrad", "nothing like it", "x" * 5000])
def test_an_unknown_metric_gives_one_short_line(runs, metric, tmp_path, capsys):
    further_metrics = {f"rewards/of_a_long_name_{i}/mean": 1.0 for i in range(60)} | {"y" * 1000: 1.0}
    folders = [run(tmp_path / f"run{i}", [0.1, 0.2], **further_metrics) for i in range(runs)]
    output = plot(capsys, *folders, "--metric", metric, status=2)
    assert output.count("\n") == 1, output
    assert len(output) < 300, output
    assert " more" in output, output
    assert ("the nearest names are reward, " in output) or metric != "rewrad"
    for folder in folders:
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **further_metrics}))
    output = plot(capsys, *folders, status=2)
    assert "no reward and no loss" in output, output
    assert output.count("\n") == 1, output
    assert len(output) < 300, output


def trace_keeping(layers: Sequence[int]) -> EvictionTrace:
    """Return a trace of 60 tokens in which each layer keeps its own number of last tokens."""
    evict_at = torch.stack([torch.arange(60).add(kept).expand(2, 60) for kept in layers])
    return EvictionTrace(torch.where(evict_at >= 59, NEVER, evict_at).int())


@pytest.mark.parametrize(
    ("layers", "legend"),
    [((20, 30), {"each layer", "mean over layers"}), ((20, 20), {"all layers alike"}), ((20,), {"its one layer"})],
)
def test_the_density_plot_shows_its_policy_and_every_legend_entry(layers, legend, tmp_path, capsys, figures):
    file = tmp_path / "t.safetensors"
    save_traces(file, [trace_keeping(layers)], {"policy": json.dumps({"policy": "gkv", "budget": 40})})
    plot(capsys, file)
    (figure,) = figures
    (axes,), (legend_box,) = figure.axes, figure.legends
    assert axes.get_title(loc="left").startswith("gkv, budget 40: ")
    assert {text.get_text() for text in legend_box.get_texts()} == legend
    colours = [line.get_color() for line in axes.lines]
    grey = [drawing.GREY] * (len(layers) if "each layer" in legend else 0)
    assert colours == [*grey, drawing.COLOURS["gkv"]]


@pytest.mark.parametrize("fingerprint", [{}, {"policy": "["}, {"policy": "[]"}, {"policy": '{"policy": ["x"]}'}])
def test_traces_with_a_damaged_fingerprint_are_drawn(fingerprint, tmp_path, capsys, figures):
    save_traces(tmp_path / "t.safetensors", [trace_keeping([20])], fingerprint)
    plot(capsys, tmp_path / "t.safetensors")
    assert figures[0].axes[0].get_title(loc="left")


def test_a_folder_with_one_file_of_traces_is_drawn(tmp_path, capsys):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    save_traces(folder / "traces-00000.safetensors", [trace_keeping([20])], {})
    assert plot(capsys, folder).strip() == str(folder / "traces-00000.png")
    save_traces(folder / "traces-00001.safetensors", [trace_keeping([20])], {})
    assert "has 2 files of traces; draw one of them" in plot(capsys, folder, status=2)


def test_runs_of_a_group_that_share_no_step_are_drawn_one_by_one(tmp_path, figures):
    for name, steps in (("a", (1, 2, 3)), ("b", (4, 5)), ("c", (3, 4)), ("d", ())):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({"step": step, "reward": 1.0}) + "\n" for step in steps)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    for names, lines_drawn, bands in (("ab", 2, 0), ("ac", 1, 1), ("abd", 2, 0), ("acd", 1, 1), ("abc", 3, 0)):
        folders = [tmp_path / name for name in names]
        plot_metric([Group("seeds", folders, None)], tmp_path / "out.png", "reward")
        (axes,) = figures[-1].axes
        assert len([line for line in axes.lines if len(line.get_xdata()) > 0]) == lines_drawn
        assert len(axes.collections) == bands


def test_tokens_keep_the_spaces_that_they_have_after_other_tokens():
    words = ["▁Once", "▁upon", "▁a", ",", "▁", "ti", "<0xE6>", "<0xBC>", "<0x0A>", "<unk>"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    for ids in ([0, 1, 2, 3, 5], [1, 0], [4, 0, 3], [3, 4, 4, 5], [2], []):
        assert "".join(token_texts(fast, ids)) == fast.decode(ids)
    assert token_texts(fast, [0, 1]) == ["Once", " upon"]
    assert token_texts(fast, [0, 6, 7, 8, 1]) == ["Once", "�", "�", "\n", " upon"]
    assert fast.batch_decode([[0], [1]]) == ["Once", "upon"]
