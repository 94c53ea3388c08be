"""Turns the rows of a dataset into token sequences for training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rollout.engine import Rollout
from sparse_rl.data.tokens import completion_ids, prompt_ids
from sparse_rl.errors import UserError
from sparse_rl.trace import EvictionTrace

logger = logging.getLogger("sparse_rl")


@dataclass(frozen=True)
class Example:
    """One training sequence, as token ids.

    completion : tokens that the student learns; empty if the student will sample them
    trace : eviction trace of prompt + completion; None before an engine has sampled or simulated the sequence
    """

    prompt: list[int]
    completion: list[int]
    trace: EvictionTrace | None = None

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Example:
        return cls(rollout.prompt_ids, rollout.completion_ids, rollout.trace)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


def prompt_examples(data: Any, tokenizer: Any, thinking: bool | None) -> list[Example]:
    """Return the prompts as examples without completions. thinking : value for the chat template's thinking switch"""
    return [Example(prompt_ids(prompt, tokenizer, thinking), []) for prompt in data["prompt"]]


def accepted(data: Any, reward: Callable[..., Any], least: float, where: str) -> Any:
    """Return the rows whose completion has a reward of at least `least`, and log their number.

    Raises UserError, for the recipe key `where`, if the reward raises an exception.
    """
    kept: list[int] = []
    for start in range(0, len(data), 256):
        part = data[start : start + 256]
        columns = {name: values for name, values in part.items() if name not in ("prompt", "completion")}
        try:
            scores = list(reward(prompts=part["prompt"], completions=part["completion"], **columns))
            kept += [start + i for i, score in enumerate(scores) if score is not None and score >= least]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's reward function may raise anything
            name = getattr(reward, "__name__", type(reward).__name__)
            raise UserError(f"the reward {name} raised {type(error).__name__}: {error}", where) from error
    logger.warning("%s: %d of %d completions score >= %s", where, len(kept), len(data), least)
    return data.select(kept)


def completed_examples(
    data: Any,
    tokenizer: Any,
    thinking: bool | None,
    *,
    max_length: int,
    max_completion_length: int,
    truncate: bool,
    where: str,
) -> list[Example]:
    """Return prompts with their completions as examples, and log the numbers of truncated and dropped sequences.

    max_length : maximum number of tokens in prompt and completion
    truncate : True truncates an overlong completion if at least one token of it fits; False drops the sequence
    where : recipe key of the data, for errors

    Raises UserError if no sequence is left.
    """
    examples = _tokenised(data, tokenizer, thinking, where)
    kept: list[Example] = []
    cut = 0
    for example in examples:
        room = min(max_completion_length, max_length - len(example.prompt))
        if len(example.completion) <= room:
            kept.append(example)
        elif truncate and room > 0:
            kept.append(replace(example, completion=example.completion[:room]))
            cut += 1
    if cut or len(kept) < len(examples):
        dropped, line = len(examples) - len(kept), "%s: %d of %d sequences are too long: %d are truncated, %d dropped"
        logger.warning(line, where, cut + dropped, len(examples), cut, dropped)
    if not kept:
        raise UserError("no sequence is left; change keep, max_completion_length or max_length", where)
    return kept


def text_examples(
    data: Any, tokenizer: Any, thinking: bool | None, *, max_length: int, packing: bool, where: str
) -> list[Example]:
    """Return the texts of a dataset as examples of at most `max_length` tokens.

    Longer texts are dropped, and their number is logged. With `packing`, the remaining texts are joined and cut into
    examples of `max_length` tokens; otherwise each text is one example. Raises UserError if no text is left.
    """
    texts = _tokenised(data, tokenizer, thinking, where)
    kept = [text for text in texts if text.prompt and text.length <= max_length]
    if len(kept) < len(texts):
        logger.warning("%s: %d of %d texts are too long and dropped", where, len(texts) - len(kept), len(texts))
    if not kept:
        raise UserError(f"no text of at most {max_length} tokens is left; raise max_length", where)
    if not packing:
        return kept
    stream = [token for text in kept for token in (*text.prompt, *text.completion)]
    parts = [stream[start : start + max_length] for start in range(0, len(stream), max_length)]
    return [Example(part[:1], part[1:]) for part in parts if len(part) > 1]


def _tokenised(data: Any, tokenizer: Any, thinking: bool | None, where: str) -> list[Example]:
    try:
        pairs = zip(data["prompt"], data["completion"], strict=True)
        return [Example(prompt_ids(p, tokenizer, thinking), completion_ids(c, tokenizer)) for p, c in pairs]
    except UserError as error:
        raise UserError(error.message, where) from error
