"""Pictures of head budgets. Their numbers equal those of a slow loop over plain numbers, and a small case by hand."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from sparse_rl.analysis.budgets import draw_proportions, draw_sensitivity, proportions, sensitivity
from sparse_rl.commands.main import main

RATIOS, GLOBAL_RATIOS = [0.0, 0.01, 0.05, 0.2, 1.0], [0.01, 0.04, 0.2]


def budgets_of(layers: int, heads: int, contexts: int, seed: int = 0) -> dict[str, Any]:
    """Return the content of a head_budgets.json with random numbers."""
    rng = random.Random(seed)

    def row(count: int) -> list[float]:
        return [rng.random() for _ in range(count)]

    def shared() -> list[list[float]]:
        values = [row(heads) for _ in range(layers)]
        total = sum(map(sum, values))
        return [[value / total for value in of_layer] for of_layer in values]

    return {
        "format_version": 1,
        "model": {"name": "org/a-model", "fingerprint": "0"},
        "settings": {"prompt_cache": {"policy": "am", "select": "attention"}, "sampling": {}},
        "contexts": [{"task": "quality", "problem": n, "tokens": 100, "questions": 1} for n in range(contexts)],
        "ratios": RATIOS,
        "base": 0.05,
        "full_losses": row(contexts),
        "baseline_losses": row(contexts),
        "losses": [[[row(len(RATIOS)) for _ in range(heads)] for _ in range(layers)] for _ in range(contexts)],
        "global_ratios": GLOBAL_RATIOS,
        "global_shares": [[shared() for _ in GLOBAL_RATIOS] for _ in range(contexts)],
        "shares": [[layers * heads * share for share in of_layer] for of_layer in shared()],
    }


def test_sensitivity_by_hand():
    """Head 0 lowers the losses 2 and 4 of the baseline by 1 and 3: 2 on average, with an error of 1."""
    content = budgets_of(1, 2, 2) | {
        "ratios": [0.05, 1.0],
        "baseline_losses": [2.0, 4.0],
        "full_losses": [0.5, 0.5],
        "losses": [[[[2.0, 1.0], [2.0, 2.0]]], [[[4.0, 1.0], [4.0, 4.0]]]],
    }
    numbers = sensitivity(content)
    assert numbers["change"] == [[[0.0, -2.0], [0.0, 0.0]]]
    assert numbers["error"] == [[[0.0, pytest.approx(1.0)], [0.0, 0.0]]]
    assert numbers["full"] == -2.5
    assert numbers["spread"] == [[2.0, 0.0]]
    assert numbers["coloured"] == [[0, 0], [0, 1]]


def test_sensitivity_equals_a_loop():
    content = budgets_of(3, 2, 4)
    numbers = sensitivity(content)
    spreads = {}
    for layer in range(3):
        for head in range(2):
            for place in range(len(RATIOS)):
                changes = [content["losses"][n][layer][head][place] - content["baseline_losses"][n] for n in range(4)]
                assert numbers["change"][layer][head][place] == pytest.approx(mean(changes))
                assert numbers["error"][layer][head][place] == pytest.approx(stdev(changes) / math.sqrt(4))
            curve = numbers["change"][layer][head]
            spreads[layer, head] = max(curve) - min(curve)
            assert numbers["spread"][layer][head] == pytest.approx(spreads[layer, head])
    widest_first = [list(head) for head in sorted(spreads, key=lambda head: -spreads[head])]
    assert numbers["coloured"] == [*widest_first[:2], *widest_first[-2:]]


def test_proportions_equal_a_loop():
    content = budgets_of(3, 2, 4)
    numbers = proportions(content)
    assert numbers["ratio"] == 0.04
    assert sum(map(sum, numbers["budgets"])) == pytest.approx(1)
    for place in range(len(GLOBAL_RATIOS)):
        assert sum(map(sum, numbers["global"][place])) == pytest.approx(1)
    for layer in range(3):
        for head in range(2):
            assert numbers["budgets"][layer][head] == pytest.approx(content["shares"][layer][head] / 6)
            for place in range(len(GLOBAL_RATIOS)):
                of_contexts = [content["global_shares"][n][place][layer][head] for n in range(4)]
                assert numbers["global"][place][layer][head] == pytest.approx(mean(of_contexts))


def test_a_single_context_has_no_standard_error():
    numbers = sensitivity(budgets_of(2, 2, 1))
    assert numbers["error"] is None
    assert len(numbers["coloured"]) == 4


def test_heads_are_named_by_the_layers_of_the_file():
    content = budgets_of(2, 1, 2) | {"layers": [5, 11]}
    assert proportions(content)["layers"] == [5, 11]
    assert sorted(sensitivity(content)["coloured"]) == [[5, 0], [11, 0]]


@pytest.mark.parametrize("shape", [(2, 2, 3), (9, 2, 1), (36, 8, 2)])
@pytest.mark.few(1)
def test_pictures_of_few_and_of_many_heads_are_drawn(shape, tmp_path):
    content = budgets_of(*shape)
    for compute, draw in ((sensitivity, draw_sensitivity), (proportions, draw_proportions)):
        draw(json.loads(json.dumps(compute(content))), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 1000
        (tmp_path / "picture.png").unlink()


def test_plot_draws_head_budgets(tmp_path, capsys):
    """The file is named directly or by its folder. The file of numbers never replaces a file of results."""
    content = budgets_of(2, 2, 3)
    file = tmp_path / "head_budgets.json"
    file.write_text(json.dumps(content))
    for source in (file, tmp_path):
        assert main(["plot", str(source)]) == 0
        printed = list(map(Path, capsys.readouterr().out.splitlines()))
        names = [
            f"head_budgets_{kind}.{suffix}" for kind in ("sensitivity", "proportions") for suffix in ("png", "json")
        ]
        assert [path.name for path in printed] == names
        assert json.loads(printed[1].read_text()) == {"figure": "sensitivity", **sensitivity(content)}
        assert json.loads(printed[3].read_text()) == {"figure": "proportions", **proportions(content)}
        for path in printed:
            path.unlink()
    assert main(["plot", str(file), "--out", str(tmp_path / "a.svg")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "head_budgets.json", "a.svg", "a.json", "a_proportions.svg", "a_proportions.json",
    }  # fmt: skip
    assert main(["plot", str(file), "--out", str(tmp_path / "head_budgets.png")]) == 2
    assert "holds something else; name another --out" in capsys.readouterr().err
    assert json.loads(file.read_text()) == content
    for option in (["--axis", "ratio"], ["--metric", "loss"]):
        assert main(["plot", str(file), *option]) == 2
        assert option[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("losses", None, "damaged"),
        ("losses", [[[[1.0]]]], "finite numbers of shape"),
        ("baseline_losses", [0.1, float("nan"), 0.2], "finite numbers of shape"),
        ("baseline_losses", [0.1, "high", 0.2], "damaged"),
        ("baseline_losses", [0.1, 10**400, 0.2], "damaged"),
        ("contexts", [], "it has no contexts"),
        ("shares", [], "damaged"),
        ("global_ratios", [0.0, 0.1, 0.2], "damaged"),
        ("settings", 3, "damaged"),
        ("model", {}, "it has no 'name'"),
        ("full_losses", ..., "it has no 'full_losses'"),
    ],
)
def test_a_damaged_file_gives_one_short_line(key, value, message, tmp_path, capsys):
    content = copy.deepcopy(budgets_of(2, 2, 3))
    content[key] = value
    if value is ...:
        del content[key]
    (tmp_path / "head_budgets.json").write_text(json.dumps(content))
    assert main(["plot", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert len(line) < 300


def test_budgets_without_curves_are_refused(tmp_path, capsys):
    (tmp_path / "head_budgets.json").write_text(json.dumps({"L0H0": 0.7, "L0H1": 0.3}))
    assert main(["plot", str(tmp_path)]) == 2
    assert "is not a file of head budgets that sparse-rl budgets wrote" in capsys.readouterr().err
