"""Runs tests/gpu with pytest, and yields a row for each test as it ends. A skipped test does not count as passed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.process import HOUSE
from benchmarks.gpu.pytest_rows import ROWS
from benchmarks.gpu.worker import NotRunError, Options, Row

VLLM_FILES = ("test_vllm_cuda.py", "test_waits_cuda.py")


def kernels(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield the rows of all tests of tests/gpu that do not need vLLM."""
    files = sorted(place.name for place in (HOUSE / "tests/gpu").glob("test_*.py"))
    yield from run_tests([f"tests/gpu/{name}" for name in files if name not in VLLM_FILES], options)


def vllm(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield the rows of the tests of tests/gpu that need vLLM."""
    yield from run_tests([f"tests/gpu/{name}" for name in VLLM_FILES], options)


def run_tests(files: list[str], options: Options) -> Iterator[Row]:
    """Yield a row for each test of some files that no earlier call has run.

    Rows of skipped tests come last. If all tests skip, raises NotRunError and yields no row.
    """
    earlier = [row["test"] for row in options.earlier]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.gpu.pytest_rows", "-o", "addopts=", *(f"--deselect={test}" for test in earlier)]
    read_end, write_end = os.pipe()
    environment = {**os.environ, ROWS: str(write_end)}
    process = subprocess.Popen([*command, *files], cwd=HOUSE, pass_fds=[write_end], env=environment)
    os.close(write_end)
    skipped: list[Row] = []
    ran = len(earlier)
    with os.fdopen(read_end, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ran += row["outcome"] != "skipped"
            if row["outcome"] == "skipped":
                skipped.append(row)
            else:
                yield row
    status = process.wait()
    if not ran and skipped:
        reasons = ", ".join(dict.fromkeys(row["reason"] for row in skipped))
        raise NotRunError(f"all {len(skipped)} tests skip: {reasons}")
    if not ran:
        raise RuntimeError(f"pytest ended with status {status} and ran no test")
    yield from skipped
