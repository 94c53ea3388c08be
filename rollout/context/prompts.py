"""Prompts that ask the model about a context: the repetition, self-study and summaries of Attention Matching (sections
3.1 and 4.4, appendices B.3 and C.4), in our own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

REPEAT = "Write down the text above once more, word for word and from beginning to end, and nothing else."
REQUESTS = (
    "Summarize the text above. Say what it is about, then go through it from beginning to end, and leave out no "
    "person, fact or figure that a reader may want to look up later.",
    "Write down all that the text above says as one JSON object. Choose keys that fit its content, nest what belongs "
    "together, copy names, numbers and dates exactly, and write nothing but the JSON.",
    "Gather facts that stand far apart in the text above and bring them together: list everything that it says about "
    "each of its main subjects, compare these with each other, count or add up what can be counted, and say what "
    "follows that no single passage says.",
)
QUESTIONS = (
    "Ask three questions that test how well somebody has understood the text above, each about another part of it. "
    "Write one question in each line, without numbers and without answers, and nothing else."
)
MOST_QUESTIONS = 3
SUMMARIES = {
    "plain": "Summarize the text above.",
    "detailed": "Summarize the text above in detail.",
    "for_questions": "Summarize the text above. Keep every point that somebody may need to answer questions about it.",
    "concise": "Summarize the text above concisely.",
    "shortest": "Summarize the text above in as few words as possible.",
}
MARKER = re.compile(r"^\s*(?:[Qq]?\d{1,2}\s*[.):]|[-*•])\s+")  # of an item in a list


def _no_starters(answer: Sequence[int]) -> list[list[int]]:
    return []


def _unchanged(answers: Sequence[Sequence[int]]) -> list[int]:
    return [token for answer in answers for token in answer]


@dataclass(frozen=True)
class ContextPrompts:
    """Prompts about a context, each as the token ids that follow the context's tokens.

    repeat : the instruction to repeat the context; if empty, the repetition directly follows the context
    requests : the conversation starters of self-study that are the same for all contexts
    questions : the instruction to write questions about the context; if empty, there are none
    starters : function (token ids of the answer to `questions`) -> token ids of the conversation starters, one for each
        question in the answer
    summaries : name of a kind of summary -> the request for it
    text : function (token ids of summaries) -> token ids of their text, which takes the context's place
    """

    repeat: Sequence[int] = ()
    requests: Sequence[Sequence[int]] = ()
    questions: Sequence[int] = ()
    starters: Callable[[Sequence[int]], list[list[int]]] = _no_starters
    summaries: Mapping[str, Sequence[int]] = field(default_factory=dict)
    text: Callable[[Sequence[Sequence[int]]], list[int]] = _unchanged

    @classmethod
    def of(cls, tokenizer: Any, follow: Callable[[str], list[int]], chat: bool = True) -> ContextPrompts:
        """Return the prompts for a model with this tokenizer.

        follow : function that returns the token ids that follow the context's tokens in a user's turn which begins with
            the context and ends with the given text
        chat : False for plain text without turns, in which a repetition directly follows the context
        """

        questions = follow(f"\n\n{QUESTIONS}")

        def decoded(answer: Sequence[int]) -> str:
            text, turn = (tokenizer.decode(list(x), skip_special_tokens=True) for x in (answer, questions))
            begun = "<think>" in turn and "</think>" not in turn  # by the chat template
            return after_thinking(f"<think>{text}" if begun else text)

        def starters(answer: Sequence[int]) -> list[list[int]]:
            return [follow(f"\n\n{question}") for question in questions_in(decoded(answer))]

        def text(answers: Sequence[Sequence[int]]) -> list[int]:
            joined = "\n\n".join(filter(None, (decoded(answer).strip() for answer in answers)))
            return list(tokenizer.encode(joined, add_special_tokens=False))

        return cls(
            follow(f"\n\n{REPEAT}") if chat else (),
            [follow(f"\n\n{request}") for request in REQUESTS],
            questions,
            starters,
            {name: follow(f"\n\n{request}") for name, request in SUMMARIES.items()},
            text,
        )


def after_thinking(text: str) -> str:
    """Return the text after a model's thinking, which ends with </think>. It is empty if the thinking did not end."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def questions_in(text: str) -> list[str]:
    """Return the first three questions of a text with one question in each line, without the markers of a list.

    Lines without a question mark count only if no line has one.
    """
    lines = [MARKER.sub("", line).strip(" \t*") for line in text.splitlines()]
    lines = [line for line in lines if any(character.isalnum() for character in line)]
    return ([line for line in lines if "?" in line] or lines)[:MOST_QUESTIONS]
