"""`sparse-rl inspect` and `plot` of traces with further sections: the pages that queries opened under clustered
attention, and the fits of Attention Matching. The numbers equal those counted by a loop.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sparse_rl.analysis.traces import closing_line, opened_shares, page_statistics, plot_opened
from sparse_rl.commands.main import main
from sparse_rl.methods.pages.policy import Pages
from sparse_rl.trace import NEVER, EvictionTrace, load_traces, save_traces

PAGES = Pages(3, 2, 1, 2, True, True)
CLUSTERED = "cache={policy: clustered, page: 4, window: 8, sinks: 1, open_pages: 2}"
AM = "cache={policy: am, budget: 12, window: 2}"
LONG = ["model=quickstart/model", "max_completion_length=60", "--problems", "2"]


def paged(prompt, length, seed=0, layers=(0, 1), pages=PAGES):
    """Return a trace of 2 layers and 2 kv heads that is paged in `layers`; its queries open random pages, often the
    same pages as the query before."""
    generator = torch.Generator().manual_seed(seed)
    evict_at = torch.full((2, 2, length), NEVER)
    opened_pages = torch.full((2, 2, length, pages.most), -1, dtype=torch.int16)
    for query in range(prompt, length - 1):
        closed = int(pages.closed(prompt, query))
        for layer in layers:
            for head in range(2):
                most = int(torch.randint(pages.most + 1, (), generator=generator))
                picked = torch.randperm(closed, generator=generator)[:most]
                if float(torch.rand((), generator=generator)) < 0.4:
                    picked = opened_pages[layer, head, query - 1].flip(0)
                opened_pages[layer, head, query, : len(picked)] = picked.to(torch.int16)
    further = {"paged_with": pages.settings(), "closed_at": pages.closing(prompt, length), "opened": opened_pages}
    if len(layers) == 1:  # the other layer has its own policy, which evicts tokens
        further["paged_layers"] = torch.tensor(layers, dtype=torch.int32)
        evict_at[1 - layers[0]] = torch.arange(length) + 4
    return EvictionTrace.recorded(evict_at, further)


# arguments: tokens of the prompt, tokens in all, seed
TRACES = [paged(5, 40, 1), paged(12, 23, 2, layers=[1]), paged(9, 61, 3), paged(4, 6, 4)]


def count_by_loop(traces: Sequence[EvictionTrace], layers: Sequence[int]) -> dict[str, Any]:
    """Count the numbers of `page_statistics` for these layers query by query."""
    opened, closed, distances, repeated = [], [], [], []
    for trace in traces:
        for layer in layers:
            rows = trace.further["opened"][layer].tolist()
            if layer not in trace.further.get("paged_layers", [0, 1]):
                continue
            for head in rows:
                sets = [{page for page in row if page >= 0} for row in head]
                closed_at = trace.further["closed_at"].tolist()
                closed_counts = [sum(at <= query for at in closed_at) for query in range(len(trace) - 1)]
                for query, (pages_opened, count) in enumerate(zip(sets, closed_counts, strict=False)):
                    if not count:
                        continue
                    opened.append(len(pages_opened))
                    closed.append(count)
                    distances += [query - (PAGES.sinks + PAGES.size * (page + 1) - 1) for page in pages_opened]
                    if pages_opened and closed_counts[query - 1]:
                        repeated.append(pages_opened == sets[query - 1])
    return {
        "opened": pytest.approx(sum(opened) / max(len(opened), 1), abs=1e-4),
        "closed": pytest.approx(sum(closed) / max(len(closed), 1), abs=1e-4),
        "median_back": sorted(distances)[(len(distances) - 1) // 2] if distances else None,
        "repeated": pytest.approx(sum(repeated) / len(repeated), abs=1e-4) if repeated else None,
    }


@pytest.mark.parametrize("traces", [TRACES, *([trace] for trace in TRACES)])
def test_page_statistics_equal_a_counting_loop(traces):
    result = page_statistics(traces)
    assert result.pop("layers") == [count_by_loop(traces, [0]), count_by_loop(traces, [1])]
    assert result == count_by_loop(traces, [0, 1])


@pytest.mark.parametrize(("wide", "high"), [(1, 1), (7, 1), (1, 3), (4, 2), (100, 100)])
def test_a_cell_of_the_map_is_the_maximum_share_of_its_pages(wide, high):
    """A cell covers `wide` queries and `high` pages; its value is the largest share of the 4 heads."""
    opened_pages = TRACES[0].further["opened"]
    shares = opened_shares(opened_pages, wide, high)
    count = int(opened_pages.max()) + 1
    assert shares.shape == (-(-count // high), -(-opened_pages.shape[2] // wide))
    for row, column in torch.cartesian_prod(*map(torch.arange, shares.shape)).tolist():
        queries = range(column * wide, min((column + 1) * wide, opened_pages.shape[2]))
        pages = range(row * high, (row + 1) * high)
        most = max(int((opened_pages[:, :, query] == page).sum()) for query in queries for page in pages)
        assert float(shares[row, column]) == most / 4


@pytest.mark.parametrize(("traces", "finest", "lanes"), [(TRACES, 250, 4), (TRACES, 10, 4), (TRACES[1:2], 250, 2)])
def test_the_map_has_each_opened_page_where_its_tokens_are(monkeypatch, traces, finest, lanes):
    monkeypatch.setattr("sparse_rl.analysis.traces.FINEST_MAP", finest)
    monkeypatch.setattr("sparse_rl.analysis.traces.save_figure", lambda figure, out: figure)
    figure: Any = plot_opened(traces, "unused", {})
    (mesh,), (line,), longest = figure.axes[0].collections, figure.axes[0].lines, max(traces, key=len)
    corners, cells = mesh.get_coordinates(), mesh.get_array()
    assert max(cells.shape) <= finest
    at, ends = line.get_data()
    times: Counter[tuple[int, int]] = Counter()
    for layer, head, query, slot in (longest.further["opened"] >= 0).nonzero().tolist():
        page = int(longest.further["opened"][layer, head, query, slot])
        tokens = PAGES.sinks + page * PAGES.size, PAGES.sinks + (page + 1) * PAGES.size - 1
        first, last = (int(corners[:, 0, 1].searchsorted(token)) - 1 for token in tokens)
        times[first, int(corners[0, :, 0].searchsorted(query)) - 1] += 1
        assert first == last
        assert at[0] < query < at[-1]
        assert tokens[1] < ends[at.searchsorted(query) - 1]
    assert len(times) == cells.count()  # nothing else is drawn
    for cell, count in times.items():
        assert cells[cell] * lanes == count if finest == 250 else 1 <= cells[cell] * lanes <= count


def test_the_line_above_the_map_steps_up_where_pages_close():
    assert closing_line(torch.tensor([5, 8]), PAGES, 11) == ([-0.5, 4.5, 7.5, 9.5], [0.5, 3.5, 6.5, 6.5])


def output_of(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main([str(word) for word in words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_inspect_shows_pages_of_clustered_traces(workdir, capsys):
    output_of(capsys, "rollout", "grpo.yaml", CLUSTERED, *LONG)
    file = workdir / "out/rollouts/traces-00000.safetensors"
    report = json.loads(output_of(capsys, "inspect", file, "--json"))
    assert report["pages"]["opened"] > 1
    assert report["pages"]["median_back"] > 8
    assert len(report["pages"]["layers"]) == 2
    assert list(report["sections"]) == ["paged_with", "closed_at", "opened"]
    shape = report["sections"]["opened"]["shape"]
    assert shape == {"global_layer": 2, "kv_head": 2, "token": shape["token"], "open_page": 2}
    assert report["sections"]["opened"]["bytes"] == report["traces"] * report["length"]["mean"] * 2 * 2 * 2 * 2
    assert report["retention"] == {"min": 1, "mean": 1, "max": 1}
    fed = [len(trace) - 1 for trace in load_traces(file)]
    read = [n - (n - 10) // 4 * 4 for n in fed]  # except the pages that are closed for the last query
    assert report["unpaged"]["mean"] == pytest.approx(sum(r / n for r, n in zip(read, fed, strict=True)) / len(fed))
    assert report["unpaged_per_head"] == [[round(sum(read) / len(read), 2)] * 2] * 2
    assert report["unpaged_density"][10] == 0
    assert report["unpaged_density"][-1] == 1
    text = output_of(capsys, "inspect", file)
    assert "retention  100.0% at the end" in text
    assert "held at the end" not in text
    assert f"unpaged    {report['unpaged']['mean']:.1%} at the end" in text
    assert "so read token by token" in text
    assert f"{report['pages']['median_back']} tokens back (median)" in text
    assert f"2 global layers × 2 kv heads × {shape['token']} tokens × 2 open pages of int16" in text
    assert output_of(capsys, "plot", file).strip() == str(file.with_suffix(".png"))
    assert file.with_suffix(".png").stat().st_size > 5000


def test_traces_without_opened_pages_are_reported(tmp_path, capsys):
    for name, trace in (("short", paged(4, 6)), ("none", paged(4, 30, pages=Pages(3, 2, 1, 0, True, True)))):
        file = tmp_path / f"{name}.safetensors"
        save_traces(file, [trace], {})
        assert " closed pages opened per query, – tokens back (median); – of queries" in output_of(
            capsys, "inspect", file
        )
        assert "no map to draw" in output_of(capsys, "plot", file, status=2)


def test_inspect_reports_the_number_of_compactions_with_fits(workdir, capsys):
    output_of(capsys, "rollout", "grpo.yaml", AM, *LONG)
    file = workdir / "out/rollouts/traces-00000.safetensors"
    times = json.loads(output_of(capsys, "inspect", file, "--json"))["compactions"]
    assert times["min"] >= 1
    text = output_of(capsys, "inspect", file)
    assert f"refitted   at {times['mean']:.1f} compactions on average ({times['min']} to {times['max']})" in text
    assert "retention" in text
    assert "entries held at the end" in text
    output_of(capsys, "plot", file)


def test_any_declared_section_is_shown(tmp_path, with_visits, capsys):
    file = tmp_path / "t.safetensors"
    traces = [with_visits(EvictionTrace.dense(2, 2, 9), places) for places in ([1, 4], [2])]
    save_traces(file, traces, {})
    text = output_of(capsys, "inspect", file)
    assert "12 bytes; in the first trace 2 visits of int32" in text
    assert "24 bytes; in the first trace 2 visits × 2 layer" in text
    mixed = EvictionTrace(TRACES[0].evict_at, {**TRACES[0].further, **traces[0].further})
    save_traces(file, [mixed], {})
    text = output_of(capsys, "inspect", file)
    assert "tokens back" in text
    assert "2 visits of int32" in text
    output_of(capsys, "plot", file)
