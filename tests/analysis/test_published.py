"""The papers' numbers of a report: they are those of the papers' pages, and stand beside the same cache alone."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sparse_rl.analysis.report.published import Published, beside_published, published

PAGES = Path(__file__).parents[2] / "docs" / "papers"
GKV_TASKS = {"AMC": "amc23", "AIME": "aime24"}
CONTESTS = ("aime24", "aime25", "hmmt_feb25", "hmmt_nov25")
KVPOP = {  # name in the paper's table -> our policy, training
    "teacher": ("full", "untrained"),
    "StreamingLLM": ("streaming", "untrained"),
    "TOVA": ("tova", "untrained"),
    "StreamingLLM+": ("kvpop", "StreamingLLM+"),
    "DMS": ("dms", "retrofit"),
    "KVpop, MLP": ("kvpop", "retrofit, MLP"),
    "KVpop, mLSTM": ("kvpop", "retrofit, mLSTM"),
}
SMALL, LARGE = "Qwen3-4B-Instruct-2507", "Qwen3-8B"


def page_table(page: str, *first: str) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table whose first headings are `first`."""
    rows: list[list[str]] = []
    for line in (PAGES / f"{page}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if rows and not cells:
            break
        if rows or tuple(cells[: len(first)]) == first:
            rows.append(cells)
    return rows[0], rows[2:]


def gkv() -> list[Published]:
    headings, rows = page_table("gkv", "", "AMC 512")
    made = []
    for training, *cells in rows:
        for name, cell in zip(headings[1:], cells, strict=True):
            task, size = name.split()
            percent = f"{float(cell.split()[0]):g}"
            model = "DeepSeek-R1-Distill-Qwen-7B"
            made.append(
                Published(GKV_TASKS[task], "gkv", size.replace(",", ""), model, training, percent, "G-KV, table 1")
            )
    return made


def kvpop() -> list[Published]:
    columns = [(2 + i, task, SMALL, 1) for i, task in enumerate(CONTESTS)]
    columns += [(8 + i, task, LARGE, 1) for i, task in enumerate(CONTESTS)]
    first = page_table("kvpop", "entries (CR)", "policy", "4B: AIME 24")[1]
    second = page_table("kvpop", "entries (CR)", "policy", "GPQA Diamond")[1]
    others = [(2, "gpqa_diamond", SMALL, 2), (3, "livecodebench", SMALL, 2)]
    made = []
    for rows, places in ((first, columns), (second, others)):
        for row in rows:
            policy, training = KVPOP[row[1]]
            entries = row[0].split(" ")[0].replace(",", "")
            size = {"dms": {"4096": "4x", "2048": "8x"}.get(entries, ""), "full": ""}.get(policy, entries)
            for place, task, model, number in places:
                percent = f"{100 * float(row[place]):.3g}"
                made.append(Published(task, policy, size, model, training, percent, f"KVpop, table {number}"))
    return made


def matching() -> list[Published]:
    made = []
    for row in page_table("attention_matching", "physical length", "effective length")[1]:
        policy, size = ("am", "1024") if row[2] else ("full", "")
        percent = re.search(r"\(([\d.]+) %\)", row[3])
        assert percent is not None
        training = f"untrained, {row[1]} tokens"
        source = "Attention Matching, table 7"
        made.append(Published("aime25", policy, size, "Qwen3-4B", training, percent[1], source))
    text = (PAGES / "attention_matching.md").read_text()
    (quality,) = re.findall(r"with the full cache, Qwen3-4B answers ([\d.]+) % of the 894 questions", text)
    source = "Attention Matching, section 4"
    return [*made, Published("quality", "full", "", "Qwen3-4B", "untrained", quality, source)]


def luka() -> list[Published]:
    made = []
    for variant, *cells in page_table("luka", "variant", "full cache")[1]:
        for policy, size, cell in zip(
            ("full", "lined", "clustered", "layered"), ("", "8x", "", ""), cells, strict=True
        ):
            task, percent = variant.replace(" ", "_"), f"{float(cell):g}"
            made.append(Published(task, policy, size, SMALL, "untrained", percent, "LuKA, table 1"))
    return made


def test_the_numbers_are_those_of_the_pages() -> None:
    assert sorted(published()) == sorted(gkv() + kvpop() + matching() + luka())
    assert len(published()) == 176


def measured(task: str, policy: str, accuracy: float | None, **parameters: Any) -> SimpleNamespace:
    return SimpleNamespace(
        task=task, policy=policy, parameters=parameters, budget=parameters.get("budget"), accuracy=accuracy,
        standard_error=0.012, model="runs/mine/model", contexts=None,
    )  # fmt: skip


def test_numbers_stand_beside_the_same_task_policy_and_size() -> None:
    page = beside_published(
        [
            measured("amc23", "gkv", 0.5, budget=512),
            measured("amc23", "gkv", 0.6, budget=640),
            measured("amc23", "snapkv", 0.6, budget=512),
            measured("aime24", "dms", 0.25, compression=8.0),
            measured("aime24", "full", None),
        ]
    )
    rows = re.findall(r"<tr>(.*?)</tr>", page)[1:]
    cells = [re.findall(r">([^<]*)</td>", row) for row in rows]
    assert cells[0] == ["amc23", "gkv 512", "mine", "", "50.0 ± 1.2", "this report"]
    assert [row[3:] for row in cells[1:5]] == [
        ["untrained", "45", "G-KV, table 1"],
        ["Distill", "47.89", "G-KV, table 1"],
        ["RL-Full", "47.65", "G-KV, table 1"],
        ["RL-Sparse", "51.01", "G-KV, table 1"],
    ]
    assert [row[2:5] for row in cells[5:]] == [
        ["mine", "", "25.0 ± 1.2"],
        [SMALL, "retrofit", "58"],
        [LARGE, "retrofit", "52"],
    ]
    assert beside_published([measured("running_sum", "gkv", 0.5, budget=512)]) == ""
