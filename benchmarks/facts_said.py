"""The reward of retrieval where all facts are to be said: of benchmarks/cache_rl.py's question `looked_up`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def facts_said(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """The share of a document's facts that prompt and completion together say rightly, each by its first answer.

    A document states `ba=7`. The prompt ends in a question, `ba?`; the completion answers it, and asks on: `7 du? 2`.
    """
    return [_share(prompt.split(), completion.split()) for prompt, completion in zip(prompts, completions, strict=True)]


def _share(prompt: Sequence[str], completion: Sequence[str]) -> float:
    facts = dict(word.split("=") for word in prompt if "=" in word)
    words, statements = [prompt[-1], *completion], dict[str, str]()
    for question, answer in zip(words[::2], words[1::2], strict=False):
        statements.setdefault(question.removesuffix("?"), answer)
    return sum(statements.get(name) == digit for name, digit in facts.items()) / len(facts)
