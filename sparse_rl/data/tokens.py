"""Convert prompts and completions to tokens, in one place, so that training, evaluation and serving see the same text.

A prompt is text, or a list of chat messages if a chat template is used. It may begin with a context, a long text that
many prompts share. `split_prompt` cuts the prompt after the context, so that the context can be prefilled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparse_rl.config import show
from sparse_rl.errors import UserError, unread
from sparse_rl.files import MOST_TEXT, read_text

Prompt = str | Sequence[dict[str, Any]]
MARK = "\ue000"  # placeholder that marks the position of the context in a rendered chat


def prompt_ids(prompt: Prompt, tokenizer: Any, thinking: bool | None = None, context: str | None = None) -> list[int]:
    """Return the token ids of a prompt: plain text is tokenized directly, messages through the chat template.

    Messages are followed by the header of the assistant's turn. If the last one is the assistant's, it is left open.
    `thinking` is passed to the template as enable_thinking. A prompt with a context is tokenized by `split_prompt`.
    """
    if context is not None:
        split = split_prompt(prompt, context, tokenizer, thinking)
        return [*split.context, *split.rest]
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else _chat(prompt, tokenizer, thinking, True)
    if hasattr(ids, "keys"):  # some tokenizers always return a dict
        ids = ids["input_ids"]
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if len(ids) and isinstance(ids[0], list):
        ids = ids[0]
    return [int(i) for i in ids]


def prompt_ends(prompts: Sequence[Sequence[int]], tokenizer: Any) -> list[str]:
    """Return the last characters of each prompt, for rewards: a chat template may end the prompt with <think>."""
    return list(tokenizer.batch_decode([list(ids[-16:]) for ids in prompts]))


@lru_cache(maxsize=1)
def part_separator(tokenizer: Any) -> str:
    """Return the text that `serve` (vLLM) puts between two text parts of a message: a chat template that reads parts
    determines it, and otherwise it is a line break."""
    part = {"type": "text", "text": MARK}
    try:
        _, between, _ = _chat([{"role": "user", "content": [part, part]}], tokenizer, None, False).split(MARK)
    except Exception:  # the template reads only text; it may raise any exception
        return "\n"
    return "\n" if "text" in between else between


@dataclass(frozen=True)
class SplitPrompt:
    """The token ids of a prompt, cut directly after its context. `first` counts the ids before the context's text."""

    context: list[int]
    first: int
    rest: list[int]


def split_prompt(prompt: Prompt, context: str, tokenizer: Any, thinking: bool | None = None) -> SplitPrompt:
    """Tokenize a prompt whose text, or whose first user message, begins with a context.

    The text before the context, the context, and the text after it are tokenized separately: no token spans a cut, so
    prompts with the same context share its tokens. Raises UserError if the prompt does not begin with the context, if
    the chat template changes the context, or if the tokenizer adds tokens after a text.
    """
    if isinstance(prompt, str):
        header = _encoded("", tokenizer, special=True)
        if _encoded(context, tokenizer, special=True) != header + _encoded(context, tokenizer):
            raise UserError("the tokenizer adds tokens at the end of a text, so nothing can follow a context")
        rest = str(with_context(prompt, context, ""))
    else:
        replaced = (with_context(prompt, context, text) for text in (context, MARK))
        text, marked = (_chat(messages, tokenizer, thinking, False) for messages in replaced)
        before, _, rest = marked.partition(MARK)
        if text != before + context + rest:
            raise UserError("the chat template changes the context; remove whitespace from the context's ends")
        header = _encoded(before, tokenizer)
    return SplitPrompt([*header, *_encoded(context, tokenizer)], len(header), list(_encoded(rest, tokenizer)))


def with_context(prompt: Prompt, context: str, other: str, question: str | None = None) -> Prompt:
    """Return a prompt with its context replaced by `other`. `question`, if given, replaces the rest of the prompt."""
    if isinstance(prompt, str):
        return other + _behind(prompt, context, question)
    at = next((place for place, message in enumerate(prompt) if message["role"] == "user"), None)
    if at is None:
        raise UserError("a context must begin a user message, but there is none")
    content = _behind(prompt[at]["content"], context, question)
    following = prompt[at + 1 :] if question is None else ()
    return [*prompt[:at], {**prompt[at], "content": other + content}, *following]


def _behind(text: str, context: str, question: str | None) -> str:
    if text[: len(context)] != context:
        raise UserError("the prompt, or its first user message, must begin with its context; put the context before it")
    return text[len(context) :] if question is None else question


def _chat(messages: Prompt, tokenizer: Any, thinking: bool | None, tokenize: bool) -> Any:
    assert not isinstance(messages, str)
    options = {} if thinking is None else {"enable_thinking": thinking}
    continues = messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        list(messages),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        tokenize=tokenize,
        return_dict=False,
        **options,
    )


@lru_cache(maxsize=16)  # a context is long, and many questions share it
def _encoded(text: str, tokenizer: Any, special: bool = False) -> tuple[int, ...]:
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"])


def completion_ids(completion: str | Sequence[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Return the token ids of a completion: the text, or the assistant's single message, and an end-of-sequence token.

    The text is tokenized as it was sampled. A chat template would rewrite it, and many templates drop the reasoning.
    """
    if not isinstance(completion, str):
        if len(completion) != 1 or "content" not in completion[0] or "tool_calls" in completion[0]:
            raise UserError(f"a completion must be one message of text without tool_calls, got {show(completion)}")
        completion = str(completion[0]["content"])
    ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def read_pieces(path: str, tokenizer: Any, length: int, most: int | None = None) -> list[list[int]]:
    """Return the first `most` pieces of a text (None: all), of `length` tokens each. A shorter last piece is dropped.

    The whole file is tokenized in one call, so a token added at the start of a text (BOS) is only in the first piece.
    """
    try:
        text = read_text(Path(path).expanduser(), MOST_TEXT)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {unread(error)}", "text") from error
    ids = prompt_ids(text, tokenizer)
    if len(ids) < length:
        message = f"{path} has {len(ids)} tokens, but a piece needs {length}; use a longer text or fewer tokens"
        raise UserError(message, "text")
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return pieces[:most]
