"""Verdicts of the reward `code` equal those of LiveCodeBench's own checker, on the programs in
livecodebench_verdicts.jsonl.

`right` is the verdict of LiveCodeBench's checker (lcb_runner/evaluation/testing_util.py, commit 28fef95) with a time
limit of 2 seconds. For statements, which it does not know, it is the verdict of a plain Python that runs the program
and then the test, in a new process for each test and with nothing imported. `departs` is the reason for a verdict that
we do not follow, and `ours` is then the right one, or, if the reason begins with "ours", a limit of the reward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rewards.code import CodeReward
from rewards.sandbox import absent_parts

pytestmark = pytest.mark.skipif(bool(absent_parts()), reason="this machine has no complete sandbox")
LINES = "".join(f"{number}\n" for number in range(20_000))  # 109 kB, too long for the file
LARGE = [
    ("stdin", "for number in range(int(input())): print(number)", True),
    ("stdin", "for number in range(int(input()) - 1): print(number)\nprint(0)", False),
    ("functional", "def numbers(count): return list(range(count))", True),
    ("functional", "def numbers(count): return [*range(count - 1), 0]", False),
]
LARGE_TESTS = {
    "stdin": {"inputs": ["20000\n"], "outputs": [LINES]},
    "functional": {"inputs": ["20000"], "outputs": [str(list(range(20_000)))], "fn_name": "numbers"},
}
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("livecodebench_verdicts.jsonl").read_text().splitlines()
]
ROWS += [
    {"format": kind, "program": program, "tests": LARGE_TESTS[kind], "right": right} for kind, program, right in LARGE
]
CHECKER = """
import json, os, sys
sys.set_int_max_str_digits(50_000)
sys.path.insert(0, sys.argv[1])
program, tests = json.load(sys.stdin)
verdict, null = os.fdopen(os.dup(1), "w"), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
os.dup2(null, 1)
from lcb_runner.evaluation.testing_util import run_test
results, _ = run_test({"input_output": json.dumps(tests)}, test=program, timeout=2)
verdict.write(str(len(results) > 0 and all(result > 0 for result in results)))
verdict.flush()
os._exit(0)
"""


def scores_of(rows: Sequence[dict[str, Any]]) -> list[float | None]:
    reward = CodeReward(timeout=2, workers=2)
    return reward([f"```python\n{row['program']}\n```" for row in rows], tests=[row["tests"] for row in rows])


def wrong_scores(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{row['format']}, {score}: {row['program']}"
        for row, score in zip(rows, scores_of(rows), strict=True)
        if score != row.get("ours", row["right"])
    ]


def checked(row: dict[str, Any]) -> bool:
    """Return the verdict of LiveCodeBench's checker. A process that ends without a verdict means a wrong program."""
    command = [sys.executable, "-c", CHECKER, os.environ["LIVECODEBENCH"]]
    given = json.dumps([row["program"], row["tests"]])
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60).stdout == "True"


def passes_in_plain_python(row: dict[str, Any]) -> bool:
    """Return True if the program and each test run to their end."""
    for test in row["tests"]:
        source = f"{row['program']}\n{test}\nprint('end')"
        try:
            ran = subprocess.run([sys.executable, "-I", "-"], input=source, capture_output=True, text=True, timeout=5)
        except subprocess.TimeoutExpired:
            return False
        if ran.returncode != 0 or not ran.stdout.endswith("end\n"):
            return False
    return True


@pytest.mark.slow
def test_verdicts_equal_those_of_livecodebenchs_checker() -> None:
    assert wrong_scores(ROWS) == []


def test_a_false_verdict_is_reported() -> None:
    row = next(row for row in ROWS if row["right"])
    assert len(wrong_scores([{**row, "right": False}])) == 1


def test_the_file_has_right_and_wrong_programs_of_each_format_and_few_departures() -> None:
    counts = Counter((row["format"], row["right"]) for row in ROWS)
    assert len(ROWS) >= 200
    assert min(counts.values()) >= 30
    assert len(counts) == 6
    departures = [row for row in ROWS if "departs" in row]
    assert all(row["ours"] != row["right"] for row in departures)
    assert len(departures) <= 29


@pytest.mark.skipif("LIVECODEBENCH" not in os.environ, reason="LIVECODEBENCH does not name a copy of LiveCodeBench")
def test_the_file_holds_the_verdicts_of_livecodebenchs_checker() -> None:
    rows = [row for row in ROWS if row["format"] != "statements"]
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(checked, rows))
    assert [row["program"] for row, right in zip(rows, verdicts, strict=True) if right is not row["right"]] == []


@pytest.mark.slow
def test_the_file_holds_the_verdicts_of_plain_python() -> None:
    rows = [row for row in ROWS if row["format"] == "statements"]
    assert [row["program"] for row in rows if passes_in_plain_python(row) is not row["right"]] == []
