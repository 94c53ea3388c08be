"""From a prompt or a completion to tokens: the one place, so that training, evaluation and serving see the same text.

A prompt is text, or a list of chat messages where the chat template applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_rl.errors import UserError


def prompt_ids(prompt: str | Sequence[dict[str, Any]], tokenizer: Any, thinking: bool | None = None) -> list[int]:
    """The tokens of a prompt: plain text as the tokenizer has it, messages through the chat template.

    Messages end in the header of the assistant's turn; if the last one is the assistant's, it is left open instead.
    `thinking` reaches the template as enable_thinking.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        options = {} if thinking is None else {"enable_thinking": thinking}
        begun = prompt[-1]["role"] == "assistant"
        ids = tokenizer.apply_chat_template(
            list(prompt),
            add_generation_prompt=not begun,
            continue_final_message=begun,
            tokenize=True,
            return_dict=False,
            **options,
        )
    if hasattr(ids, "keys"):  # a tokenizer that returns its dict whatever it is asked
        ids = ids["input_ids"]
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if len(ids) and isinstance(ids[0], list):
        ids = ids[0]
    return [int(i) for i in ids]


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
