"""The reward for retrieval of all facts, in the part `looked_up` of benchmarks/cache_rl.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def facts_said(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return for each document the share of its facts that are answered correctly. The first answer to a fact counts.

    A document states a fact as `ba=7`. The prompt ends in a question, `ba?`. The completion answers the question, and
    asks and answers further questions: `7 du? 2`.
    """
    return [_share(prompt.split(), completion.split()) for prompt, completion in zip(prompts, completions, strict=True)]


def _share(prompt: Sequence[str], completion: Sequence[str]) -> float:
    facts = dict(word.split("=") for word in prompt if "=" in word)
    words, statements = [prompt[-1], *completion], dict[str, str]()
    for question, answer in zip(words[::2], words[1::2], strict=False):
        statements.setdefault(question.removesuffix("?"), answer)
    return sum(statements.get(name) == digit for name, digit in facts.items()) / len(facts)
