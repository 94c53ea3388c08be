"""Convert prompts and completions to tokens, in one place, so that training, evaluation and serving see the same text.

A prompt is text, or a list of chat messages if a chat template is used. It may begin with a context, a long text that
many prompts share. `split_prompt` cuts the prompt after the context, so that the context can be prefilled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sparse_rl.errors import UserError

Prompt = str | Sequence[dict[str, Any]]
MOST_TEMPLATE = 4096  # upper bound of the bytes, and so of the tokens, that a chat template adds
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


def check_room(prompts: Sequence[Prompt], tokenizer: Any, thinking: bool | None, room: int, where: str) -> None:
    """Raise UserError for a prompt of more than `room` tokens. Only prompts that may be that long are tokenized."""
    for number, prompt in enumerate(prompts, start=1):
        refuse_text(number, prompt, tokenizer, room, where)
        if sum(len(text.encode()) for text in _texts(prompt)) + MOST_TEMPLATE > room:
            refuse_long(number, len(prompt_ids(prompt, tokenizer, thinking)), room, where)


def refuse_text(number: int, prompt: Prompt, tokenizer: Any, room: int, where: str) -> None:
    """Raise UserError, without tokenizing, if a prompt has more text than `room` tokens can hold."""
    refuse_long(number, least_tokens(prompt, tokenizer), room, where, "at least ")


def refuse_long(number: int, tokens: int, room: int, where: str, about: str = "") -> None:
    """Raise UserError if problem `number` has a prompt of more than `room` tokens. `about` stands before the number."""
    if tokens > room:
        message = (
            f"the prompt of problem {number} has {about}{tokens:,} tokens, but max_completion_length leaves {room:,}"
        )
        mend = f"lower max_completion_length, or drop longer prompts with max_prompt_tokens: {room}"
        raise UserError(f"{message} of the model's context length; {mend}", where)


def least_tokens(prompt: Prompt, tokenizer: Any) -> int:
    """Return a lower bound of a prompt's number of tokens: its characters divided by those of the longest token."""
    return sum(map(len, _texts(prompt))) // _longest_token(tokenizer)


def _texts(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]


@lru_cache(maxsize=1)
def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


@dataclass(frozen=True)
class SplitPrompt:
    """The token ids of a prompt, cut directly after its context. `first` counts the ids before the context's text."""

    context: list[int]
    first: int
    rest: list[int]


def split_prompt(prompt: Prompt, context: str, tokenizer: Any, thinking: bool | None = None) -> SplitPrompt:
    """Tokenize a prompt whose text, or whose first user message, begins with a context.

    The text before the context, the context, and the text after it are tokenized separately: no token spans a cut, so
    prompts with the same context share its tokens. A tokenizer that puts a space before every text also puts one at the
    cuts. Raises UserError if the chat template changes the context, or if the tokenizer adds tokens after a text.
    """
    if isinstance(prompt, str):
        header = _encoded("", tokenizer, special=True)
        if _encoded(context, tokenizer, special=True) != header + _encoded(context, tokenizer):
            raise UserError("the tokenizer adds tokens at the end of a text, so nothing can follow a context")
        rest = prompt[len(context) :]
    else:
        text, marked = (
            _chat(with_context(prompt, context, replacement), tokenizer, thinking, False)
            for replacement in (context, MARK)
        )
        before, _, rest = marked.partition(MARK)
        if text != before + context + rest:
            raise UserError("the chat template changes the context; remove whitespace from the context's ends")
        header = _encoded(before, tokenizer)
    return SplitPrompt([*header, *_encoded(context, tokenizer)], len(header), list(_encoded(rest, tokenizer)))


def with_context(prompt: Prompt, context: str, other: str, question: str | None = None) -> Prompt:
    """Return a prompt with its context replaced by `other`. `question`, if given, replaces the rest of the prompt."""
    if isinstance(prompt, str):
        return other + (prompt[len(context) :] if question is None else question)
    at = next((place for place, message in enumerate(prompt) if message["role"] == "user"), None)
    if at is None:
        raise UserError("a context must begin a user message, but there is none")
    content = prompt[at]["content"][len(context) :] if question is None else question
    message_with_context = {**prompt[at], "content": other + content}
    return [*prompt[:at], message_with_context, *(prompt[at + 1 :] if question is None else ())]


def _chat(messages: Prompt, tokenizer: Any, thinking: bool | None, tokenize: bool) -> Any:
    """Apply the chat template to messages. Return token ids or, if not `tokenize`, text."""
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
        if len(completion) != 1:
            raise UserError(f"a completion must be one message, got {len(completion)}")
        completion = str(completion[0]["content"])
    ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
