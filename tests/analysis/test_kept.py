"""The analyses of kept tokens: their numbers equal loops over tokens, and their pictures show these numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from sparse_rl.analysis import kept as module
from sparse_rl.analysis.drawing import COLOURS, policy_settings
from sparse_rl.analysis.kept import (
    STATES,
    chosen_head,
    cloud,
    compared_positions,
    cut,
    draw_cloud,
    draw_evict_ratios,
    draw_kept_heads,
    draw_kept_text,
    draw_positions,
    evict_ratios,
    evictable,
    held,
    kept_heads,
    kept_text,
    last_eviction,
    positions,
    rows_of_text,
    source_labels,
    states,
    visible,
)
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace


@pytest.mark.parametrize("length", [2, 9, 30])
def test_held_tokens_are_those_that_the_last_query_sees(length):
    trace = random_trace(length, length)
    for layer in range(trace.layers):
        assert torch.equal(held(trace)[layer], trace.visible(layer)[:, length - 2, : length - 1])


def test_the_last_eviction_is_the_largest_recorded_one():
    trace = random_trace(20, 0)
    assert last_eviction(trace.evict_at) == trace.evict_at[trace.evict_at < NEVER].max()
    assert last_eviction(trace.dense_like().evict_at) is None


def test_the_default_head_is_the_first_of_the_last_layer_without_a_window():
    windowed = random_trace(20, 0).beside_windows([0, 5, 0, 0, 5])
    assert chosen_head(random_trace(20, 0), None, None) == (2, 0)
    assert chosen_head(windowed, None, 1) == (3, 1)
    assert chosen_head(windowed, 0, None) == (0, 0)


@pytest.mark.parametrize(
    ("layer", "head", "message"),
    [
        (5, None, "the model has the layers 0 to 4"),
        (1, None, "layer 1 has a sliding window, which no policy changes; use 0, 2, 3"),
        (None, 2, "a layer of the model has the kv heads 0 to 1"),
    ],
)
def test_a_layer_or_head_that_the_model_lacks_is_refused(layer, head, message):
    windowed = random_trace(20, 0).beside_windows([0, 5, 0, 0, 5])
    with pytest.raises(UserError, match=re.escape(message)):
        chosen_head(windowed, layer, head)


@pytest.mark.parametrize("text", ["not JSON", "[1]", "3", "[" * 100_000])
def test_a_damaged_fingerprint_has_no_settings(text):
    assert policy_settings({"policy": text}) == {}
    assert policy_settings({"policy": '{"budget": 3}'}) == {"budget": 3}


def test_spaces_and_controls_are_visible() -> None:
    assert visible(" a\n\t") == "␣a↵⇥"
    assert visible("x\r\x1b\u200b\u00a0") == "x\\r\\x1b\\u200b\\xa0"
    assert visible("你$\\frac{é}∑\ufffd") == "你$\\frac{é}∑\ufffd"
    assert visible("\ud800") == "\\ud800"
    assert cut("four", 4) == "four"
    assert cut("fours", 4) == "fou…"


POLICY = {"policy": json.dumps({"policy": "dms", "window": 3, "sinks": 1})}


def random_trace(length: int, seed: int, layers: int = 3, heads: int = 2) -> EvictionTrace:
    """Return a trace in which tokens are evicted at random times, or never."""
    generator = torch.Generator().manual_seed(seed)
    later = torch.randint(1, length, (layers, heads, length), generator=generator)
    evict_at = torch.arange(length) + later
    never = torch.rand(layers, heads, length, generator=generator) < 0.3
    return EvictionTrace.recorded(evict_at.masked_fill(never, NEVER))


def test_evict_ratios_equal_a_counting_loop():
    traces = [random_trace(length, seed) for seed, length in enumerate((9, 14, 30, 4))]
    numbers = evict_ratios(traces, POLICY)
    assert numbers["traces"] == 3, "a trace of 4 tokens has none between the sink and the window"
    for layer in range(3):
        for head in range(2):
            shares = []
            for trace in traces[:3]:
                fed = len(trace) - 1
                between = range(1, fed - 3)
                evicted = sum(int(trace.evict_at[layer, head, token]) < fed for token in between)
                shares.append(evicted / len(between))
            assert numbers["ratios"][layer][head] == pytest.approx(median(shares), abs=1e-6)


def test_a_full_cache_evicts_nothing_and_a_window_everything():
    length, token = 20, torch.arange(20)
    window = (token + 3).masked_fill(token < 1, NEVER).expand(2, 2, -1)
    for trace, ratio in ((EvictionTrace.dense(2, 2, length), 0.0), (EvictionTrace.recorded(window), 1.0)):
        assert evict_ratios([trace], POLICY)["ratios"] == [[ratio] * 2] * 2


def test_layers_with_a_sliding_window_are_left_out(tmp_path):
    trace = random_trace(20, 0).beside_windows([0, 5, 0, 5, 0])
    numbers = evict_ratios([trace], POLICY)
    assert numbers["layers"] == [0, 2, 4]
    assert numbers["ratios"] == evict_ratios([random_trace(20, 0)], POLICY)["ratios"]
    draw_evict_ratios(numbers, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_traces_without_evictable_tokens_are_refused():
    with pytest.raises(UserError, match="no trace has a token between 1 sinks and a window of 3"):
        evict_ratios([random_trace(4, 0)], POLICY)


def fingerprint(**policy: Any) -> dict[str, str]:
    return {"model": "a-model", "policy": json.dumps(policy)}


def numbered(ids: Sequence[int]) -> list[str]:
    return [f"token {token}" for token in ids]


KVPOP = fingerprint(policy="kvpop", budget=9, sinks=2, window=3)


@pytest.mark.parametrize("last", [1, 5, 100, None])
def test_counts_equal_a_loop_over_layers_heads_and_tokens(last):
    trace = random_trace(30, 1).beside_windows([0, 0, 6, 0])
    ids = list(range(100, 130))
    numbers = kept_heads(trace, ids, KVPOP, numbered, 1, last)
    tokens = list(range(2, 29 - 3))[-(last or 112) :]
    assert numbers["first"] == tokens[0]
    assert numbers["tokens"] == [f"token {100 + token}" for token in tokens]
    assert numbers["layers"] == [0, 1, 3]
    for row, layer in zip(numbers["counts"], (0, 1, 3), strict=True):
        expected = [sum(int(trace.evict_at[layer, head, token]) >= 29 for head in range(2)) for token in tokens]
        assert row == expected


def test_tokens_after_the_last_compaction_are_not_evictable():
    """The last compaction ran before query 24 with a window of 4, so 19 is the last evictable token."""
    evict_at = torch.full((2, 2, 31), NEVER)
    evict_at[0, 0, 3] = 16
    evict_at[1, 1, 8] = 24
    trace = EvictionTrace.recorded(evict_at)
    assert evictable(trace, fingerprint(policy="gkv", window=4, sinks=0, period=8)) == (0, 20)
    assert evictable(trace, fingerprint(policy="gkv", window=4, sinks=0, period=1)) == (0, 26)
    assert evictable(trace.dense_like(), fingerprint(policy="gkv", window=4, sinks=1, period=8)) == (1, 26)
    assert evictable(trace, {}) == (0, 30)


def test_a_sequence_without_evictable_tokens_is_refused():
    with pytest.raises(UserError, match="no token of line 3 can be evicted"):
        kept_heads(random_trace(6, 0), list(range(6)), KVPOP, numbered, 3)


@pytest.mark.parametrize(("length", "named"), [(60, True), (800, False)])
def test_the_map_has_texts_if_they_fit(length: int, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, out: figures.append(figure))
    texts = lambda ids: ["$x$ \n" for _ in ids]  # noqa: E731
    numbers = kept_heads(random_trace(length, 2), list(range(length)), KVPOP, texts, 1, 1000)
    draw_kept_heads(json.loads(json.dumps(numbers)), Path("unused"))
    *panels, _ = figures[0].axes
    shown = [axes.images[0].get_array() for axes in panels]
    assert np.concatenate(shown, axis=1).tolist() == numbers["counts"]
    assert all(counts.shape[1] <= module.WRAPPED for counts in shown) == named
    labels = [label for axes in panels for label in axes.get_xticklabels()]
    assert (labels[0].get_text() == "$x$␣↵") == named
    if named:
        assert len(labels) == len(numbers["tokens"])
        assert not labels[0].get_parse_math()


WORDS = ["The", " roots", " of", " $", "x", "^2", "$", " are", "\n", "\n\n", " 你", "a very long token " * 3]


def words(ids: Sequence[int]) -> list[str]:
    return [WORDS[token % len(WORDS)] for token in ids]


def test_flags_equal_the_last_querys_mask():
    trace, ids = random_trace(30, 3), list(range(30))
    for layer, head in ((None, None), (0, 1), (1, 0)):
        numbers = kept_text(trace, ids, {}, words, 1, layer, head)
        visible_at_end = trace.visible(2 if layer is None else layer)[head or 0, 28, :29]
        assert numbers["kept"] == visible_at_end.tolist()
        assert numbers["tokens"] == words(ids[:29])


def test_tokens_after_the_last_eviction_have_a_state_of_their_own():
    """Known by hand: the head evicted tokens 1 and 2, the last of them before query 5."""
    evict_at = torch.full((1, 1, 9), NEVER)
    evict_at[0, 0, 1], evict_at[0, 0, 2] = 4, 5
    numbers = kept_text(EvictionTrace.recorded(evict_at), list(range(9)), {}, words, 1)
    assert states(numbers) == ["held", "evicted", "evicted", "held", "held", "newer", "newer", "newer"]
    whole = kept_text(EvictionTrace.dense(1, 1, 9), list(range(9)), {}, words, 1)
    assert states(whole) == ["held"] * 8


@pytest.mark.parametrize("columns", [5, 12, 100])
def test_rows_contain_every_character_once_in_its_tokens_state(columns):
    tokens = words(range(40))
    token_states = [("held", "evicted", "newer")[place % 3] for place in range(40)]
    rows = rows_of_text(tokens, token_states, columns)
    assert all(0 < len(row) <= columns for row in rows)
    expected = [
        (character, state)
        for token, state in zip(tokens, token_states, strict=True)
        for character in visible(token).replace("␣", " ")
    ]
    assert [cell for row in rows for cell in row] == expected
    assert all(character != "↵" for row in rows for character, _ in row[:-1])


def test_rows_end_at_line_breaks() -> None:
    texts = ["".join(character for character, _ in row) for row in rows_of_text(["one two three\nfour"], ["held"], 9)]
    assert texts == ["one two t", "hree↵", "four"]


def test_a_held_token_has_its_colour_behind_it(monkeypatch):
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, out: figures.append(figure))
    evict_at = torch.full((1, 1, 9), NEVER)
    evict_at[0, 0, 0], evict_at[0, 0, 3] = 2, 6
    numbers = kept_text(EvictionTrace.recorded(evict_at), list(range(9)), {"model": "a"}, words, 1)
    draw_kept_text(json.loads(json.dumps(numbers)), Path("unused"))
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.texts] == ["The roots of $x^2$ are"]
    assert not axes.texts[0].get_parse_math()
    boxes = {}
    for collection in axes.collections:
        (path,) = collection.get_paths()
        box = path.get_extents()
        colour = tuple(round(255 * part) for part in collection.get_facecolor()[0][:3])
        boxes[(int(box.x0), int(box.x1))] = "#{:02X}{:02X}{:02X}".format(*colour)
    assert boxes == {(3, 12): STATES["held"], (14, 17): STATES["held"], (17, 22): STATES["newer"]}


TEXTS = ["Wait", " Wait", "wait", " ", "\n\n", "", "\ufffd", "\ufffd\ufffd", "$x$", "a b", "7", "."]


def texts(ids: Sequence[int]) -> list[str]:
    return [TEXTS[token] for token in ids]


def sequences(lengths: Sequence[int]) -> list[tuple[list[int], EvictionTrace]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        (torch.randint(0, len(TEXTS), (length,), generator=generator).tolist(), random_trace(length, length))
        for length in lengths
    ]


@pytest.mark.parametrize(("layer", "head"), [(None, None), (0, 1), (2, 0)])
def test_counts_equal_a_loop_over_the_tokens(layer, head):
    pairs = sequences([5, 40, 21])
    numbers = cloud(iter(pairs), texts, {}, layer, head)
    kept, total = Counter[str](), Counter[str]()
    for ids, trace in pairs:
        for place in range(len(ids) - 1):
            text = TEXTS[ids[place]].strip()
            text = "\ufffd" if text == "\ufffd\ufffd" else text
            total[text] += 1
            kept[text] += int(trace.evict_at[2 if layer is None else layer, head or 0, place]) >= len(ids) - 1
    assert numbers.pop("blank") == [kept.pop(""), total.pop("")]
    assert numbers.pop("incomplete") == [kept.pop("\ufffd"), total.pop("\ufffd")]
    assert {row["token"]: (row["kept"], row["total"]) for row in numbers["tokens"]} == {
        text: (kept[text], total[text]) for text in total
    }
    counts = [row["kept"] for row in numbers["tokens"]]
    assert counts == sorted(counts, reverse=True)
    assert numbers["sequences"] == 3


def test_forms_of_a_word_with_and_without_a_space_are_one():
    """Known by hand: of "Wait", " Wait", "wait" and "7" the head evicts the third; the last token is never fed."""
    evict_at = torch.full((1, 1, 5), NEVER)
    evict_at[0, 0, 2] = 3
    numbers = cloud([([0, 1, 2, 10, 11], EvictionTrace.recorded(evict_at))], texts, {})
    assert numbers["tokens"] == [
        {"token": "Wait", "kept": 2, "total": 2},
        {"token": "7", "kept": 1, "total": 1},
        {"token": "wait", "kept": 0, "total": 1},
    ]
    assert numbers["blank"] == numbers["incomplete"] == [0, 0]


def test_a_head_that_holds_only_blank_tokens_is_refused():
    with pytest.raises(UserError, match="kv head 0 of layer 1 holds no token with a text"):
        cloud([([3, 4, 5, 6], EvictionTrace.dense(2, 1, 4))], texts, {})


def test_the_same_numbers_give_the_same_picture(tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(cloud(sequences([80, 60]), texts, {"model": "a"})))
    for name in ("one.png", "two.png"):
        draw_cloud(numbers, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def of_model(model: str = "a-model", **policy: Any) -> dict[str, str]:
    return {"model": model, "policy": json.dumps(policy)}


def counted(traces: list[EvictionTrace], bins: int) -> tuple[list[float], float]:
    """Return density and mean by a loop over the bins, sequences, layers, kv heads and tokens."""
    mass, places = [Fraction(0)] * bins, []
    for trace in traces:
        fed = len(trace) - 1
        for layer in trace.global_layers:
            for head in range(trace.kv_heads):
                for token in range(fed):
                    if int(trace.evict_at[layer, head, token]) < fed:
                        continue
                    places.append(Fraction(token, max(fed - 1, 1)))
                    for b in range(bins):
                        left = max(Fraction(b, bins), Fraction(token, fed))
                        right = min(Fraction(b + 1, bins), Fraction(token + 1, fed))
                        mass[b] += max(right - left, Fraction(0)) * fed
    return [float(share * bins / len(places)) for share in mass], float(sum(places) / len(places))


@pytest.mark.parametrize("bins", [1, 7, 20])
def test_density_and_mean_equal_a_loop_with_fractions(bins):
    """Sequences have fewer tokens than there are bins, or more, and one layer has a sliding window."""
    traces = [random_trace(length, length).beside_windows([0, 4, 0, 0]) for length in (2, 5, 12, 33)]
    numbers = positions(traces, bins)
    density, mean = counted(traces, bins)
    assert numbers["density"] == pytest.approx(density, abs=2e-6)
    assert numbers["mean"] == pytest.approx(mean, abs=2e-6)
    assert numbers["sequences"] == 4
    assert sum(numbers["density"]) / bins == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("length", [2, 3, 40, 1001])
def test_a_full_cache_has_density_1_and_mean_one_half(length):
    numbers = positions([EvictionTrace.dense(2, 3, length)], 10)
    assert numbers["density"] == pytest.approx([1.0] * 10)
    assert numbers["mean"] == (0.0 if length == 2 else 0.5), "a single token is the first"
    assert numbers["held"] == 6 * (length - 1)


def test_only_the_last_tokens_of_a_window_count():
    """Known by hand: of 10 fed tokens the last two are held, at positions 8/9 and 9/9."""
    token = torch.arange(11)
    trace = EvictionTrace.recorded((token + 2).expand(1, 1, -1))
    assert positions([trace], 5) == {
        "sequences": 1, "held": 2, "mean": pytest.approx(17 / 18, abs=1e-6), "density": [0, 0, 0, 0, 5.0]
    }  # fmt: skip


def test_sequences_without_a_fed_token_are_refused():
    with pytest.raises(UserError, match="no token is held"):
        positions([EvictionTrace.dense(1, 1, 1)])


def test_labels_tell_sources_apart():
    """A label has settings in which sources of its policy differ, the model if there are several, else the folder."""
    gkv, rkv = of_model(policy="gkv", budget=8, alpha=0.8), of_model(policy="rkv", budget=8, lam=0.1)
    local = of_model(policy="gkv", budget=8, alpha=0)
    assert source_labels([("a", gkv), ("b", rkv)]) == ["gkv 8", "rkv 8"]
    assert source_labels([("a", gkv), ("b", local)]) == ["gkv 8, alpha 0.8", "gkv 8, alpha 0"]
    assert source_labels([("a", gkv), ("b", gkv)]) == ["gkv 8 (a)", "gkv 8 (b)"]
    other = of_model("b-model", policy="rkv", budget=8)
    assert source_labels([("a", gkv), ("b", other)]) == ["a-model, gkv 8", "b-model, rkv 8"]
    assert source_labels([("a", {})]) == ["unnamed policy"]


def test_each_source_has_a_curve_and_a_bar_in_its_methods_colour(monkeypatch):
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, out: figures.append(figure))
    sources = [
        (name, of_model(policy=name, budget=8), iter([random_trace(40, seed)]))
        for seed, name in enumerate(("gkv", "rkv"))
    ]
    numbers = json.loads(json.dumps(compared_positions(sources)))
    draw_positions(numbers, Path("unused"))
    (axes,) = figures[0].axes
    curve, bar, other_curve, other_bar = axes.lines
    assert [line.get_color() for line in axes.lines] == [COLOURS[name] for name in ("gkv", "gkv", "rkv", "rkv")]
    assert list(curve.get_ydata()) == numbers["sources"][0]["density"]
    assert list(other_curve.get_ydata()) == numbers["sources"][1]["density"]
    assert [bar.get_xdata()[0], other_bar.get_xdata()[0]] == [source["mean"] for source in numbers["sources"]]
    assert axes.get_title(loc="left").startswith("a-model: positions of the tokens held at the end")


def test_an_evicted_token_does_not_count():
    evict_at = torch.full((1, 1, 21), NEVER)
    evict_at[..., :10] = 15
    numbers, whole = positions([EvictionTrace.recorded(evict_at)], 2), positions([EvictionTrace.dense(1, 1, 21)], 2)
    assert numbers["density"] == [0.0, 2.0]
    assert whole["density"] == [1.0, 1.0]
    assert numbers["mean"] > whole["mean"]
