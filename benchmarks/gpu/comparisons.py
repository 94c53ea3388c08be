"""Sets the results of a stage beside the goals, and beside a CPU's figures from benchmarks/results/*.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.worker import FAILURE, Row

RESULTS = Path(__file__).parents[1] / "results"
GOALS = {16384: 2.5, 32768: 4.0}  # tokens -> how many times as fast as flex flex_sorted should be


@dataclass(frozen=True)
class Comparison:
    """Texts of the report about one stage.

    lines : function from the stage's rows to Markdown lines below its table
    shown : function from the stage's rows to the rows of the table
    """

    lines: Callable[[list[Row]], list[str]] = lambda rows: []
    shown: Callable[[list[Row]], list[Row]] = lambda rows: rows


def cpu_results(name: str) -> dict[str, Any]:
    """Return the content of benchmarks/results/NAME.json, or {} if it is missing."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _on(results: dict[str, Any]) -> str:
    measured = results["measured"]
    return f"On a CPU ({measured['machine']}, {measured['threads']} thread, `{measured['command']}`)"


def _attention(rows: list[Row]) -> list[str]:
    lines = []
    for length, goal in GOALS.items():
        timed = [row for row in rows if row.get("S") == length and FAILURE not in row]
        speedups = [row.get("times faster than flex") for row in timed if row["kernel"] == "flex_sorted"]
        both = [row for row in timed if row["kernel"] == "flex_sorted" and row.get("passes") == "forward and backward"]
        if not both or both[0].get("times faster than flex") is None:
            lines.append(
                f"- Goal at {length:,} tokens, flex_sorted at least {goal:g} times as fast as flex: not measured."
            )
            continue
        reached = both[0]["times faster than flex"]
        word = "met" if reached >= goal else "missed"
        lines.append(
            f"- Goal at {length:,} tokens, flex_sorted at least {goal:g} times as fast as flex, forward and backward: "
            f"{word}, {reached:.2f} times (all passes: {', '.join(f'{s:.2f}' for s in speedups if s is not None)})."
        )
    if results := cpu_results("attention"):
        shares = [
            f"{row['S']:,} tokens with budget {row['B']:,}: {row['sorted']:.1%} sorted, {row['natural']:.1%} natural"
            for row in results["tiles"]
            if row["scores"] == "uniform"
        ]
        lines.append(f"- {_on(results)}, tiles visited under evictions by uniform scores: {'; '.join(shares)}.")
    return lines


def _parity(rows: list[Row]) -> list[str]:
    passed = [row for row in rows if row.get("exact") is True]
    return [
        f"- {len(passed)} of {len(rows)} comparisons are exact; the error may be twice that of SDPA in the same dtype."
    ]


def _topk(rows: list[Row]) -> list[str]:
    if not (results := cpu_results("topk")):
        return []
    times = [f"{row['torch']:.0f} ms for {row['S']:,} x {row['heads']}" for row in results["rows"] if row["S"] == 16384]
    return [f"- {_on(results)}: {', '.join(times)} in torch."]


def _sampler(rows: list[Row]) -> list[str]:
    if not (results := cpu_results("sampler")):
        return []
    size = results["sizes"][0]
    times = [f"{row['sampler']:.0f} ms (reference {row['reference']:.0f})" for row in size["settings"]]
    return [f"- {_on(results)}, {size['B']} x {size['V']:,}, settings in the same order: {', '.join(times)}."]


def _decoding(rows: list[Row]) -> list[str]:
    if not (results := cpu_results("engine")):
        return []
    shares = [f"{row['case']} {row['compaction_share']:.1%}" for row in results["rows"]]
    return [f"- {_on(results)}, share of compaction in a model of 4 layers: {', '.join(shares)}."]


def _throughput(question: str, speed: str) -> Callable[[list[Row]], list[str]]:
    def lines(rows: list[Row]) -> list[str]:
        once = f"- A row is one run after a warm-up; the ratio is that of {speed}."
        if not (results := cpu_results("rollout")):
            return [once]
        ratios = [f"{row['cache']} {row['ratio_to_full']:.2f}" for row in results["rows"] if row["at"] == question]
        return [once, f"- {_on(results)}, {question}, tokens/s relative to a full cache: {', '.join(ratios)}."]

    return lines


def _contexts(rows: list[Row]) -> list[str]:
    if not (results := cpu_results("context_stages")):
        return []
    counted = [f"{row['stage']} {row['seconds']:.1f} s" for row in results["arithmetic"]]
    return [
        f"- By arithmetic alone, 0.5B's shape, 60,000 tokens, 50,000 queries of a kv head on an H200: "
        f"{', '.join(counted)} (`{results['measured']['command']}`)."
    ]


def _tests_shown(rows: list[Row]) -> list[Row]:
    """Return one row for each file of tests, and one for each test that failed."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        counts.setdefault(row["test"].partition("::")[0], Counter())[row["outcome"]] += 1
    shown: list[Row] = [
        {"test": file, **{outcome: count[outcome] for outcome in ("passed", "failed", "error", "skipped")}}
        for file, count in counts.items()
    ]
    return shown + [{"test": row["test"], "reason": row.get("reason", "")} for row in _broken(rows)]


def _tests(rows: list[Row]) -> list[str]:
    count = Counter(row["outcome"] for row in rows)
    text = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
    return [f"- {len(rows)} tests: {text}. A skipped test has not passed."]


def _broken(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["outcome"] in ("failed", "error")]


COMPARISONS = {
    "attention_parity": Comparison(_parity),
    "attention_speed": Comparison(_attention),
    "tests_kernels": Comparison(_tests, _tests_shown),
    "tests_vllm": Comparison(_tests, _tests_shown),
    "running_topk": Comparison(_topk),
    "sampler": Comparison(_sampler),
    "decoding": Comparison(_decoding),
    "vllm_1.5b": Comparison(_throughput("equal batch", "decoding tokens/s, if all requests fit at once")),
    "vllm_7b": Comparison(_throughput("equal batch", "decoding tokens/s, if all requests fit at once")),
    "vllm_equal_memory": Comparison(_throughput("equal memory", "tokens/s")),
    "one_shot_compaction": Comparison(_contexts),
}
