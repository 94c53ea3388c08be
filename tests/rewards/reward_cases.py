"""Hostile texts for the reward tests, and a time limit that turns a hang into a failure."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"  # optional, outside the repository

HANG = r"\boxed{9^{9^{9^{9}}}}"  # SymPy never returns, and SIGALRM does not interrupt it

ADVERSARIAL = {
    "empty": "",
    "blank": " \n\t" * 1000,
    "tower": HANG,
    "tower of tens": r"\boxed{10^10^10}",
    "braced tower of tens": r"\boxed{10^{10^{10}}}",
    "factorial": r"\boxed{(10^{9})!}",
    "nested braces": r"\boxed{" + "{" * 900 + "42" + "}" * 901,
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 180 + "1" + "}" * 181,
    "nested boxes": r"\boxed{" * 1000 + "7" + "}" * 1000,
    "unclosed boxes": r"\boxed{" * 200_000,
    "only closing braces": "}" * 200_000,
    "nested parentheses": "(" * 50_000 + ")" * 50_000,
    "megabytes of words": "the answer is maybe " * 50_000,
    "megabytes of dollars": "$" * 1_000_000,
    "megabytes in the box": r"\boxed{" + "1" * 1_000_000 + "}",
    "megabytes of backslashes": "\\" * 1_000_000,
    "many thinks": "<think>" * 100_000 + "</think>" * 100_000,
    "unicode": "🙂∑٤٢½\u202e\ud800" * 500,
    "unicode in the box": r"\boxed{🙂∑٤٢½" + "\u202e\ud800}",
    "null bytes": "\0" * 1000 + r"\boxed{\0}",
    "protocol": '{"ok": true}\n{"ok": true}\n',
}


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, run in a thread, and fail if the call takes too long. The limit is a guard against a
    hang, not a benchmark."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no result after {seconds} s"
    if errors:
        raise errors[0]
    return result[0]


def gold_answers(name: str, count: int) -> list[str]:
    """Return `count` answers, spread evenly over one of the optional data files."""
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{name} is not here")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    return answers[:: max(1, len(answers) // count)][:count]
