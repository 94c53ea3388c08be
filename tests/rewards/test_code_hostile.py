"""Hostile programs among honest ones neither score nor leave a trace, and honest programs keep their verdicts."""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from hostile_programs import Case, besiege, honest_cases, hostile_cases, processes_with

from rewards.sandbox import absent_parts

pytestmark = pytest.mark.skipif(bool(absent_parts()), reason="this machine has no complete sandbox")


@pytest.mark.parametrize(
    ("hostile", "honest", "timeout"), [(2, 14, 0.4), pytest.param(45, 200, 1.0, marks=pytest.mark.slow)]
)
def test_hostile_programs_break_nothing(tmp_path: Path, hostile: int, honest: int, timeout: float) -> None:
    victim = tmp_path / "victim"
    cases = [*hostile_cases(hostile, str(victim)), *honest_cases(honest)]
    random.Random(0).shuffle(cases)
    findings = besiege(cases, victim, timeout, workers=8)
    assert findings.broken == []
    assert findings.growth < 100 * 2**20


def test_a_siege_reports_a_program_that_scores_and_a_process_that_is_left(tmp_path: Path) -> None:
    scores = Case("hostile", "print(1)", [{"input": "", "output": "1"}], 0.0)
    findings = besiege([scores], tmp_path / "victim", timeout=1, workers=1)
    assert findings.broken == ["wrong: [\"hostile, 1.0: 'print(1)'\"]"]
    left = subprocess.Popen(["sleep", "60"], env={**os.environ, "SIEGE": "a token of this test"})
    try:
        end = time.monotonic() + 10  # a process that has just started may have no environment yet
        while not (processes := processes_with("a token of this test")) and time.monotonic() < end:
            time.sleep(0.01)
        assert processes == ["sleep\x0060\x00"]
    finally:
        left.kill()
        left.wait()
