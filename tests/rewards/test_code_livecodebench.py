"""Verdicts of the reward `code` equal those of LiveCodeBench's own checker, on the programs in
livecodebench_verdicts.jsonl.

`right` is the verdict of LiveCodeBench's checker (lcb_runner/evaluation/testing_util.py, commit 28fef95) with a time
limit of 2 seconds. For statements, which it does not know, it is the verdict of one plain Python that runs the program
and then the test. `departs` is the reason for a verdict that we do not follow, and `ours` is then the right one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rewards.code import CodeReward
from rewards.sandbox import absent_parts

pytestmark = pytest.mark.skipif(bool(absent_parts()), reason="this machine has no complete sandbox")
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("livecodebench_verdicts.jsonl").read_text().splitlines()
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


def test_verdicts_equal_those_of_livecodebenchs_checker() -> None:
    reward = CodeReward(timeout=2, workers=2)
    scores = reward([f"```python\n{row['program']}\n```" for row in ROWS], tests=[row["tests"] for row in ROWS])
    wrong = [
        f"{row['format']}, {score}: {row['program']}"
        for row, score in zip(ROWS, scores, strict=True)
        if score != row.get("ours", row["right"])
    ]
    assert wrong == []


def test_the_file_has_right_and_wrong_programs_of_each_format_and_few_departures() -> None:
    counts = Counter((row["format"], row["right"]) for row in ROWS)
    assert len(ROWS) >= 200
    assert min(counts.values()) >= 15
    assert len(counts) == 6
    departures = [row for row in ROWS if "departs" in row]
    assert all(row["ours"] != row["right"] for row in departures)
    assert len(departures) < 10


@pytest.mark.skipif("LIVECODEBENCH" not in os.environ, reason="LIVECODEBENCH does not name a copy of LiveCodeBench")
def test_the_file_holds_the_verdicts_of_livecodebenchs_checker() -> None:
    command = [sys.executable, "-c", CHECKER, os.environ["LIVECODEBENCH"]]
    for row in ROWS:
        if row["format"] == "statements":
            continue
        given = json.dumps([row["program"], row["tests"]])
        checked = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
        assert (checked.stdout == "True") is row["right"], row["program"]
