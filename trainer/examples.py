"""The token sequences that taught trainings train on: a dataset's prompts, and its completions where those count."""

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
    """One sequence to train on, in tokens.

    completion : what is learned; empty where the student is to sample it
    trace : what an engine did to the cache, of prompt + completion; None where no engine has seen it
    """

    prompt: list[int]
    completion: list[int]
    trace: EvictionTrace | None = None

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Example:
        """A rollout's tokens and trace."""
        return cls(rollout.prompt_ids, rollout.completion_ids, rollout.trace)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion)


def prompt_examples(data: Any, tokenizer: Any, thinking: bool | None) -> list[Example]:
    """The prompts alone. data : rows with prompt; thinking : given to the chat template"""
    return [Example(prompt_ids(prompt, tokenizer, thinking), []) for prompt in data["prompt"]]


def accepted(data: Any, reward: Callable[..., Any], least: float, where: str) -> Any:
    """The rows whose completion scores at least so much; how many is logged.

    where : the recipe key of the data, for errors. Raises UserError where the reward raises.
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
        except BaseException as error:  # it may be a function of the user's, which raises what it likes
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
    """Prompts with their completions, of at most so many tokens; how many are cut off and how many dropped is logged.

    truncate : cut a completion that is too long off, where its prompt leaves it a token; else the sequence is dropped
    where : the recipe key of the data, for errors. Raises UserError where nothing is left.
    """
    examples = _in_tokens(data, tokenizer, thinking, where)
    kept: list[Example] = []
    cut = 0
    for one in examples:
        room = min(max_completion_length, max_length - len(one.prompt))
        if len(one.completion) <= room:
            kept.append(one)
        elif truncate and room > 0:
            kept.append(replace(one, completion=one.completion[:room]))
            cut += 1
    if cut or len(kept) < len(examples):
        gone, told = len(examples) - len(kept), "%s: %d of %d sequences are too long: %d are cut off, %d are dropped"
        logger.warning(told, where, cut + gone, len(examples), cut, gone)
    if not kept:
        raise UserError("no sequence is left: see keep, max_completion_length and max_length", where)
    return kept


def text_examples(
    data: Any, tokenizer: Any, thinking: bool | None, *, max_length: int, packing: bool, where: str
) -> list[Example]:
    """Texts of up to max_length tokens: one each, or (packing) as many as fill it, one after another.

    Raises UserError where nothing is left.
    """
    texts = _in_tokens(data, tokenizer, thinking, where)
    kept = [text for text in texts if text.prompt and text.length <= max_length]
    if len(kept) < len(texts):
        logger.warning("%s: %d of %d texts are too long and dropped", where, len(texts) - len(kept), len(texts))
    if not kept:
        raise UserError(f"no text of at most {max_length} tokens is left; see max_length", where)
    if not packing:
        return kept
    stream = [token for text in kept for token in (*text.prompt, *text.completion)]
    parts = [stream[start : start + max_length] for start in range(0, len(stream), max_length)]
    return [Example(part[:1], part[1:]) for part in parts if len(part) > 1]


def _in_tokens(data: Any, tokenizer: Any, thinking: bool | None, where: str) -> list[Example]:
    try:
        pairs = zip(data["prompt"], data["completion"], strict=True)
        return [Example(prompt_ids(p, tokenizer, thinking), completion_ids(c, tokenizer)) for p, c in pairs]
    except UserError as error:
        raise UserError(error.message, where) from error
