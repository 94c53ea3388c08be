r"""The process that runs math-verify: one JSON object per line in, one per line out.

    {"op": "gold",  "gold": G, "limit": seconds}               -> {"ok": can G be parsed}
    {"op": "score", "gold": G, "answer": A, "limit": seconds}  -> {"ok": is A equal to G}

G and A are ``{"box": content}``, an answer alone, or ``{"text": prose}``, out of which math-verify picks one.

It is run as a file (`python -P math_worker.py`), so that it needs neither this package on the path nor a
guarded `__main__`, and so that it may be started by a daemonic process. It knows nothing of rewards. It ends at
the end of its input; the parent ends it sooner when an item takes too long. Should the parent be gone by then,
the alarm does: its default action works even inside one long C call (10^10^10), where no Python handler would.
"""

import json
import logging
import os
import re
import signal
from functools import lru_cache
from typing import Any

MEMORY_LIMIT = 2 * 2**30  # bytes of address space; 10^10^10 alone would want 4 GiB
_WORD = re.compile(r"[^\W\d_]{4,}")
_TWO_WORDS = re.compile(r"[^\W\d_]{2,}\s+(?:[^\W\d_]\s+)?[^\W\d_]{2,}")
_COMMANDS = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_FULL_STOP = re.compile(r"(?<!\\right)\.\s*$")


def is_prose(text: str) -> bool:
    """Two words side by side, outside of LaTeX commands: a sentence, not an expression (as xy + yz is)."""
    return bool(_TWO_WORDS.search(_COMMANDS.sub("|", text)))


def tidy(answer: str) -> str:
    r"""Mend what math-verify misreads in an answer that stands alone.

    A closing full stop makes "42." unparseable. A plain word becomes a product of its letters, equal to every
    anagram: from four letters on it is a word. The minus sign of unicode is unknown to it.
    """
    answer = _FULL_STOP.sub("", answer.strip()).replace("\N{MINUS SIGN}", "-")
    return rf"\text{{{answer}}}" if _WORD.fullmatch(answer) else answer


def parse_answer(box: str | None = None, text: str | None = None, *, anchored: bool = False) -> list:
    """math-verify's reading: expressions first, then (sometimes) the string they came from; [] for nothing.

    `anchored` takes a number out of prose only where the prose calls it the answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex, number = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig(not anchored)
    source = rf"\boxed{{{tidy(box)}}}" if box is not None else text
    # Without its own timeout: that one is a signal that cannot interrupt C code, and restarts for every pair.
    return parse(source, [latex, number], parsing_timeout=None)


@lru_cache(maxsize=512)
def parse_gold(box: str) -> list:
    """The gold answer, [] where none can be compared by value: a string alone is a failed parse."""
    if "####" in box:  # GSM8K's raw solutions
        box = box.rsplit("####", 1)[1].strip()
    parsed = []
    if is_prose(box):
        parsed = parse_answer(text=box, anchored=True)
        if not parsed and not re.search(r"\d", box):
            return []
    parsed = parsed or parse_answer(box=box)
    return parsed if any(not isinstance(part, str) for part in parsed) else []


def handle(request: dict[str, Any]) -> bool:
    """Answer one request; what math-verify cannot digest is not equal."""
    from math_verify import verify

    try:
        gold = parse_gold(**request["gold"])
        if request["op"] == "gold" or not gold:
            return bool(gold)
        return bool(verify(gold, parse_answer(**request["answer"]), timeout_seconds=None))
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


def main() -> None:
    # What libraries print must not end up between the replies.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    logging.disable(logging.CRITICAL)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    try:
        parse_gold("1")  # imports, and compiles the expressions
    except Exception as error:
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    reply({"ok": True})
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit"])
        answer = handle(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply({"ok": answer})


if __name__ == "__main__":
    main()
