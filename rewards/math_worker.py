"""The process that runs math-verify. It reads requests as JSON, one per line, and writes one JSON reply per line.

    {"op": "gold",  "gold": G, "limit": seconds}                       -> {"ok": true if G can be parsed}
    {"op": "score", "gold": G, "answer": [kind, A], "limit": seconds}  -> {"ok": true if A equals G}

G is the gold answer and A the answer to score. The kind of A is "box" if A is a bare answer, or "text" if A is prose
from which math-verify extracts the answer. {"ok": null} means that the request took longer than its limit, in seconds
of processor time: a busy machine does not change a result.

A child of this process does the work. If a request takes too long, an alarm ends the child. The default action of the
alarm works even inside one long C call (10^10^10), in which a Python signal handler would not run. The next child
starts quickly, because it is a fork of a process that has already imported everything. The child ends at the end of the
input, so that it does not outlive the pool's process.
"""

import json
import logging
import os
import re
import signal
from fractions import Fraction
from functools import lru_cache
from typing import Any, BinaryIO

from rewards.math_guards import Reading, claimed, read, refused, same_word, sides, values, word
from rewards.math_spelling import NUMBER, number_of

MEMORY_LIMIT = 2 * 2**30  # bytes of address space; 10^10^10 alone would need 4 GiB
_TWO_WORDS = re.compile(r"[^\W\d_]{2,}\s+(?:[^\W\d_]\s+)?[^\W\d_]{2,}")
_COMMANDS = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")


def is_prose(text: str) -> bool:
    """Return True if two words stand side by side outside of LaTeX commands, as in a sentence but not in xy + yz."""
    return bool(_TWO_WORDS.search(_COMMANDS.sub("|", text)))


def parse(source: str) -> list:
    """Parse a text with math-verify. Return [], or a list of expressions, which may end with the source as a string."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # Do not use math-verify's units: it takes any last letter for a unit, and drops both inches^2 and million.
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)
    # Do not use math-verify's timeout: it is a signal that cannot interrupt C code, and it restarts for every pair.
    return parse(source, [latex, ExprExtractionConfig()], parsing_timeout=None)


def parse_box(latex: str) -> list:
    return parse(rf"\boxed{{{latex}}}")


@lru_cache(maxsize=512)
def read_gold(box: str) -> Reading:
    if "####" in box:  # raw solutions of GSM8K
        box = box.rsplit("####", 1)[1].strip()
    if word(box) is not None and not box.startswith("\\"):
        box = rf"\text{{{box}}}"
    return read(box) or Reading(box)


@lru_cache(maxsize=512)
def parse_gold(latex: str) -> list:
    """Parse a normalised gold answer. Return [] if it contains no expression that can be compared by value."""
    if is_prose(latex) and not re.search(r"\d", latex):
        return []
    parsed = parse_box(latex)
    # If the result contains only a string, parsing has failed.
    return parsed if any(not isinstance(part, str) for part in parsed) else []


def is_equal(gold: str, answer: str) -> bool:
    """Return True if two bare answers are equal."""
    if NUMBER.fullmatch(gold) and NUMBER.fullmatch(answer):  # the most frequent case, which needs no parsing
        return same_value(gold, answer)
    gold_word = word(gold)
    if gold_word is not None:
        return same_word(gold_word, answer)
    expected = read_gold(gold)
    response = read(answer, keep_name="=" in expected.latex)
    if response is None or refused(expected, response):
        return False
    gold = expected.latex
    return any(all(same_value(gold, side) for side in sides(latex, gold)) for latex in values(expected, response))


def same_value(gold: str, response: str) -> bool:
    """Return True if two normalised answers have the same value."""
    exact, number = number_of(gold), number_of(response)
    if exact is not None and number is not None and "frac" not in gold + response:
        # math-verify rounds all decimals to six places, so .0000671 would equal .0000672
        return abs(exact - number) <= abs(exact) * Fraction(0 if exact.denominator == 1 else "1e-9")
    from math_verify import verify

    return bool(verify(parse_gold(gold), parse_box(response), allow_set_relation_comp=True, timeout_seconds=None))


def handle(request: dict[str, Any]) -> bool:
    """Return the answer to one request. If math-verify raises an error, the answer is False."""
    from math_verify import verify

    try:
        gold = request["gold"]
        if request["op"] == "gold":
            return word(gold) is not None or bool(parse_gold(read_gold(gold).latex))
        kind, response = request["answer"]
        if kind == "box":
            return is_equal(gold, response)
        return bool(verify(parse_gold(read_gold(gold).latex), parse(claimed(response)), timeout_seconds=None))
    except Exception:  # RecursionError and MemoryError among them
        return False


def limit_memory() -> None:
    """Limit the address space, so that a huge number fails in this process and does not exhaust the machine."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # the platform has no such limit; the time limit still holds


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["limit"])
        answer = handle(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps({"ok": answer}).encode() + b"\n")


def main() -> None:
    """Run one child at a time. If the alarm ends the child, start the next child; if the child exits, exit too."""
    # Output of libraries must not mix with the replies. The streams are unbuffered, so that a child that is killed has
    # not read requests that the next child must answer.
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    null_device = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_device, 0)
    os.dup2(null_device, 1)
    logging.disable(logging.CRITICAL)
    try:
        is_equal("1", "\\frac{2}{2}")  # imports the libraries and compiles the regular expressions
    except Exception as error:
        replies.write(
            json.dumps({"error": f"it cannot run math-verify: {type(error).__name__}: {error}"}).encode() + b"\n"
        )
        return
    replies.write(b'{"ok": true}\n')
    while True:
        child = os.fork()
        if child == 0:
            serve(requests, replies)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGPROF:
            os._exit(1)  # the input ended, or the child was killed from outside
        replies.write(b'{"ok": null}\n')
