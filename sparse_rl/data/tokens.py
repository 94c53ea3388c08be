"""From a prompt or a completion to tokens: the one place, so that training, evaluation and serving see the same text.

A prompt is text, or a list of chat messages where the chat template applies. It may begin with a context, a long text
that many prompts share: `split_prompt` cuts it there, so that what is in front of the cut can be prefilled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sparse_rl.errors import UserError

Prompt = str | Sequence[dict[str, Any]]
MOST_TEMPLATE = 4096  # bytes, and so tokens, that a chat template puts around its messages
MARK = "\ue000"  # stands for a context while its place in a rendered chat is looked for


def prompt_ids(prompt: Prompt, tokenizer: Any, thinking: bool | None = None, context: str | None = None) -> list[int]:
    """The tokens of a prompt: plain text as the tokenizer has it, messages through the chat template.

    Messages end in the header of the assistant's turn; if the last one is the assistant's, it is left open instead.
    `thinking` reaches the template as enable_thinking. A prompt with a context has the tokens of `split_prompt`.
    """
    if context is not None:
        split = split_prompt(prompt, context, tokenizer, thinking)
        return [*split.context, *split.rest]
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else _chat(prompt, tokenizer, thinking, True)
    if hasattr(ids, "keys"):  # a tokenizer that returns its dict whatever it is asked
        ids = ids["input_ids"]
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if len(ids) and isinstance(ids[0], list):
        ids = ids[0]
    return [int(i) for i in ids]


def check_room(prompts: Sequence[Prompt], tokenizer: Any, thinking: bool | None, room: int, where: str) -> None:
    """Raise UserError for a prompt of more than `room` tokens. Only those are tokenized of which the text may tell."""
    for number, prompt in enumerate(prompts, start=1):
        refuse_text(number, prompt, tokenizer, room, where)
        if sum(len(text.encode()) for text in _texts(prompt)) + MOST_TEMPLATE > room:
            refuse_long(number, len(prompt_ids(prompt, tokenizer, thinking)), room, where)


def refuse_text(number: int, prompt: Prompt, tokenizer: Any, room: int, where: str) -> None:
    """Raise UserError, at once, where a prompt has more text than so many tokens hold."""
    refuse_long(number, least_tokens(prompt, tokenizer), room, where, "at least ")


def refuse_long(number: int, tokens: int, room: int, where: str, about: str = "") -> None:
    """Raise UserError where the prompt of this number has more tokens than the completion leaves to it."""
    if tokens > room:
        wrong = (
            f"the prompt of problem {number} has {about}{tokens:,} tokens, and max_completion_length leaves {room:,}"
        )
        mend = f"lower that, or drop longer prompts by max_prompt_tokens: {room}"
        raise UserError(f"{wrong} of what the model reads; {mend}", where)


def least_tokens(prompt: Prompt, tokenizer: Any) -> int:
    """Tokens that a prompt has at least, told from its characters: no token stands for more than the longest has."""
    return sum(map(len, _texts(prompt))) // _longest_token(tokenizer)


def _texts(prompt: Prompt) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]


@lru_cache(maxsize=1)
def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


@dataclass(frozen=True)
class SplitPrompt:
    """The tokens of a prompt, cut right behind its context.

    context : ids up to the cut, of which `first` stand in front of the context's text (a chat template's, BOS)
    rest : ids of what follows
    """

    context: list[int]
    first: int
    rest: list[int]


def split_prompt(prompt: Prompt, context: str, tokenizer: Any, thinking: bool | None = None) -> SplitPrompt:
    """A prompt that begins with a context, or whose first message of the user's does.

    What stands in front of the context, the context, and what follows are tokenized apart: no token spans a cut, so
    prompts with the same context have its tokens in common. A tokenizer that puts a space in front of every text puts
    one at the cuts, too.

    Raises UserError where the chat template changes the context, and where a text has special tokens at its end.
    """
    if isinstance(prompt, str):
        header = _encoded("", tokenizer, special=True)
        if _encoded(context, tokenizer, special=True) != header + _encoded(context, tokenizer):
            raise UserError("the tokenizer puts tokens behind a text, so that nothing can follow a context")
        rest = prompt[len(context) :]
    else:
        text, marked = (
            _chat(with_context(prompt, context, one), tokenizer, thinking, False) for one in (context, MARK)
        )
        before, _, rest = marked.partition(MARK)
        if text != before + context + rest:
            raise UserError("the chat template changes the context, perhaps the white space at its ends; remove that")
        header = _encoded(before, tokenizer)
    return SplitPrompt([*header, *_encoded(context, tokenizer)], len(header), list(_encoded(rest, tokenizer)))


def with_context(prompt: Prompt, context: str, other: str, question: str | None = None) -> Prompt:
    """A prompt with another context in the place of its own, where a question is given with that alone behind it.

    Raises UserError for messages of which none is the user's.
    """
    if isinstance(prompt, str):
        return other + (prompt[len(context) :] if question is None else question)
    at = next((place for place, message in enumerate(prompt) if message["role"] == "user"), None)
    if at is None:
        raise UserError("a context begins a message of the user's, and there is none")
    content = prompt[at]["content"][len(context) :] if question is None else question
    asked = {**prompt[at], "content": other + content}
    return [*prompt[:at], asked, *(prompt[at + 1 :] if question is None else ())]


def _chat(messages: Prompt, tokenizer: Any, thinking: bool | None, tokenize: bool) -> Any:
    """Messages through the chat template: token ids, or the text."""
    assert not isinstance(messages, str)
    options = {} if thinking is None else {"enable_thinking": thinking}
    begun = messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        list(messages),
        add_generation_prompt=not begun,
        continue_final_message=begun,
        tokenize=tokenize,
        return_dict=False,
        **options,
    )


@lru_cache(maxsize=16)  # a context is long, and has many questions
def _encoded(text: str, tokenizer: Any, special: bool = False) -> tuple[int, ...]:
    """The tokens of a piece of text; special: with those that the tokenizer puts around a text."""
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"])


def completion_ids(completion: str | Sequence[dict[str, Any]], tokenizer: Any) -> list[int]:
    """The tokens that follow a prompt's: the text, or the assistant's one message, and an end of sequence.

    As it was sampled: a chat template would rewrite an answer, and many drop its reasoning.
    """
    if not isinstance(completion, str):
        if len(completion) != 1:
            raise UserError(f"a completion is one message, got {len(completion)}")
        completion = str(completion[0]["content"])
    ids = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
