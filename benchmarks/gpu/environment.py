"""The machine and the versions of a call, and the tests of tests/gpu. A skipped test does not count as passed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.worker import HOUSE, NotRunError, Options, Row

VLLM_FILES = ("test_vllm_cuda.py", "test_waits_cuda.py")
OUTCOME = re.compile(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?: \((.*)\))?")
REASON = re.compile(r"(?:FAILED|ERROR) (\S+::.+?) - (.*)")


def describe(options: Options) -> Iterator[Row]:
    """Yield rows of topics and findings: the lines of `sparse-rl doctor`, and how the call is measured."""
    import torch

    from benchmarks.results import measured
    from sparse_rl.commands.doctor import environment

    yield {**measured(), **{str(topic): finding for topic, finding in environment()}}
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU: all stages on cuda will fail")
        query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total,clocks.max.sm", "--format=csv,noheader"]
        yield {"driver": subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()}


def kernel_tests(options: Options) -> Iterator[Row]:
    """Yield the rows of all tests of tests/gpu that do not need vLLM."""
    names = sorted(place.name for place in (HOUSE / "tests/gpu").glob("test_*.py"))
    yield from run_tests([f"tests/gpu/{name}" for name in names if name not in VLLM_FILES], options)


def vllm_tests(options: Options) -> Iterator[Row]:
    """Yield the rows of the tests of tests/gpu that need vLLM."""
    yield from run_tests([f"tests/gpu/{name}" for name in VLLM_FILES], options)


def run_tests(files: list[str], options: Options) -> Iterator[Row]:
    """Yield a row for each test as it ends, and then the reasons of failures. Raises NotRunError if all skip."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-rfE"]
    command += ["-o", "addopts=", *(f"--deselect={row['test']}" for row in options.earlier), *files]
    wide = {**os.environ, "COLUMNS": "500"}  # pytest cuts reasons at the width
    process = subprocess.Popen(command, cwd=HOUSE, env=wide, text=True, stdout=subprocess.PIPE)
    ran, reasons = len(options.earlier), dict[str, None]()
    for line in process.stdout:
        print(line, end="")
        if match := OUTCOME.match(line):
            test, outcome, reason = match.groups()
            ran += outcome != "SKIPPED"
            reasons |= {str(reason): None} if outcome == "SKIPPED" else {}
            yield {"test": test, "outcome": outcome.lower()}
        elif match := REASON.match(line):
            yield {"test": match[1], "reason": match[2]}
    if not ran:
        raise NotRunError(f"all tests skip: {', '.join(reasons)}" if reasons else f"pytest ended with {process.wait()}")
