r"""The reward `letter` checks whether a completion states the right letter in answer to a multiple-choice question.

A statement is the content of the last ``\boxed{...}``, or the text after a phrase such as "Answer:", "the answer is" or
"the correct option is". A statement begins with an upper-case letter: C, (C), ``\text{C}``, option C, C) 12 m.
"""

import re
from collections.abc import Sequence
from typing import Any

from rewards.text import BOX, completion_text, gold_text, require_column, until_closed

FAR = 100  # number of characters that are read after a phrase

_SPACE = re.compile(r"\\[ ,;:!]|\\q?quad(?![a-zA-Z])|~")
_STYLE = re.compile(r"\\(?:text|math)[a-zA-Z]*|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[()\[\]]|[$*`\"“”'‘’]")
_GAP = r"[\s}]"  # the brace ends a style, as in \textbf{Answer:} C
_PHRASE = re.compile(
    r"(?<!wrong )(?<!incorrect )\b(?:answer|(?:correct|right|best)\s+(?:option|choice|letter))"
    rf"(?:\s+(?:option|choice|letter))?(?:\s+to\s+(?:the|this)\s+(?:question|problem))?{_GAP}*"
    rf"(?:[:：=]|\b(?:is|(?:must|should|would)\s+be)\b){_GAP}*[:：]?(?:\s*(?:therefore|thus|hence|indeed)\b,?)?",
    re.IGNORECASE,
)
_LETTER = re.compile(
    r"\s*(?:(?:the\s+)?(?i:option|choice|letter)\s*:?\s*)?"
    r"(?:[(\[]\s*([A-Z])\s*[)\]](?![-A-Za-z]|\s*\?)"  # (C), but not (E)-but-2-ene
    r"|([A-Z])(?=\s*(?:$|\n|\)(?!-)|[.:,;!—–](?!\w)|\s[-(\[]|\s(?:because|since|as|due)\b)))"  # C, but not C-H
    r"(?!\W*(?:(?:or|and)\b\W*(?:(?:option|choice)\s+)?[(\[]?|[,;/&]\s*[(\[]?)[A-Z](?![\w-]|\s+[a-z]))"  # not B or C
)
_GOLD = re.compile(r"\(?([A-Z])[).:]?")


def stated_letter(text: str) -> str | None:
    """Return the letter of the last statement with a letter, after the last ``</think>``. None means there is none."""
    answer = _STYLE.sub("", _SPACE.sub(" ", text.rpartition("</think>")[2]))
    statements = [(phrase.end(), answer[phrase.end() : phrase.end() + FAR]) for phrase in _PHRASE.finditer(answer)]
    boxes = list(BOX.finditer(answer))
    if boxes:
        start = boxes[-1].end()
        statements.append((start, until_closed(answer, start) or ""))
    letters = (_first_letter(statement) for _, statement in sorted(statements, reverse=True))
    return next((letter for letter in letters if letter is not None), None)


def _first_letter(statement: str) -> str | None:
    """Return the letter at the beginning of a statement. None means that there is none, or more than one."""
    letter = _LETTER.match(re.sub("[{}]", "", statement))
    return letter and (letter[1] or letter[2])


class LetterReward:
    """Scores 1.0 if the letter that a completion states last is the letter of the gold answer, else 0.0.

    A completion that states no letter scores 0.0. The reward is None if the gold answer is not a letter (C, (C) or C.).
    """

    __name__ = "letter"

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        golds = [
            _GOLD.fullmatch(gold_text(gold) or "")
            for gold in require_column("letter", "answer", answer, completions, columns)
        ]
        return [
            None if gold is None else float(stated_letter(completion_text(completion)) == gold[1])
            for gold, completion in zip(golds, completions, strict=True)
        ]
