r"""The process that runs math-verify: one JSON object per line in, one per line out.

    {"op": "gold",  "gold": G, "limit": seconds}                       -> {"ok": can G be parsed}
    {"op": "score", "gold": G, "answer": [kind, A], "limit": seconds}  -> {"ok": is A equal to G}

The kind of A is "box", an answer alone, or "text", prose out of which math-verify picks one. {"ok": null} says that the
request took longer than its limit, in seconds of processor time: so a busy machine changes no verdict. Knows nothing of
rewards.

A child of this process does the work. What takes too long ends the child by an alarm whose default action works even
inside one long C call (10^10^10), where no Python handler would; then the next child is there at once, for it is a fork
of a process that has everything imported. The child ends at the end of the input, so none outlives the parent.
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

MEMORY_LIMIT = 2 * 2**30  # bytes of address space; 10^10^10 alone would want 4 GiB
_TWO_WORDS = re.compile(r"[^\W\d_]{2,}\s+(?:[^\W\d_]\s+)?[^\W\d_]{2,}")
_COMMANDS = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")


def is_prose(text: str) -> bool:
    """Two words side by side, outside of LaTeX commands: a sentence, not an expression (as xy + yz is)."""
    return bool(_TWO_WORDS.search(_COMMANDS.sub("|", text)))


def parse(source: str) -> list:
    """math-verify's reading: expressions first, then (sometimes) the string they came from; [] for nothing."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # Not math-verify's units: it takes any last letter for one, and drops inches^2 and million alike.
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)
    # Without its own timeout: that one is a signal that cannot interrupt C code, and restarts for every pair.
    return parse(source, [latex, ExprExtractionConfig()], parsing_timeout=None)


def parse_box(latex: str) -> list:
    """What math-verify reads in LaTeX that stands in a box; empty where it reads nothing."""
    return parse(rf"\boxed{{{latex}}}")


@lru_cache(maxsize=512)
def read_gold(box: str) -> Reading:
    """The gold answer, spelt out."""
    if "####" in box:  # GSM8K's raw solutions
        box = box.rsplit("####", 1)[1].strip()
    if word(box) is not None and not box.startswith("\\"):
        box = rf"\text{{{box}}}"
    return read(box) or Reading(box)


@lru_cache(maxsize=512)
def parse_gold(latex: str) -> list:
    """math-verify's reading of a gold answer that is spelt out: [] where none can be compared by value."""
    if is_prose(latex) and not re.search(r"\d", latex):
        return []
    parsed = parse_box(latex)
    # A string alone is a failed parse.
    return parsed if any(not isinstance(part, str) for part in parsed) else []


def is_equal(gold: str, answer: str) -> bool:
    """Whether two answers that stand alone are the same."""
    if NUMBER.fullmatch(gold) and NUMBER.fullmatch(answer):  # most are: nothing to read
        return same_value(gold, answer)
    gold_word = word(gold)
    if gold_word is not None:
        return same_word(gold_word, answer)
    expected = read_gold(gold)
    said = read(answer, keep_name="=" in expected.latex)
    if said is None or refused(expected, said):
        return False
    gold = expected.latex
    return any(all(same_value(gold, side) for side in sides(latex, gold)) for latex in values(expected, said))


def same_value(gold: str, said: str) -> bool:
    """Whether two answers that are spelt out have the same value."""
    exact, number = number_of(gold), number_of(said)
    if exact is not None and number is not None and "frac" not in gold + said:
        # math-verify rounds decimals to six places, however small: .0000671 would be .0000672
        return abs(exact - number) <= abs(exact) * Fraction(0 if exact.denominator == 1 else "1e-9")
    from math_verify import verify

    return bool(verify(parse_gold(gold), parse_box(said), allow_set_relation_comp=True, timeout_seconds=None))


def handle(request: dict[str, Any]) -> bool:
    """Answer one request; what math-verify cannot digest is not equal."""
    from math_verify import verify

    try:
        gold = request["gold"]
        if request["op"] == "gold":
            return word(gold) is not None or bool(parse_gold(read_gold(gold).latex))
        kind, said = request["answer"]
        if kind == "box":
            return is_equal(gold, said)
        return bool(verify(parse_gold(read_gold(gold).latex), parse(claimed(said)), timeout_seconds=None))
    except Exception:  # RecursionError and MemoryError among them
        return False


def limit_memory() -> None:
    """Cap the address space, so that a huge number fails here rather than take the machine down."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # the platform has no such limit; the time limit still holds


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more, or until one of them takes too long, which ends this process."""
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["limit"])
        answer = handle(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps({"ok": answer}).encode() + b"\n")


def main() -> None:
    """Keep one child at work; exit as it does, unless it was the alarm that ended it."""
    # What libraries print must not end up between the replies. Unbuffered: a child must not take another's request.
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    logging.disable(logging.CRITICAL)
    try:
        is_equal("1", "\\frac{2}{2}")  # imports, and compiles the expressions
    except Exception as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    replies.write(b'{"ok": true}\n')
    while True:
        child = os.fork()
        if child == 0:
            serve(requests, replies)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGPROF:
            os._exit(1)  # the input has ended, or somebody shot the child
        replies.write(b'{"ok": null}\n')
