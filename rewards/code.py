"""The reward `code` runs the program in a completion against tests.

The program is the last fenced block of the completion. Each test runs it afresh, in a process of its own that can only
compute and read Python's files (sandbox.py, code_worker.py); outputs are compared here. code_tests.py reads the tests.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.code_tests import Test, function_name, read_livecodebench, read_tests
from rewards.code_values import to_text
from rewards.sandbox import absent_parts
from rewards.text import completion_text, require_column, require_whole
from rewards.workers import WorkerPool

logger = logging.getLogger(__name__)

SLACK = 5  # a test may last this many times its processor time in real time
WAITS = (0.1, 0.3, 1.0, 3.0, 10.0)  # seconds between two attempts to start a process
GRACE = 20.0  # seconds after that, within which the worker must answer
SANDBOX = ("required", "unsafe")
PROGRAM_LIMIT = 200_000  # characters; a longer text is not a program
WARNING_LIMIT = 20  # maximum number of unusable tests in the log; the metric counts all
LEAST_MEMORY = 64  # megabytes


@dataclass(frozen=True)
class Verdict:
    """Result of one program.

    passed, tests : number of tests that it passed, and number of all tests
    end : end of the first test that it did not pass: "wrong" (output), "failed" or "timeout"; or "passed"
    """

    passed: int
    tests: int
    end: str


def program_of(text: str) -> str | None:
    """Return the content of the last fenced block after the last ``</think>``. None means that no block is closed."""
    program: str | None = None
    lines: list[str] | None = None
    for line in text.rpartition("</think>")[2].split("\n"):
        fence = line.strip()
        if not fence.startswith("```"):
            if lines is not None:
                lines.append(line)
        elif lines is not None and not fence.strip("`"):
            program, lines = "\n".join(lines), None
        else:  # a block begins, also if the one before was never closed
            lines = []
    return program


class CodeReward:
    """Scores 1.0 if the program in a completion passes all tests, else 0.0. Scores None if the tests cannot be read.

    timeout : seconds of processor time for one test; in real time, a test may last five times as long
    memory_mb : megabytes of address space of a program
    workers : maximum number of programs that run at once; by default as many as there are cores
    partial : True scores the share of the tests that the program passes
    sandbox : ``required`` refuses to run where a part of the sandbox is missing; ``unsafe`` then runs without that part

    The tests are the column `tests`, or LiveCodeBench's columns. If `partial` is False, the first test that fails ends
    the run of a program. If it is True, the first test that exceeds its time does; the tests after it count as failed.

    If `log_metric` is passed, each call logs numbers of completions: `rewards/code_timeout`, `rewards/code_error` (an
    exception, a failed assertion or an exceeded limit), `rewards/code_no_program`, and `rewards/unusable_tests` with
    reward None.
    """

    __name__ = "code"

    def __init__(
        self,
        *,
        timeout: float = 6.0,
        memory_mb: int = 2048,
        workers: int | None = None,
        partial: bool = False,
        sandbox: str = "required",
    ) -> None:
        if type(timeout) not in (int, float) or not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        if not isinstance(partial, bool):
            raise ValueError(f"partial must be true or false, not {partial!r}")
        if sandbox not in SANDBOX:
            raise ValueError(f"sandbox must be one of {', '.join(SANDBOX)}, not {sandbox!r}")
        self.timeout, self.partial, self.sandbox = timeout, partial, sandbox
        self.memory_mb = require_whole("memory_mb", memory_mb, LEAST_MEMORY)
        self.workers = core_count() if workers is None else require_whole("workers", workers, 1)
        if absent := absent_parts():
            if sandbox == "required":
                raise ValueError(f"the sandbox is incomplete: {'; '.join(absent)}; set sandbox: unsafe to run without")
            logger.warning("code reward: programs run in an incomplete sandbox: %s", "; ".join(absent))
        self._reported = 0
        self._pool = WorkerPool("code_worker", self.workers, _environment())

    def __call__(
        self,
        completions: Sequence[Any],
        tests: Sequence[Any] | None = None,
        public_test_cases: Sequence[Any] | None = None,
        private_test_cases: Sequence[Any] | None = None,
        metadata: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        missing = [None] * len(completions)
        if tests is None and (public_test_cases or private_test_cases):
            sources: list[Any] = list(zip(public_test_cases or missing, private_test_cases or missing, strict=True))
        else:
            sources = list(require_column("code", "tests", tests, completions, columns))
        sources = list(zip(sources, map(function_name, metadata or missing), strict=True))
        programs = [program_of(completion_text(completion)) for completion in completions]
        keys = [to_text(source, id) for source in sources]
        tests_of = {key: self._read(*source) for key, source in dict(zip(keys, sources, strict=True)).items()}

        # Many completions of a group may have the same program, so each distinct program is run only once.
        pairs = list(zip(programs, keys, strict=True))
        runs = [(program, key) for program, key in dict.fromkeys(pairs) if program is not None and tests_of[key]]
        verdicts = self._pool.map(lambda run: self._judge(run[0], tests_of[run[1]]), runs, len(runs))
        verdict_of = dict(zip(runs, verdicts, strict=True))

        rewards: list[float | None] = []
        ends: Counter[str] = Counter()
        for program, key in pairs:
            verdict = verdict_of.get((program, key)) if program is not None else None
            if not tests_of[key]:
                rewards.append(None)
            elif verdict is None:
                ends["no program"] += 1
                rewards.append(0.0)
            else:
                ends[verdict.end] += 1
                share = verdict.passed / verdict.tests
                rewards.append(share if self.partial else float(share == 1))
        if log_metric is not None:  # on every call, so that zeros count in TRL's averages
            log_metric("rewards/code_timeout", float(ends["timeout"]))
            log_metric("rewards/code_error", float(ends["failed"]))
            log_metric("rewards/code_no_program", float(ends["no program"]))
            log_metric("rewards/unusable_tests", float(rewards.count(None)))
        return rewards

    def _read(self, source: Any, function: str) -> list[Test]:
        """Return the tests of one problem. If they cannot be read, return none and log a warning."""
        try:
            if isinstance(source, tuple):
                public, private = source
                return read_livecodebench(public, private, function)
            return read_tests(source, function)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if self._reported < WARNING_LIMIT:
                self._reported += 1
                last = self._reported == WARNING_LIMIT
                logger.warning(
                    "code reward: tests cannot be read, and the problem's completions get no reward (None): %s%s",
                    error,
                    ". Further ones are not shown, but counted: rewards/unusable_tests." * last,
                )
            return []

    def _judge(self, program: str, tests: list[Test]) -> Verdict:
        """Run a program against tests, until one fails or, with `partial`, until one exceeds its time."""
        passed, first_end = 0, "passed"
        for test in tests:
            end = self._run(program, test)
            passed += end == "passed"
            first_end = end if first_end == "passed" else first_end
            if end == "timeout" or (end != "passed" and not self.partial):
                break
        return Verdict(passed, len(tests), first_end)

    def _run(self, program: str, test: Test) -> str:
        """Return the end of one test: "passed", "wrong", "failed" or "timeout"."""
        if len(program) > PROGRAM_LIMIT:
            return "failed"
        statements = test.input if test.kind == "statements" else ""
        request = {
            "kind": test.kind,
            "program": program,
            "input": "" if statements else test.input,
            "function": test.function,
            "seconds": self.timeout,
            "real_seconds": SLACK * self.timeout,
            "memory": self.memory_mb * 2**20,
            "most_output": test.most_output,
            "complete": self.sandbox == "required",
        }
        header, source = json.dumps(request).encode(), statements.encode("utf-8", "replace")
        message = struct.pack(">II", len(header), len(source)) + header + source
        reply = self._reply(message)
        if reply is None:
            return "timeout"
        if "error" in reply:
            raise RuntimeError(f"the sandbox of the code reward cannot run programs: {reply['error']}")
        if reply["end"] == "passed" and "output" in reply and not test.is_right(reply["output"]):
            return "wrong"
        return reply["end"]

    def _reply(self, message: bytes) -> dict[str, Any] | None:
        """Return a worker's reply; None if there is none in time. Tries again while the machine has no process left."""
        problem = ""
        for wait in WAITS:
            reply = self._pool.ask(message, SLACK * self.timeout + GRACE)
            if reply is None or "busy" not in reply:
                return reply
            problem = reply["busy"]
            time.sleep(wait)
        raise RuntimeError(f"the code reward can start no process ({problem}); is a limit of processes reached?")


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment() -> dict[str, str]:
    """Return the environment of the workers and of all programs. With a fixed hash seed, sets have a fixed order."""
    variables = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    variables |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:  # some installations of Python need it
        variables["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return variables
